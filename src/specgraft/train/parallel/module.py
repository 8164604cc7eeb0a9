"""The drafter with what it minimises as one module, as DDP and FSDP2 want it: everything that uses a weight is in its forward.

DDP keeps a copy a rank and averages gradients. FSDP2 (`fully_shard`) gives every rank a part of the float32 weights, gradients
and moments; whole weights exist from the first use in a step to the last. The MLPs, two thirds of a drafter's layers, are units
of their own, gathered in `train.compute` and let go behind each use; the rest is one unit, as heads and attention are used in
several places of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from specgraft.config import TrainSection
from specgraft.drafters.drafter import Drafter
from specgraft.train.parallel.group import Group


class Step(nn.Module):
    """Forward of one micro-batch: `work` on the drafter. Its first result is the loss, or None."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, work: Callable[[], tuple[torch.Tensor | None, Any]]) -> tuple[torch.Tensor | None, Any]:
        return work()


class Stepper:
    """Runs micro-batches on one rank or many. `drafter` is changed in place."""

    def __init__(self, drafter: Drafter, part: TrainSection, group: Group) -> None:
        self.drafter, self.step = drafter, Step(drafter)
        self.outer: nn.Module = self.step
        layers = list(getattr(drafter, "layers", []))
        if part.checkpoint_activations:
            for layer in layers:
                layer.__class__ = recomputed(type(layer))  # a copy of the drafter stays one of this kind
        if part.compile:
            for layer in (layer for layer in layers if hasattr(layer, "mlp")):
                layer.mlp.compile(dynamic=True)  # attention breaks inductor: "Exponent must be non-negative" over its many lengths (torch 2.13)
        if group.size == 1:
            return
        if part.parallel == "ddp":
            self.outer = DistributedDataParallel(self.step)
            return
        half = None if part.compute == "float32" else getattr(torch, part.compute)
        gathered = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in (layer for layer in layers if hasattr(layer, "mlp")):
            fully_shard(layer.mlp, mp_policy=gathered)
        fully_shard(self.step)

    @property
    def sharded(self) -> bool:
        return isinstance(self.step, FSDPModule)

    def count(self, work: Callable[[], Any]) -> Any:
        """`work` with whole weights and without a graph."""
        with torch.no_grad():
            return self.step(lambda: (None, work()))[1]

    def learn(self, work: Callable[[], Any], last: bool) -> Any:
        """`work`, and backward from its `loss`; ranks exchange gradients behind the last micro-batch of a step."""
        waits = self.outer.no_sync() if isinstance(self.outer, DistributedDataParallel) and not last else nullcontext()
        with waits:
            loss, outcome = self.outer(lambda: _with_loss(work()))
            loss.backward()
        return outcome

    def rest(self) -> None:
        """Behind passes without backward: sharded weights are let go, so that they are gathered anew when they have changed."""
        for module in self.step.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _with_loss(outcome: Any) -> tuple[torch.Tensor, Any]:
    return outcome.loss, outcome


def recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """A layer that keeps its input in place of what lies inside it, and runs once more in backward."""

    class Recomputed(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().forward(*args)
            return checkpoint(super().forward, *args, use_reentrant=False)

    return Recomputed
