"""A run folder as the stages leave it, made of invented numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from specgraft.config import RunConfig
from specgraft.run_dir import RunDir, write_json

SURVIVAL = [0.41, 0.17, 0.07, 0.03, 0.014, 0.006, 0.002]
CONDITIONAL = [0.41, 0.415, 0.41, 0.43, 0.47, 0.43, 0.33]


def _part(temperature: int) -> dict[str, Any]:
    less = 0.85 if temperature else 1.0
    groups = {"chat": 40, "code": 25, "math": 20, "tool": 15}
    languages = {"en": 60, "ko": 20, "ja": 20}
    return {
        "temperature": temperature,
        "accept_length": 1.0 + 0.72 * less,
        "accept_length_pooled": 1.0 + 0.702 * less,
        "rounds": 7300,
        "tokens": 12400,
        "requests": 100,
        "survival": [value * less for value in SURVIVAL],
        "conditional": [value * less**0.5 for value in CONDITIONAL],
        "by_domain": {
            name: {"accept_length": 1.3 + 0.22 * place * less, "requests": n}
            for place, (name, n) in enumerate(groups.items())
        },
        "by_language": {
            name: {"accept_length": 1.8 - 0.2 * place * less, "requests": n}
            for place, (name, n) in enumerate(languages.items())
        },
        "predicted_accept_length": 1.0 + 0.71 * less,
        "agreement": 0.005,
        "per_request": [],
    }


def _speed(temperature: int) -> dict[str, Any]:
    step, plain, tau = 52.0 + temperature, 23.5, 1.69
    return {
        "plain_tokens_per_second": 1000 / plain,
        "tokens_per_second": 1000 * tau / step,
        "speedup": tau * plain / step,
        "plain_step_ms": plain,
        "step_ms": step,
        "draft_ms": 19.0 + temperature,
        "verify_ms": 29.5,
        "rest_ms": 3.5,
        "runs": [],
    }


KINDS = {"^": "prefill", "|": "draft", "~": "target"}
CODE = (
    "^Sure|! Here is~ a| short function| that~ checks| for~ a tag like |<b>bold</b>~:\n\n|```python\n~def"
    "| has_bold(text~:| str)~ ->| bool:\n    ~return| '<b>' in text\n~```"
)


def pieces(text: str) -> list[dict[str, str]]:
    """Each piece begins with the mark of its kind."""
    parts = re.split(r"([\^|~])", text)[1:]
    return [{"text": part, "kind": KINDS[mark]} for mark, part in zip(parts[::2], parts[1::2], strict=True)]


EVALUATION: dict[str, Any] = {
    "settings": {"dtype": "float32", "prompts": 100, "sampled_prompts": 32, "max_new_tokens": 128, "batch": 16},
    "t0": {**_part(0), "lossless": {"prompts": 100, "tokens": 12400, "mismatches": 0, "ties": 2, "details": []}},
    "t1": _part(1),
    "confidence": {
        "ece": 0.043,
        "auc": 0.81,
        "ece_by_slot": [0.03, 0.04, 0.05, 0.05, 0.06, 0.06, None],
        "auc_by_slot": [0.79, 0.8, 0.8, 0.77, 0.76, 0.7, None],
        "bins": [
            {"predicted": 0.05 + 0.1 * place, "accepted": min(1, 0.02 + 0.103 * place), "count": 9000 // (place + 1)}
            for place in range(9)
        ]
        + [{"predicted": None, "accepted": None, "count": 0}],
    },
    "speed": {"dtype": "bfloat16", "prompts": 8, "t0": _speed(0), "t1": _speed(1)},
    "examples": [
        {
            "prompt_id": "en-code-0017",
            "language": "en",
            "domain": "code",
            "prompt": "Write a Python function that checks whether a text holds <script>alert(1)</script>.",
            "accept_length": 1.9,
            "pieces": pieces(CODE),
        },
        {
            "prompt_id": "ko-chat-0003",
            "language": "ko",
            "domain": "chat",
            "prompt": "서울에서 하루 동안 걸어서 둘러볼 만한 곳을 알려 주세요.",
            "accept_length": 1.6,
            "pieces": pieces("^경복궁|에서 시작해 ~북촌| 한옥마을까지 걸어~ 보세요."),
        },
        {
            "prompt_id": "ja-math-0008",
            "language": "ja",
            "domain": "math",
            "prompt": "りんごが3個、みかんが5個あります。全部で何個ですか。",
            "accept_length": 2.1,
            "pieces": pieces("^全部|で8個~です。"),
        },
    ],
    "seconds": 301.5,
}
GATES = {
    "gates": [
        {"name": "token identity", "passed": True, "detail": "580 conversations, digests equal", "measured": {}},
        {
            "name": "tap identity",
            "passed": True,
            "detail": "5 taps equal their hooks, neighbours differ",
            "measured": {},
        },
        {"name": "distribution_identity", "passed": True, "detail": "4,021 of 4,021 tokens", "measured": {}},
        {
            "name": "overfit",
            "passed": True,
            "detail": "accept length 7.4 of 8 on the overfitted sample",
            "measured": {},
        },
        {"name": "agreement", "passed": False, "detail": "predicted 1.71, pooled 1.62: 5.6 % apart", "measured": {}},
        {"name": "lossless", "passed": True, "detail": "100 prompts, 2 ties", "measured": {}},
        {"name": "export", "passed": True, "detail": "logits equal after reloading", "measured": {}},
    ]
}
SUMMARY = {
    "accept_length_t0": 1.72,
    "accept_length_t1": 1.612,
    "accept_length_pooled_t0": 1.702,
    "predicted_accept_length": 1.71,
    "agreement": 0.005,
    "lossless_mismatches": 0,
    "lossless_ties": 2,
    "speedup_t0": 0.764,
    "minutes": 18.4,
    "gates": {"token identity": True, "overfit": True},
}
DATA = {
    "conversations": 580,
    "tokens": 98_431,
    "cut": 211,
    "by_language": {"en": 348, "ko": 116, "ja": 116},
    "by_domain": {"chat": 232, "code": 145, "math": 116, "tool": 87},
    "splits": {"train": 480, "heldout": 100},
    "turns": 640,
    "multi_turn": 60,
    "answers": "target",
    "tokens_with_prompts": 164_050,
    "end_reasons": {"length": 211, "stop": 429},
    "cells": [{"split": "train", "language": "en", "domain": "chat", "prompts": 115}],
    "lengths": {"0-127": {"rows": 100, "share": 0.44}, "128-255": {"rows": 480, "share": 0.63}},
    "examples": [
        {
            "prompt_id": "en-chat-1", "split": "train", "language": "en", "domain": "chat", "tokens": 31, "supervised": 14,
            "answers": "target", "finish_reason": "stop",
            "pieces": [
                {"text": "<|im_start|>user\nWrite <b>bold</b><|im_end|>\n<|im_start|>assistant\n", "supervised": False},
                {"text": "<script>alert(2)</script><|im_end|>", "supervised": True},
                {"text": "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n", "supervised": False},
                {"text": "네, 다시<|im_end|>", "supervised": True},
            ],
        },
        {
            "prompt_id": "ja-math-2", "split": "train", "language": "ja", "domain": "math", "tokens": 12, "supervised": 5,
            "answers": "target", "finish_reason": "length", "pieces": [{"text": "りんご", "supervised": False}, {"text": "3個", "supervised": True}],
        },
    ],
}
MIX = {
    "drawn_from": {},
    "report": {
        "seed": 0,
        "weighed": True,
        "splits": {
            "train": {
                "wanted": 480, "got": 476, "families": 238,
                "cells": [
                    {"language": language, "domain": domain, "length": length, "wanted": 40, "got": 40 - 4 * (language == "ja" and domain == "tool")}
                    for language in ("en", "ko", "ja") for domain in ("chat", "tool") for length in ("0-500", "500-")
                ],
            }
        },
        "sources": [
            {"name": "a", "path": "a.jsonl", "rows": 600, "rejected": 1, "contaminated": 1, "near_duplicates": 1, "available": 597, "train": 476, "heldout": 100}
        ],
        "rejected": [{"source": "a", "line": 7, "reason": "messages[0] holds image_url"}],
        "contaminated": [{"id": "a/9", "suite": "mt.jsonl", "suite_id": "81", "ngram": "compose an engaging travel blog post about"}],
        "near_duplicates": [{"id": "a/12", "kept": "a/11", "similarity": 0.91}],
    },
}  # fmt: skip
TIMING = {"regen": 402.0, "capture": 61.3, "train": 411.8, "evaluate": 190.2, "export": 7.5, "check": 31.0}


def metrics() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(1, 301):
        fall = math.exp(-step / 90) + 0.04 * math.sin(1.7 * step)
        rows.append(
            {
                "kind": "train",
                "step": step,
                "loss": 1.9 + 2.2 * fall,
                "ce": 3.4 + 5.1 * fall,
                "l1": 1.1 + 0.8 * fall,
                "confidence": 0.42 + 0.25 * fall,
                "alpha": [0.44, 0.4, 0.37, 0.34, 0.3, 0.28, 0.27],
                "lr": 6e-4 * (1 - step / 300),
                "grad_norm": 1.3,
                "seconds": 1.31,
                "slots": 1700,
            }
        )
        if step % 50 == 0:
            rows.append({"kind": "validate", "step": step, "accept_length": 1.75 - 0.6 * fall, "survival": SURVIVAL})
    return rows


def fill(root: Path) -> RunDir:
    """Writes all files of a finished run."""
    run = RunDir(root).create()
    write_json(run.config, RunConfig().model_dump())
    write_json(run.summary, SUMMARY)
    write_json(run.gates, GATES)
    write_json(run.evaluation, EVALUATION)
    write_json(run.timing, TIMING)
    write_json(run.data, DATA)
    write_json(run.prompts / "mix.json", MIX)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in metrics()), encoding="utf-8")
    return run


@pytest.fixture(scope="session")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """One that no test changes."""
    return fill(tmp_path_factory.mktemp("runs") / "pilot")


@pytest.fixture
def full_run(tmp_path: Path) -> RunDir:
    return fill(tmp_path / "pilot")
