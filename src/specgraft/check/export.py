"""Gate "export": the exported folder alone gives the drafter that was trained."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path

import torch

from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.shared import Shared
from specgraft.export.reload import load_export
from specgraft.records import GateResult

TOLERANCE = 1e-5
CONTEXT, BLOCKS, TOKENS = 24, 3, 16  # of the random inputs
TRAINING_ONLY = {"confidence_detach"}  # fields that no engine reads


def export(folder: Path, drafter: Drafter) -> GateResult:
    """Reloads `folder` strictly and compares it with the drafter, rounded to the file's dtype, in float32.

    Compared are the configuration, block states, Markov bias and confidence logits on random inputs.
    """
    try:
        export = load_export(folder)
    except ValueError as error:
        return GateResult("export", False, str(error))
    again, dtype, ids = export.drafter, export.dtype, export.ids
    if fault := config_fault(again, drafter):
        return GateResult("export", False, f"{folder}: {fault}")
    before = outputs(rounded(drafter, getattr(torch, dtype)))
    after = outputs(again)
    if ids is not None and "markov biases" in before:  # ids that are never proposed have none
        before["markov biases"], after["markov biases"] = before["markov biases"][..., ids], after["markov biases"][..., ids]
    measured = {name: float((before[name] - after[name]).abs().max()) for name in before}
    wrong = [name for name, gap in measured.items() if not gap <= TOLERANCE]
    largest = max(measured.values())
    if wrong:
        return GateResult(
            "export",
            False,
            f"{folder}: {wrong[0]} differ by {measured[wrong[0]]:.2e} after reload, at most {TOLERANCE:.0e}",
            measured,
        )
    return GateResult(
        "export",
        True,
        f"reloaded in {dtype}: {', '.join(before)} within {largest:.1e} of the trained drafter",
        measured,
    )


def config_fault(again: Drafter, drafter: Drafter) -> str | None:
    """The first field of the shape that did not survive."""
    ours, read = asdict(drafter.config), asdict(again.config)
    for name, value in ours.items():
        if name not in TRAINING_ONLY and read[name] != value:
            return f"{name} is {read[name]!r} after reload, was {value!r}"
    return None


def rounded(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    """A float32 copy on the CPU whose weights went through the file's dtype."""
    return copy.deepcopy(drafter).cpu().to(dtype).float().requires_grad_(False).eval()


@torch.inference_mode()
def outputs(drafter: Drafter, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the drafter computes for inputs that depend on the seed and its shape alone."""
    c = drafter.config
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(1, CONTEXT, len(c.taps), c.hidden_size, generator=generator)
    anchors = torch.linspace(1, CONTEXT - 1, BLOCKS).long()[None]
    ids = torch.randint(0, c.vocab_size, (1, CONTEXT), generator=generator)
    embedding = torch.randn(c.vocab_size, c.hidden_size, generator=generator)
    shared = Shared(embedding, embedding, torch.nn.Identity(), c.mask_token_id)
    hidden = drafter(shared, Texts(ids, taps, torch.zeros_like(ids)), anchors)
    found = {"block states": hidden}
    embedded = None
    if drafter.markov_head is not None:
        before = (anchors[..., None] + torch.arange(c.draft_tokens)).clamp(max=CONTEXT - 1)
        embedded = drafter.markov_head.embed(ids.gather(1, before.flatten(1)).view_as(before))
        found["markov biases"] = drafter.markov_head.bias(drafter.markov_head.latents(hidden, embedded))
    if drafter.confidence_head is not None:
        found["confidence logits"] = drafter.confidence_head(hidden, embedded)
    return found
