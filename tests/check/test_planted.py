"""Every fault that users of such tools hit silently is caught by its gate, by name; the clean run passes the same gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specgraft.capture.forward import capture_batch
from specgraft.check.agreement import agreement
from specgraft.check.distribution_identity import distribution_identity
from specgraft.check.gates import GateError, require
from specgraft.check.overfit import overfit, whole_rounds
from specgraft.check.tap_identity import tap_identity
from specgraft.check.token_identity import token_identity
from specgraft.config import DistillSection
from specgraft.decode import loop
from specgraft.decode.pair import pair
from specgraft.distill.anchors import draw_anchors
from specgraft.distill.batch import Batch
from specgraft.distill.objective import objective
from specgraft.drafters.drafter import Texts
from specgraft.drafters.shared import Shared
from specgraft.evaluate import metrics, predicted
from specgraft.records import Conversation, ids_digest
from specgraft.targets.sampling import Law

TAPS = [1, 3, 5, 7]  # the last layer included


def caught(result: Any, gate: str, *words: str) -> None:
    """The gate of this name failed, says why, and stops a run by name."""
    assert (result.name, result.passed) == (gate, False)
    for word in words:
        assert word in result.detail
    with pytest.raises(GateError, match=f"gate '{gate}' failed"):
        require([result])
    require([result], {gate})


@pytest.fixture(scope="module")
def clean(full_target, answers):
    target = full_target()
    return target, answers(target)


def passes(result: Any, gate: str) -> None:
    assert result.name == gate
    assert result.passed, result.detail
    require([result])


# --- token identity: ids decoded and re-encoded


def renderer(conversations: list[Conversation]):
    known = {c.prompt_id: c.input_ids[: c.prompt_length] for c in conversations}
    return lambda prompt_id: known[prompt_id]


def reencoded(ids: list[int]) -> list[int]:
    """A tokenizer that merges two tokens which the target wrote apart: the text is the same, the ids are not."""
    return [*ids[:3], 271, *ids[5:]]


def test_clean_ids_pass(clean):
    target, rows = clean
    result = token_identity(rows, renderer(rows), target.end_ids)
    passes(result, "token identity")
    assert result.measured == {"rows": 4, "offenders": 0}


def test_ids_decoded_and_reencoded(clean):
    target, rows = clean
    row = rows[2]
    new = reencoded(row.input_ids[row.prompt_length :])
    ids = row.input_ids[: row.prompt_length] + new
    mask = [False] * row.prompt_length + [True] * len(new)
    planted = [*rows[:2], replace(row, input_ids=ids, loss_mask=mask), rows[3]]
    result = token_identity(planted, renderer(rows), target.end_ids)
    caught(result, "token identity", "1 of 4 rows", row.prompt_id, "re-encoded")
    # the same length, one other id
    swapped = [*row.input_ids[:-2], 270, row.input_ids[-1]]
    result = token_identity([replace(row, input_ids=swapped)], renderer(rows), target.end_ids)
    caught(result, "token identity", "re-encoded")


def test_prompt_reencoded(clean):
    target, rows = clean
    row = rows[1]
    planted = replace(row, input_ids=[*row.input_ids[:4], 270, *row.input_ids[5:]])
    result = token_identity([planted], renderer(rows), target.end_ids)
    caught(result, "token identity", "prompt ids differ from the rendered prompt at 4")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: {"loss_mask": [True] * len(row.input_ids)}, "loss mask"),
        (lambda row: {"finish_reason": "stop"}, "its last id is"),
        (lambda row: {"finish_reason": ""}, "unknown"),
        (lambda row: {"prompt_length": row.prompt_length + 1}, "prompt ids differ"),
        (lambda row: {"input_ids": row.input_ids[: row.prompt_length], "loss_mask": row.loss_mask[: row.prompt_length]}, "no generated"),
    ],
)  # fmt: skip
def test_other_token_faults(clean, change, words):
    target, rows = clean
    row = replace(rows[0], **change(rows[0]))
    caught(token_identity([row], renderer(rows), target.end_ids), "token identity", words)


def with_answer(row: Conversation, answer: list[int], reason: str) -> Conversation:
    ids = row.input_ids[: row.prompt_length]
    mask = [False] * len(ids) + [True] * len(answer)
    return replace(row, input_ids=ids + answer, loss_mask=mask, digest=ids_digest(answer), finish_reason=reason)


def test_end_tokens(clean):
    target, rows = clean
    end = target.end_ids[0]
    row = rows[0]
    passes(token_identity([with_answer(row, [5, 6, end], "stop")], renderer(rows), target.end_ids), "token identity")
    early = with_answer(row, [5, end, 6], "length")
    caught(token_identity([early], renderer(rows), target.end_ids), "token identity", "before the end")
    late = with_answer(row, [5, 6, end], "length")
    caught(token_identity([late], renderer(rows), target.end_ids), "token identity", "is an end token")
    caught(token_identity([], renderer(rows), target.end_ids), "token identity", "not run")


# --- tap identity: taps shifted by one layer, final norm applied to a tap


def captured(target, taps, last=lambda state: state, change=lambda states: states):
    def capture(conversation):
        row = capture_batch(target, [conversation], taps)[0]
        return replace(row, taps=change(row.taps.clone()), last=last(row.last))

    return capture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_taps_pass(full_target, answers, dtype):
    target = full_target(dtype=dtype)
    rows = answers(target)
    result = tap_identity(target, captured(target, TAPS), rows, TAPS)
    passes(result, "tap identity")
    assert result.measured["rows"] == 3
    assert result.measured["cosine"] > 0.999 > result.measured["neighbour_cosine"]
    everything = list(range(8))
    passes(tap_identity(target, captured(target, everything), rows, everything), "tap identity")
    assert target.model.config._attn_implementation == "specgraft"  # as it was before the gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_shifted_by_one_layer(full_target, answers, dtype, shift):
    target = full_target(dtype=dtype)
    taps = [1, 3, 5]
    shifted = captured(target, [tap + shift for tap in taps])
    result = tap_identity(target, shifted, answers(target), taps)
    caught(result, "tap identity", "tap 1 of", f"it looks like layer {1 + shift}")


@pytest.mark.parametrize("place", range(4))
def test_final_norm_applied_to_a_tap(clean, place):
    target, rows = clean

    def normed(states):
        states[:, place] = target.final_norm(states[:, place])
        return states

    result = tap_identity(target, captured(target, TAPS, change=normed), rows, TAPS)
    caught(result, "tap identity", f"tap {TAPS[place]} of", "final norm applied")


def test_final_norm_of_ones_is_seen_by_size(full_target, answers):
    """Weights of one keep every direction: the size tells."""
    target = full_target()
    target.final_norm.weight.data.fill_(1.0)
    normed = captured(target, TAPS, change=target.final_norm)
    result = tap_identity(target, normed, answers(target), TAPS)
    caught(result, "tap identity", "size differs", "final norm applied")


def test_other_tap_faults(clean):
    target, rows = clean
    result = tap_identity(target, captured(target, TAPS, last=target.final_norm), rows, TAPS)
    caught(result, "tap identity", "last of", "final norm applied")
    result = tap_identity(target, captured(target, TAPS[:-1]), rows, TAPS)
    caught(result, "tap identity", "3) taps", "4 layers")
    result = tap_identity(target, captured(target, TAPS, change=lambda states: states.roll(1, 0)), rows, TAPS)
    caught(result, "tap identity", "cosine")
    result = tap_identity(target, captured(target, TAPS, change=lambda states: states.index_fill(0, torch.tensor(3), 0)), rows, TAPS)  # fmt: skip
    caught(result, "tap identity")
    other = {rows[0].prompt_id: rows[1], rows[1].prompt_id: rows[0]}
    mixed = captured(target, TAPS)
    result = tap_identity(target, lambda c: mixed(other.get(c.prompt_id, c)), rows, TAPS)
    caught(result, "tap identity", "ids are not the conversation's")
    caught(tap_identity(target, mixed, [], TAPS), "tap identity", "not run")


# --- distribution identity: head untied


def with_features(target, rows):
    return [(row, capture_batch(target, [row], TAPS)[0]) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_distribution_passes(full_target, answers, dtype):
    target = full_target(tied=True, dtype=dtype)
    result = distribution_identity(target, Shared.of(target, 0), with_features(target, answers(target)))
    passes(result, "distribution identity")
    assert result.measured["positions"] > 100
    if dtype == torch.float32:
        assert result.measured["agreement"] == 1 and result.measured["log_probability_difference"] < 1e-5


def test_head_untied(full_target, answers):
    """A random head in place of the tied one: it has the right shape, and a run with it agrees with itself."""
    target = full_target(tied=True)
    rows = answers(target)
    good = Shared.of(target, 0)
    pairs = with_features(target, rows)
    random_head = 0.15 * torch.randn(good.head.shape, generator=torch.Generator().manual_seed(9))
    # in what the drafter is trained with
    result = distribution_identity(target, replace(good, head=random_head), pairs)
    caught(result, "distribution identity", "no tie")
    # in the loaded target: its answers, states and training would all agree with one another
    target.head.weight = torch.nn.Parameter(random_head, requires_grad=False)
    again = answers(target)
    result = distribution_identity(target, Shared.of(target, 0), with_features(target, again))
    caught(result, "distribution identity", "ties head and embedding")


def test_head_of_an_untied_target_replaced_after_regen(clean, full_target):
    _, rows = clean
    other = full_target()
    other.head.weight.data = torch.randn(other.head.weight.shape, generator=torch.Generator().manual_seed(9))
    result = distribution_identity(other, Shared.of(other, 0), with_features(other, rows))
    caught(result, "distribution identity", "argmax differs from stored ids")


def test_other_distribution_faults(clean):
    target, rows = clean
    pairs = with_features(target, rows)
    good = Shared.of(target, 0)
    result = distribution_identity(target, replace(good, final_norm=torch.nn.Identity()), pairs)
    caught(result, "distribution identity")
    twice = [(row, replace(f, last=target.final_norm(f.last))) for row, f in pairs]
    caught(distribution_identity(target, good, twice), "distribution identity")
    result = distribution_identity(target, replace(good, head=1.1 * good.head), pairs)  # argmax stays, the law does not
    caught(result, "distribution identity", "100.00%", "log-probabilities differ")
    crossed = [(rows[0], pairs[1][1])]
    caught(distribution_identity(target, good, crossed), "distribution identity", "ids are not the conversation's")
    sampled = [(replace(row, temperature=1.0), features) for row, features in pairs]
    caught(distribution_identity(target, good, sampled), "distribution identity", "not run")


# --- overfit and agreement: block positions off by one


def train_on_one(target, drafter, row, steps=200):
    """Trains on every anchor of one greedy answer, as `train` does."""
    features = capture_batch(target, [row], drafter.config.taps)[0]
    mask = features.loss_mask[None]
    ids = features.input_ids[None]
    starts = torch.zeros_like(ids)
    anchors = draw_anchors(mask, starts, mask.shape[1], drafter.config.draft_tokens, torch.Generator().manual_seed(0))
    batch = Batch(Texts(ids, features.taps.clone()[None], starts), features.last.clone()[None], anchors)
    drafter.requires_grad_(True)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    shared = Shared.of(target, drafter.config.mask_token_id)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(drafter, shared, batch, DistillSection(chunk_rows=512)).loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    drafter.requires_grad_(False)


@pytest.fixture(scope="module")
def overfitted(full_target, answers, tiny_drafter):
    target = full_target(layers=4)
    row = answers(target, 80)[1]
    assert len(row.input_ids) - row.prompt_length >= 64, "too short: decoding would leave the row"
    drafter = tiny_drafter(target, draft_tokens=4, taps=[0, 1, 2], rank=4, bigram=0.0)
    train_on_one(target, drafter, row)
    return pair(target, drafter), row


def decoded(both, row):
    request = loop.Request(row.input_ids[: row.prompt_length], len(row.input_ids) - row.prompt_length)
    loop.decode(both, [request], 1)
    assert request.output == row.input_ids[row.prompt_length :]  # lossless whatever the drafter does
    return request


def agreed(both, request):
    prediction = predicted.predict(both, request.ids, request.output, Law())
    return agreement(predicted.pooled([prediction]), metrics.accept_length_pooled([request.rounds]))


def test_clean_overfit_and_agreement_pass(overfitted):
    both, row = overfitted
    request = decoded(both, row)
    passes(overfit(whole_rounds(request.rounds), 4), "overfit")
    passes(agreed(both, request), "agreement")


def test_block_positions_off_by_one(overfitted, monkeypatch):
    """Blocks sit one position too far while decoding, everything else as it is."""
    both, row = overfitted
    trunk, draft = both.drafter.trunk, both.drafter.draft
    run = trunk.run

    def shifted(*args):
        with monkeypatch.context() as patch:
            patch.setattr(trunk, "run", lambda x, positions, *rest: run(x, positions + 1, *rest))
            return draft(*args)

    monkeypatch.setattr(both.drafter, "draft", shifted)
    request = decoded(both, row)
    caught(overfit(whole_rounds(request.rounds), 4), "overfit", "of 5 is needed")
    caught(agreed(both, request), "agreement", "predicted accept length", "apart, at most 5%")
