"""Block choice of sparse attention: every path equals the definition, ties included; a branch equals its text alone.

Small whole numbers make every score exact in float32 and many of them equal, so choices are compared token by token.
Legend: R rows, N branches, W queries of one row or branch, H heads of the chooser, d its head size, S stem tokens, r ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from specgraft.ops.sparse_choice import naive, vectorised

HEADS, SIZE = 3, 4
KINDS = {"ties": torch.float32, "float32": torch.float32, "float64": torch.float64}
BRANCHES = [  # S, W, r, topk, anchors: both sides of block borders, repeated, first and last
    (23, 5, 4, 2, (0, 2, 3, 4, 6, 7, 8, 7, 22, 19)),
    (23, 5, 4, 1, (22, 3, 10, 3)),
    (16, 7, 4, 3, (15, 11, 12, 0, 15)),
    (17, 1, 4, 2, (0, 2, 3, 14, 15, 16)),
    (9, 66, 4, 3, (8, 2, 3)),
    (3, 6, 4, 2, (0, 1, 2, 2)),
    (1, 2, 4, 1, (0, 0)),
    (12, 4, 1, 3, (0, 5, 11, 5)),
    (13, 6, 3, 100, (0, 12, 6, 8)),
    (14, 2, 8, 1, (13, 5, 6, 7, 8)),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def maker(kind: str, seed: int = 0) -> Callable[..., torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (x.round() * 24 if kind == "ties" else x).to(KINDS[kind])  # 24: means over 1, 2, 3, 4 and 8 are whole

    return make


def finish(key: torch.Tensor, position: int) -> torch.Tensor:
    """Stands for norm and rope: exact, and another for every position modulo 8 and every ratio."""
    return key.roll(position % key.shape[-1]) * (1 if position % 8 < 4 else -1)


def finish_all(raw: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """raw [..,r,d], positions [..] -> [..,d]"""
    keys = naive.pool(raw).flatten(0, -2)
    done = [finish(key, int(at)) for key, at in zip(keys, positions.flatten(), strict=True)]
    return (
        torch.stack(done).view(raw.shape[:-2] + raw.shape[-1:]) if done else keys.view(*raw.shape[:-2], raw.shape[-1])
    )


def blocks_of(raw: torch.Tensor, ratio: int) -> torch.Tensor:
    """[..,T,d] -> finished keys [..,T//r,d] of the complete blocks of a plain text."""
    count = raw.shape[-2] // ratio
    groups = raw[..., : count * ratio, :].unflatten(-2, (count, ratio))
    return finish_all(groups, (torch.arange(count) * ratio).expand(groups.shape[:-2]))


def tree(case: tuple[int, int, int, int, tuple[int, ...]], kind: str) -> tuple[torch.Tensor, ...]:
    stem, width, _, _, anchors = case
    make = maker(kind, stem + width)
    return (
        make(len(anchors), width, HEADS, SIZE),
        make(stem, SIZE),
        make(len(anchors), width, SIZE),
        torch.tensor(anchors),
    )


def branches(
    q: torch.Tensor,
    stem_raw: torch.Tensor,
    branch_raw: torch.Tensor,
    anchors: torch.Tensor,
    ratio: int,
    topk: int,
    **more: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fast path from raw keys on."""
    own = finish_all(*vectorised.own_groups(stem_raw, branch_raw, anchors, ratio))
    stem_keys = blocks_of(stem_raw, ratio)
    return vectorised.choose_branches(q, stem_keys, own, anchors, ratio, topk, len(stem_raw), **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "ratio", "topk"), [(29, 4, 3), (29, 4, 1), (7, 4, 5), (3, 4, 2), (11, 1, 4), (24, 3, 2), (70, 2, 5)]
)
def test_rows_equal_the_definition(length: int, ratio: int, topk: int, kind: str) -> None:
    rows, width = 3, 6
    make = maker(kind, length)
    q, raw = make(rows, width, HEADS, SIZE), make(rows, length, SIZE)
    lengths = torch.randint(1, length + 1, (rows, width), generator=torch.Generator().manual_seed(1))
    lengths[0] = torch.arange(width).clamp_max(length - 1) + 1  # the start of a text, where no block is complete
    lengths[1, 0] = length
    for columns in (length, length + 5):
        wanted = naive.choose_rows(q, raw, lengths, ratio, topk, columns, finish)
        assert torch.equal(vectorised.choose_rows(q, blocks_of(raw, ratio), lengths, ratio, topk, columns), wanted)
        small = vectorised.choose_rows(q, blocks_of(raw, ratio), lengths, ratio, topk, columns, budget=1)
        assert torch.equal(small, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", BRANCHES, ids=str)
def test_branches_equal_the_definition(case: tuple[int, int, int, int, tuple[int, ...]], kind: str) -> None:
    ratio, topk = case[2:4]
    wanted = naive.choose_branches(*tree(case, kind), ratio, topk, finish)
    for budget in (1, 100, vectorised.BUDGET):
        found = branches(*tree(case, kind), ratio, topk, budget=budget)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("case", BRANCHES, ids=str)
def test_a_branch_reads_as_its_text_alone(case: tuple[int, int, int, int, tuple[int, ...]]) -> None:
    """Both `naive` and the fast path for plain rows, on [stem up to the anchor | branch]."""
    _, width, ratio, topk, _ = case
    q, stem_raw, branch_raw, anchors = tree(case, "ties")
    on_stem, on_own = branches(q, stem_raw, branch_raw, anchors, ratio, topk)
    for n, anchor in enumerate(anchors.tolist()):
        text = torch.cat([stem_raw[: anchor + 1], branch_raw[n]])[None]
        lengths = anchor + 2 + torch.arange(width)[None]
        slow = naive.choose_rows(q[n : n + 1], text, lengths, ratio, topk, text.shape[1], finish)[0]
        fast = vectorised.choose_rows(q[n : n + 1], blocks_of(text, ratio), lengths, ratio, topk, text.shape[1])[0]
        found = torch.cat([on_stem[n, :, : anchor + 1], on_own[n]], 1)
        assert torch.equal(found, slow) and torch.equal(found, fast)
        assert not on_stem[n, :, anchor + 1 :].any()


def test_equal_scores_go_to_the_lower_block_on_every_path() -> None:
    """All scores 0, and only the first is: the earliest blocks win, though later ones were a sort's free choice."""
    stem, width, ratio, topk = 400, 9, 2, 70
    q = -torch.ones(2, width, HEADS, SIZE)
    raw = torch.ones(1, stem, SIZE)
    keys, anchors = raw[0, ::ratio], torch.tensor([stem - 1, 20])
    lengths = stem + 1 + torch.arange(width)[None] - width
    rows = vectorised.choose_rows(q[:1], keys[None], lengths, ratio, topk, stem)[0]
    for t, length in enumerate(lengths[0].tolist()):
        wanted = torch.zeros(stem, dtype=torch.bool)
        wanted[: topk * ratio] = True
        wanted[length // ratio * ratio : length] = True
        assert torch.equal(rows[t], wanted)
    own = torch.ones(2, 5, SIZE)
    on_stem, on_own = vectorised.choose_branches(q, keys, own, anchors, ratio, topk, stem)
    assert torch.equal(on_stem[0], wanted.new_ones(1).expand(width, stem) & (torch.arange(stem) < topk * ratio))
    assert torch.equal(on_own[0], torch.eye(width, dtype=torch.bool) & (torch.arange(width) % 2 == 0)[:, None])
    # fewer blocks than topk: the second branch reads all that it sees
    assert torch.equal(on_stem[1], (torch.arange(stem) <= 20).expand(width, -1))
    assert torch.equal(on_own[1], torch.ones(width, width, dtype=torch.bool).tril())


def test_ties_across_the_border_of_stem_and_branch() -> None:
    """Own blocks come after the stem's: of equal scores the stem's block wins, of a higher one the branch's."""
    ratio, topk, q = 2, 2, torch.ones(1, 4, 1, SIZE)
    keys, anchors = torch.ones(3, SIZE), torch.tensor([5])
    on_stem, on_own = vectorised.choose_branches(q, keys, torch.ones(1, 3, SIZE), anchors, ratio, topk, 6)
    assert on_stem[0, 3].tolist() == [True] * 4 + [False] * 2 and not on_own[0, 3].any()
    on_stem, on_own = vectorised.choose_branches(q, keys, 2 * torch.ones(1, 3, SIZE), anchors, ratio, topk, 6)
    assert not on_stem[0, 3].any() and on_own[0, 3].all()


def test_own_groups_start_with_what_is_left_of_the_stem() -> None:
    stem, branch = torch.arange(10.0)[:, None], torch.tensor([[20.0, 21.0, 22.0], [30.0, 31.0, 32.0]])[..., None]
    raw, starts = vectorised.own_groups(stem, branch, torch.tensor([5, 7]), 4)
    assert raw[..., 0].tolist() == [[[4, 5, 20, 21], [22, 0, 0, 0]], [[30, 31, 32, 0], [0, 0, 0, 0]]]
    assert starts.tolist() == [[4, 8], [8, 12]]


def test_no_branch_and_no_token() -> None:
    q, stem_raw, branch_raw, anchors = tree((9, 3, 4, 1, (2, 5)), "ties")
    on_stem, on_own = branches(q[:0], stem_raw, branch_raw[:0], anchors[:0], 4, 1)
    assert on_stem.shape == (0, 3, 9) and on_own.shape == (0, 3, 3)
    for ratio in (1, 4):
        on_stem, on_own = branches(q[:, :0], stem_raw, branch_raw[:, :0], anchors, ratio, 1)
        assert on_stem.shape == (2, 0, 9) and on_own.shape == (2, 0, 0)


def test_hidden_keys_choose_nothing() -> None:
    """Another branch, the stem behind the anchor, keys of blocks that are not complete yet: not even as nan."""
    case = (23, 5, 4, 2, (6, 22, 11))
    q, stem_raw, branch_raw, anchors = tree(case, "float32")
    before = branches(q, stem_raw, branch_raw, anchors, 4, 2)
    stem_raw[7:], branch_raw[1:], q[1:] = float("nan"), float("nan"), float("nan")
    after = branches(q, stem_raw, branch_raw, anchors, 4, 2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(before, after, strict=True))
    branch_raw[0, 3:] = float("nan")
    after = branches(q, stem_raw, branch_raw, anchors, 4, 2)
    assert all(torch.equal(a[0, :3], b[0, :3]) for a, b in zip(before, after, strict=True))


def test_bfloat16_is_scored_in_float32() -> None:
    q, stem_raw, branch_raw, anchors = (
        x.bfloat16() if x.is_floating_point() else x for x in tree(BRANCHES[0], "float32")
    )
    found = branches(q, stem_raw, branch_raw, anchors, 4, 2)
    wanted = naive.choose_branches(q, stem_raw, branch_raw, anchors, 4, 2, finish)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


class TestPlantedFaults:
    """Each wrong way of regrouping must be told from the right one by the comparison above."""

    case = (22, 6, 4, 2, (5, 18, 10, 6))

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        return naive.choose_branches(*tree(self.case, "float64"), 4, 2, finish)

    def differs(self, raw: torch.Tensor, starts: torch.Tensor) -> bool:
        q, stem_raw, _, anchors = tree(self.case, "float64")
        own = finish_all(raw, starts)
        found = vectorised.choose_branches(q, blocks_of(stem_raw, 4), own, anchors, 4, 2, len(stem_raw))
        return not all(torch.equal(a, b) for a, b in zip(found, self.wanted(), strict=True))

    def test_the_right_groups_pass(self) -> None:
        _, stem_raw, branch_raw, anchors = tree(self.case, "float64")
        assert not self.differs(*vectorised.own_groups(stem_raw, branch_raw, anchors, 4))

    def test_a_group_straddles_branches(self) -> None:
        """Groups cut from the packed order [stem | branch 0 | branch 1 | ..]."""
        _, stem_raw, branch_raw, anchors = tree(self.case, "float64")
        raw, starts = vectorised.own_groups(stem_raw, branch_raw, anchors, 4)
        packed = torch.cat([stem_raw, branch_raw.flatten(0, 1), stem_raw[:12]])
        begin = (len(stem_raw) + torch.arange(4) * 6) // 4 * 4  # the block that holds a branch's first packed token
        straddling = packed[begin[:, None] + torch.arange(raw.shape[1] * 4)].view_as(raw)
        assert self.differs(straddling, starts)

    def test_the_stems_own_block_at_the_anchor_is_reused(self) -> None:
        """It holds stem tokens behind the anchor."""
        _, stem_raw, branch_raw, anchors = tree(self.case, "float64")
        raw, starts = vectorised.own_groups(stem_raw, branch_raw, anchors, 4)
        for n, anchor in enumerate(anchors.tolist()):
            begin = (anchor + 1) // 4 * 4
            if begin + 4 <= len(stem_raw):
                raw[n, 0] = stem_raw[begin : begin + 4]
        assert self.differs(raw, starts)

    def test_packed_positions(self) -> None:
        """Keys turned by their place in the packed pass, not in the text."""
        _, stem_raw, branch_raw, anchors = tree(self.case, "float64")
        raw, starts = vectorised.own_groups(stem_raw, branch_raw, anchors, 4)
        left = (anchors + 1) % 4
        packed = len(stem_raw) + torch.arange(4)[:, None] * 6 + torch.arange(raw.shape[1]) * 4 - left[:, None]
        packed[:, 0] = torch.where(left > 0, starts[:, 0], packed[:, 0])
        assert self.differs(raw, packed)
