"""Interlace's own flight logs: real runs in which one rank holds up the others."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.external.test_recorded_gloo import sleep_until_saved
from tests.support.pool import Pool

import interlace
from interlace import Executor, parse
from interlace.errors import RecordingError
from interlace_check.recorded.flights import FlightLog, flight_log, stalled

GATHER = """
def gather(tp: Team[3], x: f32[2, 4], y: out[f32[6, 4]]):
    full = alloc(f32[6, 4], symmetric=tp)
    main: copy(x, full[tp.rank])
    main: notify(ready, to=tp.others)
    main: record(e0)
    comm: wait(e0)
    comm: expect(ready, tp.rank + 1)
    comm: get(full[tp.rank + 1], peer=tp.rank + 1)
    comm: expect(ready, tp.rank + 2)
    comm: get(full[tp.rank + 2], peer=tp.rank + 2)
    comm: record(e1)
    main: wait(e1)
    main: copy(full, y)
    main: free(full)
"""

OTHERS = [
    "def met(tp: Team[3]):\n    main: barrier(team=tp)\n",
    GATHER.replace("4]", "5]"),
    "def wide(tp: Team[3]):\n" + "".join(f"    s{k}: barrier(team=tp)\n" for k in range(12)),
]
"""Of Executors on the same team that do not run: one ran, one has the name of the one that does,
one has more streams than a team tells of."""
ALL = (*OTHERS, GATHER)

EXPECT = 5


def hold_up(folder: str, rank: int, op: int) -> None:
    """Runs the gather; one rank sleeps at an op, or (op -1) comes late to the run, until all have
    saved what they had recorded."""
    me, there = dist.get_rank(), threading.Event()

    def slow(_: int, index: int, __: Any) -> None:
        if me == rank and index == op:
            there.set()
            sleep_until_saved(folder)
        elif me != rank and index == EXPECT:
            there.set()

    def save() -> None:
        assert there.wait(30)
        time.sleep(0.2)  # the op behind the event waits by now
        interlace.save_recording(folder)

    world = dist.group.WORLD
    assert world is not None
    others = [Executor(parse(text), groups={"tp": world}).prepare() for text in OTHERS]
    others[0].run([])
    executor = Executor(parse(GATHER), groups={"tp": world}, before_op=slow).prepare()
    thread = threading.Thread(target=save)
    thread.start()
    if op < 0 and me == rank:
        there.set()
        sleep_until_saved(folder)
    executor.run([torch.ones(2, 4)])
    thread.join()
    for each in (executor, *others):
        each.close()


@pytest.mark.parametrize("op", [1, -1])
def test_the_rank_that_holds_up_the_others_is_named(
    op: int, pool: Pool, tmp_path: Path, seed: int
) -> None:
    victim = seed % 3
    pool(3).run(hold_up, str(tmp_path), victim, op)
    for file in tmp_path.iterdir():
        logs = json.loads(file.read_text())["interlace"]
        stands = {log["program"]: {at for at, _ in log["streams"].values()} for log in logs}
        *idle, _ = (stands.pop(str(parse(text).instantiate(logs[0]["rank"]))) for text in ALL)
        assert idle == [{-2}, {-1}, {-1}]
        assert all(max(at) < 0 for at in stands.values()), "Executors that earlier tests left"
    report = interlace.check_recorded(tmp_path)
    (finding,) = (one for one in report.findings if one.kind == "stalled")
    assert finding.missing == (victim,)
    assert set(finding.waiting) >= {0, 1, 2} - {victim}
    said = str(finding)
    if op < 0:
        assert f"rank {victim} did not begin Program gather" in finding.message
    else:
        assert "copy(x, full[" in finding.ops[0].text
        assert finding.ops[0].rank == victim
        assert "waits for nothing" in finding.ops[0].role
        assert f"notify(ready, to=tp.others)` of rank {victim}" in said
    assert any("the same run" in one for one in report.assumed)


def log(rank: int, **streams: int) -> FlightLog:
    return log_of(GATHER, rank, **streams)


def log_of(text: str, rank: int, **streams: int) -> FlightLog:
    program = str(parse(text).instantiate(rank))
    return flight_log(rank, program, {name: (op, 2.0) for name, op in streams.items()})


def test_runs_that_ended_and_runs_that_did_not_begin_are_no_fault() -> None:
    for at in (-1, -2):
        findings, _ = stalled([log(rank, main=at, comm=at) for rank in range(3)], ())
        assert not findings


def test_of_programs_of_one_name_the_one_that_runs_counts() -> None:
    """And of those that do not, the one that is like it."""
    other = GATHER.replace("4]", "5]")
    logs = [
        log(0, main=10, comm=7),
        log_of(other, 0, main=-2, comm=-2),
        log_of(other, 1, main=-2, comm=-2),
        log(1, main=-1, comm=-1),
        log(2, main=10, comm=5),
        log(2, main=-1, comm=-1),
    ]
    for _ in range(6):
        logs = logs[1:] + logs[:1]
        (finding,) = stalled(logs, ())[0]
        assert finding.missing == (1,)
        assert finding.waiting == (0, 2)
        assert "rank 1 did not begin" in finding.message


def test_a_rank_without_a_flight_log() -> None:
    findings, _ = stalled([log(0, main=10, comm=5), log(2, main=10, comm=7)], (1,))
    (finding,) = findings
    assert finding.missing == (1,)
    assert "left no flight log" in finding.message


@pytest.mark.parametrize(
    "streams", [{"main": 99, "comm": 1}, {"main": 1}, {"main": 1, "comm": 1, "x": 1}]
)
def test_a_log_that_does_not_fit_its_program(streams: dict[str, int]) -> None:
    with pytest.raises(RecordingError):
        log(0, **streams)


def test_ranks_that_run_other_programs_under_one_name() -> None:
    """Whatever they are, there is a verdict or a RecordingError."""
    texts = [
        GATHER,
        GATHER.replace("[3]", "[2]").replace("f32[6", "f32[4").replace("rank + 2", "rank + 1"),
        "def gather(tp: Team[3]):\n    main: barrier(team=tp)\n    comm: barrier(team=tp)\n",
        "def gather(dp: Team[3]):\n    main: barrier(team=dp)\n    comm: barrier(team=dp)\n",
        "def gather(tp: Team[1]):\n    main: barrier(team=tp)\n    comm: barrier(team=tp)\n",
    ]
    reported = 0
    for first, second in itertools.product(texts, texts):
        logs = [
            flight_log(rank, str(parse(text).instantiate(rank % 2)), AT)
            for rank, text in ((0, first), (1, second))
            if "Team[1]" not in text or rank == 0
        ]
        with contextlib.suppress(RecordingError):
            findings, _ = stalled(logs, ())
            reported += len(findings)
    assert reported > 5


AT = {"main": (0, 1.0), "comm": (1, 1.0)}
