"""Block attention by the cheapest correct path.

Legend: B batch, N blocks, S slots a block, T context tokens, H query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from specgraft.ops.block_attention.spans import Spans

# every path has the same block_attention(query, context_key, context_value, block_key, block_value, spans)
PATHS = {
    "naive": "specgraft.ops.block_attention.naive",  # the definition: dense, all keys repeated
    "two_part": "specgraft.ops.block_attention.two_part",  # any device, in pieces
    "sdpa": "specgraft.ops.block_attention.sdpa",  # any device, boolean mask
    "flex": "specgraft.ops.block_attention.flex",  # CUDA; on a CPU forward only
}


def block_attention(
    query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    spans: Spans,
    path: str | None = None,
) -> torch.Tensor:
    """As `naive.block_attention`, by `path` (a key of PATHS) or else by `choose`; returned in the query's dtype.

    query [B,N,S,H,d]; context_key, context_value [B,T,Hk,d]; block_key, block_value [B,N,S,Hk,d].
    Returns [B,N,S,H,d].
    """
    name = path or choose(query.device.type, query.dtype, query.shape[1])
    if name not in PATHS:
        raise ValueError(f"block attention: no path {name!r}; choose one of {', '.join(PATHS)}")
    out: torch.Tensor = importlib.import_module(PATHS[name]).block_attention(
        query, context_key, context_value, block_key, block_value, spans
    )
    return out


def choose(device: str, dtype: torch.dtype, blocks: int) -> str:
    """The path for tensors of `dtype` on a device of this type, with N = blocks.

    Measured on a CPU (AMD EPYC, one thread, float32, H 9, Hk 3, d 64, S 7), forward and backward in processor
    milliseconds: T 512, N 64: two_part 21, sdpa 42, one dense sdpa call 51; N 256: 75, 165, 497; T 4096, N 512: two_part
    1181, sdpa 2382. Decode, N 1, forward: B 1, T 256: sdpa 0.29, two_part 0.34 (B 1, T 4096: 2.5, 1.5); B 8, T 1024:
    7.2, 9.6; B 32, T 256: 6.1, 7.6.
    """
    if device == "cuda":
        # not measured (no GPU at hand): the compiled kernel knows no float64 and needs Triton; one block is a plain call
        known = dtype in (torch.float32, torch.bfloat16, torch.float16)
        compiles = importlib.util.find_spec("triton") is not None
        return "flex" if known and compiles and blocks > 1 else "sdpa"
    return "sdpa" if blocks == 1 else "two_part"
