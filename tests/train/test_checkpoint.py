"""A checkpoint appears whole or not at all, and brings back every number."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraft.config import TrainSection
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.store import WEIGHTS
from specgraft.train import checkpoint
from specgraft.train.checkpoint import checkpoints, latest, read, save
from specgraft.train.optimizer import Optimizer, learning_rate

SETTINGS = {"train.lr": 1e-3, "drafters.layers": 1}


@pytest.fixture
def parts(tiny_target, tiny_drafter):
    def make(optimizer: str = "adamw", steps: int = 3) -> tuple[Drafter, Optimizer]:
        """A drafter after some steps of random gradients."""
        drafter = tiny_drafter(tiny_target(), layers=1, rank=8, bigram=0.0).requires_grad_(True)
        own = Optimizer(drafter, TrainSection(optimizer=optimizer, steps=10, lr=1e-3, weight_decay=0.1))
        advance(drafter, own, 0, steps)
        return drafter, own

    return make


def advance(drafter: Drafter, optimizer: Optimizer, first: int, stop: int) -> list[float]:
    norms = []
    for step in range(first, stop):
        generator = torch.Generator().manual_seed(step)
        for parameter in drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        norms.append(optimizer.step(step))
    return norms


def restore(folder: Path, drafter: Drafter, optimizer: Optimizer, settings: dict[str, Any]) -> int:
    return read(folder, drafter.config, settings).put(drafter, optimizer)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weights_and_moments_come_back_and_the_next_step_is_the_same(parts, tmp_path: Path, kind: str) -> None:
    drafter, optimizer = parts(kind)
    folder = save(tmp_path, 3, drafter, optimizer, SETTINGS, 2)
    again, other = parts(kind, steps=0)
    assert restore(folder, again, other, SETTINGS) == 3
    for key, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, other.tensors()[key]), key
    advance(drafter, optimizer, 3, 6)
    advance(again, other, 3, 6)
    for (name, a), b in zip(drafter.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_weights_are_stored_in_float32_with_shape_and_provenance(parts, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    drafter, optimizer = parts()
    folder = save(tmp_path, 3, drafter, optimizer, SETTINGS, 2)
    assert names(folder) == ["config.json", "drafter.safetensors", "optimizer.safetensors", "state.json"]
    assert {tensor.dtype for tensor in load_file(folder / "drafter.safetensors").values()} == {torch.float32}
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 3 and state["settings"] == SETTINGS
    assert {"argv", "specgraft", "torch", "transformers", "python", "commit"} <= set(state["provenance"])


def test_only_the_newest_are_kept(parts, tmp_path: Path) -> None:
    drafter, optimizer = parts()
    for step in (2, 4, 6, 100, 1000):
        save(tmp_path, step, drafter, optimizer, SETTINGS, 3)
    assert names(tmp_path) == ["step-000006", "step-000100", "step-001000"]
    assert latest(tmp_path).name == "step-001000"


def test_a_step_saved_again_replaces_itself(parts, tmp_path: Path) -> None:
    drafter, optimizer = parts()
    save(tmp_path, 3, drafter, optimizer, SETTINGS, 2)
    save(tmp_path, 3, drafter, optimizer, {**SETTINGS, "x": 1}, 2)
    assert names(tmp_path) == ["step-000003"]
    assert json.loads((tmp_path / "step-000003" / "state.json").read_text())["settings"]["x"] == 1


@pytest.mark.parametrize("where", ["save_drafter", "save_file", "provenance"])
def test_a_disk_that_fills_up_leaves_no_half_folder_and_the_older_checkpoint(parts, tmp_path: Path, monkeypatch, where: str) -> None:
    drafter, optimizer = parts()
    save(tmp_path, 3, drafter, optimizer, SETTINGS, 1)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, where, full)
    with pytest.raises(ValueError, match=r"step-000006: could not be written \(No space left on device\)"):
        save(tmp_path, 6, drafter, optimizer, SETTINGS, 1)
    assert names(tmp_path) == ["step-000003"]


def test_what_a_kill_left_is_no_checkpoint_and_is_cleared(parts, tmp_path: Path, monkeypatch) -> None:
    drafter, optimizer = parts()
    save(tmp_path, 3, drafter, optimizer, SETTINGS, 5)

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "save_file", killed)
        save(tmp_path, 6, drafter, optimizer, SETTINGS, 5)
    (tmp_path / "step-000009").mkdir()  # a folder without state is none either
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000003"] and latest(tmp_path).name == "step-000003"
    save(tmp_path, 6, drafter, optimizer, SETTINGS, 5)
    assert not list(tmp_path.glob(".*"))


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint; run train first"):
        latest(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"train.lr": 2e-3, "drafters.layers": 1}, r"train\.lr=0\.001, now 0\.002"),
        ({"train.lr": 1e-3}, r"drafters\.layers=1, now None"),
        ({**SETTINGS, "distill.kl": 0.5}, r"distill\.kl=None, now 0\.5"),
    ],
)
def test_other_settings_are_refused_naming_the_key_and_touch_nothing(parts, tmp_path: Path, now: dict[str, Any], named: str) -> None:
    drafter, optimizer = parts()
    folder = save(tmp_path, 3, drafter, optimizer, SETTINGS, 2)
    again, other = parts(steps=0)
    before = [parameter.detach().clone() for parameter in again.parameters()]
    with pytest.raises(ValueError, match=f"trained with {named}"):
        restore(folder, again, other, now)
    assert all(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True)) and not other.tensors()


@pytest.mark.parametrize("name", ["state.json", "optimizer.safetensors", "drafter.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_refused_in_one_line(parts, tmp_path: Path, name: str) -> None:
    drafter, optimizer = parts()
    folder = save(tmp_path, 3, drafter, optimizer, SETTINGS, 2)
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError) as caught:
        restore(folder, *parts(steps=0), SETTINGS)
    assert str(folder) in str(caught.value) and "damaged" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{}", "[]", '{"settings": {}}', "\udcff"])
def test_a_state_that_is_json_but_not_ours_is_refused_in_one_line(parts, tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, 3, *parts(), SETTINGS, 2)
    (folder / "state.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"step-000003: damaged \(.*\); delete it") as caught:
        restore(folder, *parts(steps=0), SETTINGS)
    assert "\n" not in str(caught.value)


def test_a_drafter_of_another_shape_or_mask_token_is_refused_by_name(parts, tmp_path: Path) -> None:
    folder = save(tmp_path, 3, *parts(), SETTINGS, 2)
    again, other = parts(steps=0)
    again.config = dataclasses.replace(again.config, mask_token_id=5)
    with pytest.raises(ValueError, match=r"trained with drafter\.mask_token_id=0, now 5"):
        restore(folder, again, other, SETTINGS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"heads": 8}))
    with pytest.raises(ValueError, match="its config says") as caught:
        restore(folder, *parts(steps=0), SETTINGS)
    assert "\n" not in str(caught.value)


def test_learning_rate_warms_up_and_falls_as_a_cosine() -> None:
    part = TrainSection(steps=104, warmup=0.04, lr=8e-4, min_lr_ratio=0.1)  # four steps of warm-up
    assert [learning_rate(step, part) for step in range(4)] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4])
    assert learning_rate(4, part) == pytest.approx(8e-4)
    assert learning_rate(54, part) == pytest.approx(8e-4 * (0.1 + 0.9 * 0.5))
    assert learning_rate(29, part) == pytest.approx(8e-4 * (0.1 + 0.9 * (0.5 + 2**-1.5)))
    assert learning_rate(104, part) == pytest.approx(8e-5)
    rates = [learning_rate(step, part) for step in range(4, 104)]
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(0, TrainSection(steps=1, warmup=0.0, lr=1.0)) == 1.0


def test_muon_takes_the_matrices_of_the_trunk_and_nothing_else(parts) -> None:
    drafter, optimizer = parts("muon")
    kinds = {key.split(".", 1)[1]: key.split(".", 1)[0] for key in optimizer.tensors()}
    by_muon = {name for name, kind in kinds.items() if kind == "momentum_buffer"}
    trunk = {name for name, p in drafter.named_parameters() if p.dim() == 2 and name.startswith(("layers.", "fc."))}
    assert by_muon == trunk and "fc.weight" in trunk
    assert set(kinds) == {name for name, _ in drafter.named_parameters()}


def test_gradients_are_clipped_to_the_norm_asked_for(parts) -> None:
    drafter, optimizer = parts(steps=0)
    for parameter in drafter.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    count = sum(parameter.numel() for parameter in drafter.parameters())
    grads = []
    optimizer.parts[0].register_step_pre_hook(lambda *args: grads.extend(p.grad.clone() for p in drafter.parameters()))
    assert optimizer.step(0) == pytest.approx(2 * count**0.5, rel=1e-5)
    assert float(torch.stack([grad.pow(2).sum() for grad in grads]).sum().sqrt()) == pytest.approx(1.0, rel=1e-4)
    assert all(parameter.grad is None for parameter in drafter.parameters())


def test_small_updates_do_not_vanish() -> None:
    """One weight 1.0, constant gradient, 100 steps of AdamW at 1e-5: 0.999 in float32 (bfloat16 would stay at 1.0)."""

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

    one: Any = One()
    optimizer = Optimizer(one, TrainSection(steps=100, warmup=0.0, lr=1e-5, min_lr_ratio=1.0))
    for step in range(100):
        one.weight.grad = torch.ones(1)
        optimizer.step(step)
    assert float(one.weight.detach()) == pytest.approx(0.999, abs=1e-5)


def test_one_flipped_byte_of_weights_or_moments_is_refused(parts, tmp_path: Path) -> None:
    for name in (WEIGHTS, checkpoint.OPTIMIZER):
        drafter, optimizer = parts()
        advance(drafter, optimizer, 0, 1)
        folder = save(tmp_path, 1, drafter, optimizer, {}, 1)
        data = bytearray((folder / name).read_bytes())
        data[-3] ^= 1
        (folder / name).write_bytes(bytes(data))
        for reads in (lambda folder=folder: restore(folder, *parts(), {}), lambda: latest(tmp_path)):
            with pytest.raises(ValueError, match=f"{name} is not what was saved"):
                reads()
