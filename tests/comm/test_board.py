"""Meetings through the store: all ranks get what all said, or none does, whoever comes when."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from unittest import mock

import pytest
import torch.distributed as dist

from interlace.comm.rendezvous import liveness
from interlace.comm.rendezvous.board import Board, Party, greet
from interlace.comm.rendezvous.liveness import PeerProcess, started
from interlace.errors import AgreementError, SharedMemoryError

SIZE = 3
T = TypeVar("T")


@pytest.fixture
def boards() -> list[Board]:
    store = dist.HashStore()
    return [Board(store, range(SIZE), rank) for rank in range(SIZE)]


def on_each(function: Callable[[int], T]) -> list[T]:
    """What the function gives on every rank, all at once."""
    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(function, range(SIZE)))


def meet(board: Board, topic: str, me: int, timeout_s: float) -> list[int] | str:
    """What all said, or why there was no meeting."""
    try:
        notes = board.exchange(topic, {"rank": me}, timeout_s)
    except AgreementError as error:
        return str(error)
    return [note["rank"] for note in notes]


def test_nobody_waits_for_a_process_that_has_ended(boards: list[Board]) -> None:
    """But what it had left by then counts."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    life = PeerProcess.of(process.pid, started(process.pid))
    try:
        boards[0].lives = {0: PeerProcess(None), 1: life, 2: PeerProcess(None)}
        for me in (1, 2):
            boards[me].post(f"t/first/{me}", {"rank": me})
        assert meet(boards[0], "t/first", 0, 20.0) == [0, 1, 2]
    finally:
        process.kill()
        process.wait()
    for me in (1, 2):
        boards[me].post(f"t/second/{me}", {"rank": me})
    assert meet(boards[0], "t/second", 0, 20.0) == [0, 1, 2]
    boards[2].post("t/third/2", {"rank": 2})
    begun = time.monotonic()
    told = meet(boards[0], "t/third", 0, 20.0)
    assert time.monotonic() - begun < 10
    assert told == (
        "rank 1 cannot come to 'third' any more: the process has ended. Start the job anew"
    )
    assert str(told) in str(meet(boards[2], "t/third", 2, 20.0))  # the others are told at once
    assert not life.alive()


def test_all_meet_or_none_whoever_comes_when(boards: list[Board], seed: int) -> None:
    """Ranks come at about the time when others give up."""
    draw, limit, every = random.Random(seed), 0.02, list(range(SIZE))
    outcomes: list[list[list[int] | str]] = []
    for number in range(60):
        delays = [draw.uniform(0, 2 * limit) for _ in every]

        def one(rank: int, number: int = number, delays: list[float] = delays) -> list[int] | str:
            time.sleep(delays[rank])
            return meet(boards[rank], f"{number}/at tea", rank, limit)

        outcomes.append(on_each(one))
    for found in outcomes:
        assert found == [every] * SIZE or all(isinstance(one, str) for one in found), found
    failed = [found for found in outcomes if found[0] != every]
    assert failed
    assert len(failed) < len(outcomes)
    assert all(
        "did not come to 'at tea' within 0.02 s" in str(o) for found in failed for o in found
    )


def test_ranks_that_tried_at_different_times_meet(boards: list[Board], seed: int) -> None:
    """One has given up a few times before the others come at all; nobody counts for them."""
    draw, tries = random.Random(seed), [0] * SIZE

    def one(rank: int) -> int:
        time.sleep(draw.uniform(0, 0.3))
        board, number = boards[rank], 0
        while tries[rank] < 200:
            tries[rank] += 1
            number = board.round("reset", number)
            if meet(board, f"reset/{number}", rank, 0.05) == list(range(SIZE)):
                return number
        return -1

    found = on_each(one)
    assert len(set(found)) == 1
    assert found[0] > 0
    assert boards[0].round("reset", 0) == found[0] + 1, "that one is over"


def test_parties_have_one_name_for_all_ranks_and_another_in_the_next_job() -> None:
    """Also a party of one, who waits for nobody; words of the job before stay in the store."""
    store, names = dist.HashStore(), list[set[str]]()

    def named(rank: int, ranks: tuple[int, ...]) -> str:
        party = Party(f"tp/{ranks}", ranks)
        greet(Board(store, ranks, rank), [party], "prepare", 20.0)
        return party.name

    for ranks in ((0,), (0, 1, 2)) * 2:
        with ThreadPoolExecutor(len(ranks)) as threads:
            names.append(set(threads.map(lambda rank, ranks=ranks: named(rank, ranks), ranks)))
    assert [len(of) for of in names] == [1] * 4
    assert "" not in set.union(*names)
    assert len(set.union(*names)) == 4


def test_who_is_interrupted_gives_up_for_all(
    boards: list[Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(boards[0], "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            meet(boards[0], "meeting", 0, 5)
    start = time.monotonic()
    assert meet(boards[1], "meeting", 1, 5) == "rank 0 gave up: KeyboardInterrupt"
    assert time.monotonic() - start < 2


def test_who_fails_while_others_are_still_to_come_is_heard_at_once(boards: list[Board]) -> None:
    """The third never comes: nobody waits for it first."""
    problem = SharedMemoryError("no room")

    def one(rank: int) -> tuple[str, float]:
        start, mine = time.monotonic(), problem if rank == 0 else None
        try:
            boards[rank].exchange("tea", {}, 20.0, problem=mine)
        except SharedMemoryError as error:
            return str(error), time.monotonic() - start
        return "met", 0.0

    with ThreadPoolExecutor(2) as threads:
        (first, _), (second, seconds) = threads.map(one, (0, 1))
    assert (first, second) == ("no room", "rank 0: no room")
    assert seconds < 10


def test_a_failure_between_two_looks_is_heard_as_itself(
    boards: list[Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note comes when it has been looked for, and its verdict when that is looked for next."""
    problem, store = SharedMemoryError("no room"), boards[0].store

    asked: list[str] = []

    def check(keys: list[str]) -> bool:
        if keys == ["interlace/tea/verdict"] and not asked:
            asked.extend(keys)
            with pytest.raises(SharedMemoryError):
                boards[1].exchange("tea", {}, 20.0, problem=problem)
        return store.check(keys)

    monkeypatch.setattr(boards[0], "store", mock.Mock(wraps=store, check=check))
    with pytest.raises(SharedMemoryError, match="rank 1: no room"):
        boards[0].exchange("tea", {}, 20.0)
    assert asked


@pytest.mark.parametrize("ago_s", [0.0, 1e6])
def test_words_of_another_host_count_by_the_wall_clock(
    boards: list[Board], monkeypatch: pytest.MonkeyPatch, ago_s: float
) -> None:
    """Its uptime says nothing here: it was started an hour ago, or years."""
    then = time.time() - ago_s
    for uptime_s in (10.0, 1e9):
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(liveness, "boot_id", lambda: "another boot")
            elsewhere.setattr(liveness, "uptime", lambda up=uptime_s: up)
            elsewhere.setattr(liveness.time, "time", lambda: then)
            boards[1].leave_word(ValueError("the cause"))
        assert boards[0].word(1) == ("" if ago_s else "the cause")
