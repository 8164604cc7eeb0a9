"""Gates on rows as they are stored: in fp8, cut, of several answers, recorded. What is right passes; what was planted is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specgraft.capture.cuts import shortened
from specgraft.capture.forward import capture_batch
from specgraft.check.distribution_identity import distribution_identity
from specgraft.check.tap_identity import tap_identity
from specgraft.drafters.shared import Shared
from specgraft.records import Conversation, Features, Turn, ids_digest
from specgraft.stream import fp8
from specgraft.targets.generate import Request, generate

TAPS = [1, 3, 5, 7]


def in_fp8(features: Features) -> Features:
    """As shards give them back."""
    states = {name: fp8.decode(*fp8.encode(getattr(features, name)), features.last.dtype) for name in ("taps", "last")}
    return replace(features, **states)


def stored(target: Any, taps: list[int] = TAPS) -> Any:
    return lambda row: in_fp8(capture_batch(target, [row], taps)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_fp8_pass_as_half_precision_does(full_target, answers, dtype) -> None:
    target = full_target(dtype=dtype)
    rows = answers(target)
    result = tap_identity(target, stored(target), rows, TAPS, "fp8")
    assert result.passed, result.detail
    assert 0.999 < result.measured["cosine"] < 0.9998
    result = distribution_identity(target, Shared.of(target, 0), [(row, stored(target)(row)) for row in rows], "fp8")
    assert result.passed, result.detail
    assert result.measured["log_probability_difference"] > 1e-3  # of 20 logits of size 10: seen, and allowed
    if dtype == torch.float32:  # what is not stored in fp8 must be exact
        assert not tap_identity(target, stored(target), rows, TAPS).passed


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_tap_off_by_one_is_caught_in_fp8_too(full_target, answers, shift) -> None:
    target = full_target()
    taps = [1, 3, 5]
    result = tap_identity(target, stored(target, [tap + shift for tap in taps]), answers(target), taps, "fp8")
    assert not result.passed and f"it looks like layer {1 + shift}" in result.detail


def test_norms_and_heads_are_caught_in_fp8_too(full_target, answers) -> None:
    target = full_target()
    rows = answers(target)
    pairs = [(row, stored(target)(row)) for row in rows]
    good = Shared.of(target, 0)
    normed = [(row, replace(features, last=target.final_norm(features.last))) for row, features in pairs]
    assert not distribution_identity(target, good, normed, "fp8").passed
    random_head = 0.15 * torch.randn(good.head.shape, generator=torch.Generator().manual_seed(9))
    assert not distribution_identity(target, replace(good, head=random_head), pairs, "fp8").passed
    states = {row.prompt_id: features for row, features in normed}
    result = tap_identity(target, lambda row: states[row.prompt_id], rows, TAPS, "fp8")
    assert not result.passed and "final norm applied" in result.detail


def two_answers(target: Any) -> Conversation:
    """Two greedy answers of the target, the second behind tokens that it did not write."""
    ids = torch.randint(2, 272, (9,), generator=torch.Generator().manual_seed(4)).tolist()
    mask, turns = [False] * 9, list[Turn]()
    for more in ([], [7, 8, 9, 10]):
        ids, mask = ids + more, mask + [False] * len(more)
        request = Request(ids, 12)
        generate(target, [request], 1)
        turns.append(Turn(len(ids), len(ids) + len(request.output), request.finish_reason, ids_digest(request.output)))
        ids, mask = ids + request.output, mask + [True] * len(request.output)
    written = [token for token, mine in zip(ids, mask, strict=True) if mine]
    return Conversation(
        "two", "f", "en", "chat", "train", ids, mask, 9, 0.0, 1.0, 0, turns[-1].finish_reason, ids_digest(written), turns=tuple(turns)
    )


def test_only_what_the_target_wrote_is_compared_in_a_row_of_two_answers(full_target) -> None:
    target = full_target()
    row = two_answers(target)
    features = capture_batch(target, [row], TAPS)[0]
    result = distribution_identity(target, Shared.of(target, 0), [(row, features)])
    assert result.passed, result.detail
    assert result.measured["positions"] == sum(row.loss_mask) and result.measured["agreement"] == 1
    place = row.turns[1].start + 1
    wrong = replace(row, input_ids=[*row.input_ids[:place], 7 if row.input_ids[place] != 7 else 8, *row.input_ids[place + 1 :]])
    result = distribution_identity(target, Shared.of(target, 0), [(wrong, capture_batch(target, [wrong], TAPS)[0])])
    assert not result.passed and f"two token {place}" in result.detail


def test_cut_rows_pass_the_gates_of_whole_ones(full_target, answers) -> None:
    target = full_target()
    rows, _ = shortened([*answers(target), two_answers(target)], 30)
    assert any(len(row.input_ids) == 30 for row in rows) and rows[-1].turns == ()
    result = tap_identity(target, lambda row: capture_batch(target, [row], TAPS)[0], rows, TAPS)
    assert result.passed, result.detail
    result = distribution_identity(target, Shared.of(target, 0), [(row, capture_batch(target, [row], TAPS)[0]) for row in rows])
    assert result.passed, result.detail


def test_recorded_answers_are_passed_over(full_target, answers) -> None:
    """The target would not write them: only its own may be compared with it."""
    target = full_target()
    row = replace(answers(target)[0], answers="data set")
    result = distribution_identity(target, Shared.of(target, 0), [(row, capture_batch(target, [row], TAPS)[0])])
    assert not result.passed and "not run" in result.detail
