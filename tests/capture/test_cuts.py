"""Long conversations end at legal places; rows that teach nothing are told by name."""

from __future__ import annotations

import itertools

import pytest

from specgraft.capture.cuts import NO_ANCHOR, NO_TOKEN, cut_place, fault_of_mask, shortened
from specgraft.records import Conversation, Turn, ids_digest


def mask(text: str) -> list[bool]:
    """"..##.": two tokens of a prompt, two of an answer, one of what follows."""
    return [sign == "#" for sign in text]


@pytest.mark.parametrize(
    ("text", "limit", "place"),
    [
        ("..###", 0, 5),  # no limit
        ("..###", 5, 5),
        ("..###", 4, 4),  # inside the only answer
        ("..###..###", 9, 5),  # behind the first answer, not inside the second
        ("..###..###", 10, 10),
        ("..###..###", 6, 5),  # the next prompt is no use without its answer
        ("..###..###..##", 12, 10),  # behind the last answer that fits
        ("..#..####", 7, 7),  # the first answer has no anchor: inside the second
        ("..#..##.###", 9, 7),
        ("..#..####", 5, 5),  # nothing is left to learn: told by `fault_of_mask`
        (".....###", 3, 3),
    ],
)
def test_cut_places(text: str, limit: int, place: int) -> None:
    assert cut_place(mask(text), limit) == place


def test_every_mask_of_nine_tokens_is_cut_within_the_limit_and_keeps_an_anchor_where_one_fits() -> None:
    for signs in itertools.product("#.", repeat=9):
        text = "".join(signs)
        for limit in range(1, 10):
            place = cut_place(mask(text), limit)
            assert 0 < place <= limit
            assert ("##" in text[:limit]) == (fault_of_mask(mask(text[:place])) is None)


def conversation(text: str, name: str = "p") -> Conversation:
    """A row whose answers are the runs of # in `text`; ids count from 10."""
    ids = list(range(10, 10 + len(text)))
    turns = []
    for answered, group in itertools.groupby(enumerate(text), lambda pair: pair[1] == "#"):
        places = [place for place, _ in group]
        if answered:
            part = ids[places[0] : places[-1] + 1]
            turns.append(Turn(places[0], places[-1] + 1, "stop", ids_digest(part)))
    written = [token for token, sign in zip(ids, text, strict=True) if sign == "#"]
    return Conversation(
        name, "f", "en", "chat", "train", ids, mask(text), turns[0].start if turns else len(text), 0.0, 1.0, 0, "stop",
        ids_digest(written), turns=tuple(turns) if len(turns) > 1 else (),
    )  # fmt: skip


def test_a_cut_row_says_where_its_answers_end() -> None:
    (row,), left_out = shortened([conversation("..###..###..##")], 12)
    assert not left_out and row.input_ids == list(range(10, 20)) and row.loss_mask == mask("..###..###")
    assert [(turn.start, turn.stop, turn.finish_reason) for turn in row.spans] == [(2, 5, "stop"), (7, 10, "stop")]
    assert row.digest == ids_digest([12, 13, 14, 17, 18, 19]) and row.finish_reason == "stop"
    (row,), _ = shortened([conversation("..#..####")], 7)  # inside an answer: it is cut, and gets no end token
    assert [(turn.start, turn.stop, turn.finish_reason) for turn in row.spans] == [(2, 3, "stop"), (5, 7, "length")]
    assert row.spans[-1].digest == ids_digest([15, 16]) and row.finish_reason == "length"
    (row,), _ = shortened([conversation("..###..###")], 6)
    assert row.turns == () and [(turn.start, turn.stop) for turn in row.spans] == [(2, 5)] and row.digest == ids_digest([12, 13, 14])


def test_r9_rows_that_a_limit_leaves_nothing_to_learn_are_left_out_by_reason() -> None:
    """Limit 64: prompt 64 + answer 20, prompt 63 + answer 20, and rows that stay."""
    rows = [
        conversation("." * 64 + "#" * 20, "none"),
        conversation("." * 63 + "#" * 20, "one"),
        conversation("." * 62 + "#" * 20, "two"),
        conversation("." * 5 + "#" * 3, "short"),
        conversation("." * 5 + "#", "single"),
    ]
    kept, left_out = shortened(rows, 64)
    assert left_out == {"none": NO_TOKEN, "one": NO_ANCHOR, "single": NO_ANCHOR}
    assert [(row.prompt_id, len(row.input_ids)) for row in kept] == [("two", 64), ("short", 8)]
    assert kept[1] is rows[3]  # what fits stays as it is
