"""Who works on what: every conversation of a step once, as even as they go, and with the numbers it has in the whole step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from specgraft.records import Features
from specgraft.stream.shards import ShardReader
from specgraft.train.batch import step_batches, step_rows, step_shares
from specgraft.train.shares import share_out, stand_in

CPU = torch.device("cpu")


class Asked:
    """A source that remembers which rows it was asked for."""

    def __init__(self, reader: ShardReader) -> None:
        self.reader, self.ids, self.lengths, self.order = reader, reader.ids, reader.lengths, []

    def digest(self) -> str:
        return self.reader.digest()

    def rows(self, order: Iterable[int]) -> Iterator[Features | None]:
        for index in order:
            self.order.append(index)
            yield self.reader[index]

    def facts(self) -> dict[str, float]:
        return {}


def test_shares_are_even_in_tokens_and_one_share_keeps_the_order() -> None:
    lengths = [9, 1, 8, 2, 7, 3]
    assert share_out(lengths, 1) == [[0, 1, 2, 3, 4, 5]]
    assert share_out(lengths, 3) == [[0, 1], [2, 3], [4, 5]]  # 10 tokens each
    assert share_out([5, 6], 4) == [[1], [0], [], []]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(1, 99, (40,), generator=generator).tolist()
        shares = share_out(lengths, 6)
        loads = [sum(lengths[place] for place in share) for share in shares]
        assert sorted(place for share in shares for place in share) == list(range(40)) and max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 3), (2, 1), (2, 4), (3, 2)])
def test_a_rank_asks_for_its_own_rows_alone_and_all_together_for_every_row_once(captured, ranks: int, accumulate: int) -> None:
    reader = ShardReader(captured / "features", "train")
    order = []
    for rank in range(ranks):
        source = Asked(reader)
        shares = list(step_shares(source, 7, 6, 3, 1024, 0, 2, 5, CPU, 0, None, accumulate, rank, ranks))
        assert [len(share.micros) for share in shares] == [accumulate] * 3  # as many on every rank
        order += source.order
    assert sorted(order) == sorted(index for step in (2, 3, 4) for index in step_rows(len(reader), 7, 0, step))


@pytest.mark.parametrize("row_tokens", [0, 40])
@pytest.mark.parametrize("end_ids", [None, (3, 9)], ids=["answers", "branches"])
def test_anchors_and_numbers_are_those_of_the_whole_step(captured, row_tokens: int, end_ids: tuple[int, ...] | None) -> None:
    """The text up to an anchor, and what is drawn for it, two rows an anchor; a conversation may come twice in a step."""

    def drawn(batch) -> list[tuple[list[int], list[float]]]:
        numbers = batch.uniforms(2, 3, torch.Generator().manual_seed(1)).view(*batch.anchors.position.shape, 6)
        found = []
        for row, column in batch.anchors.keep.nonzero().tolist():
            place = int(batch.anchors.position[row, column])
            first = int(batch.texts.starts[row, place])
            found.append((batch.texts.input_ids[row, first : place + 1].tolist(), numbers[row, column].tolist()))
        return found

    reader = ShardReader(captured / "features", "train")
    for step, whole in enumerate(step_batches(reader, 7, 6, 3, 1024, 0, 0, 3, CPU, row_tokens, end_ids)):
        found = []
        shares = [next(step_shares(reader, 7, 6, 3, 1024, 0, step, step + 1, CPU, row_tokens, end_ids, 4, rank, 2)) for rank in (0, 1)]
        kept = sum(share.kept() for share in shares)
        for share in shares:
            for batch in share.placed(kept.tolist()):
                found += [] if batch is None else drawn(batch)
        assert sorted(found) == sorted(drawn(whole)) and len(found) > 20


def test_a_stand_in_has_nothing_to_learn(tiny_target, tiny_drafter) -> None:
    target = tiny_target()
    batch = stand_in(tiny_drafter(target).config, torch.float32, CPU)
    assert not batch.anchors.keep.any() and not batch.anchors.mask.any() and batch.texts.taps.shape == (1, 2, 3, 32)
