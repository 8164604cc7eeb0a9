"""AdamW for everything, or Muon for the trunk's matrices and AdamW for the rest, behind one small face."""

from __future__ import annotations

import math

import torch

from specgraft.config import TrainSection
from specgraft.drafters.drafter import Drafter
from specgraft.train.parallel.sharded import as_held, whole

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def learning_rate(step: int, part: TrainSection) -> float:
    """Linear warm-up, then cosine to min_lr_ratio; `step` counts from 0."""
    warm = max(1, round(part.warmup * part.steps))
    if step < warm:
        return part.lr * (step + 1) / warm
    done = (step - warm) / max(1, part.steps - warm)
    return part.lr * (part.min_lr_ratio + (1 - part.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


class Optimizer:
    """Steps, schedules and stores. `muon` takes the matrices of the trunk; heads, codebooks, norms and biases never."""

    def __init__(self, drafter: Drafter, part: TrainSection) -> None:
        self.drafter, self.part = drafter, part
        named = list(drafter.named_parameters())
        matrices = [p for name, p in named if part.optimizer == "muon" and p.dim() == 2 and name.startswith(("layers.", "fc."))]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=part.lr, betas=part.betas, weight_decay=part.weight_decay, fused=True)
        ]
        if matrices:
            # update size matched to AdamW's, so that one learning rate serves both (Moonshot, 2502.16982)
            self.parts.append(
                torch.optim.Muon(matrices, lr=part.lr, weight_decay=part.weight_decay, adjust_lr_fn="match_rms_adamw")
            )

    def step(self, number: int) -> float:
        """Clips, updates at the learning rate of step `number` (from 0), clears; returns the norm before clipping."""
        norm = whole(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.part.clip))
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate(number, self.part)
            part.step()
            part.zero_grad(set_to_none=True)
        return float(norm)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments by parameter name, for a checkpoint; where they are sharded, this rank's part of each."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.drafter.named_parameters():
            for part in self.parts:
                state = part.state.get(parameter, {})
                found |= {f"{key}.{name}": state[key].detach() for key in MOMENTS if key in state}
        return found

    def load(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Puts moments back; `step` updates were made."""
        for name, parameter in self.drafter.named_parameters():
            part = next(part for part in self.parts if any(parameter is p for group in part.param_groups for p in group["params"]))
            state = {key: as_held(tensors[f"{key}.{name}"], parameter) for key in MOMENTS if f"{key}.{name}" in tensors}
            if state:
                if "exp_avg" in state:
                    state["step"] = torch.tensor(float(step))
                part.state[parameter] = state
