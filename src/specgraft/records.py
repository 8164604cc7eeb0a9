"""The nouns of specgraft (DESIGN: section 4). Each field says its shape and who fills it.

Legend: T tokens of one conversation, K taps, D hidden size, G draft tokens, B batch, S stem tokens, N branches, W tokens a branch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the nouns are read by stages that must not load torch
    import torch


def ids_digest(ids: list[int]) -> str:
    """A short sha256 of token ids, taken where they are made and compared where they are used."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Prompt:
    """One prompt of the mix. Filled by `regen` (built-in set or a JSONL file)."""

    id: str  # stable and unique; resuming goes by it
    family: str  # prompts of one family are never split between train and held-out
    language: str  # "en", "ko", "ja", ...
    domain: str  # "chat", "code", "math", "tool", ...
    # OpenAI messages. Ends with the turn to be answered, or with a recorded answer (which regen writes anew); recorded answers
    # may stand before it, and user turns that follow each other are answered one by one.
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()  # OpenAI function list, for the template's `tools`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Turn:
    """One supervised answer of a row that holds several. Filled by `regen`."""

    start: int  # its first token in the row
    stop: int  # behind its last
    finish_reason: str  # as `Conversation.finish_reason`
    digest: str  # of its ids, as `Conversation.digest`


@dataclass(frozen=True)
class Conversation:
    """One row of training text: a rendered prompt with the target's own answers as token ids, never decoded and re-encoded.

    A prompt with several turns fills one row where each turn's rendered prompt begins with the ids so far, and a row for every
    stretch of turns where not (templates rewrite earlier turns). Filled by `regen`.
    """

    prompt_id: str  # of the row: the prompt's id, then `id#2`, `id#3`, ...
    family: str
    language: str
    domain: str
    split: str  # "train" or "heldout", by family
    input_ids: list[int]  # [T] rendered prompt, then the generated ids, then what the template adds, the next generated ids, ...
    loss_mask: list[bool]  # [T] True where the target generated the token
    prompt_length: int  # tokens before the first generated one
    temperature: float  # sampling used for this answer (0 = greedy; recorded answers: 1)
    top_p: float
    top_k: int  # 0 = no limit
    finish_reason: str  # of the last answer: "stop" (an end token was generated, and is kept) or "length" (cut by the limit)
    digest: str  # of the generated ids as the engine emitted them (`ids_digest`); the token identity gate compares it
    row: int = 1  # 1 for the first row of a prompt, then 2, ...
    turns: tuple[Turn, ...] = ()  # the answers of a row that holds several; () where one stands behind the prompt
    answers: str = "target"  # whose answers: "target", or "data set" (recorded ones: the target would not write them)

    def __post_init__(self) -> None:
        turns = tuple(Turn(**turn) if isinstance(turn, dict) else turn for turn in self.turns)
        object.__setattr__(self, "turns", turns)

    @property
    def source_id(self) -> str:
        """Id of the prompt that the row belongs to."""
        return self.prompt_id if self.row == 1 else self.prompt_id.removesuffix(f"#{self.row}")

    @property
    def spans(self) -> tuple[Turn, ...]:
        """Every supervised answer, in order."""
        return self.turns or (Turn(self.prompt_length, len(self.input_ids), self.finish_reason, self.digest),)

    def to_json(self) -> dict[str, Any]:
        """Without the fields that a row of one answer needs not."""
        unset = {"row": 1, "turns": (), "answers": "target"}
        return {key: value for key, value in asdict(self).items() if key not in unset or value != unset[key]}


def row_id(prompt_id: str, row: int) -> str:
    return prompt_id if row == 1 else f"{prompt_id}#{row}"


def read_conversations(folder: Path) -> list[Conversation]:
    """All conversations of a regen folder. Raises ValueError naming a damaged file and line, or a row that is there twice."""
    found = []
    places: dict[str, str] = {}
    for path in sorted(folder.glob("*-*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path}:{number}"
            try:
                conversation = Conversation(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                raise ValueError(f"{where}: damaged; delete the file and run regen again") from None
            if len(conversation.input_ids) != len(conversation.loss_mask):
                raise ValueError(f"{where}: ids and mask differ in length; delete the file and run regen again")
            if (first := places.setdefault(conversation.prompt_id, where)) != where:
                raise ValueError(
                    f"{where}: {conversation.prompt_id} is answered in {first} already; delete one of the two files and run regen again"
                )
            found.append(conversation)
    return found


@dataclass(frozen=True)
class Features:
    """What the drafter is trained on, for one conversation. Filled by `capture`, all states in the target's dtype."""

    prompt_id: str
    input_ids: torch.Tensor  # [T] int64
    loss_mask: torch.Tensor  # [T] bool
    taps: torch.Tensor  # [T, K, D] outputs of the tapped decoder layers, before any norm
    last: torch.Tensor  # [T, D] output of the last decoder layer, before the final norm


@dataclass(frozen=True)
class ProposalTree:
    """Branches grafted on one stem, each an independent chain behind its anchor. Filled by `distill`.

    Node (n, 0) follows stem token anchors[n], node (n, t) follows node (n, t-1): it sees the stem up to the anchor and its
    own branch up to itself, at the position that it would have in the text, whatever its place in a packed pass.
    """

    stem: int  # S, tokens of the stem
    anchors: torch.Tensor  # [N] long, places in 0..S-1, in any order, may repeat
    branches: torch.Tensor  # [N, W] long, token ids; W may be 0

    def to(self, device: torch.device) -> ProposalTree:
        return ProposalTree(self.stem, self.anchors.to(device), self.branches.to(device))

    @property
    def positions(self) -> torch.Tensor:
        """[N, W] semantic position of every node."""
        import torch

        return self.anchors[:, None] + 1 + torch.arange(self.branches.shape[1], device=self.anchors.device)

    @property
    def parents(self) -> torch.Tensor:
        """[N, W] parent of every node: its index in the packed order [stem, branch 0, branch 1, ..]."""
        import torch

        count, width = self.branches.shape
        node = self.stem + torch.arange(count * width, device=self.anchors.device).view(count, width)
        return torch.cat([self.anchors[:, None], node[:, :-1]], 1)[:, :width]


@dataclass(frozen=True)
class TargetScores:
    """What the target computes at the nodes of one tree. Filled by `targets.scoring`, or by a remote target."""

    hidden: torch.Tensor  # [N, W, D] output of the last decoder layer at each node, before the final norm


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verify round for one sequence. Filled by `decode`."""

    accepted: int  # r: drafts accepted
    committed: tuple[int, ...]  # tokens added to the text: accepted drafts, then correction or bonus
    proposed: int  # drafts that were proposed (G)


@dataclass(frozen=True)
class GateResult:
    """One gate of DESIGN section 6. Filled by `check`."""

    name: str
    passed: bool
    detail: str  # what was compared, and the figure
    measured: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
