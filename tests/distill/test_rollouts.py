"""Rollouts: the target's own text, states and taps as a plain forward gives them, and which slots of a round are learnt from."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from rounds_by_hand import KINDS, batch_of_texts, greedy, make, plain, rounds_by_hand, some_prompts

from specgraft.config import DistillSection
from specgraft.decode.loop import Request, decode
from specgraft.decode.pair import pair
from specgraft.decode.scheduler import Scheduler
from specgraft.distill.draft_opd import draft_opd
from specgraft.distill.rollouts import Recording, Rollouts, prompts_of, roll_out, streams
from specgraft.drafters.drafter import Texts


@pytest.fixture(params=KINDS)
def both(request, tiny_target, tiny_drafter):
    return make(tiny_target, tiny_drafter, request.param)


@pytest.mark.parametrize("packed", [False, True])
def test_the_text_is_the_targets_and_the_rounds_are_those_of_plain_drafting(both, packed) -> None:
    prompts, counts = some_prompts()
    rolled = roll_out(both, batch_of_texts(prompts, counts, packed))
    answers = greedy(both, prompts, counts)
    assert rolled.answers == answers
    rounds = [(n, each) for n, (ids, answer) in enumerate(zip(prompts, answers, strict=True)) for each in rounds_by_hand(both, ids, answer)]
    lengths = [len(ids) + len(answer) - 1 for ids, answer in zip(prompts, answers, strict=True)]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    assert rolled.anchors.tolist() == [starts[n] + each.anchor for n, each in rounds]
    assert rolled.tokens[:, 1:].tolist() == [each.drafts for _, each in rounds]
    assert rolled.accepted.tolist() == [each.accepted for _, each in rounds]
    assert 0 < sum(each.accepted for _, each in rounds) < 3 * len(rounds), "both kinds of drafts must be there"
    for state, (_, each) in zip(rolled.states, rounds, strict=True):
        torch.testing.assert_close(state, each.states, rtol=1e-9, atol=1e-9)
    for n, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        here = slice(starts[n], starts[n] + lengths[n])
        assert rolled.texts.input_ids[0, here].tolist() == (ids + answer)[:-1]
        assert rolled.texts.starts[0, here].tolist() == [starts[n]] * lengths[n]
        torch.testing.assert_close(rolled.texts.taps[0, here], plain(both, (ids + answer)[:-1])[0], rtol=1e-9, atol=1e-9)


def test_recorded_tensors_can_be_learnt_from(tiny_target, tiny_drafter) -> None:
    rolled = roll_out(make(tiny_target, tiny_drafter, "vanilla"), batch_of_texts(*some_prompts()))
    assert not any(each.is_inference() for each in (rolled.states, rolled.tokens, rolled.texts.taps, rolled.texts.input_ids, rolled.anchors))


# accepted, committed, drafts -> slots (from 1) of the response, slots of the rejected stream; token 1 ends a text
ROUNDS = {
    "all accepted": (4, 5, [2, 3, 4, 5], [1, 2, 3, 4], []),
    "none accepted": (0, 1, [2, 3, 4, 5], [1], [1, 2, 3, 4]),
    "some accepted": (2, 3, [2, 3, 4, 5], [1, 2, 3], [3, 4]),
    "cut by an accepted end token": (2, 2, [2, 1, 4, 5], [1, 2], []),
    "cut by an end token in the last slot": (4, 4, [2, 3, 4, 1], [1, 2, 3, 4], []),
    "cut by the limit": (3, 3, [2, 3, 4, 5], [1, 2, 3], []),
    "the correction ends the text": (1, 2, [2, 3, 4, 5], [1, 2], [2, 3, 4]),
    "an end token was drafted and refused": (1, 2, [2, 3, 1, 5], [1, 2], [2, 3]),
    "the refused draft is an end token": (0, 1, [1, 3, 4, 5], [1], [1]),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_slots_of_a_round(name: str) -> None:
    accepted, committed, drafts, said, refused = ROUNDS[name]
    response, rejected = streams(torch.tensor([accepted]), torch.tensor([committed]), torch.tensor([drafts]), (1,))
    assert (response[0].nonzero()[:, 0] + 1).tolist() == said
    assert (rejected[0].nonzero()[:, 0] + 1).tolist() == refused


def test_rounds_of_a_decode_are_cut_where_its_text_is(tiny_target, tiny_drafter) -> None:
    """A limit inside an accepted run: the drafts behind it are in neither stream; with one token more they are."""
    both = make(tiny_target, tiny_drafter, "vanilla")
    prompts, _ = some_prompts()
    [answer] = greedy(both, prompts[:1], [40])
    run = next(each for each in rounds_by_hand(both, prompts[0], answer) if 1 <= each.accepted < 4)
    upto = run.anchor - len(prompts[0]) + 1 + run.accepted

    def last_round(count: int) -> tuple[list[bool], list[bool]]:
        rolled = roll_out(both, batch_of_texts(prompts[:1], [count]))
        response, rejected = streams(rolled.accepted, rolled.committed, rolled.tokens[:, 1:], ())
        return response[-1].tolist(), rejected[-1].tolist()

    slots = range(1, 5)
    assert last_round(upto) == ([j <= run.accepted for j in slots], [False] * 4)
    assert last_round(upto + 1) == ([j <= run.accepted + 1 for j in slots], [j > run.accepted for j in slots])


def test_blocks_hold_the_drafts_and_the_text_holds_the_corrections() -> None:
    tokens = torch.tensor([[7, 2, 3, 4], [5, 6, 2, 2]])
    texts = Texts(torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 9, 1, 2), torch.zeros(1, 9, dtype=torch.long))
    rolled = Rollouts(texts, [], torch.tensor([1, 4]), tokens, torch.arange(12.0).view(2, 3, 2), torch.tensor([1, 3]), torch.tensor([2, 4]), torch.tensor([6, 7]))
    assert rolled.text_tokens().tolist() == [[2, 6, 4], [6, 2, 2]]
    blocks = rolled.blocks(torch.ones(2, 3, dtype=torch.bool))
    assert blocks.tokens.tolist() == [tokens.tolist()] and blocks.mask.shape == (1, 2, 3)
    assert torch.equal(blocks.states[blocks.places[0]], rolled.states)


def test_prompts_are_what_lies_before_the_answers() -> None:
    prompts, counts = [[3, 4], [5, 6, 7]], [4, 2]
    for packed in (False, True):
        requests = prompts_of(batch_of_texts(prompts, counts, packed))
        assert [(request.ids, request.max_new_tokens) for request in requests] == [([3, 4], 4), ([5, 6, 7], 2)]
    assert [request.max_new_tokens for request in prompts_of(batch_of_texts(prompts, counts), limit=3)] == [3, 2]
    batch = batch_of_texts([[3, 4, 5, 6, 7, 2]], [3])
    batch.loss_mask[0, 2:4] = True  # an earlier turn: its answer is the one that is decoded
    assert [(request.ids, request.max_new_tokens) for request in prompts_of(batch)] == [([3, 4], 2)]


def test_a_batch_that_cannot_be_rolled_out_is_refused() -> None:
    batch = batch_of_texts([[3, 4]], [2])
    with pytest.raises(ValueError, match="loss mask"):
        prompts_of(replace(batch, loss_mask=None))
    with pytest.raises(ValueError, match="no row of the batch has an answer"):
        prompts_of(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))


def test_a_text_of_one_token_has_no_round(tiny_target, tiny_drafter) -> None:
    both = make(tiny_target, tiny_drafter, "mtp")
    rolled = roll_out(both, batch_of_texts(*some_prompts()), limit=1)
    assert rolled.anchors.shape == (0,) and rolled.tokens.shape == (0, 5) and rolled.states.shape == (0, 4, 32)
    assert [len(answer) for answer in rolled.answers] == [1] * 4


def test_a_scheduler_cannot_be_recorded(tiny_target, tiny_drafter) -> None:
    both = make(tiny_target, tiny_drafter, "vanilla")
    request = Request([3, 4], 2)
    with pytest.raises(ValueError, match="leave the scheduler out"):
        decode(both, [request], 1, scheduler=Scheduler.__new__(Scheduler), recorder=Recording([request], 4))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["vanilla", "gated"])
def test_stale_drafter(tiny_target, tiny_drafter, name, compute) -> None:
    """Planted: a step that PyTorch's version counters do not see. Rollouts must draft with the weights as they are now."""
    both = make(tiny_target, tiny_drafter, name, dtype=torch.float32)
    batch = batch_of_texts(*some_prompts())
    before = roll_out(both, batch, compute=compute)
    draft_opd(both, batch, DistillSection(preset="draft_opd")).loss.backward()
    generator = torch.Generator().manual_seed(3)
    for parameter in both.drafter.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data.add_(noise)
    after = roll_out(both, batch, compute=compute)
    fresh = roll_out(pair(both.target, copy.deepcopy(both.drafter)), batch, compute=compute)
    assert torch.equal(after.tokens, fresh.tokens) and after.answers == before.answers
    assert after.tokens.shape != before.tokens.shape or not torch.equal(after.tokens, before.tokens)
