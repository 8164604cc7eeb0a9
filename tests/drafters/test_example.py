"""The drafter of docs/adding-a-drafter.md, taken from the page: one file and one row, then training, decoding, storing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraft.capture.forward import capture_batch
from specgraft.config import DistillSection, RunConfig
from specgraft.decode.loop import Request, decode, uniform_count
from specgraft.decode.pair import pair
from specgraft.distill.objective import objective
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.registry import KINDS
from specgraft.drafters.shared import Shared
from specgraft.drafters.store import load_drafter, save_drafter
from specgraft.evaluate.metrics import accept_length_pooled
from specgraft.evaluate.predicted import pooled, predict
from specgraft.ops.sampling import Law, uniforms
from specgraft.records import Conversation, ids_digest
from specgraft.run_file import validate
from specgraft.targets.generate import Request as PlainRequest
from specgraft.targets.generate import generate
from specgraft.train.batch import collate
from specgraft.train.setup import new_drafter

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-drafter.md"
NEW = 24


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The page's file on the path, and its row."""
    folder = tmp_path_factory.mktemp("yours")
    (folder / "heads_of_the_page.py").write_text(blocks("python")[0], encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setitem(KINDS, "heads", "heads_of_the_page:Heads")
        yield


def config_of(**drafters: Any) -> RunConfig:
    section = tomllib.loads(blocks("toml")[0])["drafters"] | {"options": {"width": 64}} | drafters
    return validate({"target": {"id": "tiny", "mask_token_id": 0}, "drafters": section}, "test")


def answered(target: Any, count: int = 6) -> list[Conversation]:
    """Greedy answers of the target."""
    found = []
    for number in range(count):
        ids = torch.randint(2, 64, (4 + number,), generator=torch.Generator().manual_seed(number)).tolist()
        request = PlainRequest(ids, NEW)
        generate(target, [request], 1)
        row = ids + request.output
        found.append(
            Conversation(
                f"p{number}", "f", "en", "chat", "train", row, [place >= len(ids) for place in range(len(row))], len(ids),
                0.0, 1.0, 0, request.finish_reason, ids_digest(request.output),
            )
        )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def learnt(registered: None, tiny_target: Any) -> tuple[Any, Drafter, list[Conversation], list[float]]:
    """Target, drafter trained on its answers, the answers, the losses."""
    target = tiny_target(dtype=torch.float64, markov=3.0)
    rows = answered(target)
    config = config_of()
    drafter = new_drafter(config, target, [0, 2]).double()
    features = capture_batch(target, rows, (0, 2))
    shared = Shared.of(target, 0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        batch = collate(features, 32, 5, 256, torch.Generator().manual_seed(step), torch.device("cpu"))
        outcome = objective(drafter, shared, batch, config.distill, torch.float64)
        outcome.loss.backward()
        assert all(parameter.grad is not None for parameter in drafter.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(outcome.loss.detach()))
    return target, drafter.requires_grad_(False).eval(), rows, losses


def test_the_example_is_short_and_the_page_says_how_short() -> None:
    lines = blocks("python")[0].splitlines()
    assert len(lines) <= 60
    assert f"{len(lines)} lines" in PAGE.read_text(encoding="utf-8")
    assert list(KINDS)[-1] != "heads" and '"heads": ' in blocks("python")[1]


def test_it_is_built_from_a_run_file_and_learns(learnt: Any) -> None:
    _, drafter, _, losses = learnt
    assert drafter.config.kind == "heads" and drafter.config.draft_tokens == 5
    assert drafter.config.options == {"width": 64} and drafter.wide.out_features == 64
    assert losses[0] > 3 and losses[-1] < 0.3 * losses[0]
    assert DistillSection().weights("heads") == {"ce": 1.0}


@pytest.mark.parametrize("batch", [1, 4])
def test_it_decodes_the_target_s_own_text_and_is_accepted(learnt: Any, batch: int) -> None:
    target, drafter, rows, _ = learnt
    both = pair(target, drafter)
    requests = [Request(row.input_ids[: row.prompt_length], NEW) for row in rows]
    decode(both, requests, batch)
    assert [request.ids + request.output for request in requests] == [row.input_ids for row in rows]
    measured = accept_length_pooled([request.rounds for request in requests])
    assert measured > 3
    predictions = [predict(both, request.ids, request.output, Law()) for request in requests]
    assert pooled(predictions) == pytest.approx(measured, rel=1e-9)  # decoding feeds it as training did


def test_sampled_text_does_not_depend_on_the_batch(learnt: Any) -> None:
    target, drafter, rows, _ = learnt
    both, texts = pair(target, drafter), []
    for batch in (1, 6):
        requests = [
            Request(row.input_ids[: row.prompt_length], 12, Law(0.8), uniforms(0, row.prompt_id, uniform_count(12, 5))) for row in rows
        ]
        decode(both, requests, batch)
        texts.append([(request.output, request.rounds) for request in requests])
    assert texts[0] == texts[1]


def test_other_objectives_reach_it(learnt: Any) -> None:
    target, drafter, rows, _ = learnt
    batch = collate(capture_batch(target, rows, (0, 2)), 8, 5, 256, torch.Generator().manual_seed(0), torch.device("cpu"))
    drafter.requires_grad_(True)
    for preset in ("dspark", "dpace", "lk_hybrid", "e2e_tv"):
        outcome = objective(drafter, Shared.of(target, 0), batch, DistillSection(preset=preset), torch.float64)
        grads = torch.autograd.grad(outcome.loss, list(drafter.parameters()))
        assert all(grad.any() for grad in grads), preset
    drafter.requires_grad_(False)


def test_it_is_stored_and_read_back(learnt: Any, tmp_path: Path) -> None:
    target, drafter, rows, _ = learnt
    save_drafter(tmp_path, drafter)
    again = load_drafter(tmp_path, dtype=torch.float64)
    assert type(again) is type(drafter) and again.config == drafter.config
    for (name, a), b in zip(drafter.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-6, msg=name)
    request = Request(rows[0].input_ids[: rows[0].prompt_length], NEW)
    decode(pair(target, again), [request], 1)
    assert request.ids + request.output == rows[0].input_ids


def test_an_unknown_kind_is_refused_with_those_there_are(tiny_target: Any) -> None:
    with pytest.raises(ValueError, match=r"drafters\.kind='tails': known are mtp, dflash, dflash2, dspark"):
        new_drafter(config_of(kind="tails"), tiny_target(), [0, 2])
