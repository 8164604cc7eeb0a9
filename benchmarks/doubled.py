"""A float64 copy of a Hugging Face model. Their code casts to float32 by name in norms, rotary angles and linear attention."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

CASTS = {
    "torch.float32": "torch.float64",
    ".float()": ".double()",
    "dtype=torch.float)": "dtype=torch.float64)",
    # equal scores (relu makes zeros) go to the lower block, as they do with us; topk breaks ties as it likes
    "scores.topk(min(self.block_topk, num_complete_blocks), dim=0).indices": (
        "scores.sort(dim=0, descending=True, stable=True).indices[: self.block_topk]"
    ),
}


def doubled(model: Any, attention: str) -> Any:
    """The same weights in float64, in classes whose every float32 is a float64, with transformers' attention `attention`."""
    name = type(model).__module__
    copy = sys.modules.get(f"{name}_double") or compiled(name)
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation, config._experts_implementation = attention, "eager"  # grouped products know no float64
    made = getattr(copy, type(model).__name__)(config).double()
    made.load_state_dict(model.state_dict())
    made.generation_config = model.generation_config
    return made.eval()


def compiled(name: str) -> types.ModuleType:
    """The modeling module `name`, executed again with every cast replaced."""
    path = str(importlib.import_module(name).__file__)
    with open(path) as handle:
        source = handle.read()
    for old, new in CASTS.items():
        source = source.replace(old, new)
    copy = types.ModuleType(f"{name}_double")
    copy.__package__, copy.__file__ = name.rpartition(".")[0], path
    sys.modules[copy.__name__] = copy
    exec(compile(source, f"{path}:double", "exec"), copy.__dict__)
    return copy
