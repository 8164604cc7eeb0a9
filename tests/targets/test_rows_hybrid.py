"""Decode rows of every kind of target against transformers on each row alone; plain decoding and the whole draft-verify loop.

A recurrent state cannot be counted back: every test lets rows keep fewer tokens than a pass brought.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from hybrids import END, HYBRIDS, KINDS, Tiny, apart, as_target, build, text, tiny

from specgraft.decode.loop import Request, decode, uniform_count
from specgraft.decode.pair import pair
from specgraft.decode.scheduler import Scaling, make
from specgraft.evaluate.predicted import predict
from specgraft.ops.gated_delta.chunked import Record
from specgraft.ops.sampling import Law, uniforms
from specgraft.targets.generate import Request as PlainRequest
from specgraft.targets.generate import generate
from specgraft.targets.load import load_target
from specgraft.targets.scoring import prefill

WIDE, NARROW = torch.float64, torch.float32
EVERY = pytest.mark.parametrize("kind", KINDS)
HYBRID = pytest.mark.parametrize("kind", HYBRIDS)
LOOPED = pytest.mark.parametrize("kind", ["qwen3_5", "kimi_linear", "qwen4_exp"])


class Rows:
    """A cache and what its rows should hold; every pass is compared with transformers on each row alone."""

    def __init__(self, kind: str, count: int, slots: int) -> None:
        self.model = tiny(kind, WIDE)
        self.cache = self.model.target.cache(count, slots)
        self.held = [torch.zeros(0, dtype=torch.long) for _ in range(count)]
        self.seed = 100

    def fresh(self, count: int) -> torch.Tensor:
        self.seed += 1
        return text(count, self.seed)

    def move(self, rows, new, states, kept) -> None:
        for row, ids, last, keep in zip(rows, new, states, kept, strict=True):
            whole = torch.cat([self.held[row], ids])
            expected = self.model.alone(whole)[len(self.held[row]) :]
            assert apart(self.model.logits(last[: len(ids)]), expected) < 1e-9
            self.held[row] = whole[: len(self.held[row]) + keep]
            self.cache.lengths[row] += keep

    def step(self, width: int, kept: list[int], rows: list[int] | None = None) -> None:
        """`width` new tokens of each row, of which it keeps `kept`."""
        chosen = list(range(len(self.held))) if rows is None else rows
        new = torch.stack([self.fresh(width) for _ in chosen])
        found = self.model.target.forward(new, self.cache, [1], rows=None if rows is None else torch.tensor(rows))
        assert found.taps.shape == (len(chosen), width, 1, self.model.target.hidden_size)
        self.move(chosen, new, found.last, kept)

    def packed(self, counts: list[int], kept: list[int], rows: list[int]) -> None:
        new = [self.fresh(count) for count in counts]
        found = self.model.target.forward_packed(torch.cat(new), torch.tensor(counts), self.cache, [1], torch.tensor(rows))
        self.move(rows, new, found.last[0].split(counts), kept)

    def enter(self, rows: list[int], lengths: list[int]) -> None:
        """Rows are given new texts of these lengths, padded behind."""
        index = torch.tensor(rows)
        self.cache.lengths[index] = 0
        new = [self.fresh(length) for length in lengths]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for number, row in enumerate(new):
            ids[number, : len(row)] = row
            self.held[rows[number]] = row[:0]
        found = self.model.target.forward(ids, self.cache, rows=index)
        self.move(rows, new, found.last, lengths)


@EVERY
def test_ragged_rows_that_keep_some_of_what_passes_bring(kind) -> None:
    rows = Rows(kind, 3, 110)
    rows.enter([0, 1, 2], [3, 66, 20])  # unequal prompts, one over the border of a chunk
    for width, kept in ((1, [1, 1, 1]), (4, [0, 4, 1]), (5, [5, 2, 0]), (2, [0, 0, 0]), (3, [1, 3, 2]), (1, [1, 1, 1])):
        rows.step(width, kept)
    rows.step(4, [2, 0], [2, 1])
    rows.step(3, [3], [0])
    rows.step(2, [1, 2, 0])
    rows.packed([1, 4, 2], [1, 3, 0], [0, 1, 2])
    rows.packed([3, 1], [0, 1], [1, 2])
    rows.packed([5], [4], [0])
    rows.step(2, [2, 2, 2])
    assert [len(ids) for ids in rows.held] == rows.cache.lengths.tolist()


@EVERY
def test_a_row_given_to_another_text_keeps_nothing_of_the_old_one(kind) -> None:
    rows = Rows(kind, 3, 80)
    rows.enter([0, 1, 2], [30, 9, 14])
    rows.step(4, [2, 4, 1])
    rows.enter([1], [12])  # while the others stand where they are
    rows.step(3, [1, 3, 2])
    rows.enter([2, 0], [1, 2])  # shorter than the convolution
    rows.step(1, [1, 1, 1])
    rows.step(6, [0, 6, 3])
    rows.enter([0], [40])
    rows.packed([2, 1, 4], [1, 1, 4], [0, 1, 2])
    rows.step(2, [2, 2, 2])


@HYBRID
def test_a_state_that_is_not_rolled_back_is_caught(kind, monkeypatch) -> None:
    """The planted fault: rejected tokens stay in the state."""
    honest = Record.after
    monkeypatch.setattr(Record, "after", lambda self, rows, counts: honest(self, rows, torch.full_like(counts, self.keys.shape[1])))
    rows = Rows(kind, 2, 40)
    rows.enter([0, 1], [9, 9])  # nothing to roll back
    rows.step(4, [4, 2])
    with pytest.raises(AssertionError):
        rows.step(2, [2, 2])


@EVERY
def test_rows_and_stems_are_the_same_text(kind) -> None:
    """Decode rows choose groups, windows and states as stems do: taps and last states agree."""
    model, ids = tiny(kind, WIDE), text(41, 3)
    stem = prefill(model.target, ids, [0, 1, 2])
    cache = model.target.cache(1, 41)
    start, taps, last = 0, [], []
    for width in (7, 1, 20, 13):
        step = model.target.forward(ids[None, start : start + width], cache, [0, 1, 2])
        cache.lengths += width
        start += width
        taps.append(step.taps[0])
        last.append(step.last[0])
    assert apart(torch.cat(taps), stem.taps) < 1e-9 and apart(torch.cat(last), stem.last) < 1e-9


def prompts() -> list[list[int]]:
    return [text(length, 50 + length).tolist() for length in (3, 21, 9, 1, 14)]


def hugging_face(model, ids: list[int], count: int) -> list[int]:
    out = model.plain.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
        max_new_tokens=count, eos_token_id=[END, 7], pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@EVERY
def test_greedy_text_is_transformers_own(kind, monkeypatch) -> None:
    model = tiny(kind, NARROW)
    monkeypatch.setattr(model.target, "end_ids", (END, 7))
    requests = [PlainRequest(ids, 14) for ids in prompts()]
    generate(model.target, requests, 2)  # rows are given to other prompts on the way
    assert [request.output for request in requests] == [hugging_face(model, ids, 14) for ids in prompts()]


@cache
def likely(kind: str, dtype: torch.dtype) -> Tiny:
    """A model whose next token depends more on the last one, so that a drafter that knows the law after single tokens hits."""
    plain = build(kind, dtype)
    plain.get_input_embeddings().weight.data *= 25
    return Tiny(plain, as_target(copy.deepcopy(plain)))


@LOOPED
def test_the_decode_loop_gives_the_targets_own_greedy_text(kind, tiny_drafter, monkeypatch) -> None:
    model = likely(kind, NARROW)
    monkeypatch.setattr(model.target, "end_ids", (END, 7))
    both = pair(model.target, tiny_drafter(model.target, draft_tokens=3, taps=(0, 2, 4)))
    expected = [hugging_face(model, ids, 14) for ids in prompts()]

    def run() -> list[Request]:
        requests = [Request(ids, 14) for ids in prompts()]
        decode(both, requests, 3)
        return requests

    requests = run()
    assert [request.output for request in requests] == expected
    assert {0, 1, 2} <= {verdict.accepted for request in requests for verdict in request.rounds}
    honest = Record.after  # the planted fault: rejected drafts stay in the states
    monkeypatch.setattr(Record, "after", lambda self, rows, counts: honest(self, rows, torch.full_like(counts, self.keys.shape[1])))
    assert [request.output for request in run()] != expected


@LOOPED
def test_a_schedule_that_verifies_some_drafts_gives_the_same_text(kind, tiny_drafter) -> None:
    """Passes are packed then, rows bring different numbers of tokens."""
    model = likely(kind, NARROW)
    drafter = tiny_drafter(model.target, draft_tokens=3, taps=(0, 2, 4))
    drafter.confidence_head.proj.weight.normal_(0, 1, generator=torch.Generator().manual_seed(4))
    scheduler = make("threshold", {0.0: Scaling([1.0] * 3, [0.0] * 3)}, None, 0.15)
    plain = [PlainRequest(ids, 14) for ids in prompts()]
    generate(model.target, plain, 5)
    requests = [Request(ids, 14) for ids in prompts()]
    decode(pair(model.target, drafter), requests, 3, scheduler=scheduler)
    assert [request.output for request in requests] == [request.output for request in plain]
    rounds = [verdict for request in requests for verdict in request.rounds]
    assert len({verdict.proposed for verdict in rounds}) > 1 and sum(verdict.accepted for verdict in rounds) > 5


@LOOPED
def test_sampled_text_does_not_depend_on_the_batch_and_prediction_knows_the_rounds(kind, tiny_drafter) -> None:
    model = likely(kind, WIDE)
    both = pair(model.target, tiny_drafter(model.target, draft_tokens=3, taps=(0, 2, 4)))

    def run(batch: int, law: Law) -> list[tuple]:
        requests = [Request(ids, 10, law, uniforms(0, str(n), uniform_count(10, 3))) for n, ids in enumerate(prompts())]
        decode(both, requests, batch)
        return [(request.output, request.rounds) for request in requests]

    law = Law(0.8, 0.9)
    assert run(1, law) == run(3, law)
    for ids, (output, rounds) in zip(prompts(), run(5, Law()), strict=True):
        found = predict(both, ids, output, Law())
        if found is None:
            assert not rounds
        else:  # at temperature 0 there is nothing random
            assert (found.tokens, found.rounds) == (len(output) - 1, pytest.approx(len(rounds)))
        sampled = predict(both, ids, output, law)
        assert sampled is None or 0 < sampled.rounds <= sampled.tokens + 1e-9


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_folder)


@EVERY
def test_a_saved_folder_of_the_kind_is_loaded(kind, tokenizer, tmp_path) -> None:
    plain = build(kind, NARROW, vocab_size=288, eos_token_id=tokenizer.eos_token_id)
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), "float32")
    assert target.end_ids == (tokenizer.eos_token_id,) and target.vocab_size == 288
    assert target.num_layers == len(plain.model.layers)
    ids = torch.tensor([tokenizer.encode("the name in ab, count: 0 1 2 3")])
    with torch.inference_mode():
        expected = plain(input_ids=ids, use_cache=False).logits
    found = target.logits(target.forward(ids, target.cache(1, ids.shape[1])).last)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


UNSERVED = {
    "olmo_hybrid": "linear_attention", "minimax": "linear_attention", "bailing_hybrid": "linear_attention",
    "lara_mini": "linear_attention", "jamba": "linear_attention", "mamba": "linear_attention", "falcon_h1": "hybrid",
    "deepseek_v32": "indexed_attention", "glm5_next": "layers", "deepseek_v4": "compressed_sparse_attention",
    "dots3_note": "indexed_attention", "lfm3": "conv", "nemotron_h": "mlp", "llama4_text": "chunked_attention",
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSERVED)
def test_a_kind_without_a_row_is_refused_in_one_line(kind, tokenizer, tmp_path) -> None:
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not served in process yet") as caught:
        load_target(str(tmp_path), "float32")
    assert UNSERVED[kind] in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


