"""Trains a nano language model: a small real target for experiments on a CPU, in minutes, cached.

    python benchmarks/nano.py KIND OUT_DIR --answers RUN/regen [--answers ..] [--prompts FOLDER] [--steps N | --minutes M] [--json PATH]

KIND: full (Qwen3), gdn (Qwen3.5), kda (Kimi Linear), qsa (Qwen4-Exp: GDN, sparse attention, n-gram embedding).
OUT_DIR becomes an ordinary Hugging Face folder with a nano.json beside the weights. With the same settings and texts nothing is
trained again. The answers are those of the embedded target (a regen folder of a run on `smollm2`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

VERSION = 1  # of the recipe: raise it when the same settings give another model
DEFAULT_STEPS = {"full": 900, "gdn": 500, "kda": 500, "qsa": 500}  # six to ten minutes on one thread
OURS = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "nano.json",
        "special_tokens_map.json"}  # fmt: skip


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(DEFAULT_STEPS))
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--answers", type=Path, action="append", required=True, help="a regen folder; may be given again"
    )
    parser.add_argument("--prompts", type=Path, help="a folder of JSONL files of prompts, learnt without answers")
    parser.add_argument("--languages", default="en", help="of the texts, with commas between")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="updates; the default takes six to ten minutes on one thread")
    length.add_argument("--minutes", type=float, help="train for this long instead")
    parser.add_argument("--hidden", type=int, default=192, help="width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument(
        "--rate", type=float, default=4e-3, help="peak learning rate of embeddings; matrices learn at five times that"
    )
    parser.add_argument("--prompt-share", type=float, default=0.15, help="of the tokens of a pass, from --prompts")
    parser.add_argument("--max-tokens", type=int, default=384, help="longer texts are cut")
    parser.add_argument(
        "--samples",
        type=int,
        default=5,
        help="greedy answers kept in nano.json, to held-out prompts and to learnt ones",
    )
    parser.add_argument(
        "--sharpness",
        type=float,
        default=1.0,
        help="the trained head is multiplied by this: text drawn at temperature 1 is then drawn at 1/SHARPNESS of before",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for settings that cannot work and for an OUT_DIR that holds something else."""
    for name in ("steps", "minutes", "hidden", "layers", "batch_tokens", "rate", "max_tokens", "sharpness"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
    if args.hidden % 64:
        raise ValueError(f"--hidden {args.hidden}: give a multiple of 64")
    if args.layers % 4:
        raise ValueError(f"--layers {args.layers}: give a multiple of 4 (three linear layers, one that attends)")
    if args.vocabulary < 300:
        raise ValueError(f"--vocabulary {args.vocabulary}: give at least 300 (256 bytes and the special tokens)")
    if not 0 <= args.prompt_share < 1:
        raise ValueError(f"--prompt-share {args.prompt_share}: give a share from 0 to below 1")
    if args.out.exists() and (not args.out.is_dir() or {path.name for path in args.out.iterdir()} - OURS):
        raise ValueError(f"{args.out}: holds files that are not of a nano model; give a new folder")


def cached(out: Path, digest: str) -> dict[str, Any] | None:
    """The report beside a finished model with this digest, or None."""
    try:
        report: dict[str, Any] = json.loads((out / "nano.json").read_text())
    except (OSError, ValueError):
        return None
    whole = all(
        (out / name).is_file()
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    )
    return report if whole and report.get("digest") == digest else None


def build(args: argparse.Namespace) -> dict[str, Any]:
    """Trains (or finds) the model of these settings; returns its report."""
    from transformers import AutoTokenizer
    from transformers.utils import logging as hf_logging

    import nano_corpus
    from specgraft.targets.embedded import smollm2_folder

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    languages = args.languages.split(",")
    answered = nano_corpus.read_answers(args.answers, languages, AutoTokenizer.from_pretrained(smollm2_folder()))
    bare = nano_corpus.read_bare(args.prompts, languages) if args.prompts else []
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "json", "answers", "prompts")}
    if args.sharpness == 1.0:  # as before there was a choice
        del settings["sharpness"]
    settings |= {"version": VERSION, "steps": args.steps or (None if args.minutes else DEFAULT_STEPS[args.kind])}
    settings["corpus"] = nano_corpus.corpus_digest([*answered, *bare])
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    if report := cached(args.out, digest):
        print(f"{args.out}: trained before with these settings", file=sys.stderr)
        return {**report, "cached": True}
    model, tokenizer, found = fit(args, settings, answered, bare)
    report = {"kind": args.kind, "digest": digest, "settings": settings, **found}
    save(args.out, model, tokenizer, report)
    return {**report, "cached": False}


def fit(
    args: argparse.Namespace, settings: dict[str, Any], answered: list[Any], bare: list[Any]
) -> tuple[Any, Any, dict[str, Any]]:
    import nano_corpus
    import nano_models
    import nano_train

    tokenizer = nano_corpus.train_tokenizer([*answered, *bare], args.vocabulary)
    rows = nano_corpus.encode(answered, tokenizer, args.max_tokens)
    learnt, kept = [row for row in rows if not row.text.held_out], [row for row in rows if row.text.held_out]
    if not learnt or not kept:
        raise ValueError(
            f"{len(learnt)} answers to learn and {len(kept)} held out: give --answers of a run with both splits"
        )
    special = {"pad": tokenizer.pad_token_id, "end": tokenizer.eos_token_id}
    model = nano_models.make_model(
        nano_models.make_config(args.kind, len(tokenizer), args.hidden, args.layers, special), args.seed
    )
    stream = nano_corpus.batches(
        learnt, nano_corpus.encode(bare, tokenizer, args.max_tokens), args.prompt_share, args.batch_tokens, args.seed
    )
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "texts": len(learnt),
        "held_out_texts": len(kept),
    }
    found |= nano_train.train(
        model, stream, steps=settings["steps"] or 0, minutes=args.minutes, rate=args.rate, say=args.kind
    )
    nano_models.sharpen(model, args.sharpness)
    found["tokens_per_second"] = found["tokens"] / found["seconds"]
    found["held_out"] = nano_train.held_out(model, kept)
    if args.kind == "qsa":
        found["sparsity"] = nano_train.sparsity(model, kept)
    shown = [*spread(kept, (args.samples + 1) // 2), *spread(learnt, args.samples // 2)]
    said = nano_train.speak(model, tokenizer, shown, 128)
    for name in ("max_probability", "repetition"):
        found[f"mean_{name}"] = sum(one[name] for one in said) / len(said) if said else None
    return model, tokenizer, {**found, "samples": said}


def spread(rows: list[Any], count: int) -> list[Any]:
    """`count` of the rows, at equal distances."""
    return rows[:: max(1, len(rows) // max(1, count))][:count]


def save(out: Path, model: Any, tokenizer: Any, report: dict[str, Any]) -> None:
    """Writes the folder under a temporary name beside `out`, then renames it, so that a kill leaves no half of one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        fresh, old = temporary / "new", temporary / "old"
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / "nano.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        if out.exists():
            out.rename(old)
        fresh.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> None:
    args = options().parse_args()
    try:
        check(args)
        report = build(args)
    except (ValueError, OSError) as error:
        print(f"nano: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
