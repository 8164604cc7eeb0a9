"""One row's states on their way from who makes them to the trainer: in the form that shards keep, under the digest of its ids.

Legend: T tokens, K taps, D hidden size, E width of the last layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specgraft.records import Conversation, Features, ids_digest
from specgraft.stream import fp8

STATED = ("taps", "last")  # tensors of states; in fp8 each has a `_scale`


@dataclass(frozen=True)
class Parcel:
    """A row's states. Filled by `parcel`."""

    prompt_id: str
    digest: str  # of the ids that the states are of
    states: Mapping[str, torch.Tensor]  # taps [T,K,D], last [T,E]; in fp8 codes, and `taps_scale` [T,K], `last_scale` [T]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.states.values())


@dataclass(frozen=True)
class Failed:
    """A row that could not be made, in the place of its parcel."""

    prompt_id: str
    why: str  # one line
    bytes: int = 0


def parcel(row: Features, coded: bool, fault_of: Callable[[Features], str | None]) -> Parcel | Failed:
    """The states of a row on the CPU, as fp8 codes where they are `coded`; what `fault_of` finds in them instead, if anything."""
    if fault := fault_of(row):
        return Failed(row.prompt_id, f"{row.prompt_id}: {fault}")
    states: dict[str, torch.Tensor] = {}
    for name in STATED:
        value = getattr(row, name)
        if coded:
            states[name], states[f"{name}_scale"] = (each.cpu() for each in fp8.encode(value))
        else:
            states[name] = value.cpu()
    return Parcel(row.prompt_id, ids_digest(row.input_ids.tolist()), states)


def unpacked(found: Parcel, row: Conversation, dtype: torch.dtype) -> Features:
    """The features of `row`; of codes in `dtype`. Raises ValueError where the states are of another row or other ids."""
    if (found.prompt_id, found.digest) != (row.prompt_id, ids_digest(row.input_ids)):
        raise ValueError(f"{row.prompt_id}: states of {found.prompt_id} ({found.digest}) came in its place; restart the producers")
    taps, last = (
        fp8.decode(found.states[name], found.states[f"{name}_scale"], dtype) if f"{name}_scale" in found.states else found.states[name]
        for name in STATED
    )
    if not len(taps) == len(last) == len(row.input_ids):
        raise ValueError(f"{row.prompt_id}: {len(last)} states came for {len(row.input_ids)} tokens; restart the producers")
    return Features(row.prompt_id, torch.tensor(row.input_ids), torch.tensor(row.loss_mask), taps, last)


def shard_tensors(found: Parcel, row: Conversation) -> dict[str, torch.Tensor]:
    """As a shard holds them: ids, mask, states."""
    ids, mask = torch.tensor(row.input_ids, dtype=torch.int32), torch.tensor(row.loss_mask)
    return {"input_ids": ids, "loss_mask": mask, **found.states}


def to_wire(found: Parcel | Failed) -> Any:
    """Bytes in numpy arrays, which object stores hand over without a copy."""
    if isinstance(found, Failed):
        return (found.prompt_id, found.why)
    arrays = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).numpy())
        for name, tensor in found.states.items()
    }
    return (found.prompt_id, found.digest, arrays)


def from_wire(sent: Any) -> Parcel | Failed:
    """The parcel with memory of its own: what it came in may be given up."""
    if len(sent) == 2:
        return Failed(*sent)
    prompt_id, digest, arrays = sent
    states = {name: torch.from_numpy(raw.copy()).view(getattr(torch, kind)).view(shape) for name, (kind, shape, raw) in arrays.items()}
    return Parcel(prompt_id, digest, states)
