"""Models in which faults show: random weights of deviation 0.15, norm weights 1 +- 0.3 (ones would hide a norm)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specgraft.records import Conversation, ids_digest
from specgraft.targets.generate import Request, generate
from specgraft.targets.model import Target

END = 1
PROMPTS = (9, 14, 22, 31)  # tokens


def randomise_norms(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.weight.data = (0.7 + 0.6 * torch.rand(part.weight.shape, generator=generator)).to(part.weight.dtype)


def prompts(vocab: int, seed: int = 0) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {f"p{n}": torch.randint(2, vocab, (n,), generator=generator).tolist() for n in PROMPTS}


def answered(target: Target, new: int = 40) -> list[Conversation]:
    """Greedy answers of the target to `prompts`, kept as regen keeps them."""
    found = []
    for name, ids in prompts(target.vocab_size).items():
        request = Request(ids, new)
        generate(target, [request], 1)
        found.append(
            Conversation(
                prompt_id=name,
                family=name,
                language="en",
                domain="chat",
                split="train",
                input_ids=ids + request.output,
                loss_mask=[False] * len(ids) + [True] * len(request.output),
                prompt_length=len(ids),
                temperature=0.0,
                top_p=1.0,
                top_k=0,
                finish_reason=request.finish_reason,
                digest=ids_digest(request.output),
            )
        )
    return found


@pytest.fixture(scope="session")
def full_target(tiny_target: Callable[..., Target]) -> Callable[..., Target]:
    """FULL: 8 layers, hidden 64, vocabulary 272; `tied` shares head and embedding."""

    def build(tied: bool = False, **changes: Any) -> Target:
        shape: dict[str, Any] = {"vocab": 272, "layers": 8, "hidden": 64, "spread": 0.15, "markov": 1.0, "end": END}
        target = tiny_target(**{**shape, **changes})
        randomise_norms(target.model)
        if tied:
            target.model.config.tie_word_embeddings = True
            target.model.tie_weights()
            assert target.head.weight.data_ptr() == target.embedding.weight.data_ptr()
        return target

    return build


@pytest.fixture(scope="session")
def answers() -> Callable[..., list[Conversation]]:
    """Greedy conversations of a target; arguments as `answered`."""
    return answered
