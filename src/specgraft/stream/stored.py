"""Token ids and masks of features on disk, without their states: what the token identity gate reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from specgraft.run_dir import read_json
from specgraft.stream.shards import MANIFEST


def stored_ids(folder: Path, sample: int = 0) -> Iterator[tuple[str, str, list[int], list[bool]]]:
    """(file, row id, ids, mask) of the rows of every shard; `sample` of each, picked by hash of the id, or all (0).

    Raises ValueError, in one line, for a shard that is missing or damaged.
    """
    for entry in read_json(folder / MANIFEST)["shards"]:
        path = folder / entry["file"]
        try:
            with safe_open(path, framework="pt") as shard:
                ids, mask = shard.get_tensor("input_ids").tolist(), shard.get_tensor("loss_mask").tolist()
        except (OSError, SafetensorError) as error:
            reason = (str(error).splitlines() or ["unreadable"])[0]
            raise ValueError(f"{path}: missing or damaged shard ({reason}); delete {folder} and run capture again") from None
        names = [row["prompt_id"] for row in entry["rows"]]
        chosen = set(names)
        if sample and len(names) > sample:
            chosen = set(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:sample])
        first = 0
        for row in entry["rows"]:
            stop = first + row["tokens"]
            if row["prompt_id"] in chosen:
                yield path.name, row["prompt_id"], ids[first:stop], mask[first:stop]
            first = stop
