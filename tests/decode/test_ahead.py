"""A round drafted before the round before it is read: the same texts, rounds and confidences, and no answer of a device is waited for."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from specgraft.decode import loop
from specgraft.decode.loop import Request, decode, uniform_count
from specgraft.decode.pair import pair
from specgraft.ops.sampling import Law, uniforms

ENDS = [1, 7, 20, 33]
KINDS = {
    "dspark": {},
    "dflash": {},
    "dflash2": {"conv_group": 8, "selector_rank": 8, "selector_top_k": 6},
    "mtp": {},
}


def requests(laws):
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            torch.randint(2, 64, (length,), generator=generator).tolist(), 15, law, uniforms(0, str(number), uniform_count(15, 4))
        )
        for number, (length, law) in enumerate(zip((3, 9, 5, 14, 2, 7), laws, strict=True))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_drafting_ahead_changes_nothing(tiny_target, tiny_drafter, monkeypatch, kind, batch):
    target = tiny_target(dtype=torch.float64, end=ENDS)
    both = pair(target, tiny_drafter(target, kind=kind, **KINDS[kind]))
    laws = [Law(), Law(1.0), Law(0.7, 0.8, 5), Law(), Law(1.0), Law()]
    told = []
    for ahead in (False, True):
        monkeypatch.setattr(loop, "AHEAD", ahead)
        found = requests(laws)
        decode(both, found, batch)
        told.append([(r.output, r.rounds, r.finish_reason, [[round(x, 8) for x in row] for row in r.confidence]) for r in found])
    assert told[0] == told[1]
    assert len({len(r.output) for r in found}) > 1, "rows must end at different times"


def test_the_next_drafts_are_launched_before_the_round_is_read(tiny_target, tiny_drafter, monkeypatch):
    """From the start of a steady round to its one reading, nothing is fetched from the device."""
    target = tiny_target(dtype=torch.float64, end=[1])
    both = pair(target, tiny_drafter(target))
    both = type(both)(both.target, both.drafter, both.shared, None)  # bias rows are looked up by token on a CPU only
    monkeypatch.setattr(loop, "AHEAD", True)
    fetched: list[str] = []
    names = ("tolist", "item", "__int__", "__bool__", "__float__", "cpu", "nonzero")
    draft, head = both.drafter.draft, both.drafter.markov_head
    monkeypatch.setattr("specgraft.drafters.markov.BiasRows.__call__", lambda self, previous, latent: head.bias(latent))

    def drafting(*args):
        fetched.append("draft")
        return draft(*args)

    monkeypatch.setattr(both.drafter, "draft", drafting)

    def noted(name, original):
        def method(self, *args, **kwargs):
            fetched.append(name)
            return original(self, *args, **kwargs)

        return method

    request = Request([5, 9, 3], 24)
    target.end_ids = ()
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(torch.Tensor, name, noted(name, getattr(torch.Tensor, name))))
        decode(both, [request], 1)
    first = fetched.index("draft")
    steady = fetched[first:]
    # each round: draft of the next, then one reading of ids and one of confidences
    assert steady == ["draft", *["draft", "tolist", "tolist"] * len(request.rounds)]
