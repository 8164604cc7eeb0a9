"""Compiled MLPs of draft layers learn what plain ones do. Traced as for a real backend, and run by torch itself: compiling for this machine takes long."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specgraft.log import read_metrics


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the tracer's own
def test_compiled_mlps_learn_as_plain_ones(ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged batches, so shapes change from step to step; an MLP is traced in one piece, and not anew for every shape."""
    real, compiled, traced = torch.nn.Module.compile, [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        traced.append(len(inputs))
        return graph.forward

    def noted(self: torch.nn.Module, **options: Any) -> None:
        compiled.append(self)
        real(self, **options, backend=backend)

    monkeypatch.setattr(torch.nn.Module, "compile", noted)
    part = {"steps": 3, "checkpoint_every": 3, "validate_every": 3, "checkpoint_activations": True}
    plain, made = ready("plain"), ready("made")
    plain.train(train=part)
    assert not compiled
    try:
        made.train(train={**part, "compile": True})
    finally:
        torch._dynamo.reset()
    assert len(compiled) == 1 and 1 <= len(traced) <= 3  # with a graph and without
    rows, others = ([row for row in read_metrics(one.run.metrics) if row["kind"] == "train"] for one in (plain, made))
    assert len(rows) == 3
    for row, other in zip(rows, others, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5) and other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-5)
