"""Producers as Ray actors: order, bound, deaths, restarts, and one line where nobody is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from media import HEADER, Held, asked, bytes_of, conversations, digests, features, made

from specgraft.config import StreamSection
from specgraft.stream import cluster
from specgraft.stream.crew import Crew
from specgraft.stream.live import Counts, LiveSource

pytestmark = pytest.mark.ray


def part(**more: Any) -> StreamSection:
    return StreamSection(**{"medium": "ray", "cpus": 0.1, "start_timeout": 600, "timeout": 120, **more})


def live(crew: Crew, rows: Any, *arguments: Any, **more: Any) -> LiveSource:
    counts = Counts()
    return LiveSource(rows, digests(rows), HEADER, crew.make(made, bytes_of, counts, *arguments), counts, **more)


@pytest.fixture(scope="module")
def pair(ray_cluster: None) -> Any:
    with Crew(part(producers=2, bound_mb=0.05, retries=50), Held) as crew:
        yield crew


def test_rows_come_once_in_the_order_asked_for_bit_for_bit(pair: Crew) -> None:
    rows = conversations(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    source = live(pair, rows, group=1)
    found = list(source.rows(order))
    for row, index in zip(found, order, strict=True):
        want = features(rows[index])
        assert row.prompt_id == want.prompt_id and torch.equal(row.taps, want.taps) and torch.equal(row.last, want.last)
    both = [member.call(asked)[0] for member in pair.members]
    assert all(both) and sorted(both[0] + both[1]) == sorted(digests(rows))
    facts = source.facts()
    assert facts["queue_bytes"] == facts["queue_rows"] == 0 and 0 < facts["queue_peak_bytes"] <= 0.05e6


def test_two_trainer_ranks_share_the_producers_each_with_its_own_order(pair: Crew) -> None:
    rows = conversations(30)
    found: dict[int, list[str]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.__setitem__(rank, [row.prompt_id for row in live(pair, rows).rows(range(rank, 30, 2)) if row]))
        for rank in range(2)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == {rank: [f"p{n}" for n in range(rank, 30, 2)] for rank in range(2)}


def test_a_producer_killed_in_the_middle_costs_nothing_but_time(pair: Crew, tmp_path: Path) -> None:
    rows, kill = conversations(300), tmp_path / "kill"  # many more than the bound holds
    source = live(pair, rows, (), str(kill))
    found = []
    for row in source.rows(range(300)):
        found.append(row.prompt_id)
        if len(found) in (5, 100):
            kill.touch()
    assert found == [f"p{n}" for n in range(300)]
    assert 1 <= sum(member.deaths for member in pair.members) <= 2


def test_bad_states_are_found_there_and_stop_or_are_skipped(pair: Crew) -> None:
    rows = conversations(8)
    with pytest.raises(ValueError, match="p3: last not finite"):
        list(live(pair, rows, ("p3",)).rows(range(8)))
    source = live(pair, rows, ("p3",), bad_rows="skip")
    assert [row and row.prompt_id for row in source.rows(range(8))] == ["p0", "p1", "p2", None, "p4", "p5", "p6", "p7"]
    assert source.facts()["skipped"] == 1


def test_s3_a_row_that_a_producer_fails_at_is_left_out_and_no_tensor_is_invented(ray_cluster: None) -> None:
    rows = conversations(20)
    with Crew(part(retries=1), partial(Held, 0.0, ("p9",))) as crew:
        found = list(live(crew, rows, bad_rows="skip").rows(range(20)))
        assert [place for place, row in enumerate(found) if row is None] == [9]
        with pytest.raises(ValueError, match=r"p9: failed 2 times; the last: .*no states for p9"):
            list(live(crew, rows).rows(range(20)))


def test_s4_a_producer_dead_beyond_its_retries_stops_the_trainer_in_one_line(ray_cluster: None) -> None:
    with Crew(part(retries=0, bound_mb=0.05), Held) as crew:
        rows = live(crew, conversations(500)).rows(range(500))
        next(rows)
        time.sleep(1.0)  # idle: nobody calls it dead
        assert not crew.members[0].deaths
        os.kill(crew.members[0].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"stream: producer-0 died 1 times, stream\.retries=0: SYSTEM_ERROR") as caught:
            list(rows)
        assert time.monotonic() - began < 10 and "\n" not in str(caught.value)


def test_a_producer_that_gives_no_answer_counts_as_dead(ray_cluster: None) -> None:
    with Crew(part(retries=0, timeout=1.0), partial(Held, 30.0)) as crew:
        began = time.monotonic()
        with pytest.raises(ValueError, match="gave no answer for 1 s"):
            list(live(crew, conversations(3)).rows(range(3)))
        assert time.monotonic() - began < 60


def refuses() -> Any:
    raise ValueError("target.id='x' could not be loaded: no such folder")


def test_a_target_that_cannot_be_loaded_is_no_death_to_be_repeated(ray_cluster: None) -> None:
    with Crew(part(retries=5), refuses) as crew, pytest.raises(ValueError, match=r"stream: producer-0 died: ValueError: target\.id='x' could not"):
        list(live(crew, conversations(3)).rows(range(3)))
    assert crew.members[0].deaths == 1


def test_a_cluster_is_named_or_started_for_one_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"stream\.address is empty and several trainer ranks"):
        cluster.connect(StreamSection(medium="ray"))
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ValueError, match=r'pip install "specgraft\[ray\]"'):
        cluster.ray()


def test_reports_of_ray_become_one_line() -> None:
    long = "The actor died.\n\tpid: 3\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) x"
    assert cluster.one_line(Exception(long)) == "SYSTEM_ERROR: Worker unexpectedly exits with a connection error code 2. End of file."
    assert cluster.one_line(Exception("a\n  ValueError: b\n")) == "ValueError: b"


def test_who_waits_when_the_crew_goes_home_hires_nobody(ray_cluster: None) -> None:
    """Else a thread would start an actor that nobody ends, or a cluster of its own where that one has ended too."""
    heard: list[BaseException] = []

    def waits(crew: Crew) -> None:
        try:
            crew.ask(made, conversations(1))
        except Exception as error:
            heard.append(error)

    with Crew(part(), partial(Held, 60.0)) as crew:
        crew.ask(asked)
        thread = threading.Thread(target=waits, args=(crew,))
        thread.start()
        time.sleep(0.5)
    thread.join(30)
    assert not thread.is_alive() and [str(error) for error in heard] == ["stream: the producers have been sent home"]
    assert crew.members[0].generation == 0
