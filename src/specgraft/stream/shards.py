"""Features on disk: safetensors shards, and a manifest that says whose they are.

A shard holds whole conversations back to back; the manifest holds names, lengths, checksums and the header: identity of the
target, tap list, dtype. Every shard carries the header and its own rows, so that it can be told apart without the manifest.
Legend: T tokens of one conversation, K taps, D hidden size.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specgraft.records import Features
from specgraft.run_dir import read_json, write_json
from specgraft.stream import fp8
from specgraft.stream.folder_lock import exclusive
from specgraft.stream.parcels import STATED
from specgraft.stream.source import BadRows, rows_digest
from specgraft.targets.text import digest

MANIFEST = "manifest.json"
FORMAT = 2
STATES = {"layer_ids": "output of layer i, pre-norm"}  # what the numbers are; a manifest that does not say so is refused
KEY = "specgraft"  # of the shards' own metadata


class ShardWriter:
    """Adds shards to a folder. The manifest is rewritten after each shard, so a kill leaves whole shards only.

    Several processes may write into one folder: each takes its turn (`folder_lock`) and reads what the others added.
    """

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        """`header` is what all shards of the folder share: identity of the target, taps, dtype ("fp8": codes and scales).

        Raises ValueError when the folder holds features made otherwise.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / MANIFEST
        self.header: dict[str, Any] = {"format": FORMAT, **STATES, **header}
        self.manifest: dict[str, Any] = {**self.header, "shards": []}
        if path.exists():
            before = read_json(path)
            if odd := difference(before, self.header):
                raise ValueError(
                    f"{folder}: holds features with another `{odd.key}`{odd.parts}; use another run.name, or delete that folder"
                )
            self.manifest = before
        with exclusive(folder):
            for stale in folder.glob(".*.tmp"):
                stale.unlink()

    @property
    def digests(self) -> dict[str, str]:
        """Digest of the ids of every row there, by prompt id."""
        return {row["prompt_id"]: row["digest"] for shard in self.manifest["shards"] for row in shard["rows"]}

    def read(self) -> list[dict[str, Any]]:
        """The shards that are there now, those of other writers too."""
        if (self.folder / MANIFEST).exists():
            self.manifest = read_json(self.folder / MANIFEST)
        shards: list[dict[str, Any]] = self.manifest["shards"]
        return shards

    def digests_now(self) -> dict[str, str]:
        """`digests`, those of other writers too."""
        self.read()
        return self.digests

    def add(self, split: str, rows: Sequence[Features], digests: Sequence[str]) -> None:
        """Writes one shard: to a temporary name, then renamed, then entered in the manifest.

        Raises ValueError naming the folder when the disk refuses.
        """
        tensors = {
            "input_ids": torch.cat([row.input_ids for row in rows]).to(torch.int32),
            "loss_mask": torch.cat([row.loss_mask for row in rows]),
            "taps": torch.cat([row.taps.cpu() for row in rows]),
            "last": torch.cat([row.last.cpu() for row in rows]),
        }
        errors = coded(tensors) if self.header.get("dtype") == "fp8" else {}
        self._write(split, tensors, [row.prompt_id for row in rows], [len(row.input_ids) for row in rows], digests, errors)

    def add_coded(self, split: str, rows: Sequence[tuple[str, Mapping[str, torch.Tensor]]], digests: Sequence[str]) -> None:
        """As `add`, of rows whose states have the form of the shards already (`wire`): id and tensors by name."""
        names = list(rows[0][1])
        tensors = {name: torch.cat([tensors[name] for _, tensors in rows]) for name in names}
        self._write(split, tensors, [name for name, _ in rows], [len(tensors["input_ids"]) for _, tensors in rows], digests, {})

    def _write(
        self, split: str, tensors: dict[str, torch.Tensor], names: list[str], lengths: list[int], digests: Sequence[str],
        errors: dict[str, Any],
    ) -> None:  # fmt: skip
        entries = [
            {"prompt_id": name, "tokens": tokens, "digest": value} for name, tokens, value in zip(names, lengths, digests, strict=True)
        ]
        with exclusive(self.folder):
            number = sum(shard["split"] == split for shard in self.read())
            path = self.folder / f"{split}-{number:05d}.safetensors"
            temporary = self.folder / f".{path.name}.tmp"
            own = {**self.header, "split": split, "rows": entries}
            try:
                save_file(tensors, temporary, metadata={KEY: json.dumps(own, ensure_ascii=False)})
                check = digest(temporary)
                temporary.replace(path)
            except (OSError, SafetensorError) as error:
                temporary.unlink(missing_ok=True)
                reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
                raise ValueError(f"{self.folder}: shard could not be written ({reason}); free space or set run.root") from None
            shard = {"file": path.name, "split": split, "sha256": check, "bytes": os.path.getsize(path), **errors, "rows": entries}
            self.manifest["shards"].append(shard)
            write_json(self.folder / MANIFEST, self.manifest)

    def note(self, **facts: Any) -> None:
        """Adds facts about the whole capture to the manifest, such as the rows that were left out."""
        self.manifest["notes"] = {**self.manifest.get("notes", {}), **facts}
        write_json(self.folder / MANIFEST, self.manifest)


def coded(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Replaces states by codes and scales, in place; returns the relative error that this costs, for the manifest."""
    errors: dict[str, Any] = {}
    for name in STATED:
        states = tensors[name]
        tensors[name], tensors[f"{name}_scale"] = fp8.encode(states)
        mean, worst = fp8.round_trip_error(states, tensors[name], tensors[f"{name}_scale"])
        errors[name] = {"mean": mean, "worst": worst}
    return {"round_trip_error": errors}


class ShardReader:
    """Reads Features of one split by index, in the target's dtype. A shard is compared with its checksum when it is first opened.

    It is the source (`stream.source`) of the medium "disk".
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        expect: dict[str, Any] | None = None,
        keep: Mapping[str, str] | None = None,
        bad_rows: str = "stop",
    ) -> None:
        """`expect` holds manifest fields that must agree (target, taps, dtype, ...); `keep` limits the rows to these prompts,
        in their order, and gives the digest of each one's ids.

        Raises ValueError for another target, other taps, features of other answers, or no features at all.
        """
        self.folder = folder
        self.manifest = read_json(folder / MANIFEST)
        if odd := difference(self.manifest, {"format": FORMAT, **STATES, **(expect or {})}):
            raise ValueError(
                f"{folder}: the features were made with {odd.key}={_short(odd.have)}, "
                f"this run has {_short(odd.want)}; run capture again under another run.name"
            )
        self.dtype: torch.dtype | None = None  # as it is stored
        if self.manifest.get("dtype") == "fp8":
            self.dtype = getattr(torch, self.manifest["target"]["dtype"])
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
        if keep is not None:  # what is trained on hangs neither on the shards nor on when capture was stopped
            place = {prompt_id: number for number, prompt_id in enumerate(keep)}
            self.index.sort(key=lambda row: place[row[2]])
        self._open: dict[int, Any] = {}
        self._bad = BadRows(bad_rows, len(self.index))
        self._waited = 0.0

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lengths(self) -> list[int]:
        return [tokens for *_, tokens in self.index]

    @property
    def ids(self) -> list[str]:
        return [prompt_id for _, _, prompt_id, _ in self.index]

    def digest(self) -> str:
        """Of the target, the dtype and the rows in their order: other text or another target gives another digest."""
        stored = {row["prompt_id"]: row["digest"] for shard in self.manifest["shards"] for row in shard["rows"]}
        return rows_digest(self.manifest, [(name, stored[name]) for name in self.ids])

    def rows(self, order: Iterable[int]) -> Iterator[Features | None]:
        """These rows in this order. A row of a damaged shard: ValueError naming the shard, or None where bad rows are skipped."""
        for index in order:
            began = time.monotonic()
            try:
                row: Features | None = self[index]
            except ValueError as error:
                self._bad(self.index[index][2], str(error))
                row = None
            self._waited += time.monotonic() - began
            yield row

    def take_over(self, before: ShardReader | None) -> None:
        """The open shards, and what was counted, of a reader of this folder from when it held fewer."""
        if before is not None:
            self._open, self._bad, self._waited = before._open, before._bad, before._waited

    def facts(self) -> dict[str, float]:
        """Nothing is made, or held, ahead of the trainer: the time spent reading is all there is."""
        waited, self._waited = self._waited, 0.0
        return {"wait_seconds": waited, "skipped": float(len(self._bad.found))}

    def __getitem__(self, item: int) -> Features:
        number, first, prompt_id, tokens = self.index[item]
        shard = self._shard(number)
        part = slice(first, first + tokens)

        def states(name: str) -> torch.Tensor:
            stored: torch.Tensor = shard.get_slice(name)[part]
            return stored if self.dtype is None else fp8.decode(stored, shard.get_slice(f"{name}_scale")[part], self.dtype)

        return Features(
            prompt_id=prompt_id,
            input_ids=shard.get_slice("input_ids")[part].long(),
            loss_mask=shard.get_slice("loss_mask")[part],
            taps=states("taps"),
            last=states("last"),
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
                shard = safe_open(path, framework="pt")
                own = json.loads((shard.metadata() or {}).get(KEY, "{}"))
            except (SafetensorError, json.JSONDecodeError) as error:
                raise ValueError(f"{path}: damaged shard ({error}); {remedy}") from None
            header = {key: value for key, value in self.manifest.items() if key not in ("shards", "notes")}
            if odd := difference(own, {**header, "split": entry["split"], "rows": entry["rows"]}):
                raise ValueError(f"{path}: its own `{odd.key}`{odd.parts} is not the manifest's; {remedy}")
            self._open[number] = shard
        return self._open[number]


@dataclass(frozen=True)
class Difference:
    """The first field in which two headers differ. Filled by `difference`."""

    key: str
    have: Any  # of a field with parts, those that differ
    want: Any

    @property
    def parts(self) -> str:
        """Names of the parts that differ, in brackets."""
        return f" ({', '.join(self.want)})" if isinstance(self.want, dict) and self.want else ""


def difference(have: Mapping[str, Any], want: Mapping[str, Any]) -> Difference | None:
    """The first field of `want` that `have` lacks or has otherwise. A field that is missing is a difference, never a default."""
    for key, value in want.items():
        other = have.get(key)
        if key in have and other == value:
            continue
        if isinstance(value, dict) and isinstance(other, dict):
            odd = [name for name in {**value, **other} if value.get(name) != other.get(name)]
            return Difference(key, {name: other.get(name) for name in odd}, {name: value.get(name) for name in odd})
        return Difference(key, other, value)
    return None


def refuse_other_ids(folder: Path, prompt_id: str, digest: str, wanted: Mapping[str, str] | None) -> None:
    """Raises ValueError when the features are of another answer than the one that is there now (regen was run anew)."""
    if wanted is not None and wanted.get(prompt_id, digest) != digest:
        raise ValueError(f"{folder}: features of {prompt_id} are of another answer than regen's; delete {folder} and run capture again")


def _short(value: Any) -> str:
    if isinstance(value, dict):  # of a digest the first digits tell
        return str({key: text if len(text := str(part)) <= 24 else text[:12] + "..." for key, part in value.items()})
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."
