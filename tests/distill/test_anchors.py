"""Where blocks start and which of their slots are supervised."""

from __future__ import annotations

import pytest
import torch

from specgraft.distill.anchors import choose_anchors, draw_anchors, legal_anchors, slot_mask


def mask(*rows: str) -> torch.Tensor:
    """One row per text, "1" where the target generated the token; padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[char == "1" for char in row.ljust(width, "0")] for row in rows])


def starts_of(*rows: str) -> torch.Tensor:
    """One row per text, a letter per document."""
    return torch.tensor([[row.index(char) for char in row] for row in rows])


def alone(loss_mask: torch.Tensor) -> torch.Tensor:
    """Starts of rows with one document."""
    return torch.zeros_like(loss_mask, dtype=torch.long)


def draw(loss_mask: torch.Tensor, count: int, draft_tokens: int = 3, seed: int = 0, starts: torch.Tensor | None = None, **more):
    starts = alone(loss_mask) if starts is None else starts
    return draw_anchors(loss_mask, starts, count, draft_tokens, torch.Generator().manual_seed(seed), **more)


def kept(anchors, row: int = 0) -> list[int]:
    return anchors.position[row][anchors.keep[row]].tolist()


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
    assert legal_anchors(mask(row), alone(mask(row)))[0].nonzero()[:, 0].tolist() == legal


def test_supervised_slots_are_a_prefix_read_at_the_position_of_the_label() -> None:
    """Prompt x0-x4, answer x5-x7, three drafts: at anchor 5 the slots of x6 and x7, at anchor 6 that of x7."""
    found = slot_mask(mask("00000111"), alone(mask("00000111")), torch.tensor([[5, 6, 7, 0]]), torch.tensor([[True, True, True, False]]), 3)
    assert found.int().tolist() == [[[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]]


def test_a_hole_ends_the_block() -> None:
    found = slot_mask(mask("0011011111"), alone(mask("0011011111")), torch.tensor([[2, 5]]), torch.ones(1, 2, dtype=torch.bool), 4)
    assert found.int().tolist() == [[[1, 0, 0, 0], [1, 1, 1, 1]]]


def test_a_block_of_a_row_that_is_not_kept_has_no_slot() -> None:
    found = slot_mask(mask("1111"), alone(mask("1111")), torch.tensor([[0, 0]]), torch.tensor([[True, False]]), 2)
    assert found.int().tolist() == [[[1, 1], [0, 0]]]


def test_anchors_are_legal_distinct_ascending_and_padded_by_zero() -> None:
    loss_mask = mask("0001111111", "0000000011", "0000000000")
    found = draw(loss_mask, 4)
    assert found.position.shape == found.keep.shape == (3, 4) and found.mask.shape == (3, 4, 3)
    assert found.keep.sum(1).tolist() == [4, 1, 0]
    legal = legal_anchors(loss_mask, alone(loss_mask))
    for row in range(3):
        kept = found.position[row][found.keep[row]].tolist()
        assert kept == sorted(set(kept)) and all(legal[row, anchor] for anchor in kept)
        assert (found.position[row][~found.keep[row]] == 0).all() and not found.mask[row][~found.keep[row]].any()
    assert torch.equal(found.mask, slot_mask(loss_mask, alone(loss_mask), found.position, found.keep, 3))


def test_more_anchors_than_tokens_are_as_many_as_there_are() -> None:
    assert draw(mask("0111"), 50).keep.sum() == 2


def test_documents_of_one_row_share_neither_anchors_nor_labels() -> None:
    """Documents of 1, 3 and 2 tokens, all supervised, then padding."""
    loss_mask, starts = mask("11111100"), starts_of("abbbcc--")
    assert legal_anchors(loss_mask, starts)[0].nonzero()[:, 0].tolist() == [1, 2, 4]
    found = draw(loss_mask, 9, starts=starts)
    assert kept(found) == [1, 2, 4]
    assert found.mask.int().tolist() == [[[1, 1, 0], [1, 0, 0], [1, 0, 0]]]


def test_a_hole_and_the_end_of_a_document_end_the_block() -> None:
    loss_mask, starts = mask("0110111111"), starts_of("aaaaaaabbb")
    found = slot_mask(loss_mask, starts, torch.tensor([[1, 4, 7]]), torch.ones(1, 3, dtype=torch.bool), 4)
    assert found.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]]


def test_a_document_has_the_same_anchors_wherever_it_lies() -> None:
    """They hang on its ranks alone; here three documents of one row and each in a row of its own."""
    generator = torch.Generator().manual_seed(1)
    lengths, count = (9, 30, 17), 4
    ranks = [torch.rand(length, generator=generator) for length in lengths]
    masks = [torch.rand(length, generator=generator) < 0.8 for length in lengths]
    for order in ((0, 1, 2), (2, 0, 1)):
        firsts = [0, lengths[order[0]], lengths[order[0]] + lengths[order[1]]]
        starts = torch.cat([torch.full((lengths[index],), first) for index, first in zip(order, firsts, strict=True)])[None]
        rank, loss_mask = (torch.cat([parts[index] for index in order])[None] for parts in (ranks, masks))
        together = choose_anchors(rank, loss_mask, starts, count, 3)
        expected, slots = [], []
        for index, first in zip(order, firsts, strict=True):
            one = choose_anchors(ranks[index][None], masks[index][None], torch.zeros(1, lengths[index], dtype=torch.long), count, 3)
            expected += [first + position for position in kept(one)]
            slots.append(one.mask[0][one.keep[0]])
        assert kept(together) == expected and together.keep.shape == (1, len(expected))
        assert torch.equal(together.mask[0], torch.cat(slots))


def test_a_short_document_is_not_starved_by_a_long_one_in_its_row() -> None:
    """Documents of 187 and 7,000 tokens, at most 64 anchors (faults D9): a cap of the row leaves the short one a few."""
    loss_mask = torch.ones(1, 7_187, dtype=torch.bool)
    loss_mask[0, :150] = loss_mask[0, 187:287] = False
    starts = torch.zeros(1, 7_187, dtype=torch.long)
    starts[0, 187:] = 187

    def covered(anchors) -> tuple[float, float]:
        """Share of the supervised tokens of each document that some slot learns."""
        label = (anchors.position[..., None] + torch.arange(1, 8))[anchors.mask].unique()
        return float((label < 187).sum()) / 37, float((label >= 187).sum()) / 6_900

    by_document, by_row = draw(loss_mask, 64, 7, starts=starts), draw(loss_mask, 64, 7, starts=starts, quota="row")
    assert by_document.keep.sum() == 36 + 64 and by_row.keep.sum() == 64
    short, long = draw(loss_mask[:, :187], 64, 7), draw(loss_mask[:, 187:], 64, 7)
    assert covered(by_document)[0] == covered(short)[0] == 36 / 37
    alone_long = float((long.position[..., None] + torch.arange(1, 8))[long.mask].unique().numel()) / 6_900
    assert covered(by_document)[1] == pytest.approx(alone_long, abs=0.01)
    assert covered(by_row)[0] < 0.5


def test_the_seed_decides() -> None:
    loss_mask = mask("0" * 10 + "1" * 60)
    assert torch.equal(draw(loss_mask, 8, seed=3).position, draw(loss_mask, 8, seed=3).position)
    assert not torch.equal(draw(loss_mask, 8, seed=3).position, draw(loss_mask, 8, seed=4).position)


def test_every_legal_anchor_is_equally_likely() -> None:
    rows, count = 1_500, 3
    loss_mask = mask("0" * 5 + "1" * 13 + "0" * 4).expand(rows, -1)
    hits = draw(loss_mask, count).position.flatten().bincount(minlength=22).float()
    expected = rows * count / 12
    assert hits.nonzero()[:, 0].tolist() == list(range(5, 17))
    chi_square = float(((hits[5:17] - expected) ** 2 / expected).sum())
    assert chi_square < 31.3  # 11 degrees of freedom, one in a thousand (drawing without replacement varies less)
