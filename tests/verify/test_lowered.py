"""Schedules that the passes make: sound as they are, unsound without any one of their order ops."""

from __future__ import annotations

import pytest

from interlace.ir import Alloc, Expect, Free, Notify, Op, Program, Record, Wait, parse
from interlace.options import Options
from interlace.passes import lower
from interlace.strategies import StrategyName
from interlace.verify import check

SITES = {
    "all_gather_matmul": """
def site(tp: Team[3], x: f32[4, 8], w: f32[8, 6]):
    full = empty(f32[12, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := f32[12, 6]))
    return y
""",
    "matmul_reduce_scatter": """
def site(tp: Team[3], x: f32[12, 8], w: f32[8, 6]):
    main: call("aten.mm.default", x, w, out=(p := f32[12, 6]))
    y = empty(f32[4, 6])
    main: reduce_scatter(p, y, reduce="sum", team=tp)
    return y
""",
    "matmul_all_reduce": """
def site(tp: Team[3], x: f32[12, 8], w: f32[8, 6]):
    main: call("aten.mm.default", x, w, out=(p := f32[12, 6]))
    y = empty(f32[12, 6])
    main: all_reduce(p, y, reduce="sum", team=tp)
    return y
""",
}

STRATEGIES: list[StrategyName | tuple[StrategyName, str]] = [
    *("serial", "pipeline", "ring"),
    *(("peer", protocol) for protocol in ("get", "put")),
]


def lowered(site: str, strategy: StrategyName | tuple[StrategyName, str]) -> Program:
    """The schedule of a site."""
    name, protocol = strategy if isinstance(strategy, tuple) else (strategy, None)
    return lower(parse(SITES[site]), Options(strategy=name), protocol=protocol)


def matters(program: Program, op: Op) -> bool:
    """Returns True if the schedule needs the op."""
    if isinstance(op, Free):
        return program.buffers()[op.buffer].kind == "symmetric"
    if isinstance(op, Wait):
        at = next(i for i, other in enumerate(program.ops) if other == _record(program, op))
        stream = program.ops[at].stream
        before = [other for other in program.ops[:at] if other.stream == stream]
        # A use of the arena waits for its Alloc too, which takes effect when it is issued.
        return not (before and isinstance(before[-1], Alloc))
    return isinstance(op, Expect | Notify)


def _record(program: Program, wait: Wait) -> Record:
    return next(
        op for op in program.ops if isinstance(op, Record) and op.event == wait.event
    )  # fmt: skip


@pytest.mark.parametrize(
    "strategy", STRATEGIES, ids=lambda s: s if isinstance(s, str) else "-".join(s)
)
@pytest.mark.parametrize("site", SITES)
def test_schedule(site: str, strategy: StrategyName | tuple[StrategyName, str]) -> None:
    program = lowered(site, strategy)
    for in_order in (False, True):
        report = check(program, in_order=in_order)
        assert report.sound, f"{program}\n{report}"
    for i, op in enumerate(program.ops):
        if matters(program, op):
            ops = (*program.ops[:i], *program.ops[i + 1 :])
            report = check(program.replace(ops=ops))
            assert not report.sound, f"nobody misses line {i}, {op}, of\n{program}"
