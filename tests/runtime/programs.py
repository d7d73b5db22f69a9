"""Programs by hand, one for each way of overlapping, for any number of ranks.

Each is a function of the team's size that gives the text, and takes a shard `x` of rows and a
weight `w` of each rank; results are compared with the reference interpreter on the same text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import InterlaceError
from interlace.ir import Program, parse
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime.engine import BeforeOp

ROWS, K, N = 2, 3, 4


def lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def head(name: str, world: int, params: str) -> str:
    return f"def {name}(tp: Team[{world}], {params}):"


def gather_matmul_get(world: int) -> str:
    """All-gather + matmul by one-sided copies: every rank pulls the others' shards."""
    body = [
        head("gather_matmul_get", world, f"x: f32[{ROWS}, {K}], w: f32[{K}, {N}]"),
        f"    full = alloc(f32[{world * ROWS}, {K}], symmetric=tp)",
        f"    y = empty(f32[{world * ROWS}, {N}])",
        "    main: copy(x, full[tp.rank])",
        "    main: notify(ready, to=tp.others)",
        "    main: record(mine)",
        "    comm: wait(mine)",
    ]
    for k in range(1, world):
        body += [
            f"    comm: expect(ready, tp.rank + {k})",
            f"    comm: get(full[tp.rank + {k}], peer=tp.rank + {k})",
            f"    comm: record(came{k})",
        ]
    body.append('    main: call("aten.mm.out", full[tp.rank], w, out=y[tp.rank])')
    for k in range(1, world):
        body += [
            f"    main: wait(came{k})",
            f'    main: call("aten.mm.out", full[tp.rank + {k}], w, out=y[tp.rank + {k}])',
        ]
    return lines(*body, "    main: free(full)", "    return y")


def gather_matmul_put(world: int) -> str:
    """All-gather + matmul by one-sided copies: every rank pushes its shard."""
    body = [
        head("gather_matmul_put", world, f"x: f32[{ROWS}, {K}], w: f32[{K}, {N}]"),
        f"    full = alloc(f32[{world * ROWS}, {K}], symmetric=tp)",
        f"    y = empty(f32[{world * ROWS}, {N}])",
        "    main: notify(open, to=tp.others)",
        "    main: record(taken)",
        "    comm: wait(taken)",
    ]
    for k in range(1, world):
        body += [
            f"    comm: expect(open, tp.rank + {k})",
            f"    comm: put(x, full[tp.rank], peer=tp.rank + {k})",
            f"    comm: notify(ready, to=tp.rank + {k})",
        ]
    body.append("    comm: record(pushed)")
    body.append('    main: call("aten.mm.out", x, w, out=y[tp.rank])')
    for k in range(1, world):
        body += [
            f"    main: expect(ready, tp.rank - {k})",
            f'    main: call("aten.mm.out", full[tp.rank - {k}], w, out=y[tp.rank - {k}])',
        ]
    return lines(*body, "    main: wait(pushed)", "    main: free(full)", "    return y")


def gather_matmul_shift(world: int) -> str:
    """All-gather + matmul by shifting: in step k rank r has the shard of rank r - k."""
    body = [
        head("gather_matmul_shift", world, f"x: f32[{ROWS}, {K}], w: f32[{K}, {N}]"),
        f"    full = alloc(f32[{world * ROWS}, {K}])",
        f"    y = empty(f32[{world * ROWS}, {N}])",
        "    main: copy(x, full[tp.rank])",
        "    main: record(came0)",
    ]
    for k in range(1, world):
        body += [
            f"    comm: wait(came{k - 1})" if k == 1 else "",
            f"    comm: group(send(full[tp.rank - {k - 1}], peer=tp.rank + 1), "
            f"recv(full[tp.rank - {k}], peer=tp.rank - 1))",
            f"    comm: record(came{k})",
        ]
    body.append('    main: call("aten.mm.out", full[tp.rank], w, out=y[tp.rank])')
    for k in range(1, world):
        body += [
            f"    main: wait(came{k})",
            f'    main: call("aten.mm.out", full[tp.rank - {k}], w, out=y[tp.rank - {k}])',
        ]
    return lines(*body, "    return y")


def matmul_scatter_pipeline(world: int) -> str:
    """Matmul + reduce-scatter cut into two collectives of half the columns each."""
    rows, half = world * ROWS, N // 2
    return lines(
        head("matmul_scatter_pipeline", world, f"x: f32[{rows}, {K}], w: f32[{K}, {N}]"),
        f"    p = alloc(f32[2, {rows}, {half}])",
        f"    s = alloc(f32[2, {ROWS}, {half}])",
        f"    y = empty(f32[{ROWS}, {N}])",
        *(
            f'    main: call("aten.mm.out", x, w.slice(1, {c * half}, {(c + 1) * half}), '
            f"out=p.select(0, {c}))\n"
            f"    main: record(made{c})\n"
            f"    comm: wait(made{c})\n"
            f'    comm: reduce_scatter(p.select(0, {c}), s.select(0, {c}), team=tp, reduce="sum")\n'
            f"    comm: record(came{c})"
            for c in range(2)
        ),
        *(
            f"    main: wait(came{c})\n"
            f"    main: copy(s.select(0, {c}), y.slice(1, {c * half}, {(c + 1) * half}))"
            for c in range(2)
        ),
        "    return y",
    )


def scatter_by_slots(world: int) -> str:
    """Matmul + reduce-scatter: chunks put into their owners' slots, then one fixed-order sum."""
    rows = world * ROWS
    body = [
        head("scatter_by_slots", world, f"x: f32[{rows}, {K}], w: f32[{K}, {N}]"),
        f"    slots = alloc(f32[{world}, {ROWS}, {N}], symmetric=tp)",
        f"    part = alloc(f32[{rows}, {N}])",
        f"    y = empty(f32[{ROWS}, {N}])",
        "    main: notify(open, to=tp.others)",
    ]
    for k in range(1, world):
        body += [
            f'    main: call("aten.mm.out", x[tp.rank + {k}], w, out=part[tp.rank + {k}])',
            f"    main: record(made{k})",
            f"    comm: wait(made{k})",
            f"    comm: expect(open, tp.rank + {k})",
            f"    comm: put(part[tp.rank + {k}], slots[tp.rank].view({ROWS}, {N}), "
            f"peer=tp.rank + {k})",
            f"    comm: notify(ready, to=tp.rank + {k})",
        ]
    mine = f"slots[tp.rank].view({ROWS}, {N})"
    body += [
        "    comm: record(pushed)",
        f'    main: call("aten.mm.out", x[tp.rank], w, out={mine})',
    ]
    body += [f"    main: expect(ready, tp.rank + {k})" for k in range(1, world)]
    body += ['    main: call("interlace.sum_slots", slots, out=y)', "    main: wait(pushed)"]
    return lines(*body, "    main: free(slots)", "    return y")


def reduce_flat(backend: str, world: int) -> str:
    """Matmul + all-reduce on one stream."""
    return lines(
        head("reduce_flat", world, f"x: f32[{ROWS}, {K}], w: f32[{K}, {N}]"),
        f"    p = alloc(f32[{ROWS}, {N}])",
        f"    y = empty(f32[{ROWS}, {N}])",
        '    main: call("aten.mm.out", x, w, out=p)',
        f'    main: all_reduce(p, y, team=tp, reduce="sum", backend="{backend}")',
        "    return y",
    )


TEXTS = {
    "get": gather_matmul_get,
    "put": gather_matmul_put,
    "shift": gather_matmul_shift,
    "pipeline": matmul_scatter_pipeline,
    "slots": scatter_by_slots,
}
FLAT = {f"flat-{backend}": partial(reduce_flat, backend) for backend in ("gloo", "peer")}
"""Programs of one stream."""


def program_of(kind: str, world: int) -> Program:
    return parse((TEXTS | FLAT)[kind](world))


def inputs_of(program: Program, rank: int, seed: int) -> list[torch.Tensor]:
    """Small integers, so that sums are exact, different on every rank and for every seed."""
    generator = torch.Generator().manual_seed(seed * 31 + rank)
    found: list[torch.Tensor] = []
    for buffer in program.instantiate(rank).params:
        shape = [int(dim) for dim in buffer.shape if isinstance(dim, int)]
        found.append(torch.randint(-4, 5, shape, generator=generator).float())
    return found


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def prepared(kind: str, before_op: BeforeOp | None = None, **options: Any) -> Executor:
    """An Executor of a kind over the default group, prepared."""
    program = program_of(kind, dist.get_world_size())
    return executor_of(program, before_op, **options).prepare()


def executor_of(
    program: Program | str,
    before_op: BeforeOp | None = None,
    **options: object,
) -> Executor:
    """An Executor over the default group, which is the team `tp`."""
    made = Options.from_dict({"timeout_s": 20.0, **options})
    own = parse(program) if isinstance(program, str) else program
    return Executor(own, groups={"tp": world_group()}, options=made, before_op=before_op)


Outcome = tuple[str, str, float]
"""The type of the error (or "result"), its text, and the seconds it took."""


def attempt(action: Callable[[], object]) -> Outcome:
    """Does something that may raise an error of ours."""
    start = time.monotonic()
    try:
        value = action()
    except InterlaceError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "result", str(value), time.monotonic() - start
