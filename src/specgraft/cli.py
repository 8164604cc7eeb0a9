"""The command line. One command per stage; `--help` and a faulty run file cost no torch import.

Exit codes: 0 done, 2 bad input (one line says what, where, what to do), 3 a gate failed, 130 interrupted.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from specgraft import __version__
from specgraft.log import say
from specgraft.plan.cli import app as plan_app
from specgraft.regen.cli import app as data_app
from specgraft.run_file import read_arguments

app = typer.Typer(
    help="Makes a frozen LLM decode faster: a drafter trained on the target's own tokens and hidden states.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(plan_app, name="plan")
app.add_typer(data_app, name="data")

PILOT = Path(__file__).with_name("pilot") / "pilot.toml"

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN.toml] [section.key=value]...", help="run file, then overrides such as train.lr=3e-4"),
]
Allow = Annotated[list[str] | None, typer.Option("--allow", help="go on although this gate fails; written into gates.json")]


def session(arguments: list[str] | None, allow: list[str] | None = None, default: Path | None = None, small: bool = False) -> Any:
    config = read_arguments(arguments, default)
    if small:
        from specgraft.pilot.tiny import tiny

        config = tiny(config)
    from specgraft.run import Session

    return Session(config, frozenset(allow or []))


@app.command()
def pilot(
    arguments: Arguments = None,
    allow: Allow = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="the run file's graph on a random target of 48 layers, in RUN-tiny: for targets that fit no machine here")] = False,
) -> None:
    """All of it, small, on the embedded target: regen, capture, train, evaluate, export, check, report."""
    work = session(arguments, allow, PILOT, tiny)  # a faulty run file costs no torch import
    from specgraft.pilot.stage import pilot

    pilot(work)


@app.command()
def regen(arguments: Arguments = None, allow: Allow = None) -> None:
    """Prompts answered by the target: token ids and loss mask kept as generated."""
    work = session(arguments, allow)
    work.passed(work.token_gates(work.regen()))


@app.command()
def capture(arguments: Arguments = None, allow: Allow = None) -> None:
    """Hidden states of the tapped layers and of the last one, as safetensors shards."""
    session(arguments, allow).capture()


@app.command()
def train(
    arguments: Arguments = None,
    allow: Allow = None,
    ray_workers: Annotated[int, typer.Option(min=0, help="ranks as workers of Ray Train, in the cluster of stream.address or one of this machine; 0: none")] = 0,
) -> None:
    """Trains the drafter; goes on from the newest checkpoint. Several ranks: torchrun --nproc-per-node N -m specgraft train RUN.toml"""
    work = session(arguments, allow)
    say(f"checkpoint: {work.train_on_ray(ray_workers) if ray_workers else work.train()}")


@app.command()
def evaluate(
    arguments: Arguments = None,
    allow: Allow = None,
    checkpoint: Annotated[Path | None, typer.Option(help="folder of a checkpoint, `best` (by train.decode_prompts), or `latest`; the newest if left out")] = None,
) -> None:
    """Accept length, losslessness and speed in the real draft and verify loop, on held-out prompts."""
    session(arguments, allow).evaluate(checkpoint)


@app.command()
def export(
    arguments: Arguments = None,
    allow: Allow = None,
    checkpoint: Annotated[Path | None, typer.Option(help="folder of a checkpoint, `best` (by train.decode_prompts), or `latest`; the newest if left out")] = None,
    to: Annotated[str | None, typer.Option(help="sglang, vllm, llamacpp or hf; in place of export.to")] = None,
    bundle: Annotated[bool, typer.Option("--bundle", help="and a folder with the untouched target (linked) and the drafter")] = False,
    out: Annotated[Path | None, typer.Option(help="folder to write; RUN/export if left out")] = None,
) -> None:
    """The drafter in the form that an engine loads: a Hugging Face folder, or a GGUF file for llama.cpp."""
    more = [f'export.to="{to}"'] if to else []
    work = session([*(arguments or []), *more, *(["export.bundle=true"] if bundle else [])], allow)
    say(f"export: {work.export(checkpoint, out)}")


@app.command()
def bench(arguments: Arguments = None, allow: Allow = None) -> None:
    """A real engine with and without drafters: accept length, speed, break-even, same text. Finished cells are kept."""
    session(arguments, allow).bench()


@app.command()
def check(
    arguments: Arguments = None,
    allow: Allow = None,
    every: Annotated[bool, typer.Option("--all", help="token identity of all rows and shards, not of a sample of very large sets")] = False,
) -> None:
    """Runs every gate whose stage has run, and prints them."""
    from specgraft.pilot.tables import gate_table

    work = session(arguments, allow)
    results = work.check(every)
    gate_table([result.to_json() for result in results])
    work.passed(results)


@app.command()
def report(arguments: Arguments = None) -> None:
    """One HTML page of the run, also of one that is not finished."""
    say(f"report: {session(arguments).report()}")


@app.command()
def top(
    run: Annotated[Path, typer.Argument(help="folder of the run, or its run file")],
    once: Annotated[bool, typer.Option("--once", help="print the table once and end")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="seconds between two looks")] = 2.0,
) -> None:
    """A live table of a run that trains: loss, accept length, speed, waiting, memory. Reads metrics.jsonl and disturbs nothing."""
    from specgraft.report.top import show

    show(run, once, every)


@app.command()
def serve(
    engine: Annotated[str, typer.Argument(help="llamacpp, vllm, sglang")],
    target: Annotated[str, typer.Argument(help="as target.id: smollm2, a Hugging Face folder, a hub id; llamacpp: or a .gguf file")] = "smollm2",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    dtype: Annotated[str, typer.Option(help="of the weights: float32, bfloat16, float16")] = "bfloat16",
    context: Annotated[int, typer.Option(min=16, help="tokens of one request, prompt and answer")] = 2048,
    parallel: Annotated[int, typer.Option(min=1, help="requests decoded together")] = 8,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: the engine's own choice")] = 0,
    taps: Annotated[str, typer.Option(help="for `capture.servers`: layers whose outputs it returns, such as 1,8,15; `spread`: five; and the last one")] = "",
    states: Annotated[str, typer.Option(help="folder in which vllm leaves them; as capture.states")] = "",
    more: Annotated[list[str] | None, typer.Option("--flag", help="a further flag of the engine, as it is; may be repeated")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command and start nothing")] = False,
) -> None:
    """Serves a target on this machine for `regen.servers`, or `capture.servers`. Engines are installed by `make engines`."""
    from specgraft.engines.serve import Serving, start

    model = served(engine, target)
    start(Serving(engine, model, port, dtype=dtype, context=context, parallel=parallel, threads=threads, more=more or (), taps=layer_ids(taps, model), states=states), dry_run)


def layer_ids(text: str, model: Path) -> list[int]:
    """`1,8,15`, or `spread`: the five that capture takes by default."""
    if text == "spread":
        from specgraft.capture.forward import spread_taps
        from specgraft.engines.serve import decoder_layers

        return spread_taps(decoder_layers(model), 5)
    try:
        return [int(word) for word in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--taps {text!r}: write layer ids, such as 1,8,15, or spread") from None


def served(engine: str, target: str) -> Path:
    """What an engine is given for a target's name."""
    if engine == "llamacpp" and target.endswith(".gguf"):
        return Path(target).expanduser()
    from specgraft.targets.text import resolve

    return Path(resolve(target))


@app.command()
def cluster(
    arguments: Arguments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would run where, and start nothing")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="trainer ranks, as torchrun's --nproc-per-node times --nnodes")] = 1,
    speed: Annotated[float, typer.Option("--tokens-per-second", min=0, help="tokens that all ranks take in a second, as measured; 0: unknown")] = 0.0,
    hidden: Annotated[int, typer.Option(min=0, help="hidden size of a target that is no folder here")] = 0,
) -> None:
    """What a run needs of machines: who makes features, who trains, and what goes from the one to the other."""
    from specgraft.plan.cluster import layout

    config = read_arguments(arguments)
    if not dry_run:
        raise ValueError("cluster starts nothing: add --dry-run to see what would run where; `specgraft train` starts producers and trainer")
    for line in layout(config, ranks, speed, hidden):
        print(line)


@app.command()
def version() -> None:
    """Prints the version."""
    print(__version__)


def guarded(call: Callable[[], Any]) -> int:
    """Runs a command; what a user can mend is one line and an exit code."""
    try:
        call()
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        return 130
    except ValueError as error:
        code = getattr(error, "exit_code", 2)
        say(f"{'gate failed' if code == 3 else 'error'}: {error}")
        return code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        say(f"error: {error.filename or 'disk'}: {error.strerror}; free space, or set run.root to another folder")
        return 2
    return 0


def main() -> None:
    """Entry point of the `specgraft` command."""

    def call() -> None:
        code = app(standalone_mode=False)
        if isinstance(code, int) and code:
            raise SystemExit(code)

    try:
        sys.exit(guarded(call))
    except (typer.Abort, typer.Exit) as stop:
        sys.exit(getattr(stop, "exit_code", 1))
    except Exception as error:
        show = getattr(error, "show", None)  # a usage error of the command line itself
        if show is None:
            raise
        show()
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
