"""What the parts of a Fused op do, where they are one of the two forms that have a kernel.

With W ranks and `rows` rows a rank, the matmul is [W * rows, inner] @ [inner, columns]:

    gather    the own chunk's matmul, then for each other chunk: expect its arrival, its matmul
    scatter   for each of `subs` ranges of a chunk's rows, the others' chunks: matmul into the stage;
              then each range of the own one: matmul into its slot; records wherever somebody waits

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

@dataclass(frozen=True, slots=True)
class GatherParts:
    """A matmul of chunks that arrive."""

    shape: Shape
    team: str
    signal: str
    value: int
    """What says that a chunk has come."""
    x: Place
    weight: View
    slots: Place
    y: Place
    bias: View | None


@dataclass(frozen=True, slots=True)
class ScatterParts:
    """A matmul whose chunks leave as they are made."""

    shape: Shape
    team: str
    subs: int
    x: Place
    weight: View
    stage: Place
    slots: str
    own: Place
    """The rank's own rows, in its slot."""
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
    shape = _shape(plan, first, told[0], len(others) + 1)
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
        *(shape, *told),
        (first.a.buffer, box(first.a)),
        first.b,
        (slots, _matrix(0, shape.size * rows, inner, shape.dtype)),
        (first.out.buffer, whole),
        first.bias,
    )


def scatter_of(plan: Plan, op: Fused, index: int) -> ScatterParts | None:
    """What a Fused, the op of that index, scatters."""
    box = plan.box
    products = [Matmul.of(part[0]) for part in op.parts]
    slots = products[-1].out.buffer if products[-1] is not None else ""
    buffer = plan.buffers.get(slots)
    if buffer is None or buffer.kind != "symmetric" or buffer.team is None:
        return None
    size = len(plan.where.member(buffer.team).ranks)
    subs, rest = divmod(len(op.parts), size)
    others = (size - 1) * subs
    first = None if rest or size < 2 else products[others]
    part_shape = None if first is None else _shape(plan, first, buffer.team, size)
    if first is None or part_shape is None:
        return None
    shape = replace(part_shape, rows=part_shape.rows * subs)
    rows, inner, columns, rank = shape.rows, shape.inner, shape.columns, shape.rank
    part_rows, first_x = rows // subs, box(first.a).offset - rank * rows * inner
    own = box(first.out).offset
    stage: tuple[str, int] | None = None
    records: list[tuple[Spot, int, int]] = []
    position = 0
    for nth, (part, product) in enumerate(zip(op.parts, products, strict=True)):
        chunk, sub = (rank + 1 + nth % (size - 1)) % size, nth // (size - 1)
        if nth >= others:
            chunk, sub = rank, nth - others
        if product is None or (product.b, product.bias, product.a.buffer) != (
            *(first.b, first.bias),
            first.a.buffer,
        ):
            return None
        at = chunk * rows + sub * part_rows
        if chunk == rank:
            place, start = slots, own + sub * part_rows * columns
        else:
            stage = stage or (product.out.buffer, box(product.out).offset - at * columns)
            place, start = stage[0], stage[1] + at * columns
        if not (
            product.out.buffer == place
            and _is(box(product.out), start, part_rows, columns)
            and _is(box(product.a), first_x + at * inner, part_rows, inner)
            and all(isinstance(member, Record) for member in part[1:])
        ):
            return None
        records += [((index, position + 1 + i), chunk, sub) for i in range(len(part) - 1)]
        position += len(part)
    assert stage is not None
    return ScatterParts(
        *(shape, buffer.team, subs),
        (first.a.buffer, _matrix(first_x, size * rows, inner, shape.dtype)),
        first.b,
        (stage[0], _matrix(stage[1], size * rows, columns, shape.dtype)),
        slots,
        (slots, _matrix(own, rows, columns, shape.dtype)),
        first.bias,
        tuple(records),
    )


def puts_of(plan: Plan, parts: ScatterParts, fused: int) -> dict[int, int]:
    """The waits, puts and signals by which the chunks of the op `fused` leave, each with its chunk,
    if nothing else hangs on them; else none.

    That is: each put stands right behind the wait for its range, and right before its signal; and
    what else uses the stage or the slots is a sum of what came.
    """
    ops, shape = plan.program.ops, parts.shape
    spots = {spot: (chunk, sub) for spot, chunk, sub in parts.records if chunk != shape.rank}
    found: dict[int, int] = {}
    moved: list[tuple[int, int]] = []
    awaited: list[tuple[int, int]] = []
    told: list[tuple[int, int]] = []
    signal: tuple[str, int] | None = None  # its name, and what it says of the first range
    part_rows = shape.rows // parts.subs
    for index, op in enumerate(ops):
        if index == fused or isinstance(op, Alloc | Free | Expect):
            continue
        if isinstance(op, Wait) and plan.waits[index, 0] in spots:
            awaited.append(spots[plan.waits[index, 0]])
            found[index] = awaited[-1][0]
        elif isinstance(op, Put) and op.dst.buffer == parts.slots:
            (peer,) = plan.members(op.team, op.peer)
            src, dst = plan.box(op.src), plan.box(op.dst)
            sub = (dst.offset - parts.own[1].offset) // (part_rows * shape.columns)
            at = (peer * shape.rows + sub * part_rows) * shape.columns
            into = parts.own[1].offset + sub * part_rows * shape.columns
            if not (
                awaited
                and awaited[-1] == (peer, sub)
                and op.src.buffer == parts.stage[0]
                and _is(src, parts.stage[1].offset + at, part_rows, shape.columns)
                and _is(dst, into, part_rows, shape.columns)
            ):
                return {}
            moved.append((peer, sub))
            found[index] = peer
        elif isinstance(op, Notify) and op.team == parts.team and (
            op.signal == signal[0] if signal else moved
        ):
            signal = signal or (op.signal, op.value)
            peer, sub = moved[-1]
            told.append((peer, sub))
            if plan.members(op.team, op.peer) != (peer,) or op.value != signal[1] + sub:
                return {}
            found[index] = peer
        elif isinstance(op, Call) and op.fn == SUM:
            continue
        elif {parts.slots, parts.stage[0]} & {
            access.view.buffer for access in (*op.reads(), *op.writes())
        }:
            return {}
    wanted = [(chunk, sub) for _, chunk, sub in parts.records if chunk != shape.rank]
    return found if sorted(moved) == sorted(wanted) == sorted(awaited) == sorted(told) else {}


def _signal(op: Fused) -> tuple[str, str, int] | None:
    """The one signal that a Fused awaits, and its least value."""
    expects = [member for member in op.members if isinstance(member, Expect)]
    told = {(item.team, item.signal) for item in expects}
    if len(told) != 1:
        return None
    return *next(iter(told)), min(item.value for item in expects)


def _shape(plan: Plan, one: Matmul, name: str, size: int) -> Shape | None:
    """The whole matmul, from that of the own chunk."""
    box: Callable[[View], Box] = plan.box
    a, b, out = box(one.a), box(one.b), box(one.out)
    team = plan.where.member(name)
    if len(team.ranks) != size or not len(a.sizes) == len(b.sizes) == len(out.sizes) == 2:
        return None
    (rows, inner), columns = a.sizes, out.sizes[1]
    if b.strides not in ((columns, 1), (1, inner)) or not a.dtype == b.dtype == out.dtype:
        return None
    if not (_is(a, a.offset, rows, inner) and _is(out, out.offset, rows, columns)):
        return None
    transposed = b.strides != (columns, 1)
    return Shape(rows, inner, columns, size, team.index, a.dtype, transposed)


def _matrix(offset: int, rows: int, columns: int, dtype: DType) -> Box:
    return Box(offset, (rows, columns), (columns, 1), dtype)


def _is(box: Box, offset: int, rows: int, columns: int) -> bool:
    """Whether a box is a matrix whose rows lie one after another from there."""
    return box.offset == offset and box.sizes == (rows, columns) and box.strides == (columns, 1)
