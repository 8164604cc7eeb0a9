"""Masks of twelve families and more, times message shapes, against marks made by hand: every token."""

from __future__ import annotations

import pytest
from templates_by_hand import FAMILIES, SHAPES, family, tools_of

from specgraft.regen.render import Chat

CASES = [(name, thinking, shape) for name in FAMILIES for thinking, shape in family(name).marks]


def test_there_are_enough_families_and_every_mark_names_a_shape() -> None:
    assert len(FAMILIES) >= 12
    for name in FAMILIES:
        lines = (family(name).marks, name)
        assert lines[0], name


@pytest.mark.parametrize(("name", "thinking", "shape"), CASES)
def test_rows_and_masks_are_those_marked_by_hand(name: str, thinking: str, shape: str) -> None:
    mine = family(name)
    expected = mine.marks[thinking, shape]
    if expected[0].startswith("!!"):
        with pytest.raises(ValueError, match=expected[0].removeprefix("!! ")) as caught:
            Chat(mine.tokenizer, mine.end_ids, thinking).answered(SHAPES[shape], tools_of(shape))
        assert "\n" not in str(caught.value)
        return
    rows = Chat(mine.tokenizer, mine.end_ids, thinking).answered(SHAPES[shape], tools_of(shape))
    shown = [mine.tokenizer.decode(row.ids) for row in rows]
    assert shown == [text.replace("⟦", "").replace("⟧", "") for text in expected]
    for row, text in zip(rows, expected, strict=True):
        ids, mask = mine.marked(text)
        assert row.ids == ids
        assert row.mask == mask
