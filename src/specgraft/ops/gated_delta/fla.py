"""The gated delta rule by the kernels of flash-linear-attention, on CUDA.

Checked against a stand-in for the package only (its argument names and shapes are those of commit bc3b101, August 2026): no
GPU was at hand, and nothing is known of its speed or error here.
The package's public functions give no states between chunks that are float32 and carry gradients, so each chunk is a call
and its final state is kept. What else a Record holds is made by `chunked` for all chunks at once.
Legend: R rows, T tokens, H value heads, Hk query and key heads, dk key and dv value head size, M chunks, C tokens of one
chunk.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from specgraft.ops.gated_delta import chunked
from specgraft.ops.gated_delta.chunked import Record

DTYPES = (torch.bfloat16, torch.float16)  # what all of the package's versions take


def available(device: torch.device | str) -> bool:
    """Whether the package is there and has kernels for this device."""
    return torch.device(device).type == "cuda" and importlib.util.find_spec("fla") is not None


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None = None, chunk: int = 64
) -> tuple[Tensor, Record]:
    """As `chunked.gated_delta`, and by it where v is neither bfloat16 nor float16."""
    if v.dtype not in DTYPES or not v.shape[1]:
        return chunked.gated_delta(q, k, v, g, beta, initial, chunk)
    if g.dim() == 3:
        kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    else:
        kernel = importlib.import_module("fla.ops.kda").chunk_kda
    parts = chunked.pieces(q, k, v, g, beta, chunk)
    size, shared = parts.sums.shape[2], v.shape[2] // k.shape[2]
    # not every version shares heads by itself
    query, key = (x.to(v.dtype).repeat_interleave(shared, dim=2) for x in (q, k))
    outs, states = [], [chunked.start(k, v, initial)]
    for tokens in zip(*(x.split(size, 1) for x in (query, key, v, g.float(), beta.float())), strict=True):
        out, state = kernel(
            *(x.contiguous() for x in tokens),
            initial_state=states[-1].contiguous(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        outs.append(out)
        states.append(state)
    before = torch.stack(states).flatten(1, 2)
    new = parts.fresh - parts.reads @ before[:-1]
    return torch.cat(outs, 1), parts.record(before, new, g)
