"""Two ranks with unequal shares of a batch, one of them with nothing, step as one process with all of it (faults.md T5)."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

from by_hand import F64, batch_of, randomised
from specgraft.config import DistillSection
from specgraft.distill.anchors import Anchors
from specgraft.distill.batch import Batch
from specgraft.distill.objective import objective
from specgraft.distill.ranks import total, world
from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Texts
from specgraft.drafters.layers import RMSNorm
from specgraft.drafters.registry import build
from specgraft.drafters.shared import Shared

SHAPE: dict[str, Any] = {
    "draft_tokens": 3, "layers": 1, "hidden_size": 16, "vocab_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 8,
    "intermediate": 24, "eps": 1e-5, "rope_theta": 1e4, "max_positions": 64, "taps": (0, 1), "target_layers": 3,
    "mask_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {"kind": "dspark", "markov_rank": 4, "confidence": True},
    "dflash2": {"kind": "dflash2", "conv_group": 4, "selector_rank": 4, "selector_top_k": 6},
}
ALL = {"ce": 0.3, "kl": 0.4, "l1": 0.2, "lk_hybrid": 0.5, "dpace": 0.7, "e2e_tv": 1.1, "confidence": 0.8}
CASES: dict[str, tuple[str, DistillSection]] = {
    "dspark": ("dspark", DistillSection()),
    "everything": ("dspark", DistillSection.model_validate(ALL)),
    "e2e_tv": ("dspark", DistillSection(preset="e2e_tv")),
    "dpace": ("dspark", DistillSection(preset="dpace")),
    "selector": ("dflash2", DistillSection()),
    "selector, inject": ("dflash2", DistillSection(preset="dflash2_kl", selector_missing="inject")),
    "selector, dpace and e2e_tv": ("dflash2", DistillSection(dpace=0.5, e2e_tv=0.5)),
}
SPLITS = {"unequal": ([0, 1], [2]), "nothing": ([0, 1, 2], [3])}  # rows of each rank; row 3 has no slot


def parts(kind: str) -> tuple[Any, Shared]:
    torch.manual_seed(0)
    drafter = randomised(build(DrafterConfig(**SHAPE, **KINDS[kind])).double())
    generator = torch.Generator().manual_seed(1)
    embedding, head = torch.randn(2, 24, 16, generator=generator, dtype=F64)
    return drafter, Shared(embedding, head, RMSNorm(16, 1e-5).double().requires_grad_(False), 0)


def rows_of(rows: list[int]) -> Batch:
    whole = batch_of([12, 17, 9, 11], [[5, 6, 9], [5, 11, 15], [7, -1, -1], [-1, -1, -1]], 5, 3, vocab=24, hidden=16, taps=2)
    texts = Texts(*(getattr(whole.texts, field.name)[rows] for field in dataclasses.fields(Texts)))
    return Batch(texts, whole.last[rows], Anchors(*(getattr(whole.anchors, name)[rows] for name in ("position", "keep", "mask"))))


def step(case: str, rows: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, gradients by name, denominators."""
    kind, options = CASES[case]
    drafter, shared = parts(kind)
    outcome = objective(drafter, shared, rows_of(rows), options, F64)
    outcome.loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, f"{name}: a rank without one would wait for ever"
    grads = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    return outcome.loss.detach(), grads, outcome.denominators


def work(rank: int, folder: str) -> None:
    """One rank: every case and split, gradients averaged as distributed training does."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, Any] = {"world": world(), "total": total(torch.tensor([8.0, 10.0]))}
    for split, shares in SPLITS.items():
        for case in CASES:
            loss, grads, denominators = step(case, shares[rank])
            for value in (loss, *grads.values()):
                distributed.all_reduce(value)
                value /= 2
            found[f"{split}/{case}"] = (loss, grads, denominators)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return torch.load(folder / "found.pt", weights_only=False)


def test_one_process_is_the_whole_world() -> None:
    values = torch.tensor([8.0, 10.0])
    assert world() == 1 and total(values) is values


def test_sums_are_taken_once(found: dict[str, Any]) -> None:
    assert found["world"] == 2 and found["total"].tolist() == [16, 20]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_step_as_one_process(found: dict[str, Any], split: str, case: str) -> None:
    loss, grads, denominators = found[f"{split}/{case}"]
    alone = step(case, sorted(row for share in SPLITS[split] for row in share))
    assert float(loss) == pytest.approx(float(alone[0]), rel=1e-6) and float(loss) > 0
    for name, value in alone[2].items():
        assert float(denominators[name]) == pytest.approx(float(value), rel=1e-6), name
    for name, value in alone[1].items():
        scale = max(float(value.abs().max()), 1e-6)
        torch.testing.assert_close(grads[name], value, rtol=1e-6, atol=1e-6 * scale, msg=lambda text, name=name: f"{name}: {text}")
    assert sum(bool(grad.any()) for grad in grads.values()) > 10
