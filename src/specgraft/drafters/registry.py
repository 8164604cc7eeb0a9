"""The kinds of drafters: adding one is a file with a `Drafter` and a row here. Loaded on demand; this file loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from specgraft.drafters.config import DrafterConfig

if TYPE_CHECKING:
    from specgraft.drafters.drafter import Drafter

KINDS = {
    "mtp": "specgraft.drafters.mtp:MTP",  # independent heads on a causal trunk
    "dflash": "specgraft.drafters.dflash:DFlash",  # parallel block, independent drafts
    "dflash2": "specgraft.drafters.dflash2:DFlash2",  # the same with convolutions and a candidate selector
    "dspark": "specgraft.drafters.dspark:DSpark",  # parallel block, Markov correction, confidence
}


def check_kind(kind: str) -> None:
    """Raises ValueError for a kind that is not registered."""
    if kind not in KINDS:
        raise ValueError(f"drafters.kind={kind!r}: known are {', '.join(KINDS)}")


def build(config: DrafterConfig) -> Drafter:
    """A fresh drafter of this shape. Raises ValueError for a kind that does not exist."""
    check_kind(config.kind)
    module, _, name = KINDS[config.kind].partition(":")
    drafter: Drafter = getattr(import_module(module), name)(config)
    if drafter.selector is not None and (drafter.markov_head is not None or drafter.confidence_head is not None):
        raise ValueError(f"drafters.kind={config.kind!r}: a selector goes with neither a Markov nor a confidence head")
    return drafter
