"""The decode loop on tiny models: the target's own greedy text, whatever the batch; nothing committed computed twice."""

from __future__ import annotations

import pytest
import torch

from specgraft.decode.loop import Request, Timing, decode, uniform_count
from specgraft.decode.pair import pair
from specgraft.drafters.drafter import Texts
from specgraft.ops.sampling import Law, uniforms
from specgraft.targets.generate import Request as PlainRequest
from specgraft.targets.generate import generate

ENDS = [1, 7, 20, 33]
LENGTHS = (3, 9, 5, 14, 2, 7, 11, 1)


def prompts(seed=0, vocab=64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def hugging_face(target, ids, new):
    out = target.model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_text_is_hugging_faces(tiny_target, tiny_drafter, dtype):
    stopped = accepted = 0
    for seed in range(3):
        target = tiny_target(dtype=dtype, seed=seed, end=ENDS)
        both = pair(target, tiny_drafter(target))
        target.model.set_attn_implementation("eager")
        expected = [hugging_face(target, ids, 21) for ids in prompts(seed)]
        target.model.set_attn_implementation("specgraft")
        requests = [Request(ids, 21) for ids in prompts(seed)]
        decode(both, requests, 3)
        assert [request.output for request in requests] == expected
        for request in requests:
            assert sum(len(v.committed) for v in request.rounds) == len(request.output) - 1
            assert len(request.confidence) == len(request.rounds)
            assert request.finish_reason == ("stop" if request.output[-1] in ENDS else "length")
            accepted += sum(v.accepted for v in request.rounds)
            stopped += any(v.committed[-1] in ENDS and len(v.committed) == v.accepted for v in request.rounds)
    assert accepted > 30, "drafts must be accepted for this test to mean anything"
    assert stopped, "an end token must fall inside an accepted block at least once"


def test_plain_generate_agrees(tiny_target, tiny_drafter):
    target = tiny_target(end=ENDS)
    plain = [PlainRequest(ids, 16) for ids in prompts()]
    generate(target, plain, 4)
    requests = [Request(ids, 16) for ids in prompts()]
    decode(pair(target, tiny_drafter(target, draft_tokens=7)), requests, 4)
    assert [request.output for request in requests] == [request.output for request in plain]


@pytest.mark.parametrize("law", [Law(), Law(1.0), Law(0.7, 0.8, 5)])
def test_one_row_equals_many(tiny_target, tiny_drafter, law):
    target = tiny_target(dtype=torch.float64, end=ENDS)
    both = pair(target, tiny_drafter(target))

    def run(batch):
        requests = [
            Request(ids, 15, law, uniforms(0, str(number), uniform_count(15, 4)))
            for number, ids in enumerate(prompts())
        ]
        decode(both, requests, batch)
        return [(request.output, request.rounds, request.finish_reason) for request in requests]

    one = run(1)
    assert one == run(3) == run(8)
    assert sum(v.accepted for _, rounds, _ in one for v in rounds) > 5


def test_rows_of_different_laws_share_a_batch(tiny_target, tiny_drafter):
    target = tiny_target(dtype=torch.float64)
    both = pair(target, tiny_drafter(target))
    laws = [Law(), Law(1.0), Law(0.7, 0.9), Law(), Law(1.0, 1.0, 3), Law(), Law(1.0), Law()]

    def run(batch):
        requests = [
            Request(ids, 12, law, uniforms(0, str(number), uniform_count(12, 4)))
            for number, (ids, law) in enumerate(zip(prompts(), laws, strict=True))
        ]
        decode(both, requests, batch)
        return [request.output for request in requests]

    mixed = run(8)
    assert mixed == run(1)
    greedy = [Request(ids, 12) for ids, law in zip(prompts(), laws, strict=True) if law.temperature == 0]
    decode(both, greedy, 4)
    assert [request.output for request in greedy] == [mixed[i] for i, law in enumerate(laws) if law.temperature == 0]


def test_nothing_committed_is_computed_twice(tiny_target, tiny_drafter, monkeypatch):
    """Both caches equal ones built from scratch at every round, and the passes see prompt + (G+1) tokens a round only."""
    target = tiny_target(dtype=torch.float64, end=ENDS)
    drafter = tiny_drafter(target)
    both, draft, encode = pair(target, drafter), drafter.draft, drafter.encode
    seen = {"target": 0, "context": 0, "checked": 0}
    requests = [Request(ids, 10) for ids in prompts()]

    def checked(shared, cache, rows, anchors, *rest):
        for row, anchor in zip(rows.tolist(), anchors.tolist(), strict=True):
            length = int(cache.lengths[row])
            owner = [
                r for r in requests if r.output and not r.finish_reason and len(r.ids) + len(r.output) - 1 == length
            ]
            for request in owner:
                if request.output[-1] != anchor:
                    continue
                text = torch.tensor([(request.ids + request.output)[:length]])
                taps = target.forward(text, target.cache(1, length), drafter.config.taps).taps
                whole = encode(shared, Texts(text, taps, torch.zeros_like(text)))
                close = all(
                    torch.allclose(keys[row, :length], key[0], rtol=0, atol=1e-10)
                    for (keys, _), (key, _) in zip(cache.layers, whole, strict=True)
                )
                seen["checked"] += close
        return draft(shared, cache, rows, anchors, *rest)

    monkeypatch.setattr(drafter, "draft", checked)
    decode(both, requests, 3)
    assert seen["checked"] >= sum(len(request.rounds) for request in requests)

    monkeypatch.setattr(drafter, "draft", draft)
    requests = [Request(ids, 10) for ids in prompts()]
    run, context = target.lean().run, drafter.trunk.context

    def counting(ids, *args):
        seen["target"] += ids.numel()
        return run(ids, *args)

    def counting_context(taps, positions):
        seen["context"] += positions.numel()
        return context(taps, positions)

    monkeypatch.setattr(target.lean(), "run", counting)
    monkeypatch.setattr(drafter.trunk, "context", counting_context)
    decode(both, requests, 1)
    prompt_tokens, rounds = sum(LENGTHS), [v for request in requests for v in request.rounds]
    assert seen["target"] == prompt_tokens + 5 * len(rounds)
    last = [request.rounds[-1] for request in requests if request.rounds]
    assert seen["context"] == prompt_tokens + sum(v.accepted + 1 for v in rounds) - sum(v.accepted + 1 for v in last)


def test_a_real_token_that_equals_the_mask_id_stays(tiny_target, tiny_drafter):
    """faults.md X5: slots are tracked by index, never by token value."""
    target = tiny_target(dtype=torch.float64)
    plain = [PlainRequest(ids, 12) for ids in prompts()]
    generate(target, plain, 1)
    mask = plain[1].output[4]
    drafter = tiny_drafter(target, mask_token_id=mask)
    requests = [Request(ids, 12) for ids in prompts()]
    decode(pair(target, drafter), requests, 3)
    assert requests[1].output[4] == mask
    assert [request.output for request in requests] == [request.output for request in plain]


def test_first_token_may_end_it(tiny_target, tiny_drafter):
    target = tiny_target()
    first = PlainRequest([5, 9, 12], 1)
    generate(target, [first], 1)
    target.end_ids = (first.output[0],)
    request = Request([5, 9, 12], 10)
    decode(pair(target, tiny_drafter(target)), [request], 1)
    assert (request.output, request.rounds, request.finish_reason) == (first.output, [], "stop")
    one = Request([6, 9, 12], 1)
    decode(pair(target, tiny_drafter(target)), [one], 1)
    assert len(one.output) == 1 and one.rounds == []


def test_timing_and_progress(tiny_target, tiny_drafter):
    target = tiny_target()
    timing, seen = Timing(), []
    requests = [Request(ids, 8) for ids in prompts()]
    decode(pair(target, tiny_drafter(target)), requests, 3, lambda done, tokens: seen.append((done, tokens)), timing)
    assert timing.draft > 0 and timing.verify > 0 and timing.rest > 0 and timing.prefill > 0
    assert 0 < timing.rounds <= sum(len(request.rounds) for request in requests)
    assert seen[-1] == (8, sum(len(request.output) for request in requests))


def test_a_drafter_of_another_target_is_refused(tiny_target, tiny_drafter):
    target = tiny_target()
    for other, message in (
        (tiny_target(vocab=48), "vocabulary is 64 and the drafter's 48"),
        (tiny_target(hidden=16), "hidden size is 32 and the drafter's 16"),
        (tiny_target(layers=4), "drafter tap 3: the target's decoder layers are 0 to 2"),
        (tiny_target(layers=2), "has 3 layers and the drafter's had 2"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            pair(target, tiny_drafter(other))
        assert "\n" not in str(error.value) and "train" in str(error.value)


def test_what_does_not_fit_is_refused(tiny_target, tiny_drafter):
    target = tiny_target(max_positions=32)
    both = pair(target, tiny_drafter(target))
    with pytest.raises(ValueError, match="request 1: prompt and answer may take 33 tokens, the target's context is 32"):
        decode(both, [Request([5] * 22, 10), Request([5] * 23, 10)], 2)
    with pytest.raises(ValueError, match="the prompt is empty"):
        decode(both, [Request([], 10)], 2)
    with pytest.raises(ValueError, match="needs 91 uniforms"):
        decode(both, [Request([5], 10, Law(1.0))], 2)
    full = Request([5] * 22, 10)
    decode(both, [full], 1)
    assert len(full.output) <= 10
