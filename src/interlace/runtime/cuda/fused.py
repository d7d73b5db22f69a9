"""A Fused op as one persistent kernel, where one of ours does just what its parts say.

Two forms are known, with W ranks and chunk c of rank r's rows:

    gather    the own chunk's matmul, then for each other chunk: expect its arrival, its matmul
    scatter   the others' chunks: matmul into the stage, record; last the own chunk: matmul,
              expects, the sum of all slots

`bind_kernel` gives None for whatever else, and its members then run one after another: slower, and
the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interlace.ir import Arg, Box, Call, Expect, Fused, Record, View
from interlace.runtime.cuda.lanes import CounterPoint, Lane, Thunk
from interlace.runtime.values import DTYPES

if TYPE_CHECKING:
    from interlace.runtime.cuda.binder import Binder

MATMULS = ("aten.mm.out", "aten.addmm.out")
SUM = "interlace.sum_slots"


@dataclass(frozen=True, slots=True)
class Matmul:
    """A matmul of one part: boxes of its matrices."""

    a: View
    b: View
    out: View
    bias: View | None

    @classmethod
    def of(cls, op: object) -> Matmul | None:
        """What a Call multiplies; None for another op."""
        if not (isinstance(op, Call) and op.fn in MATMULS and len(op.outs) == 1):
            return None
        args: tuple[Arg, ...] = op.args
        if op.fn == "aten.addmm.out":
            if op.kwargs:
                return None
            bias, args = args[0], args[1:]
        else:
            bias = None
        a, b = args[:2]
        if not (isinstance(a, View) and isinstance(b, View)):
            return None
        if bias is not None and not isinstance(bias, View):
            return None
        return cls(a, b, op.outs[0], bias)


def rows_of(box: Box) -> tuple[int, int, int] | None:
    """Rows, columns and row stride of a matrix whose rows lie in a row each."""
    if len(box.sizes) != 2:
        return None
    rows, columns = box.sizes
    if columns != 1 and box.strides[1] != 1:
        return None
    return rows, columns, box.strides[0]


def bind_kernel(binder: Binder, lane: Lane, index: int, op: Fused) -> Thunk | None:
    """The launch of the kernel that does these parts, or None."""
    if binder.context.options.in_order:
        return None
    firsts = [part[0] for part in op.parts]
    if all(isinstance(first, Call | Expect) for first in firsts) and not any(
        isinstance(member, Record) for member in op.members
    ):
        return _gather(binder, lane, op)
    return _scatter(binder, lane, index, op)


def _gather(binder: Binder, lane: Lane, op: Fused) -> Thunk | None:
    from interlace.kernels.gather_matmul import GatherMatmul  # Triton

    box = binder.plan.box
    own, *others = op.parts
    first = Matmul.of(own[0]) if len(own) == 1 else None
    if first is None or not others:
        return None
    x, w, y = box(first.a), box(first.b), box(first.out)
    shape, out = rows_of(x), rows_of(y)
    if shape is None or out is None or shape[2] != shape[1] or out[2] != out[1]:
        return None
    rows, inner, _ = shape
    size = len(others) + 1
    team = binder.plan.where.member(_team_of(others))
    rank = team.index
    slots: str | None = None
    signal: tuple[str, str, int] | None = None
    for k, part in enumerate(others, start=1):
        chunk = (rank + k) % size
        expects = [item for item in part if isinstance(item, Expect)]
        product = Matmul.of(part[-1])
        if len(expects) != 1 or len(part) != 2 or product is None:
            return None
        (expect,) = expects
        (source,) = binder.plan.members(expect.team, expect.peer)
        told = expect.team, expect.signal, expect.value
        a, c = box(product.a), box(product.out)
        slots, signal = slots or product.a.buffer, signal or told
        fits = (
            source == chunk
            and told == signal
            and product.b == first.b
            and product.bias == first.bias
            and product.a.buffer == slots
            and product.out.buffer == first.out.buffer
            and rows_of(a) == (rows, inner, inner)
            and a.offset == chunk * rows * inner
            and rows_of(c) == out
            and c.offset - y.offset == (chunk - rank) * rows * out[1]
        )
        if not fits:
            return None
    if slots is None or signal is None or len(team.ranks) != size:
        return None
    start = y.offset - rank * rows * out[1]
    whole = Box(start, (size * rows, out[1]), (out[1], 1), y.dtype)
    spread = Box(0, (size, rows, inner), (rows * inner, inner, 1), x.dtype)
    transposed = _transposed(w)
    if transposed is None:
        return None
    bias = None if first.bias is None else binder.values.own(first.bias)
    kernel = GatherMatmul(
        rows=rows,
        inner=inner,
        columns=out[1],
        size=size,
        rank=rank,
        dtype=DTYPES[x.dtype],
        transposed=transposed,
        bias=bias is not None,
        device=binder.context.device,
    )
    values, space = binder.values, binder.links.spaces[signal[0]]
    items, value = values.items, signal[2]
    places = values.own(first.a), values.own(first.b), values.at(slots, spread)
    into = values.at(first.out.buffer, whole)
    gates = space.own(signal[1], 0)
    launch: Any = kernel.launch
    a, b, s = places

    def run() -> None:
        launch(
            *(lane.handle, items[a], items[b], items[s], items[into]),
            *(None if bias is None else items[bias], gates, (space.base + value) & 0xFFFFFFFF),
        )

    return run


def _scatter(binder: Binder, lane: Lane, index: int, op: Fused) -> Thunk | None:
    from interlace.kernels.scatter_matmul import ScatterMatmul  # Triton

    box = binder.plan.box
    *others, own = op.parts
    last = Matmul.of(own[0])
    total = own[-1]
    expects = own[1:-1]
    if last is None or not others or not (isinstance(total, Call) and total.fn == SUM):
        return None
    if not all(isinstance(item, Expect) for item in expects):
        return None
    told = {(item.team, item.signal, item.value) for item in expects}  # pyright: ignore
    if len(told) != 1:
        return None
    ((team_name, signal, value),) = told
    team = binder.plan.where.member(team_name)
    size, rank = len(team.ranks), team.index
    sources = [m for item in expects for m in binder.plan.members(team_name, item.peer)]  # pyright: ignore
    subs, rest = divmod(len(others), size - 1)
    if rest or sorted(sources) != [m for m in range(size) if m != rank]:
        return None
    x, w, mine = box(last.a), box(last.b), box(last.out)
    shape, slot = rows_of(x), rows_of(mine)
    (slots_view,) = total.views()
    slots, y = box(slots_view), box(total.outs[0])
    out = rows_of(y)
    if shape is None or slot is None or out is None or shape[2] != shape[1]:
        return None
    rows, inner, _ = shape
    columns = slot[1]
    matches = (
        slots.sizes == (size, rows, columns)
        and slots.strides == (rows * columns, columns, 1)
        and last.out.buffer == slots_view.buffer
        and mine.offset == slots.offset + rank * rows * columns
        and rows % subs == 0
        and out == (rows, columns, columns)
        and y.dtype == mine.dtype == x.dtype
    )
    if not matches:
        return None
    stage: str | None = None
    begin: int | None = None
    spots: list[tuple[int, int]] = []
    number = 0
    part_rows = rows // subs
    for nth, part in enumerate(others):
        chunk, sub = (rank + 1 + nth // subs) % size, nth % subs
        product = Matmul.of(part[0])
        if product is None or len(part) != 2 or not isinstance(part[1], Record):
            return None
        a, c = box(product.a), box(product.out)
        at = chunk * rows + sub * part_rows
        first = c.offset - at * columns
        stage, begin = stage or product.out.buffer, first if begin is None else begin
        fits = (
            product.b == last.b
            and product.bias == last.bias
            and product.a.buffer == last.a.buffer
            and rows_of(a) == (part_rows, inner, inner)
            and a.offset - x.offset == (at - rank * rows) * inner
            and product.out.buffer == stage
            and rows_of(c) == (part_rows, columns, columns)
            and first == begin
        )
        if not fits:
            return None
        spots.append((index, number + 1))
        number += 2
    assert stage is not None
    assert begin is not None
    transposed = _transposed(w)
    if transposed is None:
        return None
    bias = None if last.bias is None else binder.values.own(last.bias)
    kernel = ScatterMatmul(
        rows=rows,
        inner=inner,
        columns=columns,
        size=size,
        rank=rank,
        dtype=DTYPES[x.dtype],
        transposed=transposed,
        bias=bias is not None,
        subs=subs,
        device=binder.context.device,
    )
    ranges = [range(sub * part_rows, (sub + 1) * part_rows) for sub in range(subs)]
    if kernel.subs != subs or [kernel.sub_rows(sub) for sub in range(subs)] != ranges:
        return None
    counters, runs = binder.links.words(team_name, size * subs), binder.links.runs
    for nth, spot in enumerate(spots):
        chunk, sub = (rank + 1 + nth // subs) % size, nth % subs
        tiles = kernel.tiles_per_part(sub)
        due = lambda tiles=tiles: runs() * tiles  # noqa: E731
        address = counters + 4 * (chunk * subs + sub)
        binder.points[spot] = CounterPoint(binder.driver, address, due)  # pyright: ignore
    values, space = binder.values, binder.links.spaces[team_name]
    items = values.items
    whole_x = Box(x.offset - rank * rows * inner, (size * rows, inner), (inner, 1), x.dtype)
    whole_stage = Box(begin, (size * rows, columns), (columns, 1), mine.dtype)
    a, b = values.at(last.a.buffer, whole_x), values.own(last.b)
    s, t = values.at(stage, whole_stage), values.own(slots_view)
    into = values.own(total.outs[0])
    gates = space.own(signal, 0)
    launch: Any = kernel.launch

    def run() -> None:
        launch(
            *(lane.handle, items[a], items[b], items[s], items[t], items[into], None),
            None if bias is None else items[bias],
            *(gates, (space.base + value) & 0xFFFFFFFF, counters),
        )

    return run


def _transposed(w: Box) -> bool | None:
    """Whether a [K, N] matrix is the transpose of rows in a row; None: neither."""
    if len(w.sizes) != 2:
        return None
    inner, columns = w.sizes
    if w.strides == (columns, 1):
        return False
    return True if w.strides == (1, inner) else None


def _team_of(parts: Any) -> str:
    for part in parts:
        for member in part:
            if isinstance(member, Expect):
                return member.team
    return ""
