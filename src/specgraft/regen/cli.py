"""`specgraft data`: what a mix will hold, what a run's conversations look like, and what they add up to. Loads no weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specgraft.config import RunConfig
from specgraft.log import say
from specgraft.records import Conversation, Prompt, read_conversations
from specgraft.regen.show import Piece, headline, pieces, print_parts
from specgraft.regen.stats import read_refused, stats, stats_lines
from specgraft.run_dir import RunDir, write_json
from specgraft.run_file import read_arguments

app = typer.Typer(help="The run's text: what a mix will hold, conversations with their masks, counts.", no_args_is_help=True)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN.toml] [section.key=value]...", help="run file, then overrides such as prompts.train=6400"),
]
JsonPath = Annotated[Path | None, typer.Option("--json", help="also write the numbers to this file")]
Split = Annotated[str | None, typer.Option(help="train or heldout; both if left out")]


@app.command()
def plan(arguments: Arguments = None, json: JsonPath = None) -> None:
    """What the mix will hold, before anything runs: quotas, shortfalls, near-duplicates, contamination. Writes nothing."""
    from specgraft.regen.mix import draw, plan_lines, refusal

    config = read_arguments(arguments)
    report = draw(config, stop=False).report
    for line in plan_lines(report):
        print(line)
    _write(json, report)
    if fault := refusal(config, report):
        raise ValueError(fault)


@app.command()
def show(
    arguments: Arguments = None,
    id: Annotated[str | None, typer.Option(help="id of a prompt: all its rows")] = None,
    number: Annotated[int, typer.Option(min=1, help="conversations to show")] = 1,
    split: Split = None,
) -> None:
    """Conversations with their masks: supervised green, template grey; marked ⟦ ⟧ where there is no colour."""
    config = read_arguments(arguments)
    run = _run(config)
    rows = _rows(run, split)
    console = Console(highlight=False)
    if rows:
        chosen = [row for row in rows if id in (row.prompt_id, row.source_id)] if id else rows[:number]
        if not chosen:
            raise ValueError(f"{run.regen}: no answers of prompt {id!r} there; `specgraft data show --number 5` shows some")
        tokenizer = _tokenizer(config)
        for row in chosen:
            print_parts(console, headline(row), pieces(tokenizer, row.input_ids, row.loss_mask))
        return
    say(f"{run.regen}: no answers yet; these are the prompts as the target will read them")
    _show_prompts(console, config, run, id, number, split)


@app.command("stats")
def stats_command(arguments: Arguments = None, json: JsonPath = None) -> None:
    """Counts of the answered text: tokens, supervised share, cut answers, by split, language, domain and length."""
    run = _run(read_arguments(arguments))
    rows = _rows(run, None)
    if not rows:
        raise ValueError(f"{run.regen}: no answers there; run `specgraft regen` first")
    found = stats(rows, read_refused(run.regen))
    for line in stats_lines(found):
        print(line)
    _write(json, found)


def _run(config: RunConfig) -> RunDir:
    return RunDir(Path(config.run.root).expanduser() / config.run.name)


def _rows(run: RunDir, split: str | None) -> list[Conversation]:
    if split not in (None, "train", "heldout"):
        raise ValueError(f"--split {split}: give train or heldout")
    rows = read_conversations(run.regen) if run.regen.is_dir() else []
    return sorted((row for row in rows if split in (None, row.split)), key=lambda row: row.split != "train")


def _tokenizer(config: RunConfig) -> Any:
    """The target's tokenizer alone: weights are neither loaded nor read."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    from specgraft.targets.text import resolve

    part = config.target
    try:
        return AutoTokenizer.from_pretrained(resolve(part.id), trust_remote_code=part.remote_code)
    except (OSError, KeyError, ImportError) as error:
        raise ValueError(f"target.id={part.id!r}: its tokenizer could not be loaded: {(str(error).strip() or 'unknown').splitlines()[0]}") from None


def _show_prompts(console: Console, config: RunConfig, run: RunDir, id: str | None, number: int, split: str | None) -> None:
    from specgraft.regen.mix import draw
    from specgraft.regen.render import Chat

    prompts = [(part, prompt) for part, some in draw(config).prompts.items() if split in (None, part) for prompt in some]
    chosen = [(part, prompt) for part, prompt in prompts if prompt.id == id] if id else prompts[:number]
    if not chosen:
        raise ValueError(f"no prompt {id!r} in the mix; `specgraft data show --number 5` shows some")
    tokenizer = _tokenizer(config)
    chat = Chat(tokenizer, (), config.regen.thinking)
    for part, prompt in chosen:
        ids = _prompt_ids(chat, prompt)
        title = f"{prompt.id}  {part}, {prompt.language}, {prompt.domain}, family {prompt.family}; {len(ids)} tokens, not answered yet"
        print_parts(console, title, [Piece(tokenizer.decode(ids, skip_special_tokens=False), False)])


def _prompt_ids(chat: Any, prompt: Prompt) -> list[int]:
    """The prompt of the first turn that the target will answer itself."""
    messages = list(prompt.messages)
    if messages[-1].get("role") == "assistant":
        messages.pop()
    try:
        return list(chat.prompt(messages, prompt.tools))
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from None


def _write(path: Path | None, value: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, value)
