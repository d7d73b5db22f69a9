"""Accounts of runs: parts by hand, what is planted, and the time over another run."""

from __future__ import annotations

import dataclasses
import statistics
import time

import pytest
import torch.distributed as dist
from tests.runtime.programs import executor_of, inputs_of
from tests.support.pool import Pool

from interlace.cost import Span, Timeline, op_kind, op_name
from interlace.errors import InputError
from interlace.ir import Op, parse
from interlace.trace.account import CHANGES, AccountLine, account, account_rows, beyond, totals

TEXT = """
def all_gather_linear(tp: Team[2], x: f32[64, 256], w: f32[256, 512]):
    site(1, "all_gather_matmul", "layers.3.up", strategy="peer")
    full = alloc(f32[128, 256], symmetric=tp, site=1)
    y = empty(f32[128, 512])
    main: copy(x, full[tp.rank], site=1)
    main: notify(ready, to=tp.others, site=1)
    main: record(e0)
    comm: wait(e0)
    comm: expect(ready, tp.rank + 1, site=1)
    comm: get(full[tp.rank + 1], peer=tp.rank + 1, site=1)
    comm: record(e1)
    main: call("aten.mm.out", full[tp.rank], w, out=y[tp.rank], site=1, loc="layers.3.up")
    main: wait(e1)
    main: call("aten.mm.out", full[tp.rank + 1], w, out=y[tp.rank + 1], site=1, loc="layers.3.up")
    main: free(full)
    return y
"""
PROGRAM = parse(TEXT.strip())
ALLOC, _, COPY, NOTIFY, E0, WAIT_0, EXPECT, GET, E1, MM_0, WAIT_1, MM_1, FREE = range(13)
RUN: dict[int, tuple[float, float]] = {
    **{ALLOC: (0, 1), COPY: (1, 51), NOTIFY: (51, 52), E0: (52, 52), MM_0: (60, 360)},
    **{WAIT_1: (360, 500), MM_1: (500, 800), FREE: (800, 801)},
    **{WAIT_0: (0, 52), EXPECT: (52, 400), GET: (400, 480), E1: (480, 481)},
}
"""Starts and ends in microseconds of each op of a rank's run."""
PARTS = {
    "exposed communication": 80,  # the get, 400 to 480
    "idle, event": 19,  # between the record and the end of the wait for it
    "idle, signal": 40,  # the first matmul is done, and the peer's rows are not there
    "idle, slot": 1,
    "idle, launch": 11,  # 51 to 60, 480 to 481, 800 to 801
    "matmuls": 600,
    "copies": 50,
}
PLANTED = 200


def timeline(run: dict[int, tuple[float, float]]) -> Timeline:
    """A measured timeline of rank 0."""
    ops = PROGRAM.ops
    spans = (
        Span(0, ops[i].stream, i, op_name(ops[i]), a / 1e6, b / 1e6, ops[i].site, op_kind(ops[i]))
        for i, (a, b) in run.items()
    )
    return Timeline(tuple(spans), source="measured")


def longer(index: int) -> dict[int, tuple[float, float]]:
    """The run with a longer op; what came after its end comes later, what awaited it waits on."""
    end = RUN[index][1]
    return {
        i: (a + PLANTED * (a >= end and i != index), b + PLANTED * (b >= end))
        for i, (a, b) in RUN.items()
    }


def parts(lines: list[AccountLine]) -> dict[str, float]:
    """Microseconds of each part."""
    return {part: round(seconds * 1e6, 6) for part, seconds in totals(lines).items()}


def test_every_moment_has_a_reason() -> None:
    lines = account(PROGRAM, timeline(RUN))
    assert parts(lines) == PARTS
    assert sum(line.seconds for line in lines) == pytest.approx(801e-6)
    of = {line.part: line for line in lines}
    name = PROGRAM.name
    assert of["exposed communication"].what == "site 1 all_gather_matmul peer"
    assert of["exposed communication"].module == "layers.3.up"
    assert of["idle, signal"].what == "get < expect ready"
    assert of["idle, signal"].ops == ((name, EXPECT),)
    assert of["idle, event"].what == f"aten.mm.out < wait e1 of op {E1}"
    assert of["matmuls"].what == "aten.mm.out 64x256x512"
    assert of["matmuls"].ops == ((name, MM_0), (name, MM_1))
    assert of["matmuls"].layer == "layers.3"


@pytest.mark.parametrize(
    ("index", "part"),
    [
        (EXPECT, "idle, signal"),
        (GET, "exposed communication"),
        (COPY, "copies"),
        (MM_1, "matmuls"),
        (NOTIFY, "idle, launch"),
    ],
)
def test_what_is_planted_is_in_its_own_part(index: int, part: str) -> None:
    found = parts(account(PROGRAM, timeline(longer(index))))
    assert found == {**PARTS, part: PARTS[part] + PLANTED}


def test_what_a_matmul_hides_costs_nothing() -> None:
    """A copy beside a matmul that is as fast as alone: neither takes time over the ideal."""
    ends = {COPY: (60, 360), NOTIFY: (360, 361), E0: (361, 361)}
    lines = account(PROGRAM, timeline({**RUN, **ends}))
    assert parts(lines)["matmuls"] == 600
    assert "copies" not in parts(lines)
    alone = {(PROGRAM.name, op): 300e-6 for op in (MM_0, MM_1)}
    over = parts(beyond(lines, {"matmuls": 600e-6}, alone))
    assert over.get("matmuls slower than alone", 0) == over.get("matmuls in chunks", 0) == 0


def test_parts_without_time_and_ranks_are_no_error() -> None:
    nothing = [AccountLine("elementwise", "x")]
    assert parts(beyond(nothing, {"elementwise": 1e-6})) == {"elementwise": -1}
    run = timeline(RUN)
    of_two = Timeline((*run.spans, dataclasses.replace(run.spans[0], rank=1)))
    with pytest.raises(InputError, match=r"fix: give timeline.of\(rank=0\)"):
        account(PROGRAM, of_two)


def test_time_over_a_run_without_communication_adds_up() -> None:
    lines = account(PROGRAM, timeline(RUN))
    ideal = {"matmuls": 500e-6, "elementwise": 7e-6, "boundaries": 3e-6}
    alone = {(PROGRAM.name, op): 260e-6 for op in (MM_0, MM_1)}
    found = beyond(lines, ideal, alone)
    assert sum(line.seconds for line in found) == pytest.approx(801e-6 - 510e-6)
    rest = {part: us for part, us in PARTS.items() if part != "matmuls"}
    assert parts(found) == rest | {
        "matmuls slower than alone": 80,
        "matmuls in chunks": 20,
        "elementwise": -7,
        "boundaries": -3,
    }
    assert parts(beyond(lines, ideal))["matmuls"] == 100


def test_rows_have_a_total_and_the_longest_lines() -> None:
    lines = [AccountLine("sums", f"sum {i}", "a.0", i * 1e-3) for i in range(1, 6)]
    rows = account_rows([*lines, AccountLine("copies", "copy", "a.1", 1e-4)], most=2)
    assert [row[:4] for row in rows] == [
        ("copies", "0.100 ms", CHANGES["copies"], ""),
        ("sums", "15.00 ms", CHANGES["sums"], ""),
        ("", "5.00 ms", "sum 5", "a.0"),
        ("", "4.00 ms", "sum 4", "a.0"),
        ("", "6.00 ms", "3 more", ""),
    ]


# -- on two ranks ----------------------------------------------------------------------------------

SLEEP_S = 0.04
PLANTS = {"none": (-1, 0, ""), "stall": (NOTIFY, 1, "idle, signal")} | {
    "copy": (COPY, 0, "copies"),
    "matmul": (MM_1, 0, "matmuls"),
}
"""Ops that are held back, with the rank, and the part of rank 0's time that it is to be in."""


def measured() -> dict[str, dict[str, float]]:
    """Median seconds of each part, by what is planted."""
    planted = ["none"]

    def before(rank: int, index: int, op: Op) -> None:
        if (index, rank) == PLANTS[planted[0]][:2]:
            time.sleep(SLEEP_S)

    found: dict[str, dict[str, float]] = {}
    rank = dist.get_rank()
    with executor_of(PROGRAM, before, trace=True).prepare() as executor:
        for planted[0] in PLANTS:
            runs: list[dict[str, float]] = []
            for _ in range(7):
                executor.run(inputs_of(PROGRAM, rank, 0))
                runs.append(totals(account(executor.program, executor.timeline())))
            names = {part for run in runs for part in run}
            found[planted[0]] = {
                part: statistics.median(run.get(part, 0.0) for run in runs) for part in names
            }
    return found


def test_what_is_planted_into_a_run_is_in_its_own_part(pool: Pool) -> None:
    """A peer's stall, a copy and a matmul that take 40 ms longer."""
    on_first, _ = pool(2).run(measured)
    for plant, (_, _, part) in PLANTS.items():
        if part:
            more = on_first[plant][part] - on_first["none"].get(part, 0.0)
            assert more == pytest.approx(SLEEP_S, rel=0.1), (plant, on_first)
