"""schedule: communication under compute, decided alike on all ranks, bounded in what it moves."""

from __future__ import annotations

import pytest

from interlace.cost import Machine, default_machine, simulate
from interlace.cost.machine import Link
from interlace.errors import PassError
from interlace.ir import Alloc, Call, Collective, Expect, Notify, Op, Program, parse, validate
from interlace.passes.insert_sync import InsertSync
from interlace.passes.plan_memory import PlanMemory
from interlace.passes.schedule import Schedule
from interlace.verify import check

SLOW = default_machine("cpu").replace(
    links=(("gloo", Link(latency_s=0.0, bandwidth=1e9)), ("peer", Link(latency_s=0, bandwidth=1e9)))
)


def finish(program: Program) -> Program:
    """The scheduled Program, ready to run."""
    program = InsertSync().run(PlanMemory().run(program))
    validate(program)
    check(program).raise_if_unsound()
    return program


def hidden(program: Program, machine: Machine = SLOW) -> tuple[float, float]:
    """How much of the communication compute hides, and how much shorter that makes the run."""
    serial = simulate(finish(program), machine)
    overlapped = simulate(finish(Schedule().run(program)), machine)
    assert serial.figures(0).hidden == 0
    return overlapped.figures(0).hidden, serial.makespan_s / overlapped.makespan_s


BACKWARD = """
def backward(tp: Team[2], x: f32[256, 512], w: f32[512, 512], dy: f32[512, 512]):
    site(1, "all_gather")
    site(2, "matmul_reduce_scatter")
    full = empty(f32[512, 512])
    main: all_gather(x, full, team=tp, site=1)
    main: call("aten.mm.default", full.permute(1, 0), dy, out=(dw := f32[512, 512]))
    main: call("aten.mm.default", dy, w, out=(dfull := f32[512, 512]))
    dx = empty(f32[256, 512])
    main: reduce_scatter(dfull, dx, reduce="sum", team=tp, site=2)
    main: call("aten.mul.Tensor", dx, 2.0, out=(r := f32[256, 512]))
    return dw, r
"""
GRADIENTS = """
def gradients(dp: Team[2], a: f32[512, 512], b: f32[512, 512], w: f32[512, 512]):
    main: call("aten.mm.default", a, b, out=(g3 := f32[512, 512]))
    r3 = empty(f32[512, 512])
    main: all_reduce(g3, r3, reduce="avg", team=dp)
    main: call("aten.mm.default", a, w, out=(d2 := f32[512, 512]))
    main: call("aten.mm.default", d2, b, out=(g2 := f32[512, 512]))
    r2 = empty(f32[512, 512])
    main: all_reduce(g2, r2, reduce="avg", team=dp)
    main: call("aten.mm.default", d2, w, out=(d1 := f32[512, 512]))
    main: call("aten.mm.default", d1, w, out=(d0 := f32[512, 512]))
    return r3, r2, d0
"""
TWO_BATCHES = """
def halves(tp: Team[2], x: f32[512, 512], z: f32[512, 512], w: f32[512, 512]):
    main: call("aten.mm.default", x, w, out=(a := f32[512, 512]))
    ra = empty(f32[512, 512])
    main: all_reduce(a, ra, reduce="sum", team=tp)
    main: call("aten.mm.default", ra, w, out=(ya := f32[512, 512]))
    main: call("aten.mm.default", z, w, out=(b := f32[512, 512]))
    rb = empty(f32[512, 512])
    main: all_reduce(b, rb, reduce="sum", team=tp)
    main: call("aten.mm.default", rb, w, out=(yb := f32[512, 512]))
    return ya, yb
"""
CHUNKS = """
def chunks(tp: Team[4], x: f32[128, 512], w: f32[512, 512]):
    site(1, "all_gather_matmul", strategy="peer", protocol="get")
    full = alloc(f32[512, 512], symmetric=tp)
    main: copy(x, full[tp.rank], site=1)
    main: notify(ready, to=tp.others, site=1)
    y = empty(f32[512, 512])
    main: call("aten.mm.out", full[tp.rank], w, out=y[tp.rank], site=1)
    main: expect(ready, tp.rank + 1, site=1)
    main: get(full[tp.rank + 1], peer=tp.rank + 1, site=1)
    main: call("aten.mm.out", full[tp.rank + 1], w, out=y[tp.rank + 1], site=1)
    main: expect(ready, tp.rank + 2, site=1)
    main: get(full[tp.rank + 2], peer=tp.rank + 2, site=1)
    main: call("aten.mm.out", full[tp.rank + 2], w, out=y[tp.rank + 2], site=1)
    main: expect(ready, tp.rank + 3, site=1)
    main: get(full[tp.rank + 3], peer=tp.rank + 3, site=1)
    main: call("aten.mm.out", full[tp.rank + 3], w, out=y[tp.rank + 3], site=1)
    return y
"""
CASES = {
    "backward: gather under dgrad, scatter under wgrad": (BACKWARD, 0.9),
    "gradients reduced under backward": (GRADIENTS, 0.9),
    "one half computes while the other travels": (TWO_BATCHES, 0.9),
    "chunks arrive while others are multiplied": (CHUNKS, 0.9),
}


@pytest.mark.parametrize(("text", "least"), CASES.values(), ids=CASES)
def test_communication_runs_under_compute(text: str, least: float) -> None:
    fraction, speedup = hidden(parse(text))
    assert fraction >= least, f"{fraction:.2f} hidden"
    assert speedup > 1.05, f"{speedup:.2f} times as fast"
    if text == BACKWARD:  # what feeds communication comes first
        made = order(Schedule().run(parse(text)), Call, Collective)
        assert made == ["all_gather", "dfull", "reduce_scatter", "dw", "r"]


def order(program: Program, *types: type[Op]) -> list[str]:
    """What the ops of these types are called, in list order."""
    found: list[str] = []
    for op in program.ops:
        if isinstance(op, types):
            found.append(op.fresh[0].name if isinstance(op, Call) else getattr(op, "kind", ""))
    return found


def test_a_window_of_nothing_makes_no_sense() -> None:
    with pytest.raises(PassError, match="schedule: window=0"):
        Schedule(window=0).run(parse(BACKWARD))


def layers(count: int) -> Program:
    """Weights gathered for one layer after another, as FSDP does."""
    lines = [
        f"def p(dp: Team[2], x: f32[4, 4], {', '.join(f'w{i}: f32[2, 4]' for i in range(count))}):"
    ]
    for i in range(count):
        lines += [
            f"    full{i} = empty(f32[4, 4])",
            f"    main: all_gather(w{i}, full{i}, team=dp)",
            f'    main: call("aten.mm.default", {f"y{i - 1}" if i else "x"}, full{i}, '
            f"out=(y{i} := f32[4, 4]))",
        ]
    return parse("\n".join([*lines, f"    return y{count - 1}"]))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_no_more_than_a_window_is_gathered_ahead(window: int) -> None:
    program = Schedule(window=window).run(layers(12))
    ahead = most = 0
    for op in program.ops:
        ahead += isinstance(op, Collective)
        most = max(most, ahead)
        ahead -= isinstance(op, Call)
    assert 1 <= most <= window + 1
    assert order(program, Call) == [f"y{i}" for i in range(12)]


def backward_of(count: int) -> Program:
    """Backward of so many layers under sequence parallelism; each gathers its input again for the
    gradient of its weight, which nothing awaits."""
    given = ", ".join(f"x{i}: f32[2, 4], w{i}: f32[4, 4]" for i in range(count))
    lines = [f"def backward(tp: Team[2], g{count}: f32[2, 4], {given}):"]
    for i in reversed(range(count)):
        lines += [
            f"    y{i} = empty(f32[4, 4])",
            f"    main: all_gather(g{i + 1}, y{i}, team=tp)",
            f'    main: call("aten.mm.default", y{i}, w{i}, out=(d{i} := f32[4, 4]))',
            f"    g{i} = empty(f32[2, 4])",
            f'    main: reduce_scatter(d{i}, g{i}, team=tp, reduce="sum")',
            f"    z{i} = empty(f32[4, 4])",
            f"    main: all_gather(x{i}, z{i}, team=tp)",
            f'    main: call("aten.mm.default", z{i}, y{i}, out=(dw{i} := f32[4, 4]))',
        ]
    results = ", ".join(f"dw{i}" for i in range(count))
    return parse("\n".join([*lines, f"    return g0, {results}"]))


def test_temporaries_of_a_backward_do_not_grow_with_layers() -> None:
    arenas: list[int] = []
    for count in (8, 32):
        program = PlanMemory().run(Schedule().run(backward_of(count)))
        buffers = [b for b in program.buffers().values() if b.storage == "arena"]
        arenas.append(max(b.offset for b in buffers))
    assert arenas[0] == arenas[1]


def test_uneven_ranks_decide_alike() -> None:
    """Graphs that differ in local sizes alone become schedules that differ in nothing else."""
    small, large = parse(BACKWARD), parse(BACKWARD.replace("512", "8").replace("256", "4"))
    kinds = [
        [(type(op), op.stream, op.site) for op in finish(Schedule().run(program)).ops]
        for program in (small, large)
    ]
    assert kinds[0] == kinds[1]


def test_signals_stand_beside_what_they_serve() -> None:
    ops = Schedule().run(parse(CHUNKS)).ops
    for index, op in enumerate(ops):
        if isinstance(op, Expect):
            assert type(ops[index + 1]).__name__ == "Get", "right before its copy"
            assert op.stream == "comm"
        if isinstance(op, Notify):
            assert type(ops[index - 1]).__name__ == "Copy", "right after what it tells of"
        if isinstance(op, Alloc):
            assert op.buffer.name in str(ops[index + 1])


def test_a_pipeline_of_two_programs_keeps_its_messages_in_order() -> None:
    text = """
def {name}(pipe: Team[[0, 1]], x: f32[4, 4], w: f32[4, 4]):
    ranks({rank})
    main: call("aten.mm.default", x, w, out=(a := f32[4, 4]))
    b = empty(f32[4, 4])
    {messages}
    main: call("aten.mm.default", b, w, out=(c := f32[4, 4]))
    return c, a
"""
    first = "main: send(a, peer=1)\n    main: recv(b, peer=1)"
    second = "main: recv(b, peer=0)\n    main: send(a, peer=0)"
    pair = [
        parse(text.format(name="one", rank=0, messages=first)),
        parse(text.format(name="two", rank=1, messages=second)),
    ]
    done = [InsertSync().run(PlanMemory().run(Schedule().run(program))) for program in pair]
    assert check(done).sound
    assert check(done, in_order=True).sound


ALONE = """
def f(tp: Team[2], x: f32[4, 8], w: f32[8, 8], v: f32[8, 8]):
    main: call("aten.mm.default", x, w, out=(y := f32[4, 8]))
    z = empty(f32[4, 8])
    main: all_reduce(y, z, reduce="sum", team=tp)
    main: call("aten.mm.default", {after}, v, out=(t := f32[4, 8]))
    return z, t
"""


@pytest.mark.parametrize(("after", "stream"), [("z", "main"), ("x", "comm")])
def test_a_collective_with_nothing_to_run_under_it_needs_no_event(after: str, stream: str) -> None:
    made = finish(Schedule().run(parse(ALONE.format(after=after))))
    (reduced,) = (op for op in made.ops if isinstance(op, Collective))
    assert reduced.stream == stream
    assert (made.streams() == ("main",)) == (stream == "main")


CASTS = """
def casts(tp: Team[RANKS], dy: f8e5m2[512, 512], w: bf16[512, 512], v: bf16[512, 512],
          u: bf16[512, 512], a: f32[16], b: f32[16], c: f32[16]):
    full = empty(f8e5m2[ROWS, 512])
    main: all_gather(dy, full, team=tp)
    main: call("interlace.float8_across.default", w, a, True, 1e-37, f8e4m3, out=(cw := f8e4m3[512, 512]))
    main: call("interlace.float8_mm.default", full, cw.permute(1, 0), 1, None, False, bf16, out=(d := bf16[ROWS, 512]))
    main: call("interlace.float8_across.default", v, b, True, 1e-37, f8e4m3, out=(cv := f8e4m3[512, 512]))
    main: call("interlace.float8_mm.default", full, cv.permute(1, 0), 1, None, False, bf16, out=(e := bf16[ROWS, 512]))
    main: call("interlace.float8_across.default", u, c, True, 1e-37, f8e4m3, out=(cu := f8e4m3[512, 512]))
    main: call("interlace.float8_mm.default", full, cu.permute(1, 0), 1, None, False, bf16, out=(f := bf16[ROWS, 512]))
    return d, e, f
"""  # noqa: E501


@pytest.mark.parametrize(("ranks", "early"), [(2, 1), (3, 2), (4, 3)])
def test_no_more_weights_are_cast_under_a_gather_than_it_hides(ranks: int, early: int) -> None:
    """A cast takes 1 / (ranks - 1) of a gather; made earlier, its result waits in memory."""
    text = CASTS.replace("RANKS", str(ranks)).replace("ROWS", str(512 * ranks))
    for others in ("", " dp: Team[8],"):  # a team that gathers nothing for them
        given = text.replace("casts(", f"casts({others}")
        calls = [op.fn for op in Schedule().run(parse(given)).ops if isinstance(op, Call)]
        assert calls.index("interlace.float8_mm.default") == early
