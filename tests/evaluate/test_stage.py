"""The whole stage on a tiny model: what evaluate.json holds, and that a fault in the loop shows up as a mismatch."""

from __future__ import annotations

import json

import pytest
import torch

from specgraft.config import RunConfig
from specgraft.decode import judge
from specgraft.decode.loop import Request
from specgraft.decode.pair import pair
from specgraft.evaluate import stage
from specgraft.evaluate.examples import origins, pieces, spread
from specgraft.evaluate.lossless import compare, first_difference
from specgraft.records import Conversation, Verdict, ids_digest
from specgraft.run_dir import RunDir

ENDS = [1, 7, 20, 33]


def conversation(number, ids):
    return Conversation(
        f"p{number}", "f", ("en", "ko")[number % 2], ("chat", "code", "math")[number % 3], "heldout", [*ids, 5, 1],
        [False] * len(ids) + [True] * 2, len(ids), 0.0, 1.0, 0, "stop", ids_digest([5, 1]),
    )  # fmt: skip


@pytest.fixture
def ready(tiny_target, tiny_drafter, tmp_path, monkeypatch):
    """A run folder with eight held-out conversations, and the tiny pair in place of the loaded one."""
    generator = torch.Generator().manual_seed(0)
    rows = [conversation(n, torch.randint(2, 64, (3 + n,), generator=generator).tolist()) for n in range(8)]
    run = RunDir(tmp_path / "run").create()
    run.regen.mkdir()
    (run.regen / "heldout-00000.jsonl").write_text("".join(json.dumps(row.to_json()) + "\n" for row in rows))
    target = tiny_target(end=ENDS)
    both = pair(target, tiny_drafter(target))
    monkeypatch.setattr(stage, "load_pair", lambda *args: both)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "drafter.safetensors").write_bytes(b"")
    evaluate = {"prompts": 6, "sampled_prompts": 4, "max_new_tokens": 14, "batch": 3, "examples": 2}
    evaluate |= {"speed_prompts": 2, "speed_dtype": "float32"}
    return RunConfig.model_validate({"evaluate": evaluate}), run, both


def test_evaluate_writes_what_the_report_reads(ready, tmp_path):
    config, run, _ = ready
    result = stage.evaluate(config, run, tmp_path / "drafter")
    assert json.loads(run.evaluation.read_text()) == result
    t0, t1 = result["t0"], result["t1"]
    for table, count in ((t0, 6), (t1, 4)):
        assert table["requests"] == len(table["per_request"]) == count
        assert table["rounds"] == sum(row["rounds"] for row in table["per_request"])
        assert table["tokens"] == sum(row["tokens"] for row in table["per_request"])
        assert table["accept_length_pooled"] == pytest.approx(table["tokens"] / table["rounds"])
        assert len(table["survival"]) == len(table["conditional"]) == 4
        assert sum(row["requests"] for row in table["by_language"].values()) == count
        assert sum(row["requests"] for row in table["by_domain"].values()) == count
    assert t0["agreement"] == pytest.approx(0, abs=1e-12)
    assert t0["lossless"]["mismatches"] == 0 and t0["lossless"]["prompts"] == 6
    assert result["settings"]["bonus_included"] is True and result["settings"]["draft_tokens"] == 4
    assert sum(row["count"] for row in result["confidence"]["bins"]) > 0
    for name in ("t0", "t1"):
        row = result["speed"][name]
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["plain_tokens_per_second"])
        assert row["step_ms"] == pytest.approx(row["draft_ms"] + row["verify_ms"] + row["rest_ms"])
        assert len(row["runs"]) == 2
    assert result["examples"][0]["pieces"][0]["kind"] == "prefill"
    assert not list(run.root.glob(".*tmp"))


def test_a_fault_in_the_loop_is_a_mismatch(ready, tmp_path, monkeypatch):
    """Every draft accepted unseen: the text is no longer the target's."""
    config, run, _ = ready

    def gullible(best, drafts, *lengths):
        return torch.full((len(drafts),), drafts.shape[1]), best[:, -1]

    monkeypatch.setattr(judge, "verify_greedy", gullible)
    t0 = stage.evaluate(config, run, tmp_path / "drafter")["t0"]
    assert t0["lossless"]["mismatches"] > 0


def test_a_drafter_that_is_fed_wrongly_is_a_disagreement(ready, tmp_path, monkeypatch):
    """Lossless all the same: only the prediction, made as in training, tells that drafts are worse than they could be."""
    config, run, both = ready
    draft = both.drafter.draft

    def shifted(shared, cache, rows, anchor_ids, *rest):
        return draft(shared, cache, rows, (anchor_ids + 1) % 64, *rest)

    monkeypatch.setattr(both.drafter, "draft", shifted)
    t0 = stage.evaluate(config, run, tmp_path / "drafter")["t0"]
    assert t0["lossless"]["mismatches"] == 0
    assert t0["agreement"] > 0.05


def test_too_few_held_out_conversations(ready, tmp_path):
    config, run, _ = ready
    short = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"prompts": 9})})
    with pytest.raises(ValueError, match="8 held-out conversations, 9 are to be evaluated"):
        stage.evaluate(short, run, tmp_path)
    assert not run.evaluation.exists()


def test_ties_are_told_from_mismatches(tiny_target):
    target = tiny_target()
    prompt = [5, 9, 12]
    step = target.forward(torch.tensor([prompt]), target.cache(1, 3))
    best = int(target.logits(step.last[0, -1]).argmax())
    other = (best + 1) % 64
    found = compare(target, [prompt] * 3, [[best, 4]] * 3, [[best, 4], [other, 4], [best]], ["a", "b", "c"])
    assert (found["prompts"], found["tokens"], found["mismatches"], found["ties"]) == (3, 2 + 1 + 2, 2, 0)
    assert found["details"][0]["prompt_id"] == "b" and found["details"][0]["gap"] > 1e-3
    with torch.no_grad():  # two tokens with the same row of the head
        target.head.weight[other] = target.head.weight[best] * (1 - 1e-6)
    found = compare(target, [prompt], [[best, 4]], [[other, 9]], ["b"])
    assert (found["mismatches"], found["ties"]) == (0, 1)
    assert first_difference([1, 2], [1, 2]) is None and first_difference([1, 2], [1]) == 1


def test_equal_logits_far_below_the_top_are_no_tie(tiny_target):
    target = tiny_target()
    prompt = [5, 9, 12]
    logits = target.logits(target.forward(torch.tensor([prompt]), target.cache(1, 3)).last[0, -1])
    low = int(logits.argmin())
    with torch.no_grad():
        target.head.weight[(low + 1) % 64] = target.head.weight[low]
    found = compare(target, [prompt], [[low]], [[(low + 1) % 64]], ["b"])
    assert (found["mismatches"], found["ties"]) == (1, 0)


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids).decode("utf-8", errors="replace")


def test_pieces_join_to_the_text_and_break_no_character():
    text = "가 b"
    ids = list(text.encode())
    request = Request([1], 9, output=ids, rounds=[Verdict(1, tuple(ids[1:3]), 3), Verdict(1, tuple(ids[3:]), 3)])
    runs = origins(request)
    assert [kind for _, kind in runs] == ["prefill", "draft", "target", "draft", "target"]
    found = pieces(Bytes(), runs)
    assert "".join(piece["text"] for piece in found) == text
    assert found[0] == {"text": "가", "kind": "target"}  # its last byte came from the target


def test_examples_differ_in_language_and_domain_first():
    rows = [conversation(n, [5]) for n in (0, 6, 1, 2)]  # the first two share both
    assert spread(rows, 3) == [0, 2, 3] and spread(rows, 4) == [0, 2, 3, 1]


def test_only_answers_of_the_run_s_own_prompts_are_measured(ready) -> None:
    config, run, _ = ready
    wanted = [f"p{number}" for number in (7, 6, 5, 4, 3, 2)]
    assert [c.prompt_id for c in stage.held_out(config, run, wanted)] == wanted
    with pytest.raises(ValueError, match="5 held-out conversations, 6 are to be evaluated"):
        stage.held_out(config, run, wanted[:5])
