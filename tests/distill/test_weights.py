"""Detached slot weights against their formulas, and the losses' weights that a run file gives."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from specgraft.config import PRESETS, DistillSection
from specgraft.distill.weights import decay_weights, dpace_weights, end_to_end_blocks, end_to_end_weights, survival
from specgraft.run_file import validate

F64 = torch.float64


def prefix_masks(size: int) -> torch.Tensor:
    """[size+1, size]: every supervised prefix."""
    return torch.arange(size) < torch.arange(size + 1)[:, None]


def test_decay_weights_are_the_published_ones() -> None:
    published = [1, 0.779, 0.607, 0.472, 0.368, 0.287, 0.223]
    assert decay_weights(7, 4.0).tolist() == pytest.approx(published, abs=5e-4)
    assert decay_weights(3, 1.0).tolist() == pytest.approx([1, math.exp(-1), math.exp(-2)])


def test_golden_values_of_the_sheet() -> None:
    """algorithms.md 3.13."""
    alpha, every = torch.tensor([0.8, 0.5], dtype=F64), torch.ones(2, dtype=torch.bool)
    assert float(end_to_end_blocks(alpha, every)) == pytest.approx(0.4)
    assert end_to_end_weights(alpha, every).tolist() == pytest.approx([0.75, 0.4])
    ce = torch.full((2,), math.log(2), dtype=F64)
    assert dpace_weights(ce, every, 0.5).tolist() == pytest.approx([1.3125, 0.5625])
    assert survival(torch.tensor([0.8, 0.5, 0.25]), torch.tensor([True, False, True])).tolist() == pytest.approx([0.8, 0.8, 0.2])


@pytest.mark.parametrize("delta", [0.0, 0.3, 1.0])
def test_dpace_weights_equal_a_loop(delta: float) -> None:
    mask = prefix_masks(5)
    ce = 3 * torch.rand(6, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = dpace_weights(ce, mask, delta)
    for row in range(6):
        kept = [(1 - delta) * math.exp(-float(value)) + delta for value in ce[row, :row]]
        reach = [math.prod(kept[:i]) for i in range(1, row + 1)]
        assert found[row].tolist() == pytest.approx([sum(reach[j:]) for j in range(row)] + [0.0] * (5 - row), rel=1e-12)


def test_dpace_weights_without_smoothing_are_a_gradient() -> None:
    """delta 0: sum w ce, w detached, has the gradient of -sum of prefix probabilities, zeros and all."""
    mask = prefix_masks(5)
    ce = (3 * torch.rand(6, 5, dtype=F64, generator=torch.Generator().manual_seed(1))).requires_grad_()
    total = -(torch.exp(-torch.where(mask, ce, 0.0).cumsum(-1)) * mask).sum()
    (expected,) = torch.autograd.grad(total, [ce])
    torch.testing.assert_close(dpace_weights(ce.detach(), mask, 0.0), expected, rtol=1e-12, atol=1e-15)


def test_end_to_end_weights_are_the_gradient_of_the_block_loss() -> None:
    """d L_block = sum c_j d TV_j with TV = 1 - alpha, whatever alpha is: 0, 1 or between (algorithms.md 3.7)."""
    generator = torch.Generator().manual_seed(2)
    mask = prefix_masks(6).repeat(40, 1)
    alpha = torch.rand(len(mask), 6, dtype=F64, generator=generator)
    special = torch.rand(alpha.shape, generator=generator)
    alpha = torch.where(special < 0.2, 0.0, torch.where(special > 0.8, 1.0, alpha)).requires_grad_()
    for row in range(len(mask)):
        count = int(mask[row].sum())
        loss = end_to_end_blocks(alpha, mask)[row]
        reach = [torch.stack(list(alpha[row, :j])).prod() for j in range(1, count + 1)]
        by_hand = 1 - torch.stack(reach).mean() if count else torch.zeros((), dtype=F64)
        assert float(loss.detach()) == pytest.approx(float(by_hand.detach()), abs=1e-14)
        found = end_to_end_weights(alpha.detach(), mask)[row]
        expected = -torch.autograd.grad(by_hand, [alpha])[0][row] if count else torch.zeros(6, dtype=F64)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-16)


# --- what a run file asks for


def test_auto_takes_the_published_objective_of_the_kind() -> None:
    for kind, found in (
        ("dspark", {"ce": 0.1, "l1": 0.9, "confidence": 1.0}), ("dflash", {"ce": 1.0}), ("dflash2", {"ce": 1.0, "selector": 1.0}),
        ("mtp", {"ce": 1.0}), ("somebody's own", {"ce": 1.0}),
    ):  # fmt: skip
        assert DistillSection().weights(kind) == found


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_name_and_the_same_weights_for_every_kind(preset: str) -> None:
    kind = "dflash2" if "selector" in PRESETS[preset] else "dspark"
    section = validate({"distill": {"preset": preset}, "drafters": {"kind": kind}}, "test").distill
    assert section.weights("dspark") == section.weights("mtp") == PRESETS[preset]


def test_a_weight_changes_its_objective_and_no_other() -> None:
    assert DistillSection(ce=0.0, kl=0.5).weights("dspark") == {"l1": 0.9, "confidence": 1.0, "kl": 0.5}
    assert DistillSection(preset="e2e_tv", confidence=0.0).weights("dspark") == {"e2e_tv": 1.0}
    assert DistillSection(preset="dpace", e2e_tv=0.25, ce=0.0).weights("dspark") == {"dpace": 1.0, "confidence": 1.0, "e2e_tv": 0.25}
    before = {name: dict(values) for name, values in PRESETS.items()}
    DistillSection(preset="dspark", ce=7.0).weights("dspark")
    assert before == PRESETS  # a table, not a place to write to


@pytest.mark.parametrize("section", [{"preset": "dpace"}, {"preset": "e2e_tv"}, {"dpace": 0.1}, {"e2e_tv": 2.0, "preset": "dspark"}])
def test_drawn_slots_are_refused_where_an_objective_needs_whole_blocks(section: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"distill\.slot_sampling leaves slots out and (dpace|e2e_tv) needs whole blocks") as caught:
        validate({"distill": {**section, "slot_sampling": True}}, "test")
    assert "\n" not in str(caught.value)
    validate({"distill": section}, "test")
    validate({"distill": {"preset": "e2e_tv", "e2e_tv": 0.0, "kl": 1.0, "slot_sampling": True}}, "test")


@pytest.mark.parametrize("section", [{"preset": "dspak"}, {"ce": -0.1}, {"decay": 0.0}, {"dpace_delta": 1.5}, {"selector_missing": "drop"}])
def test_values_that_mean_nothing_are_refused(section: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DistillSection.model_validate(section)
