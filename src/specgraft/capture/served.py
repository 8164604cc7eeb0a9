"""Features from servers of the target: the stored ids go out, hidden states come back; nothing is encoded again.

Legend: T tokens, K taps, L layers asked for, D hidden size.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from specgraft.capture.states_file import StatesFile, take_states
from specgraft.config import CaptureSection
from specgraft.engines.client import Pool
from specgraft.engines.states import Written, states, states_folder
from specgraft.engines.wire import Ask, Unusable
from specgraft.log import say
from specgraft.records import Conversation, Features
from specgraft.stream.memory import MemoryStream

PREFIX = "cmpl-specgraft"  # of the files that servers write for us


class ServedStates:
    """Servers of one target as a producer of Features: `for features in ServedStates(part, header, layers).states(rows)`.

    `part`: the servers and how they are asked; `header`: of the features (taps, dtype and hidden size of the target), as
    `capture.stage.feature_header` makes it; `layers`: decoder layers of the target. No target is loaded. States are compared
    with what was asked for (number, ids, layers, dtype, width), not for values: `capture.forward.fault_of` does that, and its
    caller counts. What a server computes hangs on the batches that it makes, so its last bits do too; the order and the rows do not.
    """

    def __init__(self, part: CaptureSection, header: dict[str, Any], layers: int) -> None:
        self.part, self.taps, self.width = part, list(header["taps"]), int(header["hidden_size"])
        self.dtype: torch.dtype = getattr(torch, header["target"]["dtype"])
        self.layers = sorted({*self.taps, layers - 1})
        self.folder = states_folder(part.states)
        host = sha256(socket.gethostname().encode()).hexdigest()[:8]
        self.mark = f"specgraft-{host}-{os.getpid()}-{uuid4().hex[:8]}"
        sweep(self.folder, host)

    def states(self, conversations: Iterable[Conversation], ahead: int = 65536) -> Generator[Features]:
        """Features of these rows in exactly this order; `ahead` tokens at most are asked for or wait beyond the one wanted next.

        Rows are drawn from `conversations` as they are asked for, in another thread: it may be endless. Closing the iterator
        stops the requests. Raises ValueError in one line (server, row, what, remedy) when a server is dead beyond
        `part.retries`, or sends what cannot be used; rows in front of that one have been given by then.
        """
        feed = Feed(self, conversations, ahead)
        try:
            yield from feed
        finally:
            feed.close()
            for file in self.folder.glob(f"cmpl-{self.mark}-*"):
                file.unlink(missing_ok=True)

    def pick(self, ask: Ask, found: StatesFile) -> tuple[torch.Tensor, torch.Tensor]:
        """Taps [T,K,D] and last [T,D]. Raises Unusable where the states are not those that were asked for."""
        again = f"start it with `specgraft serve vllm TARGET --taps {','.join(map(str, self.taps))}`"
        if len(found.states) != len(ask.ids):
            raise Unusable(f"{len(found.states)} states came for {len(ask.ids)} ids: prefix caching or truncation is on; {again}")
        if found.ids != ask.ids:
            raise Unusable("its states are of other ids than were sent; restart it")
        if found.layers != self.layers:
            raise Unusable(f"its states are of the layers {found.layers} and {self.layers} are wanted: {again}")
        if found.states.shape[1:] != (len(self.layers), self.width):
            raise Unusable(f"its states are {tuple(found.states.shape[1:])} and {(len(self.layers), self.width)} were expected: is it the same target?")
        if found.states.dtype != self.dtype:
            raise Unusable(f"its states are {found.states.dtype} and the target is {self.dtype}: start it with --dtype, or set target.dtype")
        places = [self.layers.index(tap) for tap in self.taps]
        return found.states[:, places], found.states[:, -1].clone()


class Feed(MemoryStream[Features]):
    """Rows of servers, handed over in order though they come in any. What is under way counts as held."""

    def __init__(self, owner: ServedStates, conversations: Iterable[Conversation], ahead: int) -> None:
        self.owner, self.conversations = owner, conversations
        self.asked: dict[int, Conversation] = {}  # given to the pool, and not made yet
        self.early: dict[int, Features] = {}  # made before one in front of them
        self.following = 0  # the next one to hand over
        super().__init__((), ahead, lambda row: len(row.input_ids))

    def _fill(self) -> None:
        part = self.owner.part
        talk = states(self.owner.layers, self.collect, self.owner.mark)
        pool = Pool(part.servers, part.engine, part.concurrency, part.timeout, part.retries, talk=talk, section="capture", silence=part.silence)
        try:
            pool.run(self.asks(), self.done, self.room, lambda: self._stop)
        except ValueError:
            if self.following:  # who takes hears why behind these
                say("capture: no more states come; those that did are used first")
            raise

    def asks(self) -> Iterator[Ask]:
        for index, conversation in enumerate(self.conversations):
            self.asked[index] = conversation
            yield Ask(conversation.input_ids, 1, name=conversation.prompt_id)

    def room(self, index: int) -> bool:
        length = len(self.asked[index].input_ids)
        with self._change:
            if self.held and self.held + length > self.bound:
                return False
            self.held += length
            return True

    def collect(self, ask: Ask, written: Written, over: Callable[[], bool]) -> tuple[torch.Tensor, torch.Tensor]:
        owner = self.owner
        if written.rows is not None:
            flat = torch.tensor(written.rows, dtype=owner.dtype)
            if flat.dim() != 2 or flat.shape[1] != len(owner.layers) * owner.width:
                raise Unusable(f"its states are {tuple(flat.shape)}, and {len(owner.layers)} layers of {owner.width} were expected")
            return owner.pick(ask, StatesFile(ask.ids, owner.layers, flat.view(len(flat), len(owner.layers), owner.width)))
        return owner.pick(ask, take_states(owner.folder / written.file, owner.part.timeout, over))

    def done(self, index: int, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        row = self.asked.pop(index)
        self.early[index] = Features(row.prompt_id, torch.tensor(row.input_ids), torch.tensor(row.loss_mask), *found)
        with self._change:
            while self.following in self.early:
                self._items.append(self.early.pop(self.following))
                self.following += 1
            self._change.notify_all()


def sweep(folder: Path, host: str) -> None:
    """Deletes what servers left for processes of this host that are no more."""
    for file in folder.glob(f"{PREFIX}-{host}-*"):
        number = file.name.removeprefix(f"{PREFIX}-{host}-").split("-")[0]
        if number.isdigit() and not Path("/proc", number).exists() and Path("/proc").exists():
            file.unlink(missing_ok=True)
