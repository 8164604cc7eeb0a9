"""Gate "export": the exported folder alone gives the drafter that was trained."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path

import torch

from specgraft.drafters.dspark import DSpark
from specgraft.export.reload import load_export, read_config
from specgraft.records import GateResult

TOLERANCE = 1e-5
CONTEXT, BLOCKS, TOKENS = 24, 3, 16  # of the random inputs
TRAINING_ONLY = {"confidence_detach"}  # fields that no engine reads


def export(folder: Path, drafter: DSpark) -> GateResult:
    """Reloads `folder` strictly and compares it with the drafter, rounded to the file's dtype, in float32.

    Compared are the configuration, block states, Markov bias and confidence logits on random inputs.
    """
    try:
        again = load_export(folder)
        _, dtype = read_config(folder)
    except ValueError as error:
        return GateResult("export", False, str(error))
    if fault := config_fault(again, drafter):
        return GateResult("export", False, f"{folder}: {fault}")
    before = outputs(rounded(drafter, getattr(torch, dtype)))
    after = outputs(again)
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
        f"reloaded in {dtype}: states, bias and confidence within {largest:.1e} of the trained drafter",
        measured,
    )


def config_fault(again: DSpark, drafter: DSpark) -> str | None:
    """The first field of the shape that did not survive."""
    ours, read = asdict(drafter.config), asdict(again.config)
    for name, value in ours.items():
        if name not in TRAINING_ONLY and read[name] != value:
            return f"{name} is {read[name]!r} after reload, was {value!r}"
    return None


def rounded(drafter: DSpark, dtype: torch.dtype) -> DSpark:
    """A float32 copy on the CPU whose weights went through the file's dtype."""
    return copy.deepcopy(drafter).cpu().to(dtype).float().requires_grad_(False).eval()


@torch.inference_mode()
def outputs(drafter: DSpark, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the drafter computes for inputs that depend on the seed and its shape alone."""
    c = drafter.config
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(1, CONTEXT, len(c.taps), c.hidden_size, generator=generator)
    states = torch.randn(1, BLOCKS, c.hidden_size, generator=generator)
    mask_state = torch.randn(c.hidden_size, generator=generator)
    anchors = torch.linspace(1, CONTEXT, BLOCKS).long()[None]
    steps = torch.arange(CONTEXT)
    tokens = torch.randint(0, c.vocab_size, (TOKENS,), generator=generator)
    hidden = drafter.block(states, mask_state, anchors, drafter.context(taps, steps[None]), steps < anchors[..., None])
    embedded = drafter.embed_previous(tokens)
    paired = hidden.flatten(0, 2)[torch.arange(TOKENS) % (BLOCKS * c.draft_tokens)]
    return {
        "block states": hidden,
        "markov biases": drafter.markov_head.markov_w2(embedded),
        "confidence logits": drafter.confidence(paired, embedded),
    }
