"""The simulator: times by hand on a machine of round figures, and sets that get stuck."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.passes import two_streams
from tests.support.line_count import per_op

from interlace.cost import Machine, Timeline, default_machine, op_kind, simulate
from interlace.cost.machine import Link
from interlace.cost.op_times import op_cost
from interlace.errors import ProgramError, SoundnessError
from interlace.ir import Group, parse

ROUND = Machine(
    name="round",
    device="cpu",
    gemm_flops=(("other", 1024.0),),
    memory_bandwidth=32.0,
    launch_s=0.0,
    issue_s=0.0,
    lanes=2,
    backend="gloo",
    links=(
        ("gloo", Link(latency_s=0.0, bandwidth=16.0)),
        ("peer", Link(latency_s=0.0, bandwidth=32.0)),
    ),
)
"""Copying 16 bytes takes a second, a 8x8x8 matmul takes one, and 16 bytes travel in one."""

HEAD = "def p(tp: Team[2], x: f32[4], y: f32[4], z: f32[8], w: f32[8, 8], v: f32[8, 8]):\n"


def played(*lines: str, machine: Machine = ROUND) -> Timeline:
    """The timeline of these statements."""
    return simulate(parse(HEAD + "".join(f"    {line}\n" for line in lines)), machine)


def times(timeline: Timeline, rank: int = 0) -> list[tuple[str, float, float]]:
    """What ran when on a rank, in list order; events left out."""
    spans = sorted(timeline.of(rank=rank).spans, key=lambda span: span.op_index)
    return [(s.name, s.start_s, s.end_s) for s in spans if s.kind in ("compute", "comm")]


MM = 'call("aten.mm.default", w, w, out=({} := f32[8, 8]))'


def mm(name: str, stream: str = "main") -> str:
    """A matmul of one second."""
    return f"{stream}: {MM.format(name)}"


def test_streams_run_at_once_as_far_as_lanes_go() -> None:
    fast = ROUND.replace(gemm_flops=(("other", 1024.0),), memory_bandwidth=1e9)
    two = [mm("a"), mm("b", "side")]
    assert played(*two, machine=fast).makespan_s == 1
    assert played(*two, machine=fast.replace(lanes=1)).makespan_s == 2
    three = [*two, mm("c", "third")]
    assert played(*three, machine=fast).makespan_s == 1.5


def test_a_matmul_is_bound_by_arithmetic_or_by_bytes_in_whole_waves() -> None:
    assert played(mm("a"), machine=ROUND.replace(memory_bandwidth=1e9)).makespan_s == 1
    assert played(mm("a")).makespan_s == 512 / 32, "one operand read twice counts once"
    tiled = ROUND.replace(memory_bandwidth=1e9, gemm_tile=(8, 8), units=2)
    assert played(mm("a"), machine=tiled).makespan_s == 2, "a second unit idles"


def test_a_wait_waits_for_its_record() -> None:
    timeline = played(
        "main: copy(x, y)",
        "main: record(e)",
        "side: wait(e)",
        "side: copy(y, x)",
        "main: copy(y, z[0:4])",
    )
    assert times(timeline) == [("copy", 0, 1), ("copy", 1, 2), ("copy", 1, 2)]


def test_the_host_waits_for_a_stream() -> None:
    timeline = played("main: copy(x, y)", "main: host_sync()", "side: copy(x, z[0:4])")
    assert times(timeline) == [("copy", 0, 1), ("copy", 1, 2)]


def test_issuing_takes_the_host_time_and_launching_the_streams() -> None:
    lines = ("main: copy(x, y)", "side: copy(x, z[0:4])")
    timeline = played(*lines, machine=ROUND.replace(issue_s=0.5))
    assert times(timeline) == [("copy", 0.5, 1.5), ("copy", 1.0, 2.0)]
    timeline = played(lines[0], lines[0], machine=ROUND.replace(launch_s=0.25))
    assert times(timeline) == [("copy", 0, 1.25), ("copy", 1.25, 2.5)]


COLLECTIVES = {
    "all_gather": ("all_gather(x, z, team=tp)", 16),
    "reduce_scatter": ('reduce_scatter(z, x, reduce="sum", team=tp)', 16),
    "all_reduce": ('all_reduce(z, z, reduce="sum", team=tp)', 32),
    "broadcast": ("broadcast(z, z, root=0, team=tp)", 32),
    "all_to_all": ("all_to_all(x, y, team=tp)", 8),
    "barrier": ("barrier(team=tp)", 0),
}


@pytest.mark.parametrize(("text", "nbytes"), COLLECTIVES.values(), ids=COLLECTIVES)
def test_bytes_of_a_collective(text: str, nbytes: int) -> None:
    assert played(f"main: {text}").makespan_s == nbytes / 16


def test_a_collective_starts_when_all_have_come() -> None:
    late = parse(
        "def late(both: Team[[0, 1]], x: f32[4], y: f32[4], z: f32[8]):\n    ranks(0)\n"
        "    main: copy(x, y)\n    main: copy(x, y)\n    main: all_gather(x, z, team=both)\n"
    )
    early = parse(
        "def early(both: Team[[0, 1]], x: f32[4], z: f32[8]):\n    ranks(1)\n"
        "    main: all_gather(x, z, team=both)\n"
    )
    timeline = simulate([late, early], ROUND)
    assert times(timeline, 0)[-1] == ("all_gather", 2, 3)
    assert times(timeline, 1) == [("all_gather", 0, 3)], "what it waits counts"


def test_collectives_of_a_team_follow_one_another_on_any_stream() -> None:
    timeline = played(
        "main: all_gather(x, z, team=tp)", "side: all_gather(y, v.view(64)[0:8], team=tp)"
    )
    assert [end for *_, end in times(timeline)] == [1, 2]
    apart = played(
        'main: all_gather(x, z, team=tp, backend="gloo")',
        'side: all_gather(y, v.view(64)[0:8], team=tp, backend="peer")',
    )
    assert apart.makespan_s < 2


def test_messages_go_both_ways_at_once_in_a_group() -> None:
    timeline = played("main: group(send(x, peer=tp.rank + 1), recv(y, peer=tp.rank - 1))")
    assert times(timeline) == [("group", 0, 1)]


def test_copies_the_same_way_share_the_link() -> None:
    head = "full = alloc(f32[8], symmetric=tp)"
    one = "main: put(x, full[0], peer=tp.rank + 1)"
    both = played(head, one, "side: put(y, full[1], peer=tp.rank + 1)", "main: free(full)")
    assert [end for *_, end in times(both)] == [1, 1]
    across = played(head, one, "side: get(full[1], y, peer=tp.rank + 1)", "main: free(full)")
    assert [end for *_, end in times(across)] == [0.5, 0.5]


def test_a_transfer_may_take_a_lane_or_steal_from_compute() -> None:
    fast = ROUND.replace(memory_bandwidth=1e9, lanes=1)
    lines = [mm("a"), "comm: all_gather(x, z, team=tp)"]
    assert played(*lines, machine=fast).makespan_s == 1
    lane = fast.replace(links=(("gloo", Link(latency_s=0, bandwidth=16, lane=1)),))
    assert played(*lines, machine=lane).makespan_s == 2
    thief = fast.replace(links=(("gloo", Link(latency_s=0, bandwidth=16, steals=0.5)),))
    assert played(*lines, machine=thief).makespan_s == 1.5


def test_an_expect_waits_for_the_peer() -> None:
    lines = (
        "def p(tp: Team[2], x: f32[rows[tp.rank]], y: f32[rows[tp.rank]], z: f32[4]):\n"
        "    rows = table(tp, 4, 12)\n"
        "    full = alloc(f32[8], symmetric=tp)\n"
        "    main: copy(x, y)\n"
        "    main: notify(ready, to=tp.others)\n"
        "    side: expect(ready, tp.rank + 1)\n"
        "    side: get(full[0], z, peer=tp.rank + 1)\n"
        "    side: free(full)\n"
    )
    timeline = simulate(parse(lines), ROUND)
    assert times(timeline, 0) == [("copy", 0, 1), ("get", 3, 3.5)]
    assert times(timeline, 1) == [("copy", 0, 3), ("get", 1, 1.5)]


def test_a_slot_has_two_copies() -> None:
    take = [
        'full{} = alloc(f32[8], symmetric=tp, storage="s", stream="side")',
        "side: copy(x, full{}[0])",
    ]
    lines = [line.format(i) for i in range(3) for line in take]
    frees = ["main: copy(x, y)", "main: copy(x, y)", "main: free(full0)", "main: free(full1)"]
    timeline = played(*lines[:4], *frees, *lines[4:], "side: free(full2)")
    assert times(timeline)[-1] == ("copy", 2, 3), "the third take waits for the first free"


STUCK = {
    "two collectives in two orders": (
        "barrier(team=one)\n    main: barrier(team=two)",
        "barrier(team=two)\n    main: barrier(team=one)",
    ),
    "two receipts": ("recv(x, peer=1, team=one)", "recv(x, peer=0, team=one)"),
    "a message that nobody takes": ("send(x, peer=1, team=one)", "copy(x, x)"),
    "a collective that one leaves out": ("barrier(team=one)", "copy(x, x)"),
    "a signal that nobody raises": ("expect(go, 1, team=one)", "copy(x, x)"),
    "a value that is never reached": (
        "expect(go, 1, team=one, value=2)",
        "notify(go, to=0, team=one)",
    ),
}


@pytest.mark.parametrize("lines", STUCK.values(), ids=STUCK)
def test_stuck(lines: tuple[str, str]) -> None:
    programs = [
        parse(
            f"def p{rank}(one: Team[[0, 1]], two: Team[[0, 1]], x: f32[4]):\n"
            f"    ranks({rank})\n    main: {line}\n"
        )
        for rank, line in enumerate(lines)
    ]
    with pytest.raises(SoundnessError, match="for ever: `interlace check` says where"):
        simulate(programs, ROUND)


def test_a_wait_for_nothing() -> None:
    with pytest.raises(SoundnessError, match="not recorded"):
        played("main: wait(e)")


def test_two_programs_on_one_rank() -> None:
    program = parse(HEAD + "    main: copy(x, y)\n")
    with pytest.raises(ProgramError, match="two Programs"):
        simulate([program, program], ROUND)


def test_a_concrete_program_plays_as_its_own_rank() -> None:
    program = parse(HEAD + "    main: all_gather(x, z, team=tp)\n")
    whole = simulate(program, ROUND)
    assert simulate([program.instantiate(r) for r in (0, 1)], ROUND).spans == whole.spans


def test_every_op_but_free_memory_has_a_span() -> None:
    program = parse(
        HEAD + "    a = empty(f32[4])\n    main: copy(x, a)\n    main: record(e)\n"
        "    side: wait(e)\n    side: barrier(team=tp)\n    side: free(a)\n"
    )
    spans = simulate(program, default_machine("cpu")).of(rank=0).spans
    kinds = {span.op_index: span.kind for span in spans}
    assert kinds == {1: "compute", 2: "sync", 3: "sync", 4: "sync"}
    assert {op_kind(program.ops[i]) for i in (0, 5)} == {"memory"}


def test_a_long_program_takes_no_more_for_each_op() -> None:
    machine = default_machine("cuda")

    def work(count: int) -> tuple[int, Callable[[], object]]:
        program = two_streams(count)
        return 4 * len(program.ops), lambda: simulate(program, machine)

    assert per_op(work, 200) < 300
    timeline = simulate(two_streams(400), machine)
    assert len({(span.rank, span.op_index) for span in timeline.spans}) == 4 * 400


def test_messages_go_by_gloo_where_collectives_go_through_memory_of_peers() -> None:
    machine = default_machine("cpu")

    def cost(backend: str) -> object:
        program = parse(f"""def f(tp: Team[2], x: f32[1024]):
    main: group(send(x, peer=tp.rank + 1, backend="{backend}"))
""")
        (group,) = program.ops
        assert isinstance(group, Group)
        teams = {team.name: team for team in program.teams}
        return op_cost(group.ops[0], program.boxes(0), machine, teams, program.where(0))

    assert cost("peer") == cost("gloo")
