"""Planted faults: each one breaks a sound schedule, and the verifier names it and its ops."""

from __future__ import annotations

import pytest
from tests.verify.schedules import moved, on_ranks, programs, replaced, text_of, without

from interlace.ir import Program
from interlace.verify import Report, check

SCHEDULES = (
    "all_gather_matmul_peer",
    "all_gather_matmul_ring",
    "matmul_reduce_scatter_put",
    "two_stages",
    "gradients",
    "slots",
    "fused_layer",
)

PEER, RING, PUT, STAGES, MESH, SLOTS, FUSED = map(text_of, SCHEDULES)

REDUCE = """
def reduce(tp: Team[3], x: f32[4], y: out[f32[4]]):
    main: copy(x, y)
    main: reduce(x, y, reduce="sum", root=0, team=tp)
"""

SEND = "send(full.chunk(tp.rank, rows), peer=tp.rank + 1)"
RECV = "recv(full.chunk(tp.rank - 1, rows), peer=tp.rank - 1)"

OWN = FUSED[FUSED.index("        part(\n            call(") : FUSED.index("        site=2,")]
FIRST = '        part(call("aten.mm.out", h[tp.rank + 1]'
FUSED_OWN_FIRST = FUSED.replace(OWN, "").replace(FIRST, OWN + FIRST)

SET = list[Program] | tuple[Program, ...]

FAULTS: dict[str, tuple[SET, str, tuple[str, ...]]] = {
    "dropped wait": (
        programs(without(PEER, "main: wait(e2)")),
        "race",
        ("comm: get(full[tp.rank + 2]", "main: call("),
    ),
    "dropped record": (
        programs(without(PEER, "record(e3)")),
        "event",
        ("main: wait(e3)",),
    ),
    "wait for a stale event": (
        programs(replaced(PEER, "wait(e2)", "wait(e1)")),
        "race",
        ("comm: get(full[tp.rank + 2]", "full[tp.rank + 2], w"),
    ),
    "dropped join with the other stream": (
        programs(without(PUT, "wait(sent)")),
        "race",
        ("comm: put(t3", "main: free(parts)"),
    ),
    "early free on the same stream": (
        programs(moved(PEER, "main: free(full)", "main: wait(e3)")),
        "use-after-free",
        ("main: free(full)", "full[tp.rank + 3], w"),
    ),
    "early free on another stream": (
        programs(replaced(SLOTS, "main: free(b)", "comm: free(b)")),
        "race",
        ("aten.add.out", "comm: free(b)"),
    ),
    "double free": (
        programs(PEER + "    main: free(full)\n"),
        "double-free",
        ("main: free(full)", "main: free(full)"),
    ),
    "forgotten free of a slot": (
        programs(without(PEER, "main: free(full)")),
        "leak",
        ("alloc(f32[8, 4], symmetric=tp)",),
    ),
    "use before the slot is taken": (
        programs(without(without(PEER, "record(e0)"), "wait(e0)")),
        "race",
        ("full = alloc(", "comm: get(full[tp.rank + 1]"),
    ),
    "dropped notify": (
        programs(without(PEER, "notify(ready")),
        "deadlock",
        ("comm: expect(ready, tp.rank + 1",),
    ),
    "notify before the write": (
        programs(moved(PEER, "notify(ready", "copy(x, full")),
        "race",
        ("copy(x, full[tp.rank]", "comm: get(full[tp.rank + 1]"),
    ),
    "expect with a value that never comes": (
        programs(replaced(PUT, "expect(here, tp.others", "expect(here, tp.others, value=2")),
        "deadlock",
        ("main: expect(here, tp.others, value=2",),
    ),
    "signal that does not grow": (
        programs(replaced(SLOTS, "value=2", "value=1", 0)),
        "signal",
        ("main: notify(ready, to=tp.others)", "comm: notify(ready, to=tp.others)"),
    ),
    "signal raised on two streams in no order": (
        programs(replaced(without(SLOTS, "wait(computed)"), "copy(t[tp.rank]", "copy(x")),
        "signal",
        ("main: notify(ready, to=tp.others)", "comm: notify(ready, to=tp.others, value=2)"),
    ),
    "get from the wrong peer": (
        programs(replaced(PEER, "peer=tp.rank + 2", "peer=tp.rank + 3")),
        "race",
        ("comm: get(full[tp.rank + 2]", "comm: get(full[tp.rank + 2], peer=tp.rank + 3"),
    ),
    "put to the wrong peer": (
        programs(replaced(PUT, "tp.rank], peer=tp.rank + 2", "tp.rank], peer=tp.rank + 1")),
        "race",
        ("comm: put(t2, parts[tp.rank], peer=tp.rank + 1", "interlace.sum_slots"),
    ),
    "shifted chunk": (
        programs(replaced(PEER, "get(full[tp.rank + 3]", "get(full[tp.rank + 2]")),
        "race",
        ("get(full[tp.rank + 2], peer=tp.rank + 3", "full[tp.rank + 2], w"),
    ),
    "chunk that leaves rows unwritten": (
        programs(replaced(PEER, "out=y[tp.rank + 2]", "out=y[tp.rank + 1]")),
        "uninitialized",
        ("return",),
    ),
    "storage used again without an order": (
        programs(without(SLOTS, "main: wait(copied)")),
        "race",
        ("comm: copy(t[tp.rank]", "main: free(t)"),
    ),
    "storage overwritten while it is read later": (
        programs(
            replaced(
                STAGES,
                "h = alloc(f32[4, 3])",
                'h = alloc(f32[4, 3], storage="s")\n'
                '    g = alloc(f32[4, 3], storage="s")\n    main: call("aten.relu.out", h, out=g)',
                0,
            )
        ),
        "uninitialized",
        ("aten.relu.out",),
    ),
    "third take of a slot before the first is free": (
        programs(
            replaced(
                without(SLOTS, "main: free(a)"),
                "    u = alloc(",
                '    c = alloc(f32[4, 4], symmetric=tp, storage="slot")\n'
                "    main: free(c)\n    u = alloc(",
            )
            + "\n    main: free(a)\n"
        ),
        "deadlock",
        ("c = alloc(",),
    ),
    "slot taken on one rank alone": (
        on_ranks(SLOTS, replaced(SLOTS, 'storage="slot"', 'storage="lone"', 0)),
        "mismatch",
        ("a = alloc(",),
    ),
    "slot of another size on one rank": (
        on_ranks(PEER, replaced(PEER, "full = alloc(f32[8, 4]", "full = alloc(f32[12, 4]")),
        "mismatch",
        ("full = alloc(", "full = alloc("),
    ),
    "collectives swapped on one rank": (
        on_ranks(MESH, moved(MESH, "comm: reduce_scatter", "comm: all_gather")),
        "mismatch",
        ("comm: all_gather", "comm: reduce_scatter"),
    ),
    "collectives of two teams swapped on two ranks": (
        on_ranks(MESH, moved(MESH, "comm: reduce_scatter", "comm: all_reduce"), (1, 2)),
        "deadlock",
        ("comm: all_reduce", "comm: reduce_scatter"),
    ),
    "collective missing on one rank": (
        on_ranks(MESH, without(MESH, "comm: reduce_scatter")),
        "mismatch",
        ("comm: reduce_scatter",),
    ),
    "collective of another element type": (
        on_ranks(MESH, MESH.replace("sums = alloc(f32", "sums = alloc(i32")),
        "mismatch",
        ("comm: all_reduce", "comm: all_reduce"),
    ),
    "collective of another shape": (
        on_ranks(MESH, replaced(MESH, "all_gather(g, full", "all_gather(g[0:2], full[0:4]")),
        "mismatch",
        ("comm: all_gather", "comm: all_gather"),
    ),
    "reduction of another shape": (
        on_ranks(REDUCE, replaced(REDUCE, "reduce(x, ", "reduce(x[0:2], "), (2,)),
        "mismatch",
        ("main: reduce(x,", "main: reduce(x[0:2],"),
    ),
    "another root on one rank": (
        on_ranks(REDUCE, replaced(REDUCE, "root=0", "root=1"), (2,)),
        "mismatch",
        ("root=0", "root=1"),
    ),
    "another reduction on one rank": (
        on_ranks(MESH, replaced(MESH, '"sum", team=dp', '"max", team=dp')),
        "mismatch",
        ("comm: all_reduce", "comm: all_reduce"),
    ),
    "another backend on one rank": (
        on_ranks(MESH, replaced(MESH, "full, team=tp", 'full, team=tp, backend="nccl"')),
        "mismatch",
        ("comm:",),
    ),
    "gather into too few rows": (
        programs(replaced(MESH, "all_gather(g, full", "all_gather(g[0:1], full")),
        "mismatch",
        ("comm: all_gather",),
    ),
    "receive dropped": (
        programs(without(STAGES, "recv(h[2:4]")),
        "deadlock",
        ("comm: send(h[2:4]",),
    ),
    "receive of another size": (
        programs(replaced(STAGES, "recv(h[2:4]", "recv(h[2:3]")),
        "mismatch",
        ("comm: send(h[2:4]", "comm: recv(h[2:3]"),
    ),
    "sends that face each other outside of a group": (
        programs(
            replaced(
                RING,
                f"comm: group(\n        {SEND}, {RECV},\n        site=1,\n    )",
                f"comm: {SEND}\n    comm: {RECV}",
            )
        ),
        "deadlock",
        ("comm: send(", "comm: recv("),
    ),
    "event recorded too early": (
        programs(moved(STAGES, "comm: record(first)", "comm: recv(h[0:2]")),
        "race",
        ("comm: recv(h[0:2]", "aten.mm.out"),
    ),
    "result in a slot": (
        programs(PEER + "    return full\n"),
        "result",
        ("return",),
    ),
    "host waits for what only it can start": (
        programs(
            replaced(
                without(PEER, "notify(ready"),
                '    main: call("aten.mm.out", full[tp.rank], w',
                "    comm: host_sync()\n    main: notify(ready, to=tp.others)\n"
                '    main: call("aten.mm.out", full[tp.rank], w',
            )
        ),
        "deadlock",
        ("main: notify(", "comm: host_sync()", "comm: expect("),
    ),
    "part that does not await its rows": (
        programs(replaced(FUSED, "expect(arrived, tp.rank + 2), ", "")),
        "race",
        ("comm: put(x, slots[tp.rank]", 'call("aten.mm.out", slots[tp.rank + 2]'),
    ),
    "part that awaits another's rows": (
        programs(
            replaced(FUSED, "expect(arrived, tp.rank + 2), ", "expect(arrived, tp.rank + 1), ")
        ),
        "race",
        ("comm: put(x, slots[tp.rank]", 'call("aten.mm.out", slots[tp.rank + 2]'),
    ),
    "parts that write the same rows": (
        programs(replaced(FUSED, "w, out=h[tp.rank + 2]", "w, out=h[tp.rank + 1]")),
        "race",
        ("out=h[tp.rank + 1]", "out=h[tp.rank + 1]"),
    ),
    "part that reads what another writes": (
        programs(
            replaced(FUSED, "h[tp.rank + 2], v", "t[tp.rank + 1].view(-1)[0:512].view(16, 32), v")
        ),
        "race",
        ("out=t[tp.rank + 1]", "call("),
    ),
    "event of another part": (
        programs(replaced(FUSED, "wait(e2)", "wait(e1)")),
        "race",
        ("out=t[tp.rank + 2]", "comm: put(t[tp.rank + 2]"),
    ),
    "event of the last part, for what all do": (
        programs(moved(FUSED, "comm: wait(e1)", "comm: wait(e2)")),
        "race",
        ("out=t[tp.rank + 1]", "comm: put(t[tp.rank + 1]"),
    ),
    "sum that awaits too few": (
        programs(replaced(FUSED, "expect(added, tp.rank - 2), ", "")),
        "race",
        ("comm: put(t[tp.rank + 2]", "interlace.sum_slots"),
    ),
    "part that waits for what a later one does": (
        programs(
            replaced(
                replaced(
                    FUSED,
                    'part(call("aten.mm.out", h[tp.rank + 1]',
                    'part(expect(late, tp.rank + 1), call("aten.mm.out", h[tp.rank + 1]',
                ),
                "sums, out=y)",
                "sums, out=y), notify(late, to=tp.rank - 1)",
            )
        ),
        "deadlock",
        ("expect(late", "notify(late"),
    ),
    "own rows computed first, before what the others wait for": (
        programs(FUSED_OWN_FIRST),
        "deadlock",
        ("expect(added", "comm: notify(added"),
    ),
}


def named(report: Report, kind: str, fragments: tuple[str, ...]) -> bool:
    """Returns True if a finding of the kind has ops that hold the fragments."""
    return any(
        finding.kind == kind
        and all(any(part in op.text for op in finding.ops) for part in fragments)
        for finding in report.errors
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_are_sound(name: str) -> None:
    report = check(programs(text_of(name)))
    assert report.sound, str(report)
    assert check(programs(text_of(name)), fold=False).sound


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault(fault: str) -> None:
    damaged, kind, fragments = FAULTS[fault]
    report = check(damaged)
    assert named(report, kind, fragments), str(report)
    for finding in report.errors:
        assert finding.message
        assert finding.fix
        assert finding.ops
    assert check(damaged, fold=False).kinds() == report.kinds()
