"""The sections about the run itself: gates, what was run, training, and the whole config."""

from __future__ import annotations

import json
import math
from typing import Any

from specgraft.config import DistillSection
from specgraft.report import pictures
from specgraft.report.blocks import Block, Code, Paragraph, Picture, Section, Table
from specgraft.report.read import Found, at, is_number, numbers
from specgraft.report.text import count, duration, number, plain

KNOWN_GATES = (  # shown even where they have not run
    "token identity",
    "tap identity",
    "distribution identity",
    "overfit",
    "agreement",
    "engine agreement",
    "lossless",
    "export",
)
CURVES = {"loss": "loss", "ce": "cross-entropy (nats)", "l1": "L1 distance to target", "confidence": "confidence (BCE)"}


def gates(run: Found) -> Section:
    """Every gate of the design, and any other the run has checked."""
    rows: dict[str, tuple[str, str]] = {}
    for gate in run.gates or []:
        rows[_gate_name(gate.get("name"))] = (
            _outcome(gate.get("passed"), gate.get("allowed")),
            str(gate.get("detail") or ""),
        )
    named = at(run.summary, "gates")
    for name, passed in (named if isinstance(named, dict) else {}).items():
        rows.setdefault(_gate_name(name), (_outcome(passed), "from summary.json"))
    for name in KNOWN_GATES:
        rows.setdefault(name, ("not run", ""))
    order = {name: place for place, name in enumerate(KNOWN_GATES)}
    ordered = sorted(rows.items(), key=lambda item: order.get(item[0], len(order)))
    table = Table(("gate", "outcome", "detail"), [(name, *row) for name, row in ordered], status=1)
    return Section("gates", "Gates", [table])


def _gate_name(name: Any) -> str:
    return str(name).replace("_", " ").replace("-", " ").lower()


def _outcome(passed: Any, allowed: Any = None) -> str:
    if passed is None:
        return "not run"
    return "passed" if passed else "FAILED, allowed" if allowed else "FAILED"


def what_was_run(run: Found) -> Section:
    blocks: list[Block] = []
    for title, rows in (("Target and drafter", _models(run)), ("Data", _data(run)), ("Settings", _settings(run))):
        kept = [row for row in rows if row[1]]
        if kept:
            blocks.append(Table((title, ""), kept))
    if not run.config:
        blocks.insert(0, Paragraph("The run's config is not there, so what was run is not known."))
    if not run.data:
        blocks.append(Paragraph("No conversations have been answered yet (the regen stage has not finished)."))
    stages = {stage: seconds for stage, seconds in (run.timing or {}).items() if is_number(seconds)}
    if stages:
        rows = [(stage, duration(seconds)) for stage, seconds in stages.items()]
        blocks.append(Table(("Stage", "time"), [*rows, ("all", duration(sum(stages.values())))], numeric=(1,)))
    else:
        blocks.append(Paragraph("No times of stages are recorded yet."))
    return Section("run", "What was run", blocks)


def _objective(distill: Any, drafter: Any) -> str:
    """The weights that counted, preset included, and on what."""
    try:
        part = DistillSection.model_validate(distill)
    except ValueError:  # a run of another version
        return ", ".join(f"{key} {plain(value)}" for key, value in distill.items())
    kind = str(at(drafter, "kind"))
    found = part.weights(kind)
    if kind in ("mtp", "dflash", "dflash2") or at(drafter, "confidence") is False:
        found.pop("confidence", None)  # no such head: it counts for nothing
    own = {"references": "", "branches": "on its own branches: ", "rollouts": "on its own rounds: "}[part.origin]
    if part.origin == "rollouts":
        found = {"kl": 1.0, "rkl": part.rollout_rejected} | found
    return own + ", ".join(f"{name} {plain(value)}" for name, value in found.items()) + f", decay {plain(part.decay)}"


def _heads(drafter: Any) -> list[tuple[str, str]]:
    """What stands behind the trunk of this kind."""
    kind = at(drafter, "kind")
    if kind == "dspark":
        return [("sequential head", f"{plain(at(drafter, 'markov_head'))}, rank {plain(at(drafter, 'markov_rank'))}")]
    if kind == "dflash2":
        return [("candidate selector", f"top {plain(at(drafter, 'selector_top_k'))}, rank {plain(at(drafter, 'selector_rank'))}")]
    return []


def _models(run: Found) -> list[tuple[str, str]]:
    target, drafter, capture = at(run.config, "target"), at(run.config, "drafters"), at(run.config, "capture")
    if not drafter:
        return []
    taps = at(capture, "taps")
    if taps == "spread":
        taps = f"{plain(at(capture, 'tap_count'))}, spread over depth"
    warm = {key: at(drafter, key) for key in ("warm_from", "warm_layers", "warm_markov", "warm_fc")}
    started = [
        f"{key.removeprefix('warm_')} {plain(value)}"
        for key, value in warm.items()
        if value not in (None, False, "none", "")
    ]
    return [
        ("target", f"{plain(at(target, 'id'))}, {plain(at(target, 'dtype'))}"),
        ("drafter", plain(at(drafter, "kind"))),
        ("draft tokens per round (G)", plain(at(drafter, "draft_tokens"))),
        ("draft layers", plain(at(drafter, "layers"))),
        ("query / key-value heads", " / ".join(_shape(at(drafter, key)) for key in ("heads", "kv_heads"))),
        ("head width / MLP width", " / ".join(_shape(at(drafter, key)) for key in ("head_dim", "intermediate"))),
        *_heads(drafter),
        ("tapped target layers", plain(taps)),
        ("warm start", ", ".join(started) or "none"),
    ]


def _shape(value: Any) -> str:
    return "as the target" if value == 0 else plain(value)


def _data(run: Found) -> list[tuple[str, str]]:
    if not run.data:
        return []
    cut = at(run.data, "cut")
    of = at(run.data, "conversations")
    share = f" ({100 * cut / of:.1f} %)" if is_number(cut) and is_number(of) and of > 0 else ""
    return [
        ("conversations", count(of)),
        ("tokens the target generated", count(at(run.data, "tokens"))),
        ("answers cut by the limit", f"{count(cut)}{share}"),
        ("by split", _pairs(at(run.data, "splits"))),
        ("by language", _pairs(at(run.data, "by_language"))),
        ("by domain", _pairs(at(run.data, "by_domain"))),
    ]


def _pairs(value: Any) -> str:
    return ", ".join(f"{key}: {plain(part)}" for key, part in value.items()) if isinstance(value, dict) else ""


def _settings(run: Found) -> list[tuple[str, str]]:
    regen, train, distill = at(run.config, "regen"), at(run.config, "train"), at(run.config, "distill")
    rows = []
    if regen:
        rows.append(
            (
                "answers",
                f"T={plain(at(regen, 'temperature'))}, top-p {plain(at(regen, 'top_p'))}, "
                f"top-k {plain(at(regen, 'top_k'))}; "
                f"{plain(at(regen, 'greedy_share'))} of the prompts greedily; "
                f"at most {plain(at(regen, 'max_new_tokens'))} tokens",
            )
        )
    if train:
        steps = f"{plain(at(train, 'steps'))} steps of {plain(at(train, 'rows'))} conversations"
        rows.append(("training", f"{steps}, {plain(at(train, 'anchors'))} anchors each, {plain(at(train, 'compute'))}"))
        rows.append(("learning rate", f"{plain(at(train, 'lr'))}, warm-up {plain(at(train, 'warmup'))} of the steps"))
    if distill:
        rows.append(("objective", _objective(distill, at(run.config, "drafters"))))
    measured = at(run.evaluation, "settings")
    if isinstance(measured, dict):
        # the stored section and the digest tie the numbers to their input; a reader has them in the config below
        shown = {key: part for key, part in measured.items() if key not in ("evaluate", "weights", "checkpoint")}
        rows.append(("evaluation", _pairs(shown)))
    rows.append(("seed", plain(at(run.config, "run", "seed")) if run.config else ""))
    return rows


def by_step(run: Found, kind: str) -> list[dict[str, Any]]:
    """Rows of one kind, in step order; of two rows of a step the later one."""
    rows = {row["step"]: row for row in run.metrics if row.get("kind") == kind and is_number(row.get("step"))}
    return [rows[step] for step in sorted(rows)]


def training(run: Found) -> Section:
    rows = by_step(run, "train")
    if not rows:
        return Section(
            "losses",
            "Loss curves",
            missing="No training step has been logged yet: the train stage has not begun.",
        )
    curves = {title: _curve(rows, key) for key, title in CURVES.items()}
    curves = {title: curve for title, curve in curves.items() if curve}
    broken = sum(not is_number(row.get("loss")) for row in rows)
    last, planned = rows[-1], at(run.config, "train", "steps")
    reached = (
        f"{count(last['step'])} of {count(planned)} steps" if is_number(planned) else f"{count(last['step'])} steps"
    )
    said = ", ".join(f"{title} {curve[-1][1]:.3f}" for title, curve in curves.items())
    caption = f"{reached}; pale: as logged, strong: smoothed. Last values: {said}."
    blocks: list[Block] = []
    if curves:
        blocks.append(Picture(pictures.losses(curves, f"Training losses by step. {caption}"), caption))
    if broken:
        blocks.append(Paragraph(f"{broken} logged steps have no finite loss: they are gaps in the curves."))
    seconds = [row["seconds"] for row in rows if is_number(row.get("seconds"))]
    table = [
        ("learning rate, last", plain(last.get("lr"))),
        ("gradient norm, last", number(last.get("grad_norm"), 3)),
        ("median seconds per logged row", number(sorted(seconds)[len(seconds) // 2] if seconds else None, 2)),
        ("overlap with the target by position, last", " ".join(f"{part:.2f}" for part in numbers(last.get("alpha")))),
    ]
    blocks.append(Table(("training", ""), [row for row in table if row[1]], folded="rates and overlap"))
    return Section("losses", "Loss curves", blocks)


def _curve(rows: list[dict[str, Any]], key: str) -> pictures.Curve:
    return [(float(row["step"]), float(row[key])) for row in rows if is_number(row.get(key))]


def validation(run: Found) -> Section:
    title = "Accept length while training"
    rows = by_step(run, "validate")
    curve = _curve(rows, "accept_length")
    if not curve:
        return Section(
            "accept-curve", title, missing="No validation has been logged yet: the train stage has not come so far."
        )
    best = max(curve, key=lambda point: point[1])
    caption = (
        f"Held-out text, teacher-forced surrogate, bonus included: it steers training and is not the measured accept "
        f"length above. Last {curve[-1][1]:.2f} at step {curve[-1][0]:,.0f}, best {best[1]:.2f} at step {best[0]:,.0f}."
    )
    blocks: list[Block] = [Picture(pictures.accept_curve(curve, f"Accept length by training step. {caption}"), caption)]
    last = [value for value in numbers(rows[-1].get("survival")) if not math.isnan(value)]
    if last:
        text = " ".join(f"{value:.3f}" for value in last)
        blocks.append(Paragraph(f"Teacher-forced survival by position at the last validation: {text}."))
    return Section("accept-curve", title, blocks)


def full_config(run: Found) -> Section:
    if not run.config:
        return Section("config", "Config", missing="config.json is not there.")
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    return Section("config", "Config", [Code(text, "The whole resolved config of this run")])
