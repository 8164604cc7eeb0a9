"""`pilot`: every stage in order, on one run file; ends with a table and the report. Finished stages are not repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specgraft.check.gates import recorded
from specgraft.check.overfit import overfit as judge_overfit
from specgraft.drafters.store import WEIGHTS
from specgraft.log import say
from specgraft.pilot.overfit import overfit, overfit_sample
from specgraft.pilot.tables import gate_table, out, summary_table
from specgraft.records import Conversation, ids_digest
from specgraft.run import Session
from specgraft.run_dir import read_json, write_json
from specgraft.targets.load import digest
from specgraft.train.checkpoint import checkpoint_folder
from specgraft.train.setup import mask_token


def pilot(work: Session) -> dict[str, Any]:
    """Runs what is missing of a run and returns its summary. A gate that fails stops it (GateError)."""
    config, run = work.config, work.run
    if config.capture.target == "outer":
        raise ValueError('capture.target="outer": the pilot decodes with the whole target; add --tiny, or run regen, train, export and bench one by one')
    say(f"run: {run.root}")
    conversations = work.regen()
    work.passed(work.token_gates(conversations))
    if config.stream.medium == "disk":  # else features are made, and their gates run, while training
        work.capture()
    exported = work.exportable()
    work.passed([judge_overfit(overfitted(work, conversations), config.drafters.draft_tokens)])
    work.train()
    checkpoint = checkpoint_folder(run.checkpoints, config.train.steps)
    evaluation = evaluated(work, checkpoint)
    if exported:
        work.export(checkpoint)
    summary = summarise(work, evaluation)
    write_json(run.summary, summary)
    page = work.report()
    gate_table(recorded(run))
    summary_table(summary, evaluation)
    out.print(f"report: {page}", soft_wrap=True)
    return summary


def overfitted(work: Session, conversations: list[Conversation]) -> float | None:
    """Accept length of the overfit check, measured anew unless it passed with this drafter, target and answer."""
    config = work.config
    made_of = {
        "sections": {name: getattr(config, name).model_dump(mode="json") for name in ("drafters", "distill", "check")},
        "features": work.header,
        "mask_token_id": mask_token(config, work.target),
        "answer": ids_digest(overfit_sample(config, conversations).input_ids),
        "seed": config.run.seed,
    }
    if work.run.overfit.exists():
        before = read_json(work.run.overfit)
        length = before.get("accept_length")
        settled = judge_overfit(length, config.drafters.draft_tokens).passed or "overfit" in work.allow
        if settled and before.get("made_of") == made_of:
            return length
    with work.timed("overfit"):
        length = overfit(config, work.header["taps"], conversations)
    write_json(work.run.overfit, {"accept_length": length, "made_of": made_of})
    return length


def evaluated(work: Session, checkpoint: Path) -> dict[str, Any]:
    """The stored evaluation when it is of these weights and settings, else a new one."""
    if work.run.evaluation.exists():
        stored = read_json(work.run.evaluation)
        settings = stored.get("settings", {})
        same = settings.get("evaluate") == work.config.evaluate.model_dump(mode="json")
        same &= settings.get("target") == work.config.target.id and settings.get("seed") == work.config.run.seed
        prompts = [c.prompt_id for c in work.conversations() if c.split == "heldout"][: work.config.evaluate.prompts]
        same &= [row.get("prompt_id") for row in stored.get("t0", {}).get("per_request", [])] == prompts
        if same and settings.get("weights") == digest(checkpoint / WEIGHTS):
            work.passed(work.evaluate_gates(stored))
            return stored
    return work.evaluate(checkpoint)


def summarise(work: Session, evaluation: dict[str, Any]) -> dict[str, Any]:
    """The numbers of summary.json."""
    zero, one = evaluation["t0"], evaluation.get("t1", {})
    return {
        "run": work.config.run.name,
        "accept_length_t0": zero["accept_length"],
        "accept_length_t1": one.get("accept_length"),
        "accept_length_pooled_t0": zero["accept_length_pooled"],
        "accept_length_pooled_t1": one.get("accept_length_pooled"),
        "predicted_accept_length": zero["predicted_accept_length"],
        "agreement": zero["agreement"],
        "lossless_prompts": zero["lossless"]["prompts"],
        "lossless_mismatches": zero["lossless"]["mismatches"],
        "lossless_ties": zero["lossless"]["ties"],
        "speedup_t0": evaluation.get("speed", {}).get("t0", {}).get("speedup"),
        "speedup_t1": evaluation.get("speed", {}).get("t1", {}).get("speedup"),
        "minutes": sum(read_json(work.run.timing).values()) / 60,
        "gates": {row["name"]: row["passed"] for row in recorded(work.run)},
    }
