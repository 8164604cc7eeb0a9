"""The table at the top: what came out, in words that do not flatter."""

from __future__ import annotations

from typing import Any

from specgraft.plan import breakeven as cost
from specgraft.plan.table import verdict
from specgraft.report.blocks import Headline, Line, Section
from specgraft.report.read import Found, at, draft_tokens, is_number
from specgraft.report.text import MISSING, count, duration, factor, number, percent, plain

TEMPERATURES = (("t0", 0), ("t1", 1))


def conditions(run: Found, temperature: int, dtype: Any) -> str:
    """What every number is said with."""
    g = draft_tokens(run)
    parts = ["bonus included", f"G={g}" if g else "", f"T={temperature}", str(dtype) if dtype else ""]
    return ", ".join(part for part in parts if part)


def evaluation_dtype(run: Found) -> Any:
    return at(run.evaluation, "settings", "dtype") or at(run.config, "evaluate", "dtype")


def speed_dtype(run: Found) -> Any:
    return at(run.evaluation, "speed", "dtype") or at(run.config, "evaluate", "speed_dtype")


def headline(run: Found) -> Section:
    lines = _engine(run)
    lines += [_accept_length(run, key, temperature) for key, temperature in TEMPERATURES]
    lines += [_speed(run, key, temperature) for key, temperature in TEMPERATURES]
    lines += [_break_even(run), _agreement(run), _lossless(run), _minutes(run)]
    return Section("headline", "Result", [Headline(lines)])


def _engine(run: Found) -> list[Line]:
    """What a real engine said, losses first; nothing where none was measured."""
    engine = at(run.bench, "settings", "bench", "engine")
    return [
        Line(
            f"In {plain(engine)}, {plain(said['model'])} with {plain(said['drafter'])}",
            f"{said['low']:.2f}x to {said['high']:.2f}x",
            beside=verdict(said["high"] if said["low"] >= 1 else said["low"]),
            tone="good" if said["low"] >= 1 else "bad",
            note=str(said["text"]),
        )
        for said in at(run.bench, "said") or []
    ]


def pooled(run: Found, key: str) -> Any:
    value = at(run.evaluation, key, "accept_length_pooled")
    return value if value is not None or key != "t0" else at(run.summary, "accept_length_pooled_t0")


def _accept_length(run: Found, key: str, temperature: int) -> Line:
    what = f"Accept length, T={temperature}"
    part = at(run.evaluation, key)
    mean = at(part, "accept_length")
    if not is_number(mean):
        mean = at(run.summary, f"accept_length_{key}")
    if not is_number(mean):
        return Line(what, MISSING, tone="missing", note="not evaluated at this temperature yet")
    g = draft_tokens(run)
    most = f", at most {g + 1}" if g else ""
    requests = f" of {count(at(part, 'requests'))} held-out requests" if is_number(at(part, "requests")) else ""
    return Line(
        what,
        number(mean),
        beside=f"pooled {number(pooled(run, key))}",
        note=f"tokens committed per verify round{most}; mean{requests}, pooled over rounds beside it; "
        + conditions(run, temperature, evaluation_dtype(run)),
    )


def _speed(run: Found, key: str, temperature: int) -> Line:
    what = f"Speed against no draft, T={temperature}"
    part = at(run.evaluation, "speed", key)
    gain = at(part, "speedup")
    if not is_number(gain) and key == "t0":
        gain = at(run.summary, "speedup_t0")
    if not is_number(gain):
        return Line(what, MISSING, tone="missing", note="no prompts were timed at this temperature")
    prompts = at(run.evaluation, "speed", "prompts")
    timed = f"{count(prompts)} prompts, one at a time" if is_number(prompts) else "one prompt at a time"
    return Line(
        what,
        factor(gain),
        beside=verdict(gain),
        tone="good" if gain > 1 else "bad",
        note=f"{number(at(part, 'tokens_per_second'), 1)} tokens/s with the drafter, "
        f"{number(at(part, 'plain_tokens_per_second'), 1)} without, same run, {timed}; "
        + conditions(run, temperature, speed_dtype(run)),
    )


def _break_even(run: Found) -> Line:
    what = "Break-even accept length at the measured step, T=0"
    part = at(run.evaluation, "speed", "t0")
    step, bare = at(part, "step_ms"), at(part, "plain_step_ms")
    if not (is_number(step) and is_number(bare) and step > 0 and bare > 0):
        return Line(what, MISSING, tone="missing", note="needs a timed step with and without the drafter")
    star = cost.break_even(step, bare)
    note = (
        f"step with drafter {number(step, 1)} ms over plain step {number(bare, 1)} ms: above this accept length the "
        f"drafter pays; {conditions(run, 0, speed_dtype(run))}"
    )
    g = draft_tokens(run)
    if g and star > g + 1:
        note += f"; out of reach at G={g}, which commits at most {g + 1} tokens a round"
    tau = pooled(run, "t0")
    if not (is_number(tau) and tau >= 1):
        return Line(what, number(star), beside="accept length not measured", note=note)
    pays = tau > star
    note += f". To pay at the measured {number(tau)} a step may take {number(cost.largest_step_ms(tau, bare), 1)} ms"
    gain = at(part, "speedup")
    if is_number(gain) and (gain > 1) != pays:
        note += ". The timed prompts say the opposite: their own accept length differs from the held-out one"
    says = "pays" if pays else "does not pay"
    return Line(what, number(star), f"{says}: pooled {number(tau)}", note, "good" if pays else "bad")


def _agreement(run: Found) -> Line:
    what = "Predicted accept length, T=0"
    predicted = at(run.evaluation, "t0", "predicted_accept_length")
    if not is_number(predicted):
        predicted = at(run.summary, "predicted_accept_length")
    if not is_number(predicted):
        return Line(what, MISSING, tone="missing", note="expected rounds have not been evaluated yet")
    measured = pooled(run, "t0")
    beside = "nothing to compare with"
    if is_number(measured) and measured > 0:
        beside = f"{percent(abs(predicted / measured - 1))} from pooled {number(measured)}"
    note = f"from expected rounds on the same text; {conditions(run, 0, evaluation_dtype(run))}"
    return Line(what, number(predicted), beside, note)


def _lossless(run: Found) -> Line:
    what = "Same text with and without the drafter, T=0"
    part = at(run.evaluation, "t0", "lossless")
    wrong, ties = at(part, "mismatches"), at(part, "ties")
    if not is_number(wrong):
        wrong, ties = at(run.summary, "lossless_mismatches"), at(run.summary, "lossless_ties")
    if not is_number(wrong):
        return Line(what, MISSING, tone="missing", note="greedy texts have not been compared yet")
    compared = ""
    if is_number(at(part, "prompts")):
        compared = f"{count(part['prompts'])} prompts, {count(at(part, 'tokens'))} tokens compared one by one; "
    tied = f"{count(ties)} ties" if is_number(ties) else "ties not counted"
    dtype = evaluation_dtype(run)
    note = f"{compared}greedy, T=0{', ' + str(dtype) if dtype else ''}; in a tie the texts part at tokens rated equal"
    if wrong > 0:
        return Line(what, "differs", f"{count(wrong)} mismatches, {tied}", note, "bad")
    return Line(what, "identical" if not ties else "identical up to ties", f"0 mismatches, {tied}", note, "good")


def _minutes(run: Found) -> Line:
    minutes = at(run.summary, "minutes")
    stages = [value for value in (run.timing or {}).values() if is_number(value)]
    if not is_number(minutes) and stages:
        minutes = sum(stages) / 60
    if not is_number(minutes):
        return Line("Time", MISSING, tone="missing", note="no times are recorded yet")
    where = f"device {plain(at(run.config, 'run', 'device'))}" if at(run.config, "run", "device") else ""
    return Line("Time", f"{number(minutes, 1)} min", duration(60 * minutes) if minutes >= 60 else "", where)
