"""Muon (Jordan et al. 2024) for the inner matrices of a nano model: in the few updates that it gets, AdamW alone learns far less.

Legend: N matrices of one shape [m, n].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    """[N, m, n] -> the nearest matrices with orthonormal rows or columns, roughly: five Newton-Schulz steps in bfloat16."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum with Nesterov's look ahead, made orthogonal; matrices of one shape (experts too, [E, m, n]) share a batch."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                velocity.lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(velocity, group["momentum"])
                by_shape.setdefault(tuple(parameter.shape[-2:]), []).append(
                    (parameter, ahead.view(-1, *parameter.shape[-2:]))
                )
            for (high, wide), pairs in by_shape.items():
                updates = orthogonal(torch.cat([ahead for _, ahead in pairs])).split([len(ahead) for _, ahead in pairs])
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update.view_as(parameter), alpha=-group["lr"] * max(1.0, high / wide) ** 0.5)
