"""`specgraft plan`: arithmetic before spending GPUs. Tables go to stdout; loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specgraft.log import say
from specgraft.plan.breakeven import Choice, choices, plain_step_ms
from specgraft.plan.budget import Budget, Line
from specgraft.plan.published import Published, published_table
from specgraft.plan.storage import SHARD_TOKENS, of_run, size_text, storage
from specgraft.plan.table import Row, breakeven_table
from specgraft.plan.units import given, over, units_of
from specgraft.run_dir import write_json
from specgraft.run_file import read_arguments

app = typer.Typer(
    help="Before spending GPUs: does a drafter pay, what do its features weigh, and what does a run take?", no_args_is_help=True
)

JsonPath = Annotated[Path | None, typer.Option("--json", help="also write the numbers to this file")]


@contextmanager
def _one_line() -> Iterator[None]:
    """A bad number is one clear line on stderr and exit code 2."""
    try:
        yield
    except ValueError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None


@app.command()
def breakeven(
    accept_length: Annotated[float | None, typer.Option(help="tokens committed per round, bonus included")] = None,
    step_ms: Annotated[float | None, typer.Option(help="one round: draft, verify and everything else")] = None,
    plain_ms: Annotated[float | None, typer.Option(help="one step without a drafter")] = None,
    plain_tokens_per_second: Annotated[
        float | None, typer.Option(help="speed without one, instead of --plain-ms")
    ] = None,
    tokens_per_second: Annotated[float | None, typer.Option(help="measured with the drafter; implies the step")] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="G: tokens proposed per round")] = None,
    survival: Annotated[str | None, typer.Option(help='share of rounds accepting at least j drafts: "0.5,0.3"')] = None,
    slot_ms: Annotated[float | None, typer.Option(help="cost of one draft token; finds the best G")] = None,
    published: Annotated[bool, typer.Option("--published", help="recompute a published deployment instead")] = False,
    json: JsonPath = None,
) -> None:
    """Does a drafter pay? Speed, speedup and the accept length at which it breaks even."""
    with _one_line():
        if published:
            rows = published_table()
            _show([_published_view(rows)])
            _write(json, {"rows": [row.to_json() for row in rows]})
            return
        plain = _plain(plain_ms, plain_tokens_per_second)
        rates = _numbers(survival) if survival is not None else None
        table = breakeven_table(
            plain_ms=plain,
            step_ms=step_ms,
            accept_length=accept_length,
            draft_tokens=draft_tokens,
            survival=rates,
            measured_tokens_per_second=tokens_per_second,
        )
        values = {row.key: row.value for row in table}
        picks: list[Choice] = []
        if slot_ms is not None:
            if rates is None:
                raise ValueError("--slot-ms needs --survival")
            picks = choices(rates, values["step_ms"], slot_ms, plain)
        _show([_rows_view(table)] + ([_choices_view(picks)] if picks else []))
        found = {"rows": [row.to_json() for row in table], "choices": [pick.to_json() for pick in picks]}
        _write(json, {"values": values, **found})


@app.command("storage")
def storage_command(
    run: Annotated[Path | None, typer.Option(help="a run folder: its own answers and settings, instead of the numbers below")] = None,
    tokens: Annotated[int | None, typer.Option(help="tokens captured, prompts included")] = None,
    hidden: Annotated[int | None, typer.Option(help="hidden size of the target")] = None,
    taps: Annotated[int, typer.Option(help="tapped layers; the last layer is kept besides")] = 5,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or fp8")] = "bfloat16",
    conversations: Annotated[int, typer.Option(help="for the headers; 0: of 400 tokens each")] = 0,
    shard_tokens: Annotated[int, typer.Option(help="tokens per shard, for the headers")] = SHARD_TOKENS,
    json: JsonPath = None,
) -> None:
    """What captured features weigh on disk."""
    with _one_line():
        if run is not None:
            if tokens is not None:
                raise ValueError("give one of --run and --tokens")
            need = of_run(run, hidden or 0)
        elif tokens is None or hidden is None:
            raise ValueError("give --tokens and --hidden, or the folder of a run by --run")
        else:
            need = storage(tokens, taps, hidden, dtype, conversations, shard_tokens)
        table = Table(title="Captured features")
        table.add_column("what")
        table.add_column("size", justify="right")
        for what, count in (
            (f"states per token: {need.taps} taps and the last layer, hidden {need.hidden}, {need.dtype}", need.state_bytes_per_token),
            ("with id and mask", need.bytes_per_token),
            (f"headers of {need.conversations:,} conversations", need.header_bytes),
            (f"{need.tokens:,} tokens", need.bytes),
        ):
            table.add_row(what, f"{count:,} B" if count < 1_000_000 else size_text(count))
        _show([table])
        _write(json, need.to_json())


@app.command("run")
def run_command(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="RUN.toml [section.key=value]...", help="run file, then overrides")] = None,
    hidden: Annotated[int, typer.Option(min=0, help="hidden size of a target that is no folder here")] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="trainer ranks, a GPU each")] = 1,
    producers: Annotated[int, typer.Option(min=0, help="servers, actors; 0: those of the run file")] = 0,
    producer_gpus: Annotated[float | None, typer.Option(help="GPUs of one server")] = None,
    conversation_tokens: Annotated[float | None, typer.Option(help="mean of a conversation, prompt and answers")] = None,
    answer_tokens: Annotated[float | None, typer.Option(help="of them written by the target")] = None,
    answer_tokens_per_second: Annotated[float | None, typer.Option(help="written by one server")] = None,
    producer_tokens_per_second: Annotated[float | None, typer.Option(help="prefilled by one producer, states handed over")] = None,
    rank_tokens_per_second: Annotated[float | None, typer.Option(help="trained on by one rank that never waits")] = None,
    measured: Annotated[Path | None, typer.Option("--from", help="folder of a run: what is not given above is read from its answers, timing.json, metrics.jsonl")] = None,
    from_ranks: Annotated[int, typer.Option(min=1, help="trainer ranks of that run")] = 1,
    json: JsonPath = None,
) -> None:
    """What a run will take: storage, network, time, GPU hours, from its run file and measured unit costs."""
    with _one_line():
        config = read_arguments(arguments)
        own = given(
            conversation_tokens=conversation_tokens, answer_tokens=answer_tokens, answer_tokens_per_second=answer_tokens_per_second,
            producer_tokens_per_second=producer_tokens_per_second, rank_tokens_per_second=rank_tokens_per_second, producer_gpus=producer_gpus,
        )  # fmt: skip
        units = own if measured is None else over(own, units_of(measured, config, from_ranks))
        lines = list(Budget(config, units, hidden, ranks, producers).lines())
        _show([_budget_view(config.run.name, lines)])
        _write(json, {"lines": [line.to_json() for line in lines]})


def _budget_view(name: str, lines: Sequence[Line]) -> Table:
    table = Table(title=f"What {name} takes")
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")  # names of options are not cut short
    table.add_column("note", overflow="fold")
    for line in lines:
        table.add_row(line.what, line.text, escape(line.note))
    return table


def _plain(plain_ms: float | None, plain_tps: float | None) -> float:
    if (plain_ms is None) == (plain_tps is None):
        raise ValueError("give one of --plain-ms and --plain-tokens-per-second")
    if plain_tps is not None:
        return plain_step_ms(plain_tps)
    assert plain_ms is not None
    return plain_ms


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--survival {text!r}: write numbers with commas between, for example 0.5,0.3") from None


def _rows_view(rows: Sequence[Row]) -> Table:
    table = Table(title="Break-even (accept length includes the bonus token)")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_column("note")
    for row in rows:
        table.add_row(row.quantity, f"{row.value:.3f} {row.unit}".strip(), row.note)
    return table


def _choices_view(picks: Sequence[Choice]) -> Table:
    table = Table(title="Draft tokens per round")
    for column in ("G", "accept length", "step ms", "tokens/s", "speedup"):
        table.add_column(column, justify="right")
    table.add_column("note")
    for pick in picks:
        note = ("this slot pays" if pick.slot_pays else "this slot does not pay") + (", best" if pick.best else "")
        numbers = (pick.accept_length, pick.step_ms, pick.tokens_per_second, pick.speedup)
        table.add_row(str(pick.draft_tokens), *(f"{number:.3f}" for number in numbers), note)
    return table


def _published_view(rows: Sequence[Published]) -> Table:
    table = Table(title="A published DSpark deployment, recomputed (accept lengths include the bonus token)")
    table.add_column("quantity")
    for column in ("model", "published", "error"):
        table.add_column(column, justify="right")
    table.add_column("status")
    table.add_column("note")
    for row in rows:
        digits = 2 if row.unit == "tokens/s" else 3
        model = "-" if row.model is None else f"{row.model:.{digits}f} {row.unit}".strip()
        known = "-" if row.published is None else f"{row.published:.{digits}f}"
        error = "-" if row.error is None or row.status == "inconsistent" else f"{row.error:+.2%}"
        table.add_row(row.quantity, model, known, error, row.status, row.note)
    return table


def _show(tables: Sequence[Table]) -> None:
    console = Console(highlight=False)
    for table in tables:
        console.print(table)


def _write(path: Path | None, value: dict[str, Any]) -> None:
    if path is not None:
        write_json(path, value)
