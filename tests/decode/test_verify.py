"""The accept rule on probabilities: golden values of algorithms.md 1.4, exactness by enumeration, end tokens."""

from __future__ import annotations

import itertools

import pytest
import torch

from specgraft.decode.verify import behind, commit, verify_greedy, verify_sampled

P1, Q1 = (0.7, 0.3), (0.5, 0.5)
P2 = {0: (0.9, 0.1), 1: (0.2, 0.8)}
Q2 = (0.6, 0.4)
ANY = (0.5, 0.5)


def test_golden_accept_length_of_two_slots():
    grid = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    level = torch.cartesian_prod(grid, grid)
    reached = [0.0, 0.0]
    for d1, d2 in itertools.product((0, 1), (0, 1)):
        p = torch.tensor([P1, P2[d1], ANY]).expand(len(level), -1, -1)
        q = torch.tensor([Q1, Q2]).expand(len(level), -1, -1)
        drafts = torch.tensor([d1, d2]).expand(len(level), -1)
        accepted, _ = verify_sampled(p, q, drafts, level, torch.zeros(len(level), dtype=torch.float64))
        for j in (1, 2):
            reached[j - 1] += Q1[d1] * Q2[d2] * (accepted >= j).double().mean().item()
    assert reached[0] == pytest.approx(0.8, abs=2e-3)
    assert reached[1] == pytest.approx(0.53, abs=2e-3)
    assert 1 + sum(reached) == pytest.approx(2.33, abs=4e-3)


def test_golden_residual():
    law = behind(torch.tensor([[P1, ANY]]), torch.tensor([[Q1]]), torch.tensor([0]))
    assert (law / law.sum()).tolist() == [[1.0, 0.0]]


def test_no_residual_behind_full_acceptance_nor_when_its_mass_is_rounding():
    p = torch.tensor([[P1, (0.25, 0.75)]])
    assert behind(p, torch.tensor([[Q1]]), torch.tensor([1])).tolist() == [[0.25, 0.75]]
    assert behind(p, torch.tensor([[P1]]), torch.tensor([0])).tolist() == [[pytest.approx(0.7), pytest.approx(0.3)]]


def test_output_law_is_the_targets_by_enumeration():
    """V=4, G=2, q on the two likeliest tokens (as a selector's), four output tokens: exact, no sampling."""
    generator = torch.Generator().manual_seed(3)
    vocab, size, want = 4, 2, 4
    table = torch.rand(vocab, vocab, generator=generator, dtype=torch.float64).pow(2).softmax(-1)

    def q_of(previous: int, slot: int) -> torch.Tensor:
        law = table[previous].roll(slot)  # another law than p's
        top = law.topk(2).indices
        out = torch.zeros(vocab, dtype=torch.float64)
        out[top] = law[top] / law[top].sum()
        return out

    found: dict[tuple[int, ...], float] = {}

    def go(text: tuple[int, ...], weight: float) -> None:
        if weight == 0:
            return
        if len(text) > want:
            found[text[1 : want + 1]] = found.get(text[1 : want + 1], 0.0) + weight
            return
        for drafts in itertools.product(range(vocab), repeat=size):
            before = [text[-1], *drafts]
            p = torch.stack([table[token] for token in before])[None]
            q = torch.stack([q_of(before[j], j) for j in range(size)])[None]
            chance = weight * float(torch.stack([q[0, j, drafts[j]] for j in range(size)]).prod())
            if chance == 0:
                continue
            for accepted in range(size + 1):
                keep = chance
                for j in range(accepted):
                    keep *= min(1.0, float(p[0, j, drafts[j]] / q[0, j, drafts[j]]))
                if accepted < size:
                    keep *= 1 - min(1.0, float(p[0, accepted, drafts[accepted]] / q[0, accepted, drafts[accepted]]))
                law = behind(p, q, torch.tensor([accepted]))[0]
                for token in range(vocab):
                    share = float(law[token] / law.sum())
                    go((*text, *drafts[:accepted], token), keep * share)

    go((0,), 1.0)
    for text, chance in found.items():
        exact = 1.0
        for before, token in itertools.pairwise((0, *text)):
            exact *= float(table[before, token])
        assert chance == pytest.approx(exact, abs=1e-12)
    assert len(found) == vocab**want


def test_greedy_rule():
    best = torch.tensor([[4, 5, 6], [4, 5, 6], [9, 5, 6]])
    drafts = torch.tensor([[4, 5], [4, 6], [4, 5]])
    accepted, following = verify_greedy(best, drafts)
    assert accepted.tolist() == [2, 1, 0]
    assert following.tolist() == [6, 5, 9]


@pytest.mark.parametrize(
    ("accepted", "following", "room", "committed", "count", "reason"),
    [
        (3, 9, 10, (4, 5, 6, 9), 3, ""),
        (1, 9, 10, (4, 9), 1, ""),
        (1, 7, 10, (4, 7), 1, "stop"),  # an end token from the target itself
        (3, 9, 4, (4, 5, 6, 9), 3, "length"),
        (3, 9, 3, (4, 5, 6), 3, "length"),
        (3, 9, 1, (4,), 1, "length"),
    ],
)
def test_commit(accepted, following, room, committed, count, reason):
    verdict, why = commit([4, 5, 6], accepted, following, {7}, room)
    assert (verdict.committed, verdict.accepted, verdict.proposed, why) == (committed, count, 3, reason)


def test_accepted_end_token_is_last_and_has_no_bonus():
    verdict, why = commit([4, 7, 6], 3, 9, {7, 8}, 10)
    assert (verdict.committed, verdict.accepted, why) == ((4, 7), 2, "stop")
    verdict, why = commit([4, 7, 6], 0, 9, {7, 8}, 10)  # a refused one is no end
    assert (verdict.committed, verdict.accepted, why) == ((9,), 0, "")
