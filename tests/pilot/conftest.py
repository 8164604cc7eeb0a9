"""A run file for the whole pilot on the tiny folder: seconds, not minutes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

RUN_FILE = """
[run]
name = "pilot"
root = "{root}"
device = "cpu"
threads = 1

[target]
id = "{folder}"
dtype = "float32"
mask_token_id = {mask}

[prompts]
source = "{source}"
train = 10
held_out = 5
held_out_share = 0.3

[regen]
max_new_tokens = 20
batch = 8
group = 8
greedy_share = 0.5

[capture]
taps = [0, 1, 3]

[drafters]
draft_tokens = 2
layers = 1
markov_rank = 16

[train]
steps = 8
rows = 4
anchors = 8
compute = "float32"
checkpoint_every = 4
validate_every = 4
validate_rows = 4

[evaluate]
prompts = 5
sampled_prompts = 2
max_new_tokens = 12
batch = 4
speed_prompts = 1
speed_dtype = "float32"
examples = 1

[export]
dtype = "float32"

[check]
overfit_steps = 300
overfit_tokens = 16
"""


@pytest.fixture(scope="session")
def make_run_file(tiny_folder: Path, tiny_mask_id: int) -> Callable[[Path], Path]:
    """Writes run.toml and its prompts into a folder; runs go to `runs` beside it."""

    def make(folder: Path) -> Path:
        source = folder / "prompts.jsonl"
        kinds = [(language, domain) for language in ("en", "ko") for domain in ("chat", "code")]
        rows = []
        for number in range(36):
            language, domain = kinds[number % 4]
            text = f"{number}: " + ("write the name", "안녕", "def f(x):", "count in ab")[number % 4]
            rows.append(
                {"id": f"p{number}", "family": f"f{number // 2}", "language": language, "domain": domain,
                 "messages": [{"role": "user", "content": text}]}
            )  # fmt: skip
        source.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        path = folder / "run.toml"
        text = RUN_FILE.format(root=folder / "runs", folder=tiny_folder, mask=tiny_mask_id, source=source)
        path.write_text(text, encoding="utf-8")
        return path

    return make
