"""`capture`: Conversations -> Features on disk. Shards that are there are kept; only what is missing is computed."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

from specgraft.capture.batches import padded_tokens, shards_of
from specgraft.capture.cuts import shortened
from specgraft.capture.forward import capture_batch, fault_of, resolve_taps
from specgraft.capture.served import ServedStates
from specgraft.config import RunConfig
from specgraft.log import progress, say
from specgraft.records import Conversation, Features, ids_digest
from specgraft.run_dir import RunDir
from specgraft.stream.shards import ShardWriter, refuse_other_ids
from specgraft.targets.load import identity
from specgraft.targets.model import Target

FAULT_RATE = 0.01  # more rows than this with broken states stop the run
SPLITS = ("train", "heldout")
Producer = Callable[[Iterable[list[Conversation]]], Generator[Features]]
PICTURE_IDS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")  # of a config: places of other media


def feature_header(config: RunConfig, target: Target) -> dict[str, Any]:
    """The manifest fields that every reader compares."""
    part = config.capture
    return {
        "target": identity(target),
        "quantisation": quantisation(target),
        "taps": resolve_taps(part.taps, part.tap_count, target.num_layers),
        "dtype": "fp8" if part.dtype == "fp8" else str(target.dtype).removeprefix("torch."),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "max_length": length_limit(config, target),
    }


def quantisation(target: Target) -> str:
    """Method by which the target's weights are packed, or "none": a packed copy has another law than its original."""
    packed = getattr(target.config, "quantization_config", None)
    if not packed:
        return "none"
    return str(packed.get("quant_method", "unknown") if isinstance(packed, dict) else getattr(packed, "quant_method", "unknown"))


def length_limit(config: RunConfig, target: Target) -> int:
    """Tokens of a captured row at most; 0: no limit."""
    context = int(getattr(target.config, "max_position_embeddings", None) or 0)
    wanted = config.capture.max_length
    return min(wanted, context) if wanted and context else wanted or context


def feature_bytes(tokens: int, taps: int, hidden: int, width: int, streams: int = 1) -> int:
    """Bytes of features: `taps` states and the last layer's (of `streams` times the width), an int32 id and a byte of mask per
    token. `width` bytes a value; 1 is fp8, with a float32 scale per state. `plan storage` counts the same, and the headers."""
    scales = (taps + 1) * 4 if width == 1 else 0
    return tokens * ((taps + streams) * hidden * width + scales + 5)


def producer(config: RunConfig, target: Target, header: dict[str, Any], ahead_bytes: float = 0) -> Producer:
    """Who makes Features of batches of rows, in that order: servers where `capture.servers` names some, else this process.

    `ahead_bytes`: of features that servers make beyond the row that is wanted next, at most; 0: a shard.
    """
    taps = header["taps"]
    if not config.capture.servers:
        return lambda batches: (row for batch in batches for row in capture_batch(target, batch, taps))
    if target.streams > 1:
        raise ValueError(f"capture.servers: a target with {target.streams} residual streams is captured in this process alone; leave them out")
    served = ServedStates(config.capture, header, target.num_layers)
    ahead = config.capture.shard_tokens
    if ahead_bytes:
        ahead = int(ahead_bytes / feature_bytes(1, len(taps), target.hidden_size, target.head.weight.element_size()))
    return lambda batches: served.states((row for batch in batches for row in batch), ahead)


def capture(config: RunConfig, run: RunDir, target: Target, conversations: Sequence[Conversation]) -> None:
    """Writes Features of every conversation that has none yet.

    Rows too long are cut, rows from which nothing can be learnt are left out (`capture.cuts`), and so are rows with broken
    states; all are counted. Raises ValueError when the disk is too small, more than 1 % of the rows have broken states, a split
    has no row left, a row holds a picture, or what is there was captured from other answers.
    """
    header = feature_header(config, target)
    refuse_pictures(conversations, target)
    writer = ShardWriter(run.features, header)
    have = writer.digests
    wanted = {c.prompt_id: ids_digest(c.input_ids) for c in conversations}
    for prompt_id, value in have.items():
        refuse_other_ids(run.features, prompt_id, value, wanted)
    rows, left_out = shortened(conversations, header["max_length"])
    refuse_empty_splits(conversations, rows, left_out, header["max_length"])
    missing = {c.prompt_id for c in rows} - have.keys()
    if not missing:
        return
    total = sum(len(c.input_ids) for c in rows if c.prompt_id in missing)
    width = 1 if header["dtype"] == "fp8" else target.head.weight.element_size()
    need = feature_bytes(total, len(header["taps"]), target.hidden_size, width, target.streams)
    free = shutil.disk_usage(run.features).free
    if need > free:
        raise ValueError(f"{run.features}: needs {need / 1e6:,.3f} MB, {free / 1e6:,.3f} MB are free; free space or set run.root")
    make, broken = producer(config, target, header), dict[str, str]()
    done = padded = 0
    with progress("capture", total) as bar:
        for split in SPLITS:
            mine = [c for c in rows if c.split == split]
            lengths = [len(c.input_ids) for c in mine]
            todo = {index for index, c in enumerate(mine) if c.prompt_id in missing}
            shards = list(shards_of(lengths, todo, config.capture.batch_tokens, config.capture.shard_tokens))
            with closing(make([mine[index] for index in batch] for shard in shards for batch in shard)) as rows_made:
                for shard in shards:
                    kept: dict[int, Features] = {}
                    stop: ValueError | None = None
                    try:
                        for batch in shard:
                            for index, row in zip(batch, rows_made, strict=False):
                                if fault := fault_of(row):
                                    broken[row.prompt_id] = fault
                                else:  # a row that stays on the device would keep its whole batch there
                                    kept[index] = dataclasses.replace(row, taps=row.taps.cpu(), last=row.last.cpu())
                            done += sum(lengths[index] for index in batch)
                            padded += sum(lengths[index] for index in batch) if config.capture.servers else padded_tokens(lengths, batch)
                            bar.at(done, f"{need * done / total / 1e9:.2f} GB, {1 - done / padded:.1%} padding")
                    except ValueError as error:  # of a server: what it gave before is kept
                        stop = error
                    refuse_many_broken(broken, len(conversations))
                    if kept:
                        writer.add(split, [kept[i] for i in sorted(kept)], [wanted[mine[i].prompt_id] for i in sorted(kept)])
                    if stop is not None:
                        raise stop
    shorter = sum(len(row.input_ids) < len(whole.input_ids) for row, whole in pairs(rows, conversations))
    say(f"capture: {len(missing) - len(broken)} rows, {done} tokens, padding {1 - done / padded:.1%}; {shorter} cut at {header['max_length']} tokens")
    if left_out or broken:
        say(f"capture: left out {dict(Counter([*left_out.values(), *broken.values()]))} of {len(conversations)}")
    writer.note(left_out={**left_out, **broken}, cut=shorter)


def pairs(rows: Sequence[Conversation], conversations: Sequence[Conversation]) -> list[tuple[Conversation, Conversation]]:
    """Every row with the conversation that it was cut from."""
    whole = {c.prompt_id: c for c in conversations}
    return [(row, whole[row.prompt_id]) for row in rows]


def refuse_many_broken(broken: dict[str, str], rows: int) -> None:
    if len(broken) > FAULT_RATE * rows:
        reasons = ", ".join(f"{n} x {why}" for why, n in Counter(broken.values()).items())
        raise ValueError(
            f"capture: {len(broken)} of {rows} conversations have broken states ({len(broken) / rows:.1%}: {reasons}): check "
            "the target's weights and dtype"
        )


def refuse_empty_splits(conversations: Sequence[Conversation], rows: Sequence[Conversation], left_out: dict[str, str], limit: int) -> None:
    """Raises ValueError when a split that has conversations has none from which anything can be learnt."""
    for split in SPLITS:
        mine = [c for c in conversations if c.split == split]
        if mine and not any(c.split == split for c in rows):
            reasons = ", ".join(f"{n} x {why}" for why, n in Counter(left_out[c.prompt_id] for c in mine).items())
            raise ValueError(
                f"capture: nothing can be learnt from any of the {len(mine)} {split} conversations ({reasons}, at most {limit} tokens "
                "of each): raise capture.max_length or regen.max_new_tokens"
            )


def refuse_pictures(conversations: Sequence[Conversation], target: Target) -> None:
    """Raises ValueError for a row that holds the place of a picture (or sound): its features enter the layers beside the ids."""
    places = {value: name for name in PICTURE_IDS if isinstance(value := getattr(target.config, name, None), int)}
    for conversation in conversations:
        if found := places.keys() & set(conversation.input_ids):
            raise ValueError(
                f"{conversation.prompt_id}: holds id {min(found)}, the target's {places[min(found)]}; pictures and sound are not "
                "captured: leave the row out of the prompts"
            )
