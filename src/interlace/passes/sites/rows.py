"""Where the bytes of a value come from, through any chain of views and data movement.

The contents of a value are `ByteRun`s: `length` bytes from `start` on, in row-major order of the
value, come from byte `offset` on of `source` (a rank's shard, or one matrix); `PAD` is zeros.

    >>> gathered = (ByteRun(0, 24, 0, 0), ByteRun(24, 24, 1, 0))    # two ranks, (2, 3) floats each
    >>> seen(gathered, Box(6, (2, 3), (3, 1), DType.f32))       # the second rank's rows
    (ByteRun(start=0, length=24, source=1, offset=0),)

A `RowLayout` says how the rows of a matrix are dealt to the ranks, the one shape that strategies
chunk: with `RowLayout(batch=2, rows=(3, 3, 2), pitch=(3, 3, 3))` the matrix is two stacks of
3 + 3 + 2 rows, and a rank's shard holds its rows of both, 3 rows apart. Other contents are refused.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from interlace.ir import Box
from interlace.ir.sizes import Int, Size, cached, divisors, fixed

PAD = -1
MAX_RUNS = 1 << 16
"""Contents of more runs than this are not followed."""


TOO_FINE = "the rows are scattered too finely to be followed"
COLUMNS = "the columns, not the rows, are what the ranks hold parts of"


class Refused(Exception):
    """Why a communication is no site; the message is the reason that users read."""


class ByteRun(NamedTuple):
    """`length` bytes at `start` of a value are the bytes at `offset` of `source`."""

    start: Int
    length: Int
    source: int
    offset: Int


Contents = tuple[ByteRun, ...]


def joined(pieces: Iterable[ByteRun]) -> Iterator[ByteRun]:
    """The pieces laid end to end, neighbours that continue one another merged."""
    count = start = position = 0
    source, offset, end = PAD, 0, 0  # of the run that begins at `start`
    for _, length, whose, at in pieces:
        if not length:
            continue
        if position > start and (whose != source or (whose != PAD and at != end)):
            yield ByteRun(start, position - start, source, offset)
            start = position
            count += 1
            if count >= MAX_RUNS:
                raise Refused(TOO_FINE)
        if start == position:
            source, offset = whose, at
        end = at + length
        position += length
    if position > start:
        yield ByteRun(start, position - start, source, offset)


def join(pieces: Iterable[ByteRun]) -> Contents:
    """All that `joined` gives."""
    return tuple(joined(pieces))


def whole_rows(runs: Iterable[ByteRun], row_bytes: Int) -> Iterator[ByteRun]:
    """The runs, or Refused at the first that cuts a row of `row_bytes` bytes."""
    for run in runs:
        if run.length % row_bytes or run.offset % row_bytes:
            raise Refused(COLUMNS)
        yield run


def cut(contents: Contents, start: Int, length: Int) -> Iterator[ByteRun]:
    """The pieces of `length` bytes from `start` on."""
    stop = start + length
    first = bisect.bisect_right(contents, start, key=lambda run: run.start) - 1
    for run in contents[max(first, 0) :]:
        if run.start >= stop:
            return
        low, high = max(run.start, start), min(run.start + run.length, stop)
        if low < high:
            offset = 0 if run.source == PAD else run.offset + low - run.start
            yield ByteRun(low, high - low, run.source, offset)


def box_runs(box: Box) -> Iterator[tuple[Int, Int]]:
    """The (first byte, bytes) of a box's stretches, in row-major order of the view."""
    if not box.numel:
        return
    length, dims = _stretches(box)
    item = box.dtype.itemsize
    if any(isinstance(n, Size) for n, _ in dims):
        yield box.offset * item, length * item
        raise Refused(TOO_FINE)
    offsets = [[i * step for i in range(n)] for n, step in dims]
    inner = offsets.pop() if offsets else (0,)
    for index in itertools.product(*offsets):
        start = box.offset + sum(index)
        for at in inner:
            yield (start + at) * item, length * item


def _stretches(box: Box) -> tuple[Int, list[tuple[Int, Int]]]:
    """The elements of each contiguous stretch, and (size, stride) of the dimensions outside it."""
    dims = list(zip(box.sizes, box.strides, strict=True))
    length = 1
    while dims and (dims[-1][0] == 1 or dims[-1][1] == length):
        length *= dims.pop()[0]
    return length, dims


@cached(32)
def seen(buffer: Contents, box: Box, row_bytes: Int = 0) -> Contents:
    """The contents of a view, from those of its buffer (in storage order).

    With `row_bytes`, the view is a matrix of rows of so many bytes: Refused at the first run that
    cuts one, so that a transposed matrix need not be walked element by element.
    """
    # Else stretches of a view hardly join but where a run of the buffer ends (or in zeros).
    if not row_bytes and box.numel and box.numel // _stretches(box)[0] - len(buffer) > MAX_RUNS:
        if all(run.source != PAD for run in buffer):
            raise Refused(TOO_FINE)
    starts = [run.start for run in buffer]

    def pieces() -> Iterator[ByteRun]:
        for start, length in box_runs(box):
            run = buffer[bisect.bisect_right(starts, start) - 1]
            within = start - run.start
            if within + length > run.length or run.source == PAD:
                yield from cut(buffer, start, length)
            else:
                yield ByteRun(start, length, run.source, run.offset + within)

    if not buffer:
        return ()
    return tuple(whole_rows(joined(pieces()), row_bytes)) if row_bytes else join(pieces())


def stored(value: Contents, box: Box) -> Contents:
    """The contents of a buffer in storage order, when `box`, the whole of it, holds `value`."""
    if box.contiguous:
        return value
    placed: list[tuple[Int, ByteRun]] = []
    position = 0
    for start, length in box_runs(box):
        for piece in cut(value, position, length):
            placed.append((start + piece.start - position, piece))
        position += length
    return join(piece for _, piece in sorted(placed, key=lambda item: item[0]))


def concatenated(parts: Sequence[tuple[Contents, tuple[Int, ...], int]], dim: int) -> Contents:
    """`cat` of (contents, sizes, bytes of an element) along `dim`."""
    sizes = parts[0][1]
    dim %= max(len(sizes), 1)
    outer = fixed(math.prod(sizes[:dim]))
    blocks = [math.prod(shape[dim:]) * item for _, shape, item in parts]

    def pieces() -> Iterator[ByteRun]:
        for i in range(outer):
            for (contents, _, _), block in zip(parts, blocks, strict=True):
                yield from cut(contents, i * block, block)

    return join(pieces())


def padded(contents: Contents, sizes: tuple[Int, ...], item: int, pads: Sequence[int]) -> Contents:
    """`constant_pad_nd` with zeros: `pads` lists (before, after) from the last dimension on."""
    for i, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        dim = len(sizes) - 1 - i
        inner = math.prod(sizes[dim + 1 :]) * item
        block, rows = sizes[dim] * inner, fixed(math.prod(sizes[:dim]))

        def pieces(
            old: Contents = contents,
            outer: int = rows,
            block: Int = block,
            low: Int = before * inner,
            high: Int = after * inner,
        ) -> Iterator[ByteRun]:
            for j in range(outer):
                yield ByteRun(0, low, PAD, 0)
                yield from cut(old, j * block - min(low, 0), block + min(low, 0) + min(high, 0))
                yield ByteRun(0, high, PAD, 0)

        contents = join(piece for piece in pieces() if piece.length > 0)
        sizes = (*sizes[:dim], sizes[dim] + before + after, *sizes[dim + 1 :])
    return contents


# layouts


@dataclass(frozen=True, slots=True)
class RowLayout:
    """`batch` stacks, each with `rows[r]` rows of rank r, `pitch[r]` apart in its shard."""

    batch: Int
    rows: tuple[Int, ...]
    pitch: tuple[Int, ...]

    @property
    def total(self) -> Int:
        """Rows of the matrix."""
        return self.batch * sum(self.rows)

    @property
    def shard(self) -> tuple[Int, ...]:
        """Rows of each rank's shard, padding included."""
        return tuple(self.batch * pitch for pitch in self.pitch)

    @property
    def padded(self) -> bool:
        """True if a shard has rows that are no rows of the matrix."""
        return self.rows != self.pitch

    @property
    def even(self) -> bool:
        """True if all ranks have as many rows, without padding."""
        return not self.padded and len(set(self.rows)) == 1


def chunk_sizes(total: Int, parts: int) -> tuple[Int, ...]:
    """The sizes that `torch.chunk` gives, with zeros for the parts that it leaves out."""
    size = -(-total // parts)
    return tuple(max(0, min(size, total - i * size)) for i in range(parts))


def balanced_sizes(total: Int, parts: int) -> tuple[Int, ...]:
    """Sizes that differ by one at most."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


@cached(32)
def gather_layout(
    contents: Contents, row_bytes: Int, shard_bytes: tuple[Int, ...], what: str = "gathered"
) -> RowLayout:
    """The layout of a matrix made of the shards of a gather, or Refused."""
    runs = in_rows(contents, row_bytes)
    if any(size % row_bytes for size in shard_bytes):
        raise Refused("a row of the matmul is spread over several ranks' shards")
    if any(run.source == PAD for run in runs):
        raise Refused(f"padding stands between the {what} rows")
    shards = [size // row_bytes for size in shard_bytes]
    used = [sum(run.length for run in runs if run.source == r) for r in range(len(shards))]

    def pieces(layout: RowLayout) -> Iterator[ByteRun]:
        for b in range(fixed(layout.batch)):
            for rank, rows in enumerate(layout.rows):
                yield ByteRun(0, rows, rank, b * layout.pitch[rank])

    return _fit(runs, used, shards, pieces, what)


@cached(32)
def scatter_layout(
    contents: Contents, row_bytes: Int, part_bytes: tuple[Int, ...], total: Int
) -> RowLayout:
    """The layout of a matrix of `total` rows that is put in order for a scatter, or Refused."""
    runs = in_rows(contents, row_bytes)
    if any(size % row_bytes for size in part_bytes):
        raise Refused("a row of the matmul is scattered over several ranks")
    parts = [size // row_bytes for size in part_bytes]
    starts = [sum(parts[:rank]) for rank in range(len(parts))]
    used = [
        sum(run.length for run in cut(runs, start, size) if run.source != PAD)
        for start, size in zip(starts, parts, strict=True)
    ]
    if sum(used) != total:
        raise Refused("rows of the matmul are dropped or repeated before the scatter")

    def pieces(layout: RowLayout) -> Iterator[ByteRun]:
        for rank, rows in enumerate(layout.rows):
            for b in range(fixed(layout.batch)):
                yield ByteRun(0, rows, 0, b * sum(layout.rows) + sum(layout.rows[:rank]))
                yield ByteRun(0, layout.pitch[rank] - rows, PAD, 0)

    return _fit(runs, used, parts, pieces, "scattered")


def _fit(
    runs: Contents,
    used: list[Int],
    shards: list[Int],
    pieces: Callable[[RowLayout], Iterable[ByteRun]],
    what: str,
) -> RowLayout:
    """The layout with the fewest stacks whose pieces, joined, are these runs."""
    problem = ""
    for batch in divisors((*used, *shards)):
        rows, pitch = (tuple(n // batch for n in counts) for counts in (used, shards))
        layout = RowLayout(batch, rows, pitch)
        if join(pieces(layout)) == runs:
            problem = _dropped(layout, what)
            if not problem:
                return layout
    if not problem and sum(used) < sum(shards):
        problem = _only(sum(used), sum(shards), what)
    raise Refused(problem or f"the {what} rows are not in the order of the ranks")


def _dropped(layout: RowLayout, what: str) -> str:
    """The problem if rows are left out that are not the padding of uneven shards; else empty."""
    even = chunk_sizes(sum(layout.rows), len(layout.rows))
    if not layout.padded or (layout.rows == even and set(layout.pitch) == {even[0]}):
        return ""
    return _only(layout.total, sum(layout.shard), what)


def _only(used: Int, held: Int, what: str) -> str:
    part = f"only {used} of {held} {what} rows are used"
    return f"{part} (a select or slice of the sharded dimension)"


def in_rows(contents: Contents, row_bytes: Int) -> Contents:
    """The runs counted in rows, or Refused where they cut a row."""
    return tuple(
        ByteRun(
            run.start // row_bytes, run.length // row_bytes, run.source, run.offset // row_bytes
        )
        for run in whole_rows(contents, row_bytes)
    )
