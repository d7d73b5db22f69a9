"""What the parts of a Fused op do, where they are one of the two forms that have a kernel.

With W ranks and `rows` rows a rank, the matmul is [W * rows, inner] @ [inner, columns]:

    gather    the own chunk's matmul, then for each other chunk: expect its arrival, its matmul
    scatter   for each of `subs` ranges of a chunk's rows: the others' chunks, matmul into the stage,
              record; then the own one, matmul into its slot, expects, the sum of all slots

`gather_of` and `scatter_of` give None for whatever is not exactly that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from interlace.ir import (
    Alloc,
    Arg,
    Box,
    Call,
    DType,
    Expect,
    Free,
    Fused,
    Notify,
    Put,
    Record,
    Spot,
    View,
    Wait,
)
from interlace.runtime.plan import Plan

MATMULS = ("aten.mm.out", "aten.addmm.out")
SUM = "interlace.sum_slots"

Place = tuple[str, Box]
"""A box of a buffer."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """The matrices of one Call."""

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
        bias: Arg = None
        if op.fn == "aten.addmm.out":
            if op.kwargs:
                return None
            bias, args = args[0], args[1:]
        a, b = args[:2]
        if not (isinstance(a, View) and isinstance(b, View) and isinstance(bias, View | None)):
            return None
        return cls(a, b, op.outs[0], bias)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the whole matmul."""

    rows: int
    inner: int
    columns: int
    size: int
    rank: int
    dtype: DType
    transposed: bool
    """Whether the weight is the transpose of a matrix whose rows lie in a row."""
    team: str
    signal: str
    value: int
    """What says that a chunk has come."""


@dataclass(frozen=True, slots=True)
class GatherParts:
    """A matmul of chunks that arrive."""

    shape: Shape
    x: Place
    weight: View
    slots: Place
    y: Place
    bias: View | None


@dataclass(frozen=True, slots=True)
class ScatterParts:
    """A matmul whose chunks leave as they are made."""

    shape: Shape
    subs: int
    x: Place
    weight: View
    stage: Place
    slots: Place
    y: Place
    bias: View | None
    records: tuple[tuple[Spot, int, int], ...]
    """Where each range is recorded: the spot, its chunk and its number in it."""


def gather_of(plan: Plan, op: Fused) -> GatherParts | None:
    """What a Fused gathers."""
    box = plan.box
    own, *others = op.parts
    first, told = (Matmul.of(own[0]) if len(own) == 1 else None), _signal(op)
    if first is None or told is None or not others:
        return None
    shape = _shape(plan, first, told, len(others) + 1)
    if shape is None:
        return None
    rows, inner, columns, rank = shape.rows, shape.inner, shape.columns, shape.rank
    y = box(first.out)
    slots: str | None = None
    for k, part in enumerate(others, start=1):
        chunk = (rank + k) % shape.size
        product = Matmul.of(part[-1])
        if product is None or len(part) != 2 or not isinstance(part[0], Expect):
            return None
        slots = slots or product.a.buffer
        alike = (product.b, product.bias, product.out.buffer) == (
            *(first.b, first.bias),
            first.out.buffer,
        )
        if not (
            alike
            and (plan.members(part[0].team, part[0].peer), part[0].value) == ((chunk,), told[2])
            and product.a.buffer == slots
            and _is(box(product.a), chunk * rows * inner, rows, inner)
            and _is(box(product.out), y.offset + (chunk - rank) * rows * columns, rows, columns)
        ):
            return None
    assert slots is not None
    whole = _matrix(y.offset - rank * rows * columns, shape.size * rows, columns, shape.dtype)
    return GatherParts(
        shape,
        (first.a.buffer, box(first.a)),
        first.b,
        (slots, _matrix(0, shape.size * rows, inner, shape.dtype)),
        (first.out.buffer, whole),
        first.bias,
    )


def scatter_of(plan: Plan, op: Fused, index: int) -> ScatterParts | None:
    """What a Fused, the op of that index, scatters."""
    box, told = plan.box, _signal(op)
    size = len(plan.where.member(told[0]).ranks) if told is not None else 0
    subs, rest = divmod(len(op.parts), max(size, 1))
    if told is None or size < 2 or rest or not subs:
        return None
    own = op.parts[size - 1]
    first, first_sum = Matmul.of(own[0]), own[-1]
    part_shape = None if first is None else _shape(plan, first, told, size)
    if first is None or part_shape is None:
        return None
    shape = replace(part_shape, rows=part_shape.rows * subs)
    rows, inner, columns, rank = shape.rows, shape.inner, shape.columns, shape.rank
    if not (isinstance(first_sum, Call) and first_sum.fn == SUM and len(first_sum.views()) == 1):
        return None
    (slots_view,), y_view = first_sum.views(), first_sum.outs[0]
    slots, y, x = box(slots_view), box(y_view), box(first.a)
    part_rows, first_x = rows // subs, x.offset - rank * rows * inner
    if y.dtype != shape.dtype:
        return None
    stage: tuple[str, int] | None = None
    records: list[tuple[Spot, int, int]] = []
    position = 0
    for nth, part in enumerate(op.parts):
        product, sub = Matmul.of(part[0]), nth // size
        chunk, at = (rank + 1 + nth) % size, sub * part_rows
        if product is None or (product.b, product.bias, product.a.buffer) != (
            *(first.b, first.bias),
            first.a.buffer,
        ):
            return None
        from_row, out = chunk * rows + at, box(product.out)
        if not _is(box(product.a), first_x + from_row * inner, part_rows, inner):
            return None
        if chunk != rank:
            stage = stage or (product.out.buffer, out.offset - from_row * columns)
            if not (
                len(part) == 2
                and isinstance(part[1], Record)
                and product.out.buffer == stage[0]
                and _is(out, stage[1] + from_row * columns, part_rows, columns)
            ):
                return None
            records.append(((index, position + 1), chunk, sub))
        else:
            total = part[-1]
            if not (isinstance(total, Call) and total.fn == SUM and len(total.views()) == 1):
                return None
            (view,) = total.views()
            expects = [item for item in part[1:-1] if isinstance(item, Expect)]
            sources = [m for item in expects for m in plan.members(item.team, item.peer)]
            wanted = Box(
                slots.offset + at * columns,
                (size, part_rows, columns),
                (rows * columns, columns, 1),
                shape.dtype,
            )
            if not (
                len(expects) == len(part) - 2
                and {item.value for item in expects} == {shape.value + sub}
                and sorted(sources) == [member for member in range(size) if member != rank]
                and (view.buffer, box(view)) == (slots_view.buffer, wanted)
                and product.out.buffer == slots_view.buffer
                and _is(out, wanted.offset + rank * rows * columns, part_rows, columns)
                and total.outs[0].buffer == y_view.buffer
                and _is(box(total.outs[0]), y.offset + at * columns, part_rows, columns)
            ):
                return None
        position += len(part)
    assert stage is not None
    whole = Box(slots.offset, (size, rows, columns), (rows * columns, columns, 1), shape.dtype)
    return ScatterParts(
        shape,
        subs,
        (first.a.buffer, _matrix(first_x, size * rows, inner, shape.dtype)),
        first.b,
        (stage[0], _matrix(stage[1], size * rows, columns, shape.dtype)),
        (slots_view.buffer, whole),
        (y_view.buffer, _matrix(y.offset, rows, columns, shape.dtype)),
        first.bias,
        tuple(records),
    )


def puts_of(plan: Plan, parts: ScatterParts) -> dict[int, int]:
    """The waits, puts and signals by which the chunks leave, each with its chunk, if nothing else
    hangs on them; else none.

    That is: each record is awaited once, before the put of its range; the slots are written by
    these puts and the Fused alone, and read by the Fused alone; the signal has no other use.
    """
    ops, shape = plan.program.ops, parts.shape
    spots = {spot: (chunk, sub) for spot, chunk, sub in parts.records}
    fused = parts.records[0][0][0]
    found: dict[int, int] = {}
    moved: list[tuple[int, int]] = []
    awaited: list[tuple[int, int]] = []
    part_rows = shape.rows // parts.subs
    for index, op in enumerate(ops):
        if index == fused or isinstance(op, Alloc | Free):
            continue
        if isinstance(op, Wait) and plan.waits[index, 0] in spots:
            awaited.append(spots[plan.waits[index, 0]])
            found[index] = awaited[-1][0]
        elif isinstance(op, Put) and op.dst.buffer == parts.slots[0]:
            (peer,) = plan.members(op.team, op.peer)
            src, dst = plan.box(op.src), plan.box(op.dst)
            sub = (dst.offset - parts.slots[1].offset) // shape.columns - shape.rank * shape.rows
            sub //= part_rows
            at = (peer * shape.rows + sub * part_rows) * shape.columns
            into = (shape.rank * shape.rows + sub * part_rows) * shape.columns
            if not (
                awaited
                and awaited[-1] == (peer, sub)
                and op.src.buffer == parts.stage[0]
                and _is(src, parts.stage[1].offset + at, part_rows, shape.columns)
                and _is(dst, parts.slots[1].offset + into, part_rows, shape.columns)
            ):
                return {}
            moved.append((peer, sub))
            found[index] = peer
        elif isinstance(op, Notify | Expect) and (op.team, op.signal) == (shape.team, shape.signal):
            known = isinstance(op, Notify) and plan.members(op.team, op.peer)
            if not moved or known != (moved[-1][0],) or op.value != shape.value + moved[-1][1]:
                return {}
            found[index] = moved[-1][0]
        elif {parts.slots[0], parts.stage[0]} & {
            access.view.buffer for access in (*op.reads(), *op.writes())
        }:
            return {}
    wanted = [(chunk, sub) for _, chunk, sub in parts.records]
    return found if sorted(moved) == sorted(wanted) == sorted(awaited) else {}


def _signal(op: Fused) -> tuple[str, str, int] | None:
    """The one signal that a Fused awaits, and its least value."""
    expects = [member for member in op.members if isinstance(member, Expect)]
    told = {(item.team, item.signal) for item in expects}
    if len(told) != 1:
        return None
    return *next(iter(told)), min(item.value for item in expects)


def _shape(plan: Plan, one: Matmul, told: tuple[str, str, int], size: int) -> Shape | None:
    """The whole matmul, from that of the own chunk."""
    box: Callable[[View], Box] = plan.box
    a, b, out = box(one.a), box(one.b), box(one.out)
    team = plan.where.member(told[0])
    if len(team.ranks) != size or not len(a.sizes) == len(b.sizes) == len(out.sizes) == 2:
        return None
    (rows, inner), columns = a.sizes, out.sizes[1]
    if b.strides not in ((columns, 1), (1, inner)) or not a.dtype == b.dtype == out.dtype:
        return None
    if not (_is(a, a.offset, rows, inner) and _is(out, out.offset, rows, columns)):
        return None
    transposed = b.strides != (columns, 1)
    return Shape(rows, inner, columns, size, team.index, a.dtype, transposed, *told)


def _matrix(offset: int, rows: int, columns: int, dtype: DType) -> Box:
    return Box(offset, (rows, columns), (columns, 1), dtype)


def _is(box: Box, offset: int, rows: int, columns: int) -> bool:
    """Whether a box is a matrix whose rows lie one after another from there."""
    return box.offset == offset and box.sizes == (rows, columns) and box.strides == (columns, 1)
