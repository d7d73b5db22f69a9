"""A Program of four ranks with a plausible timeline, for the tests of this room."""

from __future__ import annotations

from interlace.cost.timeline import Span, Timeline
from interlace.ir import (
    Alloc,
    Call,
    Collective,
    Copy,
    Free,
    Get,
    Program,
    parse,
)
from interlace.trace import arrows

RANKS = 4

TEXT = """
def all_gather_linear(
    tp: Team[4], x: bf16[2048, 8192], w: bf16[8192, 1024], y: out[bf16[8192, 1024]]
):
    site(1, "all_gather_matmul", "layers.0.mlp.up", strategy="peer", protocol="get", chunks=4,
         reason="peer is 1.4x faster than serial", serial_ms=2.0, predicted_ms=1.4)
    site(2, "all_reduce", "loss", reason="a lone all_reduce feeds no matmul")
    full = alloc(bf16[8192, 8192], symmetric=tp, site=1)
    main: copy(x, full[tp.rank], site=1)
    main: notify(ready, to=tp.others, site=1)
    main: call("aten.mm.out", full[tp.rank], w, out=y[tp.rank], site=1, loc="layers.0.mlp.up")
    comm: expect(ready, tp.rank + 1, site=1)
    comm: get(full[tp.rank + 1], peer=tp.rank + 1, site=1)
    comm: record(e1)
    main: wait(e1)
    main: call("aten.mm.out", full[tp.rank + 1], w, out=y[tp.rank + 1], site=1,
               loc="layers.0.mlp.up")
    comm: expect(ready, tp.rank + 2, site=1)
    comm: get(full[tp.rank + 2], peer=tp.rank + 2, site=1)
    comm: record(e2)
    main: wait(e2)
    main: call("aten.mm.out", full[tp.rank + 2], w, out=y[tp.rank + 2], site=1,
               loc="layers.0.mlp.up")
    comm: expect(ready, tp.rank + 3, site=1)
    comm: get(full[tp.rank + 3], peer=tp.rank + 3, site=1)
    comm: record(e3)
    main: wait(e3)
    main: call("aten.mm.out", full[tp.rank + 3], w, out=y[tp.rank + 3], site=1,
               loc="layers.0.mlp.up")
    main: call("aten.gelu.out", y, out=y)
    main: all_reduce(y, y, reduce="sum", team=tp, site=2)
    comm: free(full)
"""

SERIAL = """
def all_gather_linear(
    tp: Team[4], x: bf16[2048, 8192], w: bf16[8192, 1024], y: out[bf16[8192, 1024]]
):
    site(1, "all_gather_matmul", "layers.0.mlp.up", strategy="serial")
    site(2, "all_reduce", "loss", strategy="serial")
    full = alloc(bf16[8192, 8192], site=1)
    main: all_gather(x, full, team=tp, site=1)
    main: all_gather(x, full, team=tp, site=1)
    main: call("aten.mm.out", full, w, out=y, site=1, loc="layers.0.mlp.up")
    main: call("aten.gelu.out", y, out=y)
    main: call("aten.gelu.out", y, out=y)
    main: call("aten.gelu.out", y, out=y)
    main: call("aten.gelu.out", y, out=y)
    main: all_reduce(y, y, reduce="sum", team=tp, site=2)
    main: free(full)
"""

SECONDS = {Call: 0.3e-3, Get: 0.25e-3, Copy: 0.05e-3, Collective: 0.4e-3}


def sample() -> Program:
    """One all-gather into a matmul by peer copies, and a lone all-reduce."""
    return parse(TEXT)


def serial_sample() -> Program:
    """The same on one stream: it computes as long, and communicates in between."""
    return parse(SERIAL)


def run(program: Program, source: str = "predicted", pace: float = 1.0) -> Timeline:
    """A timeline that respects the Program's arrows; `pace` makes rank r slower by r * pace."""
    ends: dict[tuple[int, int], float] = {}
    before = arrows([program])
    spans: list[Span] = []
    for index, op in enumerate(program.ops):
        for rank in range(RANKS):
            free = max(
                (s.end_s for s in spans if (s.rank, s.stream) == (rank, op.stream)), default=0
            )
            own = SECONDS.get(type(op), 2e-6) * (1 + 0.07 * rank * (pace - 1)) * pace
            ready = [ends[a.source] for a in before if a.target == (rank, index)]
            kind = "compute" if isinstance(op, Call) else "sync"
            kind = "comm" if isinstance(op, Get | Collective | Copy) else kind
            kind = "memory" if isinstance(op, Alloc | Free) else kind
            end = max([free, *ready]) + own
            name = op.fn if isinstance(op, Call) else type(op).__name__.lower()
            spans.append(Span(rank, op.stream, index, name, free, end, op.site, kind))
            ends[rank, index] = end
    return Timeline(tuple(spans), program.name, source)
