"""Warm starts from another drafter: what is copied, when the result is the same to the bit, what is refused and what is said.

Legend: B rows, T tokens, N blocks, G draft tokens.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from by_hand import F64, randomised
from specgraft.drafters.drafter import Drafter, Texts
from specgraft.drafters.registry import KINDS, build
from specgraft.drafters.shared import Shared
from specgraft.drafters.walk import Corrector
from specgraft.drafters.warm import start_from

G = 3
DFLASH2 = {"conv_group": 8, "selector_rank": 6, "selector_top_k": 64}
BARE = {"rank": 0, "confidence": False}
TRUNK = "fc, hidden_norm, layers, norm"


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target(dtype=F64, markov=1.0, spread=0.3)


@pytest.fixture
def make(target, tiny_drafter):
    """A drafter of this target as it starts, or with every weight random."""

    def build_one(kind: str = "dspark", shaken: bool = False, **more) -> Drafter:
        more = {"draft_tokens": G, "rank": 8, "bigram": 0.0, **(DFLASH2 if kind == "dflash2" else {}), **more}
        drafter = tiny_drafter(target, kind=kind, **more)
        return randomised(drafter).requires_grad_(False) if shaken else drafter

    return build_one


def computed(drafter: Drafter, target) -> tuple[torch.Tensor, torch.Tensor]:
    """States [B,N,G,D] of some blocks of two documents in a row, and the logits of their drafts on given tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 64, (1, 16), generator=generator)
    texts = Texts(ids, torch.randn(1, 16, 3, 32, generator=generator, dtype=F64), torch.tensor([[0] * 9 + [9] * 7]))
    shared, anchors = Shared.of(target, drafter.config.mask_token_id), torch.tensor([[2, 5, 11]])
    hidden = drafter(shared, texts, anchors)
    correct, rows = Corrector(drafter), []
    for slot in range(hidden.shape[2]):
        flat = hidden[0, :, slot]
        rows.append(correct(flat @ shared.head.T, flat, ids[0, anchors[0] + slot])[0])
    return hidden, torch.stack(rows, 1)


def parts(line: str) -> dict[str, str]:
    """`F (dspark): fc copied exactly; new: x; left behind: y` by what it says of whom."""
    head, *rest = line.split("; ")
    names, _, how = head.partition(": ")[2].partition(" copied ")
    return {"copied": names, "how": how, **dict(piece.split(": ", 1) for piece in rest if ": " in piece)}


@pytest.mark.parametrize(
    ("source", "own", "said"),
    [
        *(((kind, {}), (kind, {}), {}) for kind in KINDS),
        (("dspark", {"markov_head": "rnn"}), ("dspark", {"markov_head": "rnn"}), {}),
        (("dspark", BARE), ("dspark", {}), {"copied": TRUNK, "new": "confidence_head, markov_head"}),
        (("dspark", BARE), ("dspark", {"markov_head": "gated"}), {"copied": TRUNK, "new": "confidence_head, markov_head"}),
        (("dflash", {}), ("dflash2", {}), {"copied": TRUNK, "new": "candidate_selector, convolutions"}),
        (("dspark", {"confidence": False}), ("dspark", {}), {"copied": "fc, hidden_norm, layers, markov_head, norm", "new": "confidence_head"}),
        (("dflash", {"block_causal": True, "draft_tokens": G + 2}), ("dflash", {"block_causal": True}), {}),
    ],
)  # fmt: skip
def test_an_exact_start_computes_what_the_source_does_to_the_bit(make, target, source, own, said) -> None:
    before, after = make(source[0], shaken=True, **source[1]), make(own[0], **own[1])
    line = start_from(after, before, "F")
    expected, found = computed(before, target), computed(after, target)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a[..., :G, :], b)
    assert line.startswith(f"F ({source[0]}): ")
    assert parts(line)["how"] == "exactly" and "left behind" not in parts(line)
    for name, value in said.items():
        assert parts(line)[name] == value


@pytest.mark.parametrize(
    ("before", "after", "left", "new"),
    [
        ({"markov_head": "vanilla"}, {"markov_head": "gated"}, "confidence_head, markov_head", "confidence_head, markov_head"),
        ({"rank": 16}, {}, "confidence_head, markov_head", "confidence_head, markov_head"),
        ({"markov_head": "rnn", "confidence_with_markov": False}, {"confidence_with_markov": False}, "markov_head", "markov_head"),
        ({}, {"confidence_with_markov": False}, "confidence_head", "confidence_head"),
        ({}, BARE, "confidence_head, markov_head", None),
    ],
)
def test_a_head_of_another_kind_stays_behind_and_the_trunk_is_exact(make, target, before, after, left, new) -> None:
    """Its own head begins at no bias; a confidence head goes with the embeddings that it reads."""
    source, drafter = make(shaken=True, **before), make(**after)
    line = parts(start_from(drafter, source, "F"))
    assert line["how"] == "exactly" and line["left behind"] == left and line.get("new") == new
    assert torch.equal(computed(drafter, target)[0], computed(source, target)[0])
    if drafter.markov_head is not None and left != "confidence_head":
        assert not drafter.markov_head.markov_w2.weight.any()


@pytest.mark.parametrize(
    ("source", "own", "why"),
    [
        (("dflash", {}), ("dspark", {}), "labels move by one slot"),
        (("dspark", {}), ("dflash", {}), "labels move by one slot"),
        (("dspark", {}), ("dflash2", {}), "labels move by one slot"),
        (("dflash2", {}), ("dspark", {}), "labels move by one slot; its convolutions have no place here"),
        (("dflash2", {}), ("dflash", {}), "its convolutions have no place here"),
        (("dspark", {}), ("mtp", {}), "dspark and mtp run their layers over other inputs"),
        (("mtp", {}), ("dflash", {}), "mtp and dflash run their layers over other inputs"),
        (("dspark", {"draft_tokens": 5}), ("dspark", {}), "draft_tokens 5 there, 3 here"),
        (("dspark", {"mask_token_id": 7}), ("dspark", {}), "mask_token_id 7 there, 0 here"),
        (("dspark", {"block_causal": True}), ("dspark", {}), "block_causal True there, False here; draft_tokens"),
        (("dspark", {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8}), ("dspark", {}), "layer_types sliding sliding there, full full here"),
    ],
)  # fmt: skip
def test_an_approximate_start_copies_the_trunk_and_says_why_it_is_one(make, target, source, own, why) -> None:
    before, after = make(source[0], shaken=True, **source[1]), make(own[0], **own[1])
    fresh = {name: tensor.clone() for name, tensor in after.state_dict().items()}
    line = start_from(after, before, "F")
    assert "\n" not in line and set(TRUNK.split(", ")) <= set(parts(line)["copied"].split(", "))
    assert f"approximately ({why.removesuffix('; draft_tokens')}" in line
    theirs = before.state_dict()
    copied = set(theirs) & set(fresh)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.mlp.up_proj.weight"} <= copied
    for name, tensor in after.state_dict().items():
        assert torch.equal(tensor, theirs[name] if name in copied else fresh[name]), name


def test_other_numbers_in_the_config_are_said(make) -> None:
    source = make(shaken=True)
    own = build(dataclasses.replace(source.config, rope_theta=5e5, eps=1e-6)).double()
    assert "approximately (eps 1e-05 there, 1e-06 here; rope_theta 10000.0 there, 500000.0 here)" in start_from(own, source, "F")


def test_heads_of_mtp_are_taken_one_by_one(make, target) -> None:
    source, fewer, more = make("mtp", shaken=True), make("mtp", draft_tokens=2), make("mtp", draft_tokens=5)
    assert start_from(fewer, source, "F").endswith("copied exactly")
    assert start_from(more, source, "F").endswith("copied exactly; new: heads 4 to 5")
    expected = computed(source, target)[1]
    assert torch.equal(computed(fewer, target)[1], expected[:, :2])
    assert torch.equal(computed(more, target)[1][:, :3], expected)
    assert not more.heads.weight[3 * 32 :].any()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"vocab_size": 65}, "F has vocab_size=65 and this target 64: it was made for another target"),
        ({"hidden_size": 40}, "F has hidden_size=40 and this target 32"),
        ({"target_layers": 4}, "F has target_layers=4 and this target 3"),
        ({"taps": (0, 2)}, r"F reads target layers \[0, 2\], this run \[0, 1, 2\]; set capture\.taps=\[0, 2\] and capture again"),
        ({"taps": (2, 1, 0)}, r"set capture\.taps=\[2, 1, 0\]"),  # the columns of fc follow the order
        ({"layers": 3, "layer_types": ()}, r"F has layers=3, this run 2; set drafters\.layers=3"),
        ({"layers": 1, "layer_types": ()}, r"set drafters\.layers=1"),
        ({"heads": 8}, r"set drafters\.heads=8"),
        ({"kv_heads": 4}, r"set drafters\.kv_heads=4"),
        ({"head_dim": 16}, r"set drafters\.head_dim=16"),
        ({"intermediate": 48}, r"set drafters\.intermediate=48"),
    ],
)
def test_weights_that_mean_nothing_here_are_refused_in_one_line(make, change, why: str) -> None:
    own = make()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    source = build(dataclasses.replace(own.config, **change)).double()
    with pytest.raises(ValueError, match=why) as caught:
        start_from(own, source, "F")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("drafters.warm_from: ")
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


def test_convolutions_of_other_groups_are_refused_and_other_selectors_start_new(make) -> None:
    own = make("dflash2")
    with pytest.raises(ValueError, match=r"F has conv_group=4, this run 8; set drafters\.conv_group=4"):
        start_from(own, make("dflash2", shaken=True, conv_group=4), "F")
    line = parts(start_from(own, make("dflash2", shaken=True, selector_rank=4), "F"))
    assert line["new"] == line["left behind"] == "candidate_selector" and line["how"] == "exactly"
    assert not own.selector.successor_codebook.any()


def test_layers_unknown_to_a_layout_are_no_reason_to_refuse(make) -> None:
    """speculators does not say how many layers the target has."""
    own = make()
    source = build(dataclasses.replace(own.config, target_layers=0)).double()
    assert "copied exactly" in start_from(own, source, "F")
