"""The drafter of a run: its shape from config and target, its mask token, its starting values."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraft.config import RunConfig
from specgraft.distill.objective import Outcome
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.layouts.registry import write
from specgraft.drafters.registry import KINDS
from specgraft.drafters.store import save_drafter
from specgraft.records import Conversation
from specgraft.train.checkpoint import checkpoints
from specgraft.train.setup import drafter_config, mask_token, new_drafter, spread_layers, token_pairs
from specgraft.train.stage import refuse_nothing_to_learn, summary
from specgraft.train.validate import survival

TAPS = [0, 2]


def config_of(**sections: dict[str, Any]) -> RunConfig:
    base: dict[str, dict[str, Any]] = {
        "target": {"id": "tiny", "mask_token_id": 0}, "drafters": {"layers": 2, "markov_rank": 8, "draft_tokens": 3},
    }  # fmt: skip
    return RunConfig.model_validate({name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}})


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(layers=3, end=[1, 7])


def weights(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


@pytest.mark.parametrize(
    ("chosen", "why"),
    [(None, "is not set"), (64, "vocabulary has 64 rows"), (10_000, "vocabulary has 64 rows"), (7, "end or padding"), (1, "end or padding")],
)
def test_a_mask_token_that_is_absent_or_in_use_is_refused(target, chosen: int | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mask_token(config_of(target={"mask_token_id": chosen}), target)


def test_the_padding_token_is_no_mask_token(target, monkeypatch) -> None:
    monkeypatch.setattr(target.tokenizer, "pad_token_id", 9)
    assert mask_token(config_of(target={"mask_token_id": 8}), target) == 8
    with pytest.raises(ValueError, match="end or padding"):
        mask_token(config_of(target={"mask_token_id": 9}), target)


def test_what_is_zero_in_the_run_file_is_as_in_the_target(target) -> None:
    found = drafter_config(config_of(), target, TAPS)
    assert (found.heads, found.kv_heads, found.head_dim, found.intermediate) == (4, 2, 8, 64)
    assert (found.hidden_size, found.vocab_size, found.target_layers, found.taps) == (32, 64, 3, (0, 2))
    assert found.max_positions == 256 and found.rope_theta == 10_000.0
    own = drafter_config(config_of(drafters={"heads": 6, "kv_heads": 3, "head_dim": 10, "intermediate": 20}), target, TAPS)
    assert (own.heads, own.kv_heads, own.head_dim, own.intermediate) == (6, 3, 10, 20)
    with pytest.raises(ValueError, match=r"drafters\.heads=5 is no multiple"):
        drafter_config(config_of(drafters={"heads": 5}), target, TAPS)


def test_the_same_seed_gives_the_same_drafter_and_leaves_the_random_state(target) -> None:
    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    first = weights(new_drafter(config_of(), target, TAPS))
    assert torch.equal(torch.rand(1), expected)
    second = weights(new_drafter(config_of(), target, TAPS))
    assert all(torch.equal(first[name], second[name]) for name in first)
    third = weights(new_drafter(config_of(run={"seed": 1}), target, TAPS))
    assert not torch.equal(first["fc.weight"], third["fc.weight"])
    assert not first["markov_head.markov_w2.weight"].any()  # starts as the plain trunk


@pytest.mark.parametrize(("named", "sources"), [("spread", [0, 2]), ([1, 2], [1, 2])])
def test_draft_layers_start_as_the_target_layers_named(target, named: Any, sources: list[int]) -> None:
    drafter = new_drafter(config_of(drafters={"warm_layers": named}), target, TAPS)
    for layer, source in zip(drafter.layers, sources, strict=True):
        own, theirs = layer.state_dict(), target.layers[source].state_dict()
        assert len(theirs) == 9
        for name, tensor in theirs.items():
            assert torch.equal(own[name], tensor), name
    assert torch.equal(drafter.norm.weight, target.final_norm.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_and_fc_start_from_the_target_in_every_kind(target, kind: str) -> None:
    """What only that kind has keeps its own start: identity convolutions, heads of zero."""
    plain = new_drafter(config_of(drafters={"kind": kind}), target, TAPS).state_dict()
    drafter = new_drafter(config_of(drafters={"kind": kind, "warm_layers": "spread", "warm_fc": "last"}), target, TAPS)
    source = target.layers[2].state_dict()
    for name, tensor in drafter.state_dict().items():
        if name.startswith("layers.1.") and name.removeprefix("layers.1.") in source:
            assert torch.equal(tensor, source[name.removeprefix("layers.1.")]), name
        elif not name.startswith(("layers.", "fc.", "hidden_norm.", "norm.")) or "_conv." in name:
            assert torch.equal(tensor, plain[name]), name
    torch.testing.assert_close(drafter.fc.weight - plain["fc.weight"], torch.cat([torch.zeros(32, 32), torch.eye(32)], 1), rtol=0, atol=1e-6)


def test_a_warm_start_that_does_not_fit_is_refused(target) -> None:
    with pytest.raises(ValueError, match="layers 0 to 2, not 3"):
        new_drafter(config_of(drafters={"warm_layers": [0, 3]}), target, TAPS)
    with pytest.raises(ValueError, match=r"drafters\.warm_layers: layer 0 .* in the target"):
        new_drafter(config_of(drafters={"warm_layers": "spread", "intermediate": 20}), target, TAPS)
    with pytest.raises(ValueError, match="only 3 layers"):
        spread_layers(3, 4)
    assert spread_layers(30, 5) == [0, 7, 14, 22, 29] and spread_layers(3, 1) == [0]


@pytest.mark.parametrize(("how", "shares"), [("mean", [0.5, 0.5]), ("last", [0.0, 1.0])])
def test_fc_starts_as_the_mean_of_the_taps_or_the_last_one(target, how: str, shares: list[float]) -> None:
    plain = new_drafter(config_of(), target, TAPS).fc.weight
    drafter = new_drafter(config_of(drafters={"warm_fc": how}), target, TAPS)
    added = (drafter.fc.weight - plain).detach()
    torch.testing.assert_close(added, torch.cat([share * torch.eye(32) for share in shares], 1), rtol=0, atol=1e-6)


def test_the_markov_start_prefers_the_pairs_of_the_train_answers(target, capsys) -> None:
    from specgraft.records import Conversation

    def row(split: str, ids: list[int]) -> Conversation:
        return Conversation("p", "f", "en", "chat", split, ids, [False] * 2 + [True] * (len(ids) - 2), 2, 0.0, 1.0, 0, "stop", "")

    rows = [row("train", [3, 4, *[5, 9] * 10]), row("train", [3, 4, *[6, 8] * 10]), row("heldout", [3, 4, *[5, 11] * 30])]
    before, after = token_pairs(rows[:1])
    assert before[:3].tolist() == [4, 5, 9] and after[:3].tolist() == [5, 9, 5]
    drafter = new_drafter(config_of(drafters={"warm_markov": True}), target, TAPS, rows)
    with torch.no_grad():
        bias = drafter.markov_head.markov_w2(drafter.markov_head.embed(torch.tensor([5, 6])))
    assert bias.argmax(-1).tolist() == [9, 8] and abs(float(bias[0, 11])) < 1e-3
    for kind, reason in (({"kind": "dflash"}, "no Markov head"), ({"markov_rank": 0}, "no Markov head"), ({"markov_head": "rnn"}, "the rnn head")):
        same = [new_drafter(config_of(drafters={"warm_markov": on, **kind}), target, TAPS, rows) for on in (True, False)]
        said = capsys.readouterr()
        assert "drafters.warm_markov starts nothing" in said.out + said.err and reason in said.out + said.err
        for a, b in zip(*(drafter.state_dict().values() for drafter in same), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"drafters\.warm_markov needs answers"):
        new_drafter(config_of(drafters={"warm_markov": True}), target, TAPS)


def trained(target, folder: Path, **drafters: Any) -> Drafter:
    """A drafter with random weights, stored as a checkpoint's drafter."""
    drafter = new_drafter(config_of(drafters=drafters, run={"seed": 9}), target, TAPS)
    for parameter in drafter.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    folder.mkdir(parents=True)
    save_drafter(folder, drafter)
    return drafter


def started(target, folder: Path, **drafters: Any) -> dict[str, torch.Tensor]:
    return weights(new_drafter(config_of(drafters={"warm_from": str(folder), **drafters}), target, TAPS))


def test_a_drafter_starts_from_a_checkpoint_or_a_published_layout_and_says_so(target, tmp_path, capsys) -> None:
    expected = weights(trained(target, tmp_path / "ours"))
    found = started(target, tmp_path / "ours")
    said = capsys.readouterr().err
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert said == (
        f"train: started from {tmp_path / 'ours'} (dspark): confidence_head, fc, hidden_norm, layers, markov_head, norm copied exactly\n"
    )
    for layout in ("deepspec", "speculators"):
        write(trained(target, tmp_path / f"for {layout}"), tmp_path / layout, layout, "float32")
        found = started(target, tmp_path / layout)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert "(dspark): " in capsys.readouterr().err
    found = started(target, tmp_path / "ours", markov_rank=0, confidence=False)
    assert set(found) < set(expected) and all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert "copied exactly; left behind: confidence_head, markov_head" in capsys.readouterr().err


def test_a_run_starts_from_another_ones_newest_checkpoint_and_goes_on_without_it(ready, monkeypatch) -> None:
    """The folder is a setting of the run; a checkpoint of the run is all it needs from then on."""
    from test_resume import assert_same_checkpoint, stopped_at

    source, straight, stopped = ready("source"), ready("straight"), ready("stopped")
    source.train()
    assert [path.name for path in checkpoints(source.run.checkpoints)] == ["step-000003", "step-000006"]
    changes = {"drafters": {"warm_from": str(source.run.root)}, "run": {"seed": 4}}
    straight.train(**changes)
    config = straight.config(**changes)
    first = weights(new_drafter(config, straight.new_target(), TAPS))
    by_hand = {"drafters": {"warm_from": str(source.run.checkpoints / "step-000006")}}
    assert all(torch.equal(first[name], tensor) for name, tensor in weights(new_drafter(straight.config(**by_hand), straight.new_target(), TAPS)).items())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped_at(patch, 5)
        stopped.train(**changes)
    shutil.rmtree(source.run.root)
    stopped.train(**changes)
    for a, b in zip(checkpoints(straight.run.checkpoints), checkpoints(stopped.run.checkpoints), strict=True):
        assert_same_checkpoint(a, b)
    with pytest.raises(ValueError, match=r"trained with drafters\.warm_from='.*source', now ''"):
        stopped.train(run={"seed": 4})


def test_a_folder_that_cannot_be_started_from_is_refused_in_one_line(target, tmp_path, ready) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"warm_from": str(tmp_path / "none")}, r"drafters\.warm_from: .*none is no folder"),
        ({"warm_from": str(tmp_path)}, r"drafters\.warm_from: .*config\.json: cannot be read"),
    ]
    trained(target, tmp_path / "ours")
    whole = str(tmp_path / "ours")
    cases += [
        ({"warm_from": whole, "layers": 1}, r"set drafters\.layers=2"),
        ({"warm_from": whole, "warm_markov": True}, r"set drafters\.warm_markov=false"),
    ]
    (tmp_path / "damaged").mkdir()
    for name in ("config.json", "drafter.safetensors"):
        shutil.copy(tmp_path / "ours" / name, tmp_path / "damaged" / name)
    (tmp_path / "damaged" / "drafter.safetensors").write_bytes(b"damaged")
    cases.append(({"warm_from": str(tmp_path / "damaged")}, r"drafters\.warm_from: .*damaged"))
    for drafters, why in cases:
        with pytest.raises(ValueError, match=why) as caught:
            new_drafter(config_of(drafters=drafters), target, TAPS)
        assert "\n" not in str(caught.value)
    run = ready()
    run.train()
    newest = checkpoints(run.run.checkpoints)[-1]
    tensors = (newest / "drafter.safetensors").read_bytes()
    (newest / "drafter.safetensors").write_bytes(tensors[:-4] + b"\1\2\3\4")
    for folder in (run.run.root, run.run.checkpoints, newest):  # read well, but not what was saved
        with pytest.raises(ValueError, match=r"drafters\.warm_from: .*is not what was saved"):
            new_drafter(run.config(drafters={"warm_from": str(folder)}), run.new_target(), TAPS)


def test_a_markov_head_that_the_source_lacks_may_start_from_the_answers(target, tmp_path) -> None:
    rows = [
        Conversation("p", "f", "en", "chat", "train", [3, 4, *[5, 9] * 10], [False] * 2 + [True] * 20, 2, 0.0, 1.0, 0, "stop", "")
    ]
    trained(target, tmp_path / "bare", markov_rank=0, confidence=False)
    drafter = new_drafter(config_of(drafters={"warm_from": str(tmp_path / "bare"), "warm_markov": True}), target, TAPS, rows)
    assert drafter.markov_head.markov_w2.weight.any()


def test_survival_is_the_mean_of_prefix_products_over_supervised_slots() -> None:
    """Slot acceptance (0.8, 0.5, 0.25): accept length 1 + 0.8 + 0.4 + 0.1 = 2.3."""
    values = torch.tensor([0.8, 0.5, 0.25]).view(1, 1, 3)
    found = survival(values, torch.ones(1, 1, 3, dtype=torch.bool))
    assert found == pytest.approx([0.8, 0.4, 0.1]) and 1 + sum(found) == pytest.approx(2.3)
    two = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]).view(1, 2, 3)
    mask = torch.tensor([[True, True, True], [True, True, False]]).view(1, 2, 3)
    assert survival(two, mask) == pytest.approx([1.0, 0.5, 1.0])


def test_a_step_without_slots_has_loss_zero() -> None:
    sums = {name: torch.zeros(3) for name in ("ce", "l1", "alpha", "hit", "bce", "count")}
    assert summary(Outcome(torch.zeros(()), {}, {}, sums)) == {"loss": 0.0, "slots": 0}


def test_the_mean_of_a_selector_loss_leaves_out_slots_that_it_leaves_out() -> None:
    sums = {"selector": [3.0, 1.0], "taught": [1.0, 1.0], "ce": [8.0, 8.0], "count": [4.0, 4.0]}
    row = summary(Outcome(torch.zeros(()), {}, {}, {name: torch.tensor(values) for name, values in sums.items()}))
    assert row == {"loss": 0.0, "selector": 2.0, "ce": 2.0, "slots": 8}


def test_answers_cut_away_by_the_length_limit_are_counted_and_nothing_left_is_refused(capsys) -> None:
    rows = [
        Conversation(f"p{n}", "f", "en", "chat", "train", [5] * 20, [False] * 10 + [True] * 10, 10, 0.0, 1.0, 0, "length", "")
        for n in range(3)
    ]
    short = dataclasses.replace(rows[0], input_ids=[5] * 11, loss_mask=[False] * 10 + [True])
    refuse_nothing_to_learn(12, rows)
    assert "train:" not in capsys.readouterr().err
    refuse_nothing_to_learn(12, [*rows, short])
    assert "1 of 4 answers" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"train\.max_length=11: .*; raise it"):
        refuse_nothing_to_learn(11, rows)
