"""Boxes resolved once, and compared: the same box of the same geometry is one `ByteRegion`.

A schedule names few different boxes and uses each many times (every layer, every rank, every
step of a ring), so boxes are interned, and the results of comparisons are kept:

    spot = regions.spot(view, buffer, tables)      # once per view of a Program
    region = regions.at(spot, where)               # per rank: a look-up, nearly always
    regions.overlap(region, other)                 # exact, remembered

`covered` says if several boxes cover one. A box of a large matrix is thousands of byte runs, so
runs are not counted: bytes are cut into rows, by the largest stride that occurs (or the least
common multiple of the largest of each box), and boxes are the same in many rows. What is to be
covered in them is the same question, with a smaller stride.

    >>> halves = [Box(k * 2048, (8192, 2048), (4096, 1), DType.f32) for k in (0, 1)]
    >>> covered(Box(0, (8192, 4096), (4096, 1), DType.f32), halves)
    True

Where the dimensions of a box run over the end of a row, or where a size is symbolic, runs of bytes
answer instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, lcm, prod

from interlace.errors import ProgramError
from interlace.ir.overlap import compared_box
from interlace.ir.sizes import Int, Size, greatest, least, never_above, number
from interlace.ir.types import Buffer, RankIndex, Table, TableEntry, Where
from interlace.ir.view import Box, View, runs, varying

FEW_RUNS, MAX_RUNS = 1 << 12, 1 << 16
"""Runs that are counted one by one, at most: of boxes within a row, and of one box."""
Dims = tuple[tuple[int, int], ...]
"""Steps in bytes, ascending, and how often each is taken; the first is the run of bytes."""
FlatBox = tuple[int, Dims]
"""The first byte of a box, and its dimensions."""
Rows = tuple[int, int, int, Dims]
"""Bytes that are the same in several rows: first row, row after the last, start in a row, dims."""


def covered(
    target: Box, parts: Sequence[Box], spend: Callable[[int], None] = lambda steps: None
) -> bool:
    """Returns True if every byte of `target` is in one of `parts`, and never wrongly. Passes the
    steps that this takes to `spend`, as they are taken."""
    spend(8 * len(parts))
    boxes = [_dims(box) for box in (target, *parts)]
    known = [box for box in boxes if box is not None]
    if target.numel and len(known) == len(boxes):
        (low, high), (whole, *_) = target.hull, known
        near = [
            dims
            for dims, part in zip(known[1:], parts, strict=True)
            if part.numel and part.hull[0] < high and low < part.hull[1]
        ]
        by_rows = _covered_by_rows(whole, near, spend)
        if by_rows is not None:
            return by_rows
    wanted, *there = [_byte_runs(box, spend) for box in (target, *parts)]
    if wanted is None:
        if target in parts:
            return True
        wanted = [target.hull]  # which has the gaps between its runs as well
    return _filled(wanted, sorted(run for each in there for run in each or ()))


def _dims(box: Box) -> FlatBox | None:
    """The first byte of a box and its dimensions; None where some are of named sizes."""
    length, outer = runs(box)
    start, dims = box.hull[0], [(1, length), *outer]
    if isinstance(start, Size) or any(isinstance(n, Size) for dim in dims for n in dim):
        return None
    return number(start), tuple((number(step), number(count)) for step, count in dims)


def _covered_by_rows(
    target: FlatBox, parts: Sequence[FlatBox], spend: Callable[[int], None], below: float = inf
) -> bool | None:
    """Returns True if `parts` hold every byte of `target`; None where rows do not decide it.

    Rows are counted from byte 0, and from the target's first byte, amid a row of a flat buffer.
    """
    largest = {dims[-1][0] for _, dims in (target, *parts)}
    for step in sorted({max(largest), lcm(*largest)}):
        for origin in dict.fromkeys((0, target[0])) if step < below else ():
            moved = [(start - origin, dims) for start, dims in parts]
            shifted = target[0] - origin, target[1]
            if (found := _covered_in_rows(step, shifted, moved, spend)) is not None:
                return found
    num_few = sum(prod(size for _, size in dims[1:]) for _, dims in (target, *parts))
    if num_few > FEW_RUNS:
        return None
    spend(4 * num_few)
    return _filled(_expanded(*target), sorted(run for part in parts for run in _expanded(*part)))


def _expanded(start: int, dims: Dims) -> list[tuple[int, int]]:
    """The runs of bytes of a box."""
    starts = [start]
    for step, size in dims[:0:-1]:
        starts = [one + i * step for one in starts for i in range(size)]
    return [(one, one + dims[0][1]) for one in sorted(starts)]


def _byte_runs(box: Box, spend: Callable[[int], None]) -> Sequence[tuple[Int, Int]] | None:
    """The runs of bytes of a box; None if there are too many, or a number that is no one number."""
    length, dims = runs(box)
    count = prod([size for _, size in dims])
    many = isinstance(count, Size) or count > MAX_RUNS
    spend(16 if many else 16 * number(count))
    if many or box.numel == 0:
        return None if box.numel else ()
    return _expanded(
        number(box.hull[0]), ((1, number(length)), *[(number(s), number(n)) for s, n in dims])
    )


def _covered_in_rows(
    step: int, target: FlatBox, parts: Sequence[FlatBox], spend: Callable[[int], None]
) -> bool | None:
    wanted = _rows(*target, step)
    if wanted is None:
        return None
    pieces = [_rows(*part, step) for part in parts]
    there = sorted(rows for piece in pieces for rows in piece or ())
    spend(4 * (len(pieces) + len(there)))
    for first, last, start, dims in wanted:
        borders = {row for one in there for row in one[:2] if first < row < last}
        active: list[Rows] = []
        at = 0
        for low in sorted({first, *borders}):
            while at < len(there) and there[at][0] <= low:
                active.append(there[at])
                at += 1
            active = [one for one in active if one[1] > low]
            spend(4 * (1 + len(active)))
            if any(one[2:] == (start, dims) for one in active):
                continue
            inside = [one[2:] for one in active]
            done = step > 1 and _covered_by_rows((start, dims), inside, spend, step)
            if not done:
                return None if done is None or None in pieces else False
    return True


def _rows(start: int, dims: Dims, step: int) -> list[Rows] | None:
    """A box as bytes of rows that begin at the multiples of `step`; None where its dimensions run
    over the end of a row."""
    row, at = divmod(start, step)
    if len(dims) == 1 and at + dims[0][1] > step:  # a run: up to the next row, rows, and the rest
        end_row, end = divmod(start + dims[0][1], step)
        full = row + (at > 0)
        head = [(row, full, at, ((1, step - at),))] if at else []
        rows = [(full, end_row, 0, ((1, step),))] if full < end_row else []
        return [*head, *rows, *([(end_row, end_row + 1, 0, ((1, end),))] if end else [])]
    inner, count = list[tuple[int, int]](), 1
    for by, size in dims:
        if by > 1 and step % by == by * size % step == 0:  # as many in each of some rows
            inner += [(by, step // by)] if by < step else []
            count += by * size // step - 1
        else:
            inner.append((by, size))
    if at + 1 + sum(by * (size - 1) for by, size in inner) > step:
        return None
    return [(row, row + count, at, tuple(inner))]


def _filled(wanted: Iterable[tuple[Int, Int]], there: Sequence[tuple[Int, Int]]) -> bool:
    """Returns True if runs that ascend hold all of others that do."""
    reached = at = 0
    for start, stop in wanted:
        reached = max(reached, start)
        while reached < stop and at < len(there) and there[at][0] <= reached:
            reached = max(reached, there[at][1])
            at += 1
        if reached < stop:
            return False
    return True


MAX_STEPS = 1 << 25
"""Steps that one check compares accesses in, at most: half a minute of a slow core. Two hulls are
compared in one step; what remembers a comparison counts more, for its memory."""
PER_SIZED = 32
"""Steps that comparing two hulls counts as, where some are of named sizes: those are decided."""
PER_PAIR = 32
"""Steps that a remembered comparison counts as."""
MANY_PARTS = 64
"""Number of parts up to which the result of a cover is remembered."""


@dataclass(slots=True, eq=False)
class ByteRegion:
    """A box of a buffer, in bytes from the buffer's start."""

    box: Box
    """The box that is compared for races: the whole buffer for `as_strided`."""
    exact: Box
    """The bytes themselves."""
    lo: Int
    hi: Int
    start: int
    stop: int
    """The least `lo` and the greatest `hi` of the class of sizes."""
    empty: bool
    """The region has no bytes, for any sizes of the class."""
    dense: bool
    """Every byte from `lo` to `hi` belongs to the region."""
    strided: bool
    """The region stands for an `as_strided`, so that it claims more bytes than it has."""

    def covers(self, size: Int) -> bool:
        """Returns True if the region is surely all of a buffer of so many bytes."""
        return self.dense and never_above(self.lo, 0) and never_above(size, self.hi)

    def contains(self, other: ByteRegion) -> bool:
        """True if the other region is surely part of this one (cheap, may miss that it is)."""
        return self is other or (
            self.dense and never_above(self.lo, other.lo) and never_above(other.hi, self.hi)
        )


@dataclass(slots=True, eq=False)
class Spot:
    """A view of a buffer before it is resolved."""

    view: View
    buffer: Buffer
    key: int
    by_rank: tuple[RankIndex | TableEntry, ...]
    """Rank indices and table entries that its box depends on."""


class Regions:
    """All regions of one check."""

    def __init__(self) -> None:
        self._spots: dict[object, tuple[int, tuple[RankIndex | TableEntry, ...]]] = {}
        self._found: dict[tuple[Int, ...], ByteRegion] = {}
        self._interned: dict[tuple[Box, Box], ByteRegion] = {}
        self._overlaps: dict[tuple[ByteRegion, ByteRegion], bool] = {}
        self._covers: dict[tuple[ByteRegion, frozenset[ByteRegion]], bool] = {}
        self.steps = 0
        self._per_hull = 1

    def compare(self, hulls: int) -> None:
        """Counts comparisons with so many hulls."""
        self.spend(hulls * self._per_hull)

    def spend(self, steps: int) -> None:
        """Counts what comparing takes. Raises ProgramError where that is too much."""
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise ProgramError(
                f"comparing the accesses of this schedule takes more than {MAX_STEPS:,} steps: "
                "check it in parts, with fewer ops on a buffer, views of fewer separate pieces, or "
                "fewer ranks"
            )

    def spot(self, view: View, buffer: Buffer, tables: tuple[Table, ...]) -> Spot:
        """The view, ready to be resolved on any rank. The tables are those of a Program, which
        lives as long as the check."""
        geometry = (buffer.shape, buffer.strides, buffer.dtype, view.steps, id(tables))
        known = self._spots.get(geometry)
        if known is None:
            known = self._spots[geometry] = len(self._spots), varying(view, buffer)
        return Spot(view, buffer, *known)

    def at(self, spot: Spot, where: Where) -> ByteRegion:
        """The region of a spot on one rank."""
        key = (spot.key, *map(where.value, spot.by_rank)) if spot.by_rank else (spot.key,)
        region = self._found.get(key)
        if region is None:
            region = self._found[key] = self._resolve(spot, where)
        return region

    def _resolve(self, spot: Spot, where: Where) -> ByteRegion:
        exact = spot.view.box(spot.buffer, where)
        compared = compared_box(spot.view, spot.buffer, where) if exact.numel else None
        box = exact if compared is None or compared == exact else compared
        region = self._interned.get((box, exact))
        if region is None:
            lo, hi = box.hull
            if isinstance(lo, Size) or isinstance(hi, Size):
                self._per_hull = PER_SIZED
            first, last, dense = least(lo), greatest(hi), _dense(box)
            region = self._interned[box, exact] = ByteRegion(
                box, exact, lo, hi, first, last, never_above(hi, lo), dense, box is not exact
            )
        return region

    def overlap(self, one: ByteRegion, other: ByteRegion) -> bool:
        """Returns True if the two regions of one buffer share a byte."""
        if never_above(other.hi, one.lo) or never_above(one.hi, other.lo):
            return False
        if one is other or (one.dense and other.dense):
            return one.lo < one.hi
        found = self._overlaps.get((one, other))
        if found is None:
            found, steps = one.box.meets(other.box)
            self.compare(PER_PAIR)
            self.spend(steps)
            self._overlaps[one, other] = self._overlaps[other, one] = found
        return found

    def covered(self, region: ByteRegion, parts: Iterable[ByteRegion]) -> bool:
        """Returns True if the parts together hold every byte of the region."""
        there = list(parts)
        if len(there) > MANY_PARTS:
            return covered(region.exact, [part.exact for part in there], self.spend)
        key = (region, frozenset(there))
        found = self._covers.get(key)
        if found is None:
            found = covered(region.exact, [part.exact for part in there], self.spend)
            self._covers[key] = found
        return found


def _dense(box: Box) -> bool:
    length = 1
    for stride, size in sorted(zip(box.strides, box.sizes, strict=True)):
        if size > 1:
            if stride > length:
                return False
            length += stride * (size - 1)
    return True
