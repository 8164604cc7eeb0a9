"""What all contenders of `train_step.py` share: the task, its random inputs, the measured step, the loop that serves steps.

Runs inside each package's own environment, so it needs the standard library and torch only.

What one step is: clear the gradients, forward, backward. What is measured:
- processor seconds: user and system time of the whole process, all threads (getrusage);
- peak: highest resident size during the step (VmHWM, reset through /proc/self/clear_refs) minus the resident size before
  any measured step, after a warm-up, with gradients dropped and free pages given back. Parameters, frozen embedding and
  head and inputs are in both, so they do not count; gradients, saved activations, logits and workspaces do.

Legend: T context tokens, K taps, D hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Task:
    """One shape of one drafter; the same for every contender. Filled by `train_step.py`, travels as JSON."""

    drafter: str  # dspark, dflash
    precision: str  # fp32, bf16: autocast, parameters stay float32
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    taps: int
    context: int  # tokens, all of them supervised
    anchors: int
    draft_tokens: int  # G
    vocab: int
    markov_rank: int
    decay: float = 4.0
    seed: int = 0
    threads: int = 2
    mode: str = ""  # of ours only: see specgraft_step.py

    @property
    def block_size(self) -> int:
        """Slots of a block: DSpark proposes from the anchor's own slot too."""
        return self.draft_tokens + (self.drafter == "dflash")

    @property
    def mask_token(self) -> int:
        return self.vocab - 1


@dataclass(frozen=True)
class Inputs:
    """Random, float32, the same for every contender of a seed. Filled by `inputs_of`."""

    input_ids: torch.Tensor  # [1, T]
    taps: torch.Tensor  # [1, T, K, D]
    last: torch.Tensor  # [1, T, D] before the final norm
    embedding: torch.Tensor  # [V, D]
    head: torch.Tensor  # [V, D]

    @property
    def loss_mask(self) -> torch.Tensor:
        return torch.ones_like(self.input_ids)

    @property
    def final(self) -> torch.Tensor:
        """[1, T, D] behind a final norm of weight one, for packages that keep that."""
        return self.last * torch.rsqrt(self.last.pow(2).mean(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True)
class Contender:
    """A built drafter and its step. Filled by each worker."""

    parameters: list[nn.Parameter]  # trained ones
    forward: Callable[[], tuple[torch.Tensor, float]]  # loss with graph, supervised slots
    notes: str = ""


def inputs_of(task: Task) -> Inputs:
    g = torch.Generator().manual_seed(task.seed)
    return Inputs(
        torch.randint(0, task.vocab - 1, (1, task.context), generator=g),
        torch.randn(1, task.context, task.taps, task.hidden, generator=g),
        torch.randn(1, task.context, task.hidden, generator=g),
        torch.randn(task.vocab, task.hidden, generator=g) * 0.02,
        torch.randn(task.vocab, task.hidden, generator=g) * 0.02,
    )


def autocast(task: Task) -> AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=task.precision == "bf16")


def qwen3_fields(task: Task) -> dict[str, object]:
    """The draft layer, in the names of transformers' Qwen3Config; SDPA, as flex attention has no backward on a CPU."""
    return {
        "vocab_size": task.vocab,
        "hidden_size": task.hidden,
        "intermediate_size": task.intermediate,
        "num_hidden_layers": task.layers,
        "num_attention_heads": task.heads,
        "num_key_value_heads": task.kv_heads,
        "head_dim": task.head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * task.layers,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def start(parameters: list[nn.Parameter], seed: int) -> None:
    """The same values for every contender, as far as same shapes come in the same order: matrices N(0, 0.02), norms one, biases zero."""
    seen: dict[tuple[int, ...], int] = {}
    with torch.no_grad():
        for parameter in parameters:
            shape = tuple(parameter.shape)
            seen[shape] = seen.get(shape, 0) + 1
            if len(shape) > 1:
                own = hash((seed, shape, seen[shape])) % 2**31  # a hash of integers is the same in every process
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(own))
            else:
                parameter.fill_(0.0 if parameter.numel() == 1 else 1.0)


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def drop_gradients(contender: Contender) -> None:
    for parameter in contender.parameters:
        parameter.grad = None


def settled(contender: Contender) -> int:
    """Resident bytes with everything freed that a step leaves behind."""
    drop_gradients(contender)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident("VmRSS")


def measured_step(contender: Contender, before: int) -> dict[str, float]:
    drop_gradients(contender)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    wall, processor = time.perf_counter(), processor_seconds()
    loss, supervised = contender.forward()
    loss.backward()
    processor, wall = processor_seconds() - processor, time.perf_counter() - wall
    peak = resident("VmHWM") - before
    return {"processor_s": processor, "wall_s": wall, "peak_mib": peak / 2**20, "supervised": supervised, "loss": loss.item()}


def serve(build: Callable[[Task, Inputs], Contender], versions: dict[str, str]) -> None:
    """Builds the contender of the task in argv, warms up, says so, then one measured step for every line of stdin."""
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(task.threads)
    torch.manual_seed(task.seed)
    contender = build(task, inputs_of(task))
    start(contender.parameters, task.seed)
    before = settled(contender)
    measured_step(contender, before)
    before = settled(contender)
    size = sum(parameter.numel() for parameter in contender.parameters)
    ready = {"versions": {**versions, "torch": torch.__version__}, "parameters": size, "gradients_mib": size * 4 / 2**20, "notes": contender.notes}
    print(json.dumps(ready), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measured_step(contender, before)), flush=True)
