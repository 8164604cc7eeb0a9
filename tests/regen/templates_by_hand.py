"""Chat templates in the style of the families, on a tiny tokenizer, with masks marked by hand.

`templates/NAME.marks`: `special`, `bos`, `eos` and `ends` of the family, then `[on:|off:]shape: text` lines, one per row; ⏎ is a line
break, ⟦..⟧ what the target would have written, `!!` what a refusal says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).with_name("templates")
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.marks"))
SPECIAL = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<think>", "</think>", "<|eos|>", "<|mask|>")

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def answer(text: str | None, reasoning: str = "", arguments: Any = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if arguments is not None:
        message["tool_calls"] = [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return message


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "f", "tool_call_id": "call00001"}


SHAPES: dict[str, list[dict[str, Any]]] = {
    "single": [user("x"), answer("ok")],
    "twice": [user("x"), answer("ok"), user("y"), answer("ok")],
    "system": [system("S1"), user("x"), answer("ok")],
    "system_twice": [system("S1"), user("x"), answer("ok"), user("y"), answer("ok")],
    "reasoned": [user("2+2?"), answer("4", "two plus two")],
    "reasoned_twice": [user("2+2?"), answer("4", "two plus two"), user("3+3?"), answer("6", "three more")],
    "inline": [user("2+2?"), answer("<think>\ntwo plus two\n</think>\n\n4")],
    "spaces": [user("  hi  "), answer("ok")],
    "tools": [user("x"), answer(None, arguments={"n": 1}), result("7"), answer("7")],
    "tools_reasoned": [user("x"), answer(None, "need f", {"n": 1}), result("7"), answer("7", "it is 7")],
    "trailing": [user("x"), answer("ok"), user("y")],
    "korean": [user("안녕"), answer("네")],
    "merges": [user("ab"), answer("abab")],
    "two_users": [user("x"), user("y"), answer("ok")],
    "opens": [answer("ok"), user("x"), answer("ok")],
}


def tools_of(shape: str) -> list[dict[str, Any]] | None:
    return [TOOL] if shape.startswith("tools") else None


def byte_vocabulary() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE, id = byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return {chr(byte) if byte in plain else chr(next(shifted)): byte for byte in range(256)}


def tok(template: str, extra: tuple[str, ...] = (), bos: str | None = None, eos: str = "<|eos|>") -> PreTrainedTokenizerFast:
    """TOK of the fault list: ids 0-255 raw bytes, 256 = "ab", 257-265 its special tokens; then those of the family."""
    vocab = byte_vocabulary()
    vocab["ab"] = 256
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *extra)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos, chat_template=template)


@dataclass
class Family:
    """A template with its tokenizer, and what was marked by hand. Filled from its two files."""

    name: str
    tokenizer: PreTrainedTokenizerFast
    end_ids: tuple[int, ...]
    marks: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (thinking, shape) -> rows, or one refusal

    def marked(self, text: str) -> tuple[list[int], list[bool]]:
        """Ids and mask of a text with marks; each part is encoded alone, so that a mark is a border between tokens."""
        ids: list[int] = []
        mask: list[bool] = []
        for number, part in enumerate(text.replace("⟦", "⟧").split("⟧")):
            more = self.tokenizer.encode(part, add_special_tokens=False)
            ids += more
            mask += [number % 2 == 1] * len(more)
        return ids, mask


def template_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def family(name: str) -> Family:
    lines = (FOLDER / f"{name}.marks").read_text(encoding="utf-8").splitlines()
    head = {key: value.split() for key, _, value in (line.partition(":") for line in lines) if key in ("special", "bos", "eos", "ends")}
    tokenizer = tok(
        template_of(name), tuple(head["special"]), (head.get("bos") or [None])[0], (head.get("eos") or ["<|eos|>"])[0]
    )
    vocabulary = tokenizer.get_vocab()
    made = Family(name, tokenizer, tuple(vocabulary[token] for token in head["ends"]))
    for line in lines:
        key, _, text = line.partition(": ")
        thinking, _, shape = key.rpartition(":")
        if shape in SHAPES:
            text = text.replace("⏎", "\n").replace("{TOOL}", json.dumps(TOOL)).replace("{FUNCTION}", json.dumps(FUNCTION))
            made.marks.setdefault((thinking or "template", shape), []).append(text)
    return made
