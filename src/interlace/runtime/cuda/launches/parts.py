"""What the parts of a Fused op do, where they are one of the two forms that have a kernel.

With W ranks and `rows` rows a rank, the matmul is [W * rows, inner] @ [inner, columns]:

    gather    the own chunk's matmul, then for each other chunk: expect its arrival, its matmul
    scatter   the others' chunks, each in `subs` ranges: matmul into the stage, record; then the own
              one: matmul into its slot; or that in ranges too, those between the last chunk's

`gather_of` and `scatter_of` give None for whatever is not exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from interlace.ir import (
    Arg,
    Box,
    Call,
    DType,
    Expect,
    Fused,
    Record,
    Spot,
    View,
)
from interlace.runtime.prepare.plan import Plan

MATMULS = ("aten.mm.out", "aten.addmm.out")

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
    lead: int
    """So many ranges of the last other chunk come before the first of the own; `subs`: all, 0: an
    all-reduce's, slab by slab."""
    x: Place
    weight: View
    stage: Place
    own: Place
    """The rank's own rows, in its slot."""
    bias: View | None
    records: tuple[tuple[Spot, int, int], ...]
    """Where each chunk or range is recorded: the spot, the chunk and the number of the range."""


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
    own_parts = [i for i, p in enumerate(products) if p is not None and p.out.buffer == slots]
    first, pieces = own_parts[0], len(own_parts)
    subs, rest = divmod(len(op.parts) - pieces, max(size - 1, 1))
    slabs = _by_slabs(plan, products, own_parts, size)
    lead = 0 if slabs else min(first - (size - 2) * subs, subs)
    mine = products[first]
    fits = size > 1 and subs > 0 and not rest and pieces in (1, subs) and (slabs or lead > 0)
    shape = _shape(plan, mine, buffer.team, size, pieces) if fits else None
    if mine is None or shape is None or shape.rows % subs:
        return None
    rows, inner, columns, rank = shape.rows, shape.inner, shape.columns, shape.rank
    own = box(mine.out).offset
    first_x = box(mine.a).offset - rank * (rows if lead else rows // subs) * inner
    stage: tuple[str, int] | None = None
    records: list[tuple[Spot, int, int]] = []
    position = 0
    order = turns(size, subs, lead, whole=pieces == 1)
    for part, product, (k, sub) in zip(op.parts, products, order, strict=True):
        chunk = (rank + 1 + k) % size
        length = rows // pieces if chunk == rank else rows // subs
        if product is None or (product.b, product.bias, product.a.buffer) != (
            *(mine.b, mine.bias),
            mine.a.buffer,
        ):
            return None
        at = chunk * rows + sub * length if lead else (sub * size + chunk) * length
        if chunk == rank:
            place, start = slots, own + sub * length * columns
        else:
            stage = stage or (product.out.buffer, box(product.out).offset - at * columns)
            place, start = stage[0], stage[1] + at * columns
        if not (
            product.out.buffer == place
            and _is(box(product.out), start, length, columns)
            and _is(box(product.a), first_x + at * inner, length, inner)
            and all(isinstance(member, Record) for member in part[1:])
            and (chunk != rank or pieces == subs or len(part) == 1)
        ):
            return None
        records += [((index, position + 1 + i), chunk, sub) for i in range(len(part) - 1)]
        position += len(part)
    assert stage is not None
    return ScatterParts(
        *(shape, buffer.team, subs, lead),
        (mine.a.buffer, _matrix(first_x, size * rows, inner, shape.dtype)),
        mine.b,
        (stage[0], _matrix(stage[1], size * rows, columns, shape.dtype)),
        (slots, _matrix(own, rows, columns, shape.dtype)),
        mine.bias,
        tuple(records),
    )


def _by_slabs(plan: Plan, products: Sequence[Matmul | None], own: Sequence[int], size: int) -> bool:
    """Whether the rows of the first range of all parts lie between those of the first two own."""
    first, second = products[own[0]], products[own[1]] if len(own) > 1 else None
    if first is None or second is None:
        return False
    each = plan.box(first.a)
    return plan.box(second.a).offset - each.offset == size * each.numel


def turns(size: int, subs: int, lead: int, *, whole: bool = False) -> list[tuple[int, int]]:
    """Which range of which part has its turn when, as scatter_kernel.py says; `whole`: the own rows
    are one part.

    >>> turns(2, 2, 0)
    [(0, 0), (1, 0), (0, 1), (1, 1)]

    >>> turns(2, 4, 2)
    [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3)]
    """
    if not lead:
        return [(part, sub) for sub in range(subs) for part in range(size)]
    order = [(part, sub) for part in range(size - 1) for sub in range(subs)]
    own = [(size - 1, sub) for sub in range(1 if whole else subs)]
    for sub in range(lead, subs):
        order.insert(len(order) - subs + sub, own.pop(0))
    return order + own


def _signal(op: Fused) -> tuple[str, str, int] | None:
    """The one signal that a Fused awaits, and its least value."""
    expects = [member for member in op.members if isinstance(member, Expect)]
    told = {(item.team, item.signal) for item in expects}
    if len(told) != 1:
        return None
    return *next(iter(told)), min(item.value for item in expects)


def _shape(plan: Plan, one: Matmul | None, name: str, size: int, pieces: int = 1) -> Shape | None:
    """The whole matmul, from that of the own chunk, or of the first of its pieces."""
    if one is None:
        return None
    box: Callable[[View], Box] = plan.box
    a, b, out = box(one.a), box(one.b), box(one.out)
    team = plan.where.member(name)
    if len(team.ranks) != size or not len(a.sizes) == len(b.sizes) == len(out.sizes) == 2:
        return None
    (rows, inner), columns = a.sizes, out.sizes[1]
    if b.strides not in ((columns, 1), (1, inner)) or not a.dtype == b.dtype == out.dtype:
        return None
    bias = None if one.bias is None else box(one.bias)
    if bias is not None and (bias.sizes, bias.strides, bias.dtype) != ((columns,), (1,), a.dtype):
        return None  # one that addmm spreads over rows or columns
    if not (_is(a, a.offset, rows, inner) and _is(out, out.offset, rows, columns)):
        return None
    transposed = b.strides != (columns, 1)
    return Shape(rows * pieces, inner, columns, size, team.index, a.dtype, transposed)


def _matrix(offset: int, rows: int, columns: int, dtype: DType) -> Box:
    return Box(offset, (rows, columns), (columns, 1), dtype)


def _is(box: Box, offset: int, rows: int, columns: int) -> bool:
    """Whether a box is a matrix whose rows lie one after another from there."""
    return box.offset == offset and box.sizes == (rows, columns) and box.strides == (columns, 1)
