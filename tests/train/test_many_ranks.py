"""A run is the same run on 1, 2 and 4 ranks and in any number of micro-batches (faults.md N5, S1, T5): uneven lengths, 7 conversations
a step, in 4 micro-batches of 2 ranks one of which has none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from run_ranks import Case, run_ranks, train_case

from specgraft.log import read_metrics
from specgraft.train.checkpoint import checkpoints
from specgraft.train.told import MEASURED

TRAIN: dict[str, Any] = {"rows": 7, "steps": 2, "checkpoint_every": 2, "validate_every": 2}
DFLASH2: dict[str, Any] = {"kind": "dflash2", "conv_group": 8, "selector_rank": 8, "selector_top_k": 4}
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "blocks": {"distill": {"dpace": 0.5, "e2e_tv": 0.5, "confidence": 1.0}},
    "drawn": {"distill": {"slot_sampling": True}, "train": {"packing": "rows", "row_tokens": 1024}},
    "dflash2": {"drafters": DFLASH2},
    "specopd": {"distill": {"preset": "specopd", "branches_per_anchor": 2}},
    "ahead": {"distill": {"preset": "specopd", "branches_per_anchor": 2}, "stream": {"staleness": 1}},
    "draft_opd": {"distill": {"preset": "draft_opd"}},
}
FSDP: dict[str, Any] = {"parallel": "fsdp"}
MANY: list[tuple[str, int, int, dict[str, Any]]] = [  # kind, ranks, micro-batches, more of [train]
    *((kind, ranks, 4, {}) for kind in KINDS for ranks in (2, 4)),
    ("blocks", 2, 1, {}), ("drawn", 2, 2, {}), ("dflash2", 2, 1, {}), ("draft_opd", 2, 1, {}), ("dspark", 4, 1, {}), ("specopd", 4, 2, {}),
    ("dspark", 2, 1, FSDP), ("dflash2", 2, 4, {**FSDP, "checkpoint_activations": True}), ("ahead", 2, 2, FSDP),
]  # fmt: skip
ALONE = [*((kind, 4) for kind in KINDS), ("dspark", 7), ("blocks", 3), ("drawn", 2), ("dflash2", 3), ("ahead", 3), ("draft_opd", 2)]


def changes(kind: str, accumulate: int, more: dict[str, Any] | None = None) -> dict[str, Any]:
    found = {name: dict(section) for name, section in KINDS[kind].items()}
    return found | {"train": {**TRAIN, "accumulate": accumulate, **found.get("train", {}), **(more or {})}}


def name_of(kind: str, ranks: int, accumulate: int, more: dict[str, Any]) -> str:
    return "-".join([kind, str(ranks), str(accumulate), *map(str, more.values())])


@pytest.fixture(scope="module")
def alone(captured: Path, tmp_path_factory: pytest.TempPathFactory):
    """Runs of one process by kind and micro-batches, each trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("alone")

    def run(kind: str, accumulate: int = 1) -> Path:
        root = folder / f"{kind}-{accumulate}"
        if not root.exists():
            train_case(Path(shutil.copytree(captured, root)), changes(kind, accumulate), None)
        return root

    return run


@pytest.fixture(scope="module")
def many(captured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run of `MANY`, and what else two ranks do."""
    folder = tmp_path_factory.mktemp("many")
    for size in (2, 4):
        cases: list[Case] = [(name_of(*one), changes(one[0], one[2], one[3])) for one in MANY if one[1] == size]
        if size == 2:
            plain = {"steps": 4, "checkpoint_every": 2, "keep": 9}
            cases += [
                ("sigterm", changes("dspark", 1, {"steps": 6, "checkpoint_every": 9})),
                ("refused", changes("dspark", 1)),
                ("decoded", changes("dspark", 1, {**plain, "decode_prompts": 3})),
                ("sharded", changes("dspark", 1, {**plain, "parallel": "fsdp", "decode_prompts": 3})),
            ]
        run_ranks(size, captured, folder, cases)
    return folder


def same(root: Path, other: Path) -> None:
    """The rows of two metrics files, of which sums are taken in another order; prints how far losses and gradient norms are apart."""
    rows, others = read_metrics(root / "metrics.jsonl"), read_metrics(other / "metrics.jsonl")
    assert [row["kind"] for row in rows] == [row["kind"] for row in others] and len(rows) > 2
    trained = [(row, twin) for row, twin in zip(rows, others, strict=True) if row["kind"] == "train"]
    worst = {name: max(abs(row[name] - twin[name]) / abs(twin[name]) for row, twin in trained) for name in ("loss", "grad_norm")}
    print(f"{root.name} against {other.name}: loss {worst['loss']:.1e}, gradient norm {worst['grad_norm']:.1e}")
    assert max(worst.values()) < 1e-6
    for row, twin in zip(rows, others, strict=True):
        assert row.keys() == twin.keys()
        for key in row.keys() - {name for name in row if name in MEASURED or name.endswith("seconds")}:
            expected = twin[key] if isinstance(twin[key], str) else pytest.approx(twin[key], rel=1e-6, abs=1e-7)
            assert row[key] == expected, (row["step"], key)


@pytest.mark.parametrize(("kind", "accumulate"), ALONE)
def test_micro_batches_of_one_process(alone, kind: str, accumulate: int) -> None:
    same(alone(kind, accumulate), alone(kind))


@pytest.mark.parametrize("case", MANY, ids=lambda case: name_of(*case))
def test_ranks_and_micro_batches(alone, many: Path, case: tuple[str, int, int, dict[str, Any]]) -> None:
    assert not list(many.glob(f"{name_of(*case)}.*.refused"))
    same(many / name_of(*case), alone(case[0]))


# what else ranks do


def trained_steps(root: Path) -> list[int]:
    return [row["step"] for row in read_metrics(root / "metrics.jsonl") if row["kind"] == "train"]


def test_a_rank_that_is_asked_to_stop_stops_all_behind_the_same_step(many: Path) -> None:
    """Rank 1 gets SIGTERM in its third step."""
    assert trained_steps(many / "sigterm") == [1, 2, 3]
    assert [path.name for path in checkpoints(many / "sigterm" / "checkpoints")] == ["step-000003"]
    assert [(many / f"sigterm.{rank}.exit").read_text() for rank in (0, 1)] == ["0", "0"]


def test_what_one_rank_refuses_all_refuse(many: Path) -> None:
    """Rank 1 alone finds a bad row, in its second step."""
    told = [(many / f"refused.{rank}.refused").read_text() for rank in (0, 1)]
    assert told[0] == told[1] == "7 shard 3 is damaged"
    assert trained_steps(many / "refused") == [1]
    assert [path.name for path in checkpoints(many / "refused" / "checkpoints")] == ["step-000001"]  # nothing that was learnt is lost


def test_checkpoints_are_really_decoded_by_all_ranks_as_by_one(many: Path) -> None:
    decoded = [[row for row in read_metrics(many / name / "metrics.jsonl") if row["kind"] == "decode"] for name in ("decoded", "sharded")]
    for row, twin in zip(*decoded, strict=True):
        assert row["step"] == twin["step"] and row["prompts"] == 3 and row["rounds"] == twin["rounds"] > 0
        assert row["accept_length"] == pytest.approx(twin["accept_length"]) and 1 <= row["accept_length"] <= 4
    assert [row["step"] for row in decoded[0]] == [2, 4]
