"""Every kind of fault under "Capture" in the list of faults that users hit: C1 to C9, each planted, each impossible or refused by name.

FULL: 8 layers, hidden 64, vocabulary 272, norm weights away from 1 (ones would hide a norm).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specgraft.capture import stage
from specgraft.capture.forward import capture_batch, resolve_taps
from specgraft.capture.stage import capture, feature_header
from specgraft.check.distribution_identity import distribution_identity
from specgraft.check.tap_identity import tap_identity
from specgraft.config import RunConfig
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.shared import Shared
from specgraft.records import Conversation, Features, ids_digest
from specgraft.run_dir import RunDir, read_json, write_json
from specgraft.stream.shards import MANIFEST, ShardReader
from specgraft.targets.generate import Request, generate
from specgraft.targets.load import load_target
from specgraft.targets.model import Target

TAPS = [1, 3, 5]


@pytest.fixture(scope="module")
def full(tiny_target) -> Callable[..., Target]:
    def build(**changes: Any) -> Target:
        target = tiny_target(**{"vocab": 272, "layers": 8, "hidden": 64, "spread": 0.15, "markov": 1.0, **changes})
        generator = torch.Generator().manual_seed(0)
        for part in target.model.modules():
            if type(part).__name__.endswith("RMSNorm"):
                part.weight.data = (0.7 + 0.6 * torch.rand(part.weight.shape, generator=generator)).to(part.weight.dtype)
        return target

    return build


@pytest.fixture(scope="module")
def target(full) -> Target:
    return full()


def row(ids: Sequence[int], name: str = "p", prompt: int = 4, temperature: float = 0.0, split: str = "train") -> Conversation:
    mask = [place >= prompt for place in range(len(ids))]
    return Conversation(name, "f", "en", "chat", split, list(ids), mask, prompt, temperature, 1.0, 0, "length", ids_digest(list(ids[prompt:])))


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 272, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(target: Target, length: int = 40, prompt: int = 9) -> Conversation:
    """A row that this target wrote."""
    request = Request(random_ids(prompt), length - prompt)
    generate(target, [request], 1)
    return row(request.ids + request.output, prompt=prompt)


def hooked(target: Target, ids: Sequence[int]) -> list[torch.Tensor]:
    """Outputs of every decoder layer by hooks of our own on the unmodified model's pass: [T,D] each."""
    seen: dict[int, torch.Tensor] = {}

    def keep(index: int) -> Any:
        return lambda module, args, output: seen.__setitem__(index, (output[0] if isinstance(output, tuple) else output)[0].clone())

    handles = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(target.layers)]
    try:
        capture_batch(target, [row(ids)], [0])
    finally:
        for handle in handles:
            handle.remove()
    return [seen[index] for index in range(target.num_layers)]


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def config_of(**section: Any) -> RunConfig:
    return RunConfig.model_validate({"capture": {"taps": TAPS, **section}})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def test_c1_tap_off_by_one(target) -> None:
    text = random_ids(40)
    features = capture_batch(target, [row(text)], TAPS)[0]
    layers = hooked(target, text)
    for place, tap in enumerate(TAPS):
        close(features.taps[:, place], layers[tap])
        cosine = [float(torch.cosine_similarity(features.taps[:, place], other, dim=-1).mean()) for other in layers]
        assert max(range(8), key=cosine.__getitem__) == tap and sorted(cosine)[-2] < 0.999
    for shift in (-1, 1):
        shifted = [tap + shift for tap in TAPS]
        result = tap_identity(target, lambda c, taps=shifted: capture_batch(target, [c], taps)[0], [row(text)], TAPS)
        assert not result.passed and f"it looks like layer {1 + shift}" in result.detail


@pytest.mark.parametrize("taps", [[0, 3], [0, 2]])
def test_c2_last_layer_stripped_doubled_or_normed(full, taps) -> None:
    target = full(layers=4)
    text = random_ids(23)
    features = capture_batch(target, [row(text)], taps)[0]
    layers = hooked(target, text)
    assert features.taps.shape[1] == 2
    for place, tap in enumerate(taps):
        close(features.taps[:, place], layers[tap])
    close(features.last, layers[3])  # raw
    assert (target.final_norm(features.last) - features.last).abs().max() > 0.1
    normed = lambda c: dataclasses.replace(features, last=target.final_norm(features.last))  # noqa: E731
    result = tap_identity(target, normed, [row(text)], taps)
    assert not result.passed and "final norm applied" in result.detail


def test_c3_tap_ids_missing_or_colliding(tiny_target, tiny_drafter) -> None:
    with pytest.raises(ValueError, match=r"capture\.tap_count=3: a target of 4 layers has room for 1 spread taps"):
        resolve_taps("spread", 3, 4)
    with pytest.raises(ValueError, match="name each layer once"):
        resolve_taps([1, 1, 1], 3, 4)
    stored = tiny_drafter(tiny_target()).config.to_json()
    del stored["taps"]
    with pytest.raises(ValueError, match="taps are missing"):
        DrafterConfig.from_json(stored)


def test_c4_batch_order_or_state_leak(target, run) -> None:
    rows = [row(random_ids(length, length), f"p{length}", prompt=1) for length in (3, 5, 8, 13, 21, 34, 55, 89)]
    alone = {c.prompt_id: capture_batch(target, [c], TAPS)[0] for c in rows}
    short, long = row(random_ids(9), "short"), row(random_ids(40), "long")
    first = capture_batch(target, [short], TAPS)[0]
    for batch, place in (([long, short], 1), ([short, long], 0), ([short], 0)):
        close(capture_batch(target, batch, TAPS)[place].taps, first.taps)
    capture(config_of(batch_tokens=256, shard_tokens=128), run, target, rows[::-1])
    reader = ShardReader(run.features, "train", keep={c.prompt_id: ids_digest(c.input_ids) for c in rows})
    digests = {entry["prompt_id"]: entry["digest"] for shard in reader.manifest["shards"] for entry in shard["rows"]}
    assert [reader[index].prompt_id for index in range(8)] == [c.prompt_id for c in rows]
    for index, conversation in enumerate(rows):
        found = reader[index]
        assert found.input_ids.tolist() == conversation.input_ids
        assert digests[conversation.prompt_id] == ids_digest(found.input_ids.tolist())
        close(found.taps, alone[conversation.prompt_id].taps)
        close(found.last, alone[conversation.prompt_id].last)


def test_c5_prefix_cache_shortens_the_capture(target, run) -> None:
    first = row(random_ids(80), "first")
    second = row(first.input_ids[:64] + random_ids(26, 1), "second")
    for batch in ([first, second], [first]):
        for conversation, features in zip(batch, capture_batch(target, batch, TAPS), strict=True):
            assert len(features.taps) == len(features.last) == len(conversation.input_ids)
            close(features.taps[:64, 1], hooked(target, conversation.input_ids)[3][:64])
    capture(config_of(), run, target, [first, second])
    reader = ShardReader(run.features, "train")
    assert sorted(len(reader[index].taps) for index in range(2)) == [80, 90]


def planted(monkeypatch: pytest.MonkeyPatch, faults: dict[str, float]) -> None:
    """The tap of a token is all this value: zero as after a page-size mix-up, or not finite."""

    def broken(target: Any, part: Sequence[Conversation], taps: Sequence[int]) -> list[Features]:
        found = capture_batch(target, part, taps)
        for number, features in enumerate(found):
            if features.prompt_id in faults:
                states = features.taps.clone()
                states[2, 1] = faults[features.prompt_id]
                found[number] = dataclasses.replace(features, taps=states)
        return found

    monkeypatch.setattr(stage, "capture_batch", broken)


@pytest.mark.parametrize("dtype", ["target", "fp8"])
def test_c6_zero_nan_or_infinite_states_trained_on(tiny_target, tmp_path, monkeypatch, capsys, dtype) -> None:
    target = tiny_target()
    config = RunConfig.model_validate({"capture": {"taps": [0, 2], "dtype": dtype}})
    rows = [row(torch.randint(2, 64, (7,)).tolist(), f"p{number}") for number in range(200)]
    planted(monkeypatch, {"p3": 0.0, "p90": float("nan")})
    two = RunDir(tmp_path / "two").create()
    capture(config, two, target, rows)
    reader = ShardReader(two.features, "train")
    assert len(reader) == 198 and read_json(two.features / MANIFEST)["notes"]["left_out"].keys() == {"p3", "p90"}
    assert "left out {'taps all zero at a token': 1, 'taps not finite': 1} of 200" in capsys.readouterr().err
    for index in range(198):
        assert torch.isfinite(reader[index].taps).all() and (reader[index].taps.abs().amax(-1) > 0).all()
    planted(monkeypatch, {f"p{number}": (float("nan"), float("inf"))[number % 2] for number in range(10)})
    with pytest.raises(ValueError, match=r"capture: 10 of 200 conversations have broken states \(5\.0%"):
        capture(config, RunDir(tmp_path / "ten").create(), target, rows)


def test_c7_final_norm_missing_or_applied_twice(target, run) -> None:
    text = greedy(target)
    capture(config_of(), run, target, [text])
    reader = ShardReader(run.features, "train")
    assert reader.manifest["layer_ids"].endswith("pre-norm")
    features, shared = reader[0], Shared.of(target, 0)
    assert distribution_identity(target, shared, [(text, features)]).passed
    none = dataclasses.replace(shared, final_norm=torch.nn.Identity())
    twice = dataclasses.replace(features, last=target.final_norm(features.last))
    for other, states in ((none, features), (shared, twice)):
        assert not distribution_identity(target, other, [(text, states)]).passed
    for label in (None, "output of layer i, post-norm"):
        manifest = {key: value for key, value in reader.manifest.items() if key != "layer_ids"}
        write_json(run.features / MANIFEST, manifest if label is None else {**manifest, "layer_ids": label})
        with pytest.raises(ValueError, match=r"made with layer_ids=.*, this run has output of layer i, pre-norm"):
            ShardReader(run.features, "train")


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def resaved(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> str:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(folder)


def test_c8_head_or_embedding_not_found_so_random(folder) -> None:
    target = load_target(resaved(folder, lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=True), "float32")
    assert torch.equal(target.head.weight, target.embedding.weight)  # TIED, no head in the file
    assert not any(torch.isnan(parameter).any() for parameter in target.model.parameters())
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(parameter, stored[name]) for name, parameter in target.model.named_parameters())

    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        tensors["backbone.embeddings.weight"] = tensors.pop("model.embed_tokens.weight")

    with pytest.raises(ValueError, match=r"hold no lm_head\.weight .*unknown there: backbone\.embeddings\.weight"):
        load_target(resaved(folder, renamed), "float32")


def test_c8_head_stored_packed(folder) -> None:
    def packed(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors.pop("lm_head.weight")
        tensors["lm_head.weight_packed"] = torch.zeros(len(head), head.shape[1] // 8, dtype=torch.int32)
        tensors["lm_head.weight_scale"] = torch.ones(len(head), 1)

    with pytest.raises(ValueError, match=r"hold no lm_head\.weight of the right shape .*lm_head\.weight_packed, lm_head\.weight_scale"):
        load_target(resaved(folder, packed), "float32")


def test_c9_captured_target_is_not_the_served_target(full, run) -> None:
    rows = [row(random_ids(12), "a"), row(random_ids(15, 1), "b")]
    captured = full(dtype=torch.bfloat16)
    capture(config_of(), run, captured, rows)
    ShardReader(run.features, "train", feature_header(config_of(), captured))
    other = full()  # the same weights, as float32
    with pytest.raises(ValueError, match=r"made with target=\{.*'dtype': 'bfloat16'.*this run has \{"):
        ShardReader(run.features, "train", feature_header(config_of(), other))
    packed = full(dtype=torch.bfloat16)
    packed.model.config.quantization_config = {"quant_method": "awq", "bits": 4}
    header = feature_header(config_of(), packed)
    assert header["quantisation"] == "awq" and header["target"] == feature_header(config_of(), captured)["target"]
    with pytest.raises(ValueError, match="made with quantisation=none, this run has awq"):
        ShardReader(run.features, "train", header)
    with pytest.raises(ValueError, match="another `quantisation`"):
        capture(config_of(), run, packed, rows)


def test_c9_picture_row(full, run) -> None:
    seeing = full()
    seeing.model.config.image_token_id = 271
    capture(config_of(), run, seeing, [row([5, 6, 7, 8, 9, 10], "text")])
    with pytest.raises(ValueError, match=r"seen: holds id 271, the target's image_token_id; pictures and sound are not captured"):
        capture(config_of(), run, seeing, [row([5, 6, 7, 8, 9, 10], "text"), row([5, 271, 271, 7, 8, 9], "seen")])
