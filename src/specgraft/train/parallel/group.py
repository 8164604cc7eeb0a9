"""The ranks of a run under torchrun or Ray Train: joining, refusing alike, sums. Alone, a process is a group of one and nothing is sent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from specgraft.distill.ranks import total
from specgraft.log import console, say

Result = TypeVar("Result")
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
LINE = 1000  # bytes of a refusal that other ranks are told


class Refused(ValueError):
    """What one rank refused, raised on all of them; rank 0 says it."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Group:
    """The ranks that train together. Filled by `joined`."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Writes the run's files and speaks."""
        return self.rank == 0

    def alike(self, call: Callable[[], Result]) -> Result:
        """The result of `call`, made on every rank; where one raises ValueError, all raise its line, with its exit code."""
        if self.size == 1:
            return call()
        result, refused = None, None
        try:
            result = call()
        except ValueError as error:
            refused = error
        code = torch.zeros(self.size, dtype=torch.long)
        if refused is not None:
            code[self.rank] = getattr(refused, "exit_code", 2)
        codes = total(code).tolist()
        if any(codes):
            first = next(rank for rank, value in enumerate(codes) if value)
            raise Refused(self.told(str(refused or ""), first), codes[first]) from None
        return result  # type: ignore[return-value]  # as none has refused

    def told(self, text: str, source: int) -> str:
        """What rank `source` says, on every rank."""
        line = torch.zeros(LINE, dtype=torch.uint8)
        own = text.encode()[:LINE]
        line[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else line[:0]
        distributed.broadcast(line, source)
        return bytes(line.tolist()).rstrip(b"\0").decode(errors="ignore")

    def any(self, flag: bool) -> bool:
        """Whether it holds on one rank at least."""
        return bool(total(torch.tensor(int(flag))))

    def lead(self, call: Callable[[], None]) -> None:
        """`call`, on rank 0 alone; the others wait, and refuse what it refuses."""
        self.alike(call if self.leads else lambda: None)


def launched() -> bool:
    """This process is one of several that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: str, timeout: float) -> Iterator[Group]:
    """The group of this process while a stage runs. `timeout`: seconds after which a rank that does not answer is gone.

    One that Ray Train has made is taken as it is. Raises ValueError, in one line, for ranks that cannot meet or have lost one another.
    """
    made = distributed.is_initialized()
    if not made and not launched():
        yield Group()
        return
    rank, size = distributed.get_rank() if made else int(os.environ["RANK"]), 0
    console.quiet = rank != 0
    try:
        if not made:
            meet(device, timeout)
        size = distributed.get_world_size()
        yield Group(rank, size)
    except (RuntimeError, distributed.DistError) as error:
        console.quiet = False  # this one alone knows
        if not _lost(error):
            raise
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"train: rank {rank} has lost the others ({reason}); the same command goes on from the newest checkpoint") from None
    except (Refused, SystemExit):
        if not made:
            distributed.destroy_process_group()
        raise
    except ValueError as error:
        console.quiet = False
        if size > 1:
            say(f"rank {rank}:")
        raise error
    else:
        if not made:
            distributed.destroy_process_group()


def backend(gpus: bool) -> str:
    """Gloo on CPUs; on GPUs NCCL, with gloo for what lies on the CPU."""
    return "cpu:gloo,cuda:nccl" if gpus else "gloo"


def meet(device: str, timeout: float) -> None:
    """The ranks of torchrun become a group."""
    end_with_parent()
    local, size = int(os.environ["LOCAL_RANK"]), os.environ["WORLD_SIZE"]
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if on_gpu:
        torch.cuda.set_device(local)
    if os.environ.get("LOCAL_WORLD_SIZE") == size and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all on this machine: nothing listens to others
    distributed.init_process_group(backend(on_gpu), timeout=timedelta(seconds=timeout))


def end_with_parent() -> None:
    """Where torchrun itself is killed, Linux kills this rank: it would train on beside those of the next attempt, into the same run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _lost(error: Exception) -> bool:
    """An error of the connection between ranks, not of the work."""
    words = ("gloo", "connection", "timed out", "timeout", "nccl", "socket", "peer")
    return isinstance(error, distributed.DistError) or any(word in str(error).lower() for word in words)
