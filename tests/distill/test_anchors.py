"""Where blocks start and which of their slots are supervised."""

from __future__ import annotations

import pytest
import torch

from specgraft.distill.anchors import draw_anchors, legal_anchors, slot_mask


def mask(*rows: str) -> torch.Tensor:
    """One row per text, "1" where the target generated the token; padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[char == "1" for char in row.ljust(width, "0")] for row in rows])


def draw(loss_mask: torch.Tensor, count: int, draft_tokens: int = 3, seed: int = 0):
    return draw_anchors(loss_mask, count, draft_tokens, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("row", "legal"),
    [
        ("00000111", [5, 6]),  # the last prompt token is none: decoding never drafts from a prompt
        ("00000100", []),
        ("11111111", [0, 1, 2, 3, 4, 5, 6]),  # the last token has none behind it
        ("00110110", [2, 5]),  # two answers: no block starts on the last token of the first
        ("00000000", []),
    ],
)
def test_an_anchor_needs_itself_and_the_next_token_supervised(row: str, legal: list[int]) -> None:
    assert legal_anchors(mask(row))[0].nonzero()[:, 0].tolist() == legal


def test_supervised_slots_are_a_prefix_read_at_the_position_of_the_label() -> None:
    """Prompt x0-x4, answer x5-x7, three drafts: at anchor 5 the slots of x6 and x7, at anchor 6 that of x7."""
    found = slot_mask(mask("00000111"), torch.tensor([[5, 6, 7, 0]]), torch.tensor([[True, True, True, False]]), 3)
    assert found.int().tolist() == [[[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]]


def test_a_hole_ends_the_block() -> None:
    found = slot_mask(mask("0011011111"), torch.tensor([[2, 5]]), torch.ones(1, 2, dtype=torch.bool), 4)
    assert found.int().tolist() == [[[1, 0, 0, 0], [1, 1, 1, 1]]]


def test_a_block_of_a_row_that_is_not_kept_has_no_slot() -> None:
    found = slot_mask(mask("1111"), torch.tensor([[0, 0]]), torch.tensor([[True, False]]), 2)
    assert found.int().tolist() == [[[1, 1], [0, 0]]]


def test_anchors_are_legal_distinct_ascending_and_padded_by_zero() -> None:
    loss_mask = mask("0001111111", "0000000011", "0000000000")
    found = draw(loss_mask, 4)
    assert found.position.shape == found.keep.shape == (3, 4) and found.mask.shape == (3, 4, 3)
    assert found.keep.sum(1).tolist() == [4, 1, 0]
    legal = legal_anchors(loss_mask)
    for row in range(3):
        kept = found.position[row][found.keep[row]].tolist()
        assert kept == sorted(set(kept)) and all(legal[row, anchor] for anchor in kept)
        assert (found.position[row][~found.keep[row]] == 0).all() and not found.mask[row][~found.keep[row]].any()
    assert torch.equal(found.mask, slot_mask(loss_mask, found.position, found.keep, 3))


def test_more_anchors_than_tokens_are_as_many_as_there_are() -> None:
    assert draw(mask("0111"), 50).keep.sum() == 2


def test_a_short_row_gets_the_anchors_it_would_get_alone_beside_a_long_one() -> None:
    """Rows of 187 and 7,000 tokens, at most 64 anchors each: the cap counts per conversation."""
    short, long = torch.zeros(187, dtype=torch.bool), torch.zeros(7_000, dtype=torch.bool)
    short[150:], long[100:] = True, True
    together = torch.zeros(2, 7_000, dtype=torch.bool)
    together[0, :187], together[1] = short, long
    found = draw(together, 64, 7)
    assert found.keep.sum(1).tolist() == [36, 64]
    alone = draw(short[None], 64, 7)
    assert torch.equal(found.position[0][found.keep[0]], alone.position[0][alone.keep[0]])
    assert found.mask[0].sum() == alone.mask[0].sum()


def test_the_seed_decides() -> None:
    loss_mask = mask("0" * 10 + "1" * 60)
    assert torch.equal(draw(loss_mask, 8, seed=3).position, draw(loss_mask, 8, seed=3).position)
    assert not torch.equal(draw(loss_mask, 8, seed=3).position, draw(loss_mask, 8, seed=4).position)


def test_every_legal_anchor_is_equally_likely() -> None:
    loss_mask, seeds, count = mask("0" * 5 + "1" * 13 + "0" * 4), 1_500, 3
    hits = torch.zeros(22)
    for seed in range(seeds):
        hits[draw(loss_mask, count, seed=seed).position[0]] += 1
    expected = seeds * count / 12
    assert hits.nonzero()[:, 0].tolist() == list(range(5, 17))
    chi_square = float(((hits[5:17] - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 11 degrees of freedom, one in a thousand (drawing without replacement varies less)
