"""Features on disk: safetensors shards, and a manifest that says whose they are.

A shard holds whole conversations back to back; the manifest holds names, lengths, checksums and the target's identity.
Legend: T tokens of one conversation, K taps, D hidden size.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specgraft.records import Features
from specgraft.run_dir import read_json, write_json
from specgraft.targets.load import digest

MANIFEST = "manifest.json"
FORMAT = 1


class ShardWriter:
    """Adds shards to a folder. The manifest is rewritten after each shard, so a kill leaves whole shards only."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        """`header` is what all shards of the folder share: identity of the target, taps, dtype.

        Raises ValueError when the folder holds features made otherwise.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        self.manifest: dict[str, Any] = {"format": FORMAT, "layer_ids": "output of layer i, pre-norm", **header, "shards": []}
        if path.exists():
            before = read_json(path)
            for key, value in {"format": FORMAT, **header}.items():
                if before.get(key) != value:
                    raise ValueError(
                        f"{folder}: holds features with another `{key}`; use another run.name, or delete that folder"
                    )
            self.manifest = before
        for stale in folder.glob(".*.tmp"):
            stale.unlink()

    @property
    def digests(self) -> dict[str, str]:
        """Digest of the ids of every row there, by prompt id."""
        return {row["prompt_id"]: row["digest"] for shard in self.manifest["shards"] for row in shard["rows"]}

    def add(self, split: str, rows: Sequence[Features], digests: Sequence[str]) -> None:
        """Writes one shard: to a temporary name, then renamed, then entered in the manifest.

        Raises ValueError naming the folder when the disk refuses.
        """
        number = sum(shard["split"] == split for shard in self.manifest["shards"])
        path = self.folder / f"{split}-{number:05d}.safetensors"
        temporary = self.folder / f".{path.name}.tmp"
        tensors = {
            "input_ids": torch.cat([row.input_ids for row in rows]).to(torch.int32),
            "loss_mask": torch.cat([row.loss_mask for row in rows]),
            "taps": torch.cat([row.taps.cpu() for row in rows]),
            "last": torch.cat([row.last.cpu() for row in rows]),
        }
        try:
            save_file(tensors, temporary)
            check = digest(temporary)
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise ValueError(f"{self.folder}: shard could not be written ({reason}); free space or set run.root") from None
        entries = [
            {"prompt_id": row.prompt_id, "tokens": len(row.input_ids), "digest": value}
            for row, value in zip(rows, digests, strict=True)
        ]
        shard = {"file": path.name, "split": split, "sha256": check, "bytes": os.path.getsize(path), "rows": entries}
        self.manifest["shards"].append(shard)
        write_json(self.folder / MANIFEST, self.manifest)


class ShardReader:
    """Reads Features of one split by index. Each shard's checksum is compared once, when it is first opened."""

    def __init__(self, folder: Path, split: str, expect: dict[str, Any] | None = None, keep: Mapping[str, str] | None = None) -> None:
        """`expect` holds manifest fields that must agree (target, taps, ...); `keep` limits the rows to these prompts and
        gives the digest of each one's ids.

        Raises ValueError for another target, other taps, features of other answers, or no features at all.
        """
        self.folder = folder
        self.manifest = read_json(folder / MANIFEST)
        for key, value in {"format": FORMAT, **(expect or {})}.items():
            if self.manifest.get(key) != value:
                raise ValueError(
                    f"{folder}: the features were made with {key}={_short(self.manifest.get(key))}, "
                    f"this run has {_short(value)}; run capture again under another run.name"
                )
        self.index: list[tuple[int, int, str, int]] = []  # shard, first token, prompt id, tokens
        for number, shard in enumerate(self.manifest["shards"]):
            if shard["split"] != split:
                continue
            first = 0
            for row in shard["rows"]:
                if keep is None or row["prompt_id"] in keep:
                    refuse_other_ids(folder, row["prompt_id"], row["digest"], keep)
                    self.index.append((number, first, row["prompt_id"], row["tokens"]))
                first += row["tokens"]
        if not self.index:
            raise ValueError(f"{folder}: holds no {split} features; run capture first")
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lengths(self) -> list[int]:
        return [tokens for *_, tokens in self.index]

    def digest(self) -> str:
        """Of the target and of the rows in their order: other text or another target gives another digest."""
        rows = [prompt_id for _, _, prompt_id, _ in self.index]
        stored = {row["prompt_id"]: row["digest"] for shard in self.manifest["shards"] for row in shard["rows"]}
        text = "|".join([self.manifest["target"]["weights"], *(f"{name}:{stored[name]}" for name in rows)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __getitem__(self, item: int) -> Features:
        number, first, prompt_id, tokens = self.index[item]
        shard = self._shard(number)
        part = slice(first, first + tokens)
        return Features(
            prompt_id=prompt_id,
            input_ids=shard.get_slice("input_ids")[part].long(),
            loss_mask=shard.get_slice("loss_mask")[part],
            taps=shard.get_slice("taps")[part],
            last=shard.get_slice("last")[part],
        )

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            entry = self.manifest["shards"][number]
            path = self.folder / entry["file"]
            remedy = f"delete {self.folder} and run capture again"
            if not path.is_file():
                raise ValueError(f"{path}: shard missing; {remedy}")
            if path.stat().st_size != entry["bytes"] or digest(path) != entry["sha256"]:
                raise ValueError(f"{path}: damaged shard (size or checksum differs from the manifest); {remedy}")
            try:
                self._open[number] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{path}: damaged shard ({error}); {remedy}") from None
        return self._open[number]


def refuse_other_ids(folder: Path, prompt_id: str, digest: str, wanted: Mapping[str, str] | None) -> None:
    """Raises ValueError when the features are of another answer than the one that is there now (regen was run anew)."""
    if wanted is not None and wanted.get(prompt_id, digest) != digest:
        raise ValueError(f"{folder}: features of {prompt_id} are of another answer than regen's; delete {folder} and run capture again")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."
