"""Published layouts: how other projects store the drafters we know. A layout is a file here and a row in `LAYOUTS`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from specgraft.drafters.config import DrafterConfig
from specgraft.drafters.drafter import Drafter
from specgraft.drafters.layouts.files import WEIGHTS, Fields, read_config, read_tensors, write_folder
from specgraft.drafters.registry import build
from specgraft.log import say

LAYOUTS = {
    "speculators": "specgraft.drafters.layouts.speculators",  # vLLM speculators 0.9: dflash, dflash2, dspark
    "deepspec": "specgraft.drafters.layouts.deepspec",  # DeepSpec: dspark, and dspark without its heads
    "zlab": "specgraft.drafters.layouts.zlab",  # z-lab: dflash, dflash2
}


class Layout(Protocol):
    """The functions of a layout's file. Tensor names are those of our drafters in all three."""

    def claims(self, data: dict[str, Any]) -> bool:
        """Whether a config.json is of this layout."""

    def drafter_config(self, fields: Fields) -> DrafterConfig:
        """The drafter behind a config.json. Raises ValueError naming a field that is missing or not supported."""

    def config_json(self, c: DrafterConfig, dtype: str) -> dict[str, Any]:
        """The inverse. Raises ValueError for a drafter that has no form in this layout."""

    def borrowed(self, c: DrafterConfig) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the target's tensors that a file may hold too."""


def layout_of(name: str) -> Layout:
    return cast(Layout, import_module(LAYOUTS[name]))


def detect(folder: Path) -> str:
    """The layout of a folder, from its config.json. Raises ValueError for one that is none of ours."""
    fields = read_config(folder)
    for name in LAYOUTS:
        if layout_of(name).claims(fields.data):
            return name
    what = fields.data.get("architectures")
    raise ValueError(f"{fields.where}: architectures={what!r} is no published layout that is known ({', '.join(LAYOUTS)})")


def read(folder: Path) -> Drafter:
    """A drafter in float32 from a published checkpoint, whose tensors must be exactly those of its config.

    Tensors of the target that lie in the file are left out, and that is said. Raises ValueError, in one line, for a folder
    of no known layout, a field that is missing or not supported, a tensor that is missing, unknown, of another shape, or
    not finite.
    """
    layout, fields = layout_of(detect(folder)), read_config(folder)
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(f"{folder}: mask_embedding.pt gives the mask token an embedding of its own, which is not supported")
    try:
        config = layout.drafter_config(fields)
        drafter = build(config)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(reason if reason.startswith(str(fields.where)) else f"{fields.where}: {reason}") from None
    tensors = read_tensors(folder)
    own = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    borrowed = layout.borrowed(config)
    if missing := sorted(set(own) - set(tensors)):
        raise ValueError(f"{folder / WEIGHTS}: tensor {missing[0]} is missing{and_more(missing)}")
    if extra := sorted(set(tensors) - set(own) - set(borrowed)):
        raise ValueError(f"{folder / WEIGHTS}: tensor {extra[0]} is not of this {config.kind} drafter{and_more(extra)}")
    for name, tensor in tensors.items():
        shape = own.get(name) or borrowed[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{folder / WEIGHTS}: {name} is {tuple(tensor.shape)}, its config says {shape}")
        if name in own and not (tensor.is_floating_point() and bool(torch.isfinite(tensor).all())):
            raise ValueError(f"{folder / WEIGHTS}: {name} ({str(tensor.dtype).removeprefix('torch.')}) holds no finite numbers")
    if left := sorted(set(tensors) & set(borrowed)):
        say(f"{folder}: left out {', '.join(left)}: a drafter borrows the target's")
    drafter.load_state_dict({name: tensors[name].float() for name in own})
    return drafter.requires_grad_(False).eval()


def write(drafter: Drafter, folder: Path, layout: str, dtype: str = "bfloat16") -> None:
    """Writes a new folder that `read` and the layout's own code load. Raises ValueError where that is impossible."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: known are {', '.join(LAYOUTS)}")
    config = layout_of(layout).config_json(drafter.config, dtype)
    kind = getattr(torch, dtype)
    write_folder(folder, config, {name: tensor.detach().to(kind).cpu().contiguous() for name, tensor in drafter.state_dict().items()})


def and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
