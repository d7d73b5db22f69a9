"""Fused kernels and the host's share in the simulator: by hand, on a machine of round figures."""

from __future__ import annotations

import pytest
from tests.cost.test_simulate import HEAD, ROUND

from interlace.cost import Machine, default_machine, op_kind, run_issue_seconds, simulate
from interlace.cost.op_times import issue_seconds
from interlace.ir import parse

FAST = ROUND.replace(memory_bandwidth=1e9)
"""An 8x8x8 matmul takes a second, other bytes nothing to speak of."""


def parts(*lines: str) -> str:
    """A Program whose first op is one Fused."""
    made = ", ".join(f"part({line})" for line in lines)
    outs = "    a = empty(f32[8, 8])\n    b = empty(f32[8, 8])\n    c = empty(f32[8, 8])\n"
    return HEAD + outs + f"    main: fused({made})\n"


MM = 'call("aten.mm.out", w, w, out={})'


def test_parts_take_what_their_matmuls_take_together() -> None:
    program = parse(parts(MM.format("a"), MM.format("b"), MM.format("c")))
    timeline = simulate(program, FAST)
    assert timeline.makespan_s == pytest.approx(3)
    (span,) = [s for s in timeline.of(rank=0).spans if s.kind == "compute"]
    assert span.name == "fused aten.mm.out"
    assert op_kind(program.ops[-1]) == "compute"
    launched = FAST.replace(launch_s=0.5)
    assert simulate(program, launched).makespan_s == pytest.approx(3.5), "one launch for all"


def test_waves_are_those_of_the_whole() -> None:
    tiled = FAST.replace(gemm_tile=(8, 8), units=4)
    four = parse(parts(*(MM.format(name) for name in "abca")))
    apart = simulate(parse(HEAD + f"    main: {MM.format('v')}\n"), tiled).makespan_s
    assert simulate(four, tiled).makespan_s == pytest.approx(apart), "four tiles fill one wave"


TILED = FAST.replace(gemm_tile=(8, 8), units=4)
"""Four tiles at once, each of which takes four seconds."""


@pytest.mark.parametrize(("machine", "ends"), [(TILED, 3 + 4), (FAST, 4)])
def test_a_part_takes_its_time_from_when_it_may_begin(machine: Machine, ends: int) -> None:
    """Units that have been idle since the kernel began make it no faster."""
    text = parts(MM.format("a"), f"wait(e), {MM.format('b')}")
    gathers = "    side: all_gather(x, z, team=tp)\n" * 3
    late = text.replace("    main: fused", gathers + "    side: record(e)\n    main: fused")
    assert simulate(parse(late), machine).makespan_s == pytest.approx(ends)


def test_a_part_of_a_later_wave_begins_when_units_are_free() -> None:
    names = "abcabc"
    early = parse(parts(*(MM.format(name) for name in names)))
    assert simulate(early, TILED).makespan_s == pytest.approx(8), "two waves"
    last = parts(*(MM.format(name) for name in names[:5]), f"wait(e), {MM.format('c')}")
    for gathers, ends in ((1, 8), (5, 9), (7, 11)):
        before = "    side: all_gather(x, z, team=tp)\n" * gathers + "    side: record(e)\n"
        program = parse(last.replace("    main: fused", before + "    main: fused"))
        assert simulate(program, TILED).makespan_s == pytest.approx(ends)


@pytest.mark.parametrize(("gathers", "ends"), [(0, 12), (1, 12), (8, 12), (10, 14), (20, 24)])
def test_units_fall_free_while_a_part_waits(gathers: int, ends: int) -> None:
    """Ten tiles, two waves and a half; then one that waits, for which there is room from 8 s on."""
    text = parts('call("aten.mm.out", t, w, out=r)', f"wait(e), {MM.format('a')}")
    tall = "    t = empty(f32[80, 8])\n    r = empty(f32[80, 8])\n"
    before = "    side: all_gather(x, z, team=tp)\n" * gathers + "    side: record(e)\n"
    program = parse(text.replace("    main: fused", tall + before + "    main: fused"))
    assert simulate(program, TILED).makespan_s == pytest.approx(ends)


@pytest.mark.parametrize(("machine", "begins", "ends"), [(FAST, 1, 3), (TILED, 4, 5)])
def test_a_record_in_a_part_holds_others_up_to_there(
    machine: Machine, begins: int, ends: int
) -> None:
    text = parts(f"{MM.format('a')}, record(e)", MM.format("b"), MM.format("c"))
    text += "    side: wait(e)\n    side: all_gather(x, z, team=tp)\n"
    timeline = simulate(parse(text), machine)
    (gather,) = [s for s in timeline.of(rank=0).spans if s.name == "all_gather"]
    assert gather.start_s == pytest.approx(begins)
    assert gather.end_s == pytest.approx(begins + 1)
    assert timeline.makespan_s == pytest.approx(ends)


def test_signals_inside() -> None:
    text = parts(
        f"{MM.format('a')}, notify(done, to=tp.others)",
        f"expect(done, tp.rank + 1), {MM.format('b')}",
    )
    assert simulate(parse(text), FAST).makespan_s == pytest.approx(2)


def test_what_the_host_spends() -> None:
    machine = default_machine("cuda")
    issue = dict(machine.issue)
    program = parse(
        "def p(tp: Team[4], x: f32[8], y: f32[8], z: f32[32]):\n"
        "    full = alloc(f32[32], symmetric=tp)\n"
        "    main: copy(x, full[tp.rank])\n"
        "    main: notify(ready, to=tp.others)\n"
        "    main: all_gather(x, z, team=tp)\n"
        '    main: all_gather(x, z, team=tp, backend="peer")\n'
        "    side: get(full[tp.rank + 1], y, peer=tp.rank + 1)\n"
        "    main: free(full)\n"
    )
    teams = {"tp": program.teams[0]}
    costs = [issue_seconds(op, machine, teams) for op in program.ops]
    expected = [
        *(6 * issue["signal"], issue["copy"], 3 * issue["signal"]),
        *(issue["collective"], issue["kernel"], issue["peer"], 0.0),
    ]
    assert costs == pytest.approx(expected)
    joins = 4 * issue["event"]
    assert run_issue_seconds(program, machine) == pytest.approx(sum(costs) + joins)
    assert run_issue_seconds(program, machine.replayed) == 0
    assert issue_seconds(program.ops[1], ROUND.replace(issue_s=3.0), teams) == 3.0
