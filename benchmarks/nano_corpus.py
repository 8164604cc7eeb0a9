"""Text for nano language models: answered conversations and bare prompts, their tokenizer, and rows of token ids.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specgraft.records import Conversation, read_conversations

SPECIAL = (
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
)  # ids 0 to 3; the mask is for drafters, no text holds it
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
SMOLLM2_DEFAULT = (
    "You are a helpful AI assistant named SmolLM"  # its template adds this where a prompt has no system turn
)
SENTENCE_END = re.compile(r"(?<=[.!?:;`])(?=\s)|(?<=\n)")

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Text:
    """One text to learn. Filled by `read_answers` and `read_bare`."""

    messages: Messages
    answer: str | None  # None for a bare prompt
    held_out: bool = False


def repetition(tokens: Sequence[Any], n: int = 4) -> float:
    """The share of n-grams that stood earlier in the same sequence."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def finished(answer: str) -> str:
    """An answer that a length limit cut, up to its last whole sentence (or as it is, when less than a third would remain)."""
    ends = [found.start() for found in SENTENCE_END.finditer(answer)]
    return answer[: ends[-1]].rstrip() if ends and ends[-1] > len(answer) // 3 else answer


def read_answers(folders: Sequence[Path], languages: Sequence[str], tokenizer: Any) -> list[Text]:
    """The conversations of regen folders, one per prompt id, read with the tokenizer of the model that answered.

    Greedy answers only, as the text is to be predictable; cut ones end at their last sentence; those that repeat
    themselves are out. Raises ValueError for a folder that holds none in `languages`.
    """
    found: dict[str, Conversation] = {}
    for folder in folders:
        held = read_conversations(folder) if folder.is_dir() else []
        rows = [row for row in held if row.language in languages and not row.temperature]
        if not rows:
            raise ValueError(
                f"--answers {folder}: no greedy conversations in {', '.join(languages)}; give the regen folder of a run"
            )
        for row in rows:
            found.setdefault(row.prompt_id, row)
    texts = []
    for row in found.values():
        prompt, answer = (
            tokenizer.decode(ids) for ids in (row.input_ids[: row.prompt_length], row.input_ids[row.prompt_length :])
        )
        answer = answer.removesuffix("<|im_end|>").strip()
        answer = answer if row.finish_reason == "stop" else finished(answer)
        messages = [{"role": role, "content": content} for role, content in TURN.findall(prompt)]
        messages = [turn for turn in messages if not turn["content"].startswith(SMOLLM2_DEFAULT)]
        if messages and answer and "\ufffd" not in answer and repetition(answer.split()) < 0.25:
            texts.append(Text(messages, answer, row.split == "heldout"))
    return texts


def read_bare(folder: Path, languages: Sequence[str], limit: int = 800) -> list[Text]:
    """The prompts of a folder of JSONL files, up to `limit` characters each, as texts without an answer."""
    paths = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not paths:
        raise ValueError(f"--prompts {folder}: no *.jsonl files there")
    texts = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                messages = [{"role": turn["role"], "content": turn["content"] or ""} for turn in row["messages"]]
            except (ValueError, LookupError, TypeError):
                raise ValueError(
                    f'{path}:{number}: not a line {{"messages": [{{"role": .., "content": ..}}]}}; mend or remove it'
                ) from None
            short = sum(len(turn["content"]) for turn in messages) <= limit
            if row.get("language") in languages and short and messages and messages[-1]["role"] == "user":
                texts.append(Text(messages, None))
    return texts


def train_tokenizer(texts: Sequence[Text], size: int) -> Any:
    """A byte-level BPE tokenizer of `size` entries with a ChatML template, as Hugging Face knows it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = [
        part
        for text in texts
        for part in (*(turn["content"] for turn in text.messages), *("system", "user", "assistant"), text.answer or "")
    ]
    built.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token=SPECIAL[0], eos_token=SPECIAL[2], mask_token=SPECIAL[3],
        additional_special_tokens=[SPECIAL[1]], chat_template=TEMPLATE, clean_up_tokenization_spaces=False, model_max_length=4096,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A text as token ids. Filled by `encode`."""

    ids: list[int]  # [T]
    prompt: int  # tokens before the answer
    text: Text


def encode(texts: Sequence[Text], tokenizer: Any, limit: int) -> list[Row]:
    """Each text as the template renders it, an answer with its end token behind it, cut at `limit` tokens."""
    end = tokenizer.eos_token_id
    rows = []
    for text in texts:
        rendered = tokenizer.apply_chat_template(
            text.messages, tokenize=False, add_generation_prompt=text.answer is not None
        )
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        answer = [] if text.answer is None else [*tokenizer.encode(text.answer, add_special_tokens=False), end]
        rows.append(Row((ids + answer)[:limit], len(ids), text))
    return rows


def batches(
    answers: Sequence[Row], bare: Sequence[Row], share: float, tokens: int, seed: int
) -> Iterator[torch.Tensor]:
    """Batches [B, T] of about `tokens` tokens without end: whole texts of like length, one a row, zeros (pad) behind them.

    Every pass holds the answers once, and as many of the bare prompts in turn as make up `share` of
    its tokens, but never more than one for every two times that the answers were seen.
    """
    draw = random.Random(seed)
    waiting: list[Row] = []
    wanted, quota = 0.0, len(bare) / 2
    size = sum(len(row.ids) for row in answers)
    while True:
        rows = list(answers)
        wanted, taken = wanted + size * share / (1 - share), 0
        while bare and wanted > 0 and taken < quota:
            if not waiting:
                waiting = draw.sample(list(bare), len(bare))
            rows.append(waiting.pop())
            wanted, taken = wanted - len(rows[-1].ids), taken + 1
        rows.sort(key=lambda row: (len(row.ids), draw.random()))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if groups[-1] and len(row.ids) * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(row)
        draw.shuffle(groups)
        yield from (pad([row.ids for row in group]) for group in groups)


def pad(rows: Sequence[list[int]]) -> torch.Tensor:
    """[B, T] of rows filled up with 0, the padding id."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def corpus_digest(texts: Sequence[Text]) -> str:
    """sha256 over everything the texts hold."""
    held = [(text.messages, text.answer, text.held_out) for text in texts]
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
