"""One collective at a time: the rows it brings to matmuls, or the matmuls whose rows it takes away.

By meaning, not by spelling: `Dataflow` follows the rows through views and data movement, and
`rows.py` says how they are dealt to the ranks. What is no site is refused with a reason.

    >>> recognise(values, 2, program.ops[2], taken=set())
    GatherSite(collective=2, ..., layout=RowLayout(batch=1, rows=(3, 3), pitch=(3, 3)), ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from interlace.ir import Collective, View
from interlace.ir.operators import by_data, matmul_of
from interlace.ir.sizes import Int, supposing
from interlace.passes.sites.cone import Cone, blocks_of, cone_of, lhs_of, result_of
from interlace.passes.sites.rows import (
    ByteRun,
    Refused,
    RowLayout,
    balanced_sizes,
    gather_layout,
    scatter_layout,
)
from interlace.passes.sites.values import Dataflow


@dataclass(frozen=True, slots=True)
class CutSite:
    """A collective whose matmuls are cut into chunks of rows."""

    collective: int
    op: Collective
    layout: RowLayout
    moves: tuple[int, ...]
    """Ops that only put the rows in order, for this site alone."""
    kept: tuple[int, ...]
    """Ops that do so for others as well: the site no longer needs them."""
    declared: tuple[int, ...]
    calls: tuple[int, ...]
    """The computation that is cut into chunks."""

    @property
    def ops(self) -> tuple[int, ...]:
        """All its ops."""
        return tuple(sorted((self.collective, *self.calls, *self.moves, *self.declared)))


@dataclass(frozen=True, slots=True)
class GatherSite(CutSite):
    """An all-gather, or an all-to-all, and the matmuls that take its rows."""

    width: Int
    whole: bool
    """True if other ops use the gathered tensor too, or it leaves the Program."""


@dataclass(frozen=True, slots=True)
class ScatterSite(CutSite):
    """Matmuls, row by row what follows them, and the reduction or the all-to-all of the result."""

    cone: Cone


MatmulSite = GatherSite | ScatterSite
"""A site whose matmuls are cut into chunks."""

SITE_KINDS = {
    "all_gather": "all_gather_matmul",
    "reduce_scatter": "matmul_reduce_scatter",
    "all_reduce": "matmul_all_reduce",
}
EXCHANGE = "all_to_all"


def site_kind(kind: str, site: MatmulSite) -> str:
    """The kind of a site, from the kind of its collective."""
    if kind != EXCHANGE:
        return SITE_KINDS[kind]
    return "all_to_all_matmul" if isinstance(site, GatherSite) else "matmul_all_to_all"


def recognise(values: Dataflow, i: int, op: Collective, taken: set[int]) -> MatmulSite:
    """The site of collective `i`, or Refused; the ops `taken` belong to others."""
    if op.kind == "barrier":
        raise Refused("it moves nothing")
    if op.kind not in {*SITE_KINDS, EXCHANGE}:
        raise Refused(f"{op.kind} is not overlapped chunk by chunk")
    if op.src is None or op.dst is None or not op.dst.covers_buffer:
        raise Refused("it does not fill a buffer of its own")
    if values.maker(op.dst.buffer) is None:
        raise Refused(f"{op.dst.buffer} is written by others too")
    if op.kind == EXCHANGE:
        return _exchange(values, i, op, taken)
    return (_gather if op.kind == "all_gather" else _scatter)(values, i, op, taken)


def _exchange(values: Dataflow, i: int, op: Collective, taken: set[int]) -> MatmulSite:
    """An all-to-all of even parts: before matmuls (tokens go to experts), or else after them."""
    if op.splits is not None:
        raise Refused("its parts are uneven")
    if op.sent is not None:
        raise Refused("its counts are data: it stays whole, under other compute")
    try:
        return _gather(values, i, op, taken)
    except Refused as before:
        try:
            return _scatter(values, i, op, taken)
        except Refused as after:
            raise Refused(f"after it: {before}; before it: {after}") from None


def _declared(values: Dataflow, name: str, calls: Sequence[int]) -> tuple[int, ...]:
    """The Allocs of a buffer and of what calls make."""
    outs = [result_of(values.calls[j]) for j in calls]
    names = [name, *[out.buffer for out in outs if out is not None]]
    return tuple([values.allocs[n] for n in names if n in values.allocs])


# gathers


def _gather(values: Dataflow, i: int, op: Collective, taken: set[int]) -> GatherSite:
    assert op.dst is not None
    name = op.dst.buffer
    shards = parts_of(values, op, op.dst)
    parts = enumerate(zip(accumulate(shards, initial=0), shards, strict=False))
    origin = tuple([ByteRun(start, size, r, 0) for r, (start, size) in parts if size])
    accepted: list[int] = []
    shape: tuple[RowLayout, Int] | None = None
    reasons: list[str] = []
    moved: dict[str, int] = {}
    uses, related = uses_of(values, name)
    for j in uses:
        try:
            layout, width = _rows_of(values, j, name, related, origin, shards, op.kind)
            if j in taken:
                raise Refused("its matmul is overlapped with another communication")
            if shape is not None and shape != (layout, width):
                raise Refused("its matmuls take the rows in different orders")
        except Refused as refusal:
            reasons.append(str(refusal))
            continue
        shape = layout, width
        accepted.append(j)
        moved |= values.between(lhs_of(values.calls[j]).buffer, name)
    if shape is None:
        raise Refused(reasons[0] if reasons else _unused(values, name, op.kind))
    moves = _dead(values, moved, set(accepted))
    others = set(values.users.get(name, ())) - set(accepted) - set(moves)
    whole = bool(others) or values.leaves(name)
    layout, width = shape
    kept = tuple(sorted(set(moved.values()) - set(moves)))
    declared, calls = _declared(values, name, accepted), tuple(accepted)
    return GatherSite(i, op, layout, moves, kept, declared, calls, width=width, whole=whole)


def parts_of(values: Dataflow, op: Collective, whole: View) -> tuple[Int, ...]:
    """Bytes of each rank's part of the whole tensor of a gather or scatter."""
    team, box = values.program.team(op.team), values.box(whole)
    if op.splits is None:
        return (box.nbytes // team.size,) * team.size
    table = next(t for t in values.program.tables if t.name == op.splits)
    row_bytes = box.nbytes // max(sum(table.values), 1)
    return tuple([rows * row_bytes for rows in table.values])


def uses_of(values: Dataflow, name: str) -> tuple[list[int], set[str]]:
    """Ops that use a buffer, directly or moved; and the buffers that hold it moved."""
    found: set[int] = set()
    related: set[str] = set()
    stack = [name]
    while stack:
        current = stack.pop()
        if current in related:
            continue
        related.add(current)
        for j in values.users.get(current, ()):
            outs = [access.view.buffer for access in values.touched[j][1]]
            if len(outs) == 1 and values.moved(outs[0]):
                stack.append(outs[0])
            else:
                found.add(j)
    return sorted(found), related


def _rows_of(
    values: Dataflow,
    index: int,
    name: str,
    related: set[str],
    origin: tuple[ByteRun, ...],
    shards: tuple[Int, ...],
    kind: str,
) -> tuple[RowLayout, Int]:
    what = "received" if kind == EXCHANGE else "gathered"
    call = values.calls.get(index)
    matmul = matmul_of(call.fn) if call is not None else None
    if call is None or matmul is None or (matmul.batched and kind != EXCHANGE):
        taker = call.fn if call is not None else type(values.program.ops[index]).__name__.lower()
        raise Refused(f"{taker}, not a matmul{by_data(taker)}, takes the {what} tensor")
    lhs, views = call.args[matmul.lhs], call.views()
    rest = [view for view in views if view != lhs and view.buffer in related]
    if not isinstance(lhs, View) or lhs.buffer not in related:
        raise Refused(
            f"{call.fn} takes the {what} tensor as its right-hand side or its bias: it travels "
            "as a whole, under other computation"
        )
    if rest or views.count(lhs) > 1:
        raise Refused(f"{call.fn} takes the {what} tensor twice")
    if result_of(call) is None or values.root(lhs.buffer) != name:
        raise Refused(f"{call.fn} takes more than the {what} tensor as its rows")
    box = values.box(lhs)
    if len(box.sizes) != (3 if matmul.batched else 2) or box.sizes[-1] == 0:
        raise Refused(f"{call.fn} contracts over nothing")
    width = box.sizes[-1]
    row_bytes = width * box.dtype.itemsize
    layout = gather_layout(values.contents(lhs, name, origin, row_bytes), row_bytes, shards, what)
    _check_stacks(layout, box.sizes[0] if matmul.batched else 0)
    blocks = blocks_of(call)
    if blocks > 1 and not (layout.even and blocks == layout.batch * len(layout.rows)):
        raise Refused(f"{call.fn} has {blocks} scales, which are not those of the ranks' rows")
    return layout, width


def _check_stacks(layout: RowLayout, stacks: Int) -> None:
    """Every rank has rows, one after another, of every stack of a matmul of several."""
    if stacks and layout.total and layout.batch != stacks:
        raise Refused(
            f"the rows of each rank are not one stretch of each of the matmul's {stacks} stacks"
        )


def _dead(values: Dataflow, moved: dict[str, int], users: set[int]) -> tuple[int, ...]:
    """The moves of which all users are these ops or other such moves."""
    free = {name: i for name, i in moved.items() if not values.leaves(name)}
    dead: set[int] = set()
    count = -1
    while count < len(dead):
        count = len(dead)
        dead |= {i for name, i in free.items() if users | dead >= set(values.users.get(name, ()))}
    return tuple(sorted(dead))


def _unused(values: Dataflow, name: str, kind: str) -> str:
    if any(map(values.leaves, uses_of(values, name)[1])):
        return "its result leaves the program"
    return f"nothing takes the {'received' if kind == EXCHANGE else 'gathered'} tensor"


# scatters


def _scatter(values: Dataflow, i: int, op: Collective, taken: set[int]) -> ScatterSite:
    assert op.src is not None and op.dst is not None  # noqa: PT018
    root = values.root(op.src.buffer)
    moved = values.between(op.src.buffer, root)
    moves = _dead(values, moved, {i})
    kept = tuple(sorted(set(moved.values()) - set(moves)))
    exchange = op.kind == EXCHANGE
    cone = cone_of(values, root, taken, {i, *moves}, exchange)
    if cone.transposed and not exchange and not values.users.get(op.dst.buffer):
        raise Refused(
            "it reduces the gradient of a weight, for which nothing here waits: "
            "it runs under the computation that follows"
        )
    box = values.box(op.src)
    if box.dtype != values.buffers[root].dtype or not values.whole(View(root)):
        does = "sends" if exchange else "reduces"
        raise Refused(f"it {does} other bytes than the matmul's rows")
    row_bytes = cone.width * box.dtype.itemsize
    if not row_bytes:
        raise Refused("its matmul's rows have no columns")
    total = cone.rows
    nbytes = total * row_bytes
    origin = (ByteRun(0, nbytes, 0, 0),) if nbytes else ()
    contents = values.contents(op.src, root, origin, 0 if op.kind == "all_reduce" else row_bytes)
    team = values.program.team(op.team)
    if op.kind == "all_reduce":
        if contents not in ((ByteRun(0, nbytes, 0, 0),), ()) or box.nbytes != nbytes:
            raise Refused("it reduces the matmul's rows in another order, or not all of them")
        with supposing():  # who cuts it into these notes them; a serial one needs no remainder
            rows = balanced_sizes(total, team.size)
        layout = RowLayout(1, rows, rows)
    else:
        layout = scatter_layout(contents, row_bytes, parts_of(values, op, op.src), total)
        _check_stacks(layout, cone.stacks)
    declared = _declared(values, op.dst.buffer, cone.ops)
    return ScatterSite(i, op, layout, moves, kept, declared, cone.ops, cone=cone)
