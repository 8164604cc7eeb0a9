"""Trains one nano language model, measures it on held-out answers and lets it speak.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

import nano_corpus
import nano_models
from nano_muon import Muon


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of ids [B, T] after the first column, padding (id 0) left out."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100).flatten())


def make_optimisers(model: Any, rate: float) -> list[torch.optim.Optimizer]:
    """Muon at five times `rate` for the matrices inside the layers, AdamW at `rate` for embeddings, norms, gates and convolutions."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inner = [
        p
        for name, p in trained.items()
        if p.dim() > 1 and "layers" in name and "conv" not in name and "embedding" not in name
    ]
    taken = {id(p) for p in inner}
    others = [p for p in trained.values() if id(p) not in taken]
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [Muon(inner, 5 * rate), adam]


def train(
    model: Any, batches: Iterator[torch.Tensor], *, steps: int, minutes: float | None, rate: float, say: str = ""
) -> dict[str, float]:
    """A warm-up, then a cosine to a twentieth, for `steps` updates, or for as many as fit in `minutes`.

    Returns steps, tokens (padding left out), seconds, and the mean loss of the last tenth.
    """
    optimisers = make_optimisers(model, rate)
    peaks = [group["lr"] for optimiser in optimisers for group in optimiser.param_groups]
    model.train()
    began = shown = time.perf_counter()
    losses: list[float] = []
    tokens, done = 0, 0.0
    with nano_models.fast(model):
        while done < 1:
            warm = min(1.0, (len(losses) + 1) / 30)
            share = warm * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
            for group, peak in zip((group for one in optimisers for group in one.param_groups), peaks, strict=True):
                group["lr"] = peak * share
            ids = next(batches)
            loss = loss_of(model, ids)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimiser in optimisers:
                optimiser.step()
            model.zero_grad()
            losses.append(loss.item())
            tokens += int((ids != 0).sum())
            now = time.perf_counter()
            done = (now - began) / 60 / minutes if minutes else len(losses) / steps
            if now - shown > 10 or done >= 1:
                shown = now
                mean = sum(losses[-50:]) / len(losses[-50:])
                print(
                    f"{say} {min(done, 1):4.0%} step {len(losses)} loss {mean:.3f} {tokens / (now - began):.0f} tokens/s",
                    file=sys.stderr,
                    flush=True,
                )
    tail = losses[-max(1, len(losses) // 10) :]
    return {
        "steps": len(losses),
        "tokens": tokens,
        "seconds": time.perf_counter() - began,
        "training_loss": sum(tail) / len(tail),
    }


@torch.inference_mode()
def held_out(model: Any, rows: Sequence[nano_corpus.Row]) -> dict[str, float]:
    """On the answers of `rows`: loss in nats per token, bits per character, mean of the largest probability."""
    model.eval()
    loss = tops = characters = 0.0
    count = 0
    with nano_models.fast(model):
        for row in (row for row in rows if len(row.ids) > row.prompt):
            ids = torch.tensor([row.ids])
            scores = model(input_ids=ids, use_cache=False).logits[0, row.prompt - 1 : -1].log_softmax(-1)
            loss -= float(scores.gather(1, ids[0, row.prompt :, None]).sum())
            tops += float(scores.max(-1).values.exp().sum())
            characters += len(row.text.answer or "")
            count += len(scores)
    count, characters = max(count, 1), max(characters, 1.0)
    return {
        "loss": loss / count,
        "bits_per_character": loss / math.log(2) / characters,
        "max_probability": tops / count,
        "tokens": count,
    }


@torch.inference_mode()
def speak(model: Any, tokenizer: Any, rows: Sequence[nano_corpus.Row], length: int) -> list[dict[str, Any]]:
    """Greedy answers of Hugging Face's own generate to the prompts of `rows`: text, mean probability, repeated 4-grams."""
    model.eval()
    said = []
    for row in rows:
        ids = torch.tensor([row.ids[: row.prompt]])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answer = found.sequences[0, row.prompt :].tolist()
        sure = torch.cat(found.logits).softmax(-1).max(-1).values.mean()
        said.append({
            "prompt": row.text.messages[-1]["content"], "held_out": row.text.held_out, "answer": tokenizer.decode(answer), "tokens": len(answer),
            "max_probability": float(sure), "repetition": nano_corpus.repetition(answer),
        })  # fmt: skip
    return said


@torch.inference_mode()
def sparsity(model: Any, rows: Sequence[nano_corpus.Row]) -> dict[str, float]:
    """Of the QSA layers on `rows`: the share of queries that cannot read all they see, and of tokens seen but not read."""
    chosen: list[torch.Tensor] = []
    hooks = [
        part.register_forward_hook(lambda _m, _a, out: chosen.append(out))
        for part in model.modules()
        if hasattr(part, "index_qk_proj")
    ]
    with nano_models.fast(model):
        for row in rows:
            model(input_ids=torch.tensor([row.ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    lost = [torch.arange(1, one.shape[-1] + 1) - one[0, 0].sum(-1) for one in chosen]
    seen = sum(one.shape[-1] * (one.shape[-1] + 1) // 2 for one in chosen)
    return {
        "queries_with_dropped_blocks": float(torch.cat(lost).gt(0).float().mean()),
        "tokens_dropped": float(torch.cat(lost).sum()) / seen,
    }
