"""Numbers for the math families of every language: values that belong together, so that problems have neat answers."""

from __future__ import annotations

from typing import Any


def equation(v: dict[str, Any]) -> dict[str, Any] | None:
    """From a, b, c, x: the sides of `ax + b = cx + d`, and a guess that is right for even b."""
    a, b, c, x = v["a"], v["b"], v["c"], v["x"]
    if a == c or b == 0:
        return None
    right = a * x + b - c * x
    left = f"{a}x {'+' if b > 0 else '-'} {abs(b)}"
    guess = x if b % 2 == 0 else x + 2
    return {"left": left, "right": _term(c, "x", right), "guess": guess}


def system_of_two(v: dict[str, Any]) -> dict[str, Any] | None:
    """From x, y, a, b, c, d: two linear equations solved by (x, y), and a heads-and-legs puzzle."""
    a, b, c, d, x, y = v["a"], v["b"], v["c"], v["d"], v["x"], v["y"]
    if a * d == b * c:
        return None
    two, four = abs(x) + 4, abs(y) + 3
    return {
        "e1": f"{_linear(a, b)} = {a * x + b * y}",
        "e2": f"{_linear(c, d)} = {c * x + d * y}",
        "sum": two * 3 + four,
        "diff": abs(two * 3 - four),
        "n": two + four,
        "legs": 2 * two + 4 * four,
    }


def fraction_pair(v: dict[str, Any]) -> dict[str, Any] | None:
    """From a, b, c, d: two proper fractions f and g that differ."""
    a, b, c, d = v["a"], v["b"], v["c"], v["d"]
    if a >= b or c >= d or a * d == b * c:
        return None
    return {"f": f"{a}/{b}", "g": f"{c}/{d}"}


def sequence(v: dict[str, Any]) -> dict[str, Any]:
    """From kind, a, d: five terms of a sequence and a number to look for in it."""
    a, d = v["a"], v["d"]
    if v["kind"] == "add":
        terms = [a + d * i for i in range(5)]
    elif v["kind"] == "multiply":
        terms = [a * (2 + d % 3) ** i for i in range(5)]
    elif v["kind"] == "square":
        terms = [(a + i) ** 2 + d for i in range(5)]
    elif v["kind"] == "fib":
        terms = [a, d]
        while len(terms) < 6:
            terms.append(terms[-1] + terms[-2])
    else:
        terms = [a + d * i * (i + 1) // 2 for i in range(5)]
    return {"terms": ", ".join(map(str, terms)), "probe": terms[-1] + 3 * d}


def _linear(a: int, b: int) -> str:
    first = "x" if a == 1 else f"{a}x"
    size = "" if abs(b) == 1 else abs(b)
    return f"{first} {'+' if b > 0 else '-'} {size}y"


def _term(factor: int, name: str, rest: int) -> str:
    if factor == 0:
        return str(rest)
    head = {1: name, -1: f"-{name}"}.get(factor, f"{factor}{name}")
    return head if rest == 0 else f"{head} {'+' if rest > 0 else '-'} {abs(rest)}"
