"""Numbers as text."""

from __future__ import annotations

from specgraft.report.text import MISSING, count, duration, factor, number, percent, plain, printable, shortened


def test_numbers() -> None:
    assert number(1.5) == "1.50" and number(12345.678, 1, "ms") == "12,345.7 ms"
    assert count(98431) == "98,431" and percent(0.0511) == "5.1 %"
    for nothing in (None, "1", float("nan"), float("inf"), True, []):
        assert number(nothing) == count(nothing) == percent(nothing) == factor(nothing) == duration(nothing) == MISSING


def test_a_speedup_near_one_keeps_its_side() -> None:
    assert factor(0.997) == "0.997×" and factor(1.31) == "1.31×"


def test_duration() -> None:
    assert [duration(s) for s in (7.46, 75.2, 119.6, 4000)] == ["7.5 s", "1 min 15 s", "2 min 0 s", "1 h 6 min"]


def test_plain() -> None:
    assert plain({"a": [1, 2.5], "b": {"c": None}}) == "a 1, 2.5, b c none"
    assert plain(True) == "yes" and plain(6e-4) == "0.0006"


def test_text() -> None:
    assert printable("a\x00\n\ud800é") == "a\ufffd\n\ufffdé"
    assert shortened("abcdef", 4) == "abc…" and shortened("abc", 4) == "abc"
