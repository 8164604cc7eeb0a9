"""Batched decoding equals transformers' own, and a text depends neither on the batch nor on its neighbours."""

from __future__ import annotations

import random

import pytest
import torch

from specgraft.ops.sampling import uniforms
from specgraft.targets.generate import Request, generate

LENGTHS = (3, 17, 8, 1, 12, 5, 9)
LIMIT = 16


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 64, (length,), generator=generator).tolist() for length in LENGTHS]


def outputs(target, batch: int, **settings) -> list[list[int]]:
    requests = [Request(ids, LIMIT, **settings) for ids in prompts()]
    generate(target, requests, batch)
    return [request.output for request in requests]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(dtype=torch.float64, markov=3.0, spread=0.3)


@pytest.fixture(scope="module")
def greedy(target, oracle) -> list[list[int]]:
    """Texts of transformers' own greedy generation without any end token."""
    reference = oracle(target)
    return [reference.greedy(ids, LIMIT, (1_000,)) for ids in prompts()]


@pytest.mark.parametrize("batch", [1, 3, 7, 64])
def test_greedy_text_equals_transformers_generate_at_every_batch(target, greedy, monkeypatch, batch) -> None:
    monkeypatch.setattr(target, "end_ids", ())
    assert outputs(target, batch) == greedy
    assert len({tuple(text) for text in greedy}) == len(greedy)  # the texts do depend on their prompts


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_list_of_end_tokens_and_the_limit_stop_each_row_by_itself(target, oracle, greedy, monkeypatch, batch) -> None:
    ends = (greedy[0][4], greedy[1][9])
    monkeypatch.setattr(target, "end_ids", ends)
    requests = [Request(ids, LIMIT) for ids in prompts()]
    generate(target, requests, batch)
    reference = oracle(target)
    assert [request.output for request in requests] == [reference.greedy(ids, LIMIT, ends) for ids in prompts()]
    reasons = [request.finish_reason for request in requests]
    assert set(reasons) == {"stop", "length"}
    for request in requests:
        inside = [token in ends for token in request.output]
        assert not any(inside[:-1])  # an end token ends the text, and is kept
        assert inside[-1] == (request.finish_reason == "stop")
        assert request.finish_reason == "stop" or len(request.output) == LIMIT


def test_an_end_token_at_the_limit_counts_as_stop(target, greedy, monkeypatch) -> None:
    first = greedy[2].index(greedy[2][-1])
    monkeypatch.setattr(target, "end_ids", (greedy[2][-1],))
    request = Request(prompts()[2], first + 1)
    generate(target, [request], 1)
    assert (len(request.output), request.finish_reason) == (first + 1, "stop")


def test_each_request_has_its_own_limit(target, greedy, monkeypatch) -> None:
    monkeypatch.setattr(target, "end_ids", ())
    requests = [Request(ids, 1 + row) for row, ids in enumerate(prompts())]
    generate(target, requests, 3)
    assert [request.output for request in requests] == [text[: 1 + row] for row, text in enumerate(greedy)]
    assert {request.finish_reason for request in requests} == {"length"}


def test_sampled_text_depends_on_its_uniforms_alone(target) -> None:
    def sampled(batch: int, order: list[int], seed: int = 0) -> list[list[int]]:
        requests = [Request(ids, LIMIT, 0.9, 0.95, 20, uniforms(seed, str(row), LIMIT)) for row, ids in enumerate(prompts())]
        generate(target, [requests[row] for row in order], batch)
        return [request.output for request in requests]

    order = list(range(len(LENGTHS)))
    alone = sampled(1, order)
    mixed = order.copy()
    random.Random(0).shuffle(mixed)
    assert alone == sampled(3, order) == sampled(7, mixed) == sampled(4, order[::-1])
    assert all(a != b for a, b in zip(alone, sampled(3, order, seed=1), strict=True))


def test_greedy_and_sampled_rows_of_one_batch_do_not_disturb_each_other(target) -> None:
    kinds = [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.8, 20), (1.3, 1.0, 3)]

    def request(row: int, ids: list[int]) -> Request:
        temperature, top_p, top_k = kinds[row % 4]
        return Request(ids, LIMIT, temperature, top_p, top_k, uniforms(0, str(row), LIMIT) if temperature else None)

    together = [request(row, ids) for row, ids in enumerate(prompts())]
    generate(target, together, 7)
    for row, ids in enumerate(prompts()):
        alone = request(row, ids)
        generate(target, [alone], 1)
        assert alone.output == together[row].output


def test_progress_counts_what_is_finished_and_every_token(target, monkeypatch) -> None:
    monkeypatch.setattr(target, "end_ids", ())
    seen: list[tuple[int, int]] = []
    requests = [Request(ids, 4) for ids in prompts()]
    generate(target, requests, 2, lambda finished, tokens: seen.append((finished, tokens)))
    assert seen[-1] == (7, 28) and seen == sorted(seen)


def test_no_request_is_no_work(target) -> None:
    generate(target, [], 4)
