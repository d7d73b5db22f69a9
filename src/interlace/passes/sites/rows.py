"""Where the bytes of a value come from, through any chain of views and data movement.

The contents of a value are `Run`s: `length` bytes from `start` on, in row-major order of the value,
come from byte `offset` on of `source` (a rank's shard, or one matrix); source `PAD` is zeros.
Views, cat, clone, slice and pad change only the list of runs, so that a gather is understood
however its result is put in order:

    >>> gathered = (Run(0, 24, 0, 0), Run(24, 24, 1, 0))        # two ranks, (2, 3) floats each
    >>> seen(gathered, Box(6, (2, 3), (3, 1), DType.f32))       # the second rank's rows
    (Run(start=0, length=24, source=1, offset=0),)
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from interlace.ir import Box

PAD = -1
MAX_RUNS = 1 << 16
"""Contents of more runs than this are not followed."""


TOO_FINE = "the rows are scattered too finely to be followed"
COLUMNS = "the columns, not the rows, are what the ranks hold parts of"


class Refused(Exception):
    """Why a communication is no site; the message is the reason that users read."""


class Run(NamedTuple):
    """`length` bytes at `start` of a value are the bytes at `offset` of `source`."""

    start: int
    length: int
    source: int
    offset: int


Contents = tuple[Run, ...]


def joined(pieces: Iterable[Run]) -> Iterator[Run]:
    """The pieces laid end to end, neighbours that continue one another merged."""
    count = start = position = 0
    source, offset, end = PAD, 0, 0  # of the run that begins at `start`
    for _, length, whose, at in pieces:
        if not length:
            continue
        if position > start and (whose != source or (whose != PAD and at != end)):
            yield Run(start, position - start, source, offset)
            start = position
            count += 1
            if count >= MAX_RUNS:
                raise Refused(TOO_FINE)
        if start == position:
            source, offset = whose, at
        end = at + length
        position += length
    if position > start:
        yield Run(start, position - start, source, offset)


def join(pieces: Iterable[Run]) -> Contents:
    """All that `joined` gives."""
    return tuple(joined(pieces))


def whole_rows(runs: Iterable[Run], row: int) -> Iterator[Run]:
    """The runs, or Refused at the first that cuts a row of so many bytes."""
    for run in runs:
        if run.length % row or run.offset % row:
            raise Refused(COLUMNS)
        yield run


def cut(contents: Contents, start: int, length: int) -> Iterator[Run]:
    """The pieces of `length` bytes from `start` on."""
    stop = start + length
    first = bisect.bisect_right(contents, start, key=lambda run: run.start) - 1
    for run in contents[max(first, 0) :]:
        if run.start >= stop:
            return
        low, high = max(run.start, start), min(run.start + run.length, stop)
        if low < high:
            offset = 0 if run.source == PAD else run.offset + low - run.start
            yield Run(low, high - low, run.source, offset)


def box_runs(box: Box) -> Iterator[tuple[int, int]]:
    """The (first byte, bytes) of a box's stretches, in row-major order of the view."""
    if not box.numel:
        return
    dims = list(zip(box.sizes, box.strides, strict=True))
    length = 1
    while dims and (dims[-1][0] == 1 or dims[-1][1] == length):
        length *= dims.pop()[0]
    item = box.dtype.itemsize
    offsets = [range(0, n * step, step) if step else (0,) * n for n, step in dims]
    inner = offsets.pop() if offsets else (0,)
    for index in itertools.product(*offsets):
        start = box.offset + sum(index)
        for at in inner:
            yield (start + at) * item, length * item


def _num_stretches(box: Box) -> int:
    """How many stretches `box_runs` gives."""
    if not box.numel:
        return 0
    dims = list(zip(box.sizes, box.strides, strict=True))
    length = 1
    while dims and (dims[-1][0] == 1 or dims[-1][1] == length):
        length *= dims.pop()[0]
    return box.numel // length


def seen(buffer: Contents, box: Box, row: int = 0) -> Contents:
    """The contents of a view, from those of its buffer (in storage order).

    With `row`, the view is a matrix of rows of so many bytes: Refused at the first run that cuts
    one, so that a transposed matrix need not be walked element by element.
    """
    # Else stretches of a view hardly join but where a run of the buffer ends (or in zeros).
    if not row and _num_stretches(box) - len(buffer) > MAX_RUNS:
        if all(run.source != PAD for run in buffer):
            raise Refused(TOO_FINE)
    starts = [run.start for run in buffer]

    def pieces() -> Iterator[Run]:
        for start, length in box_runs(box):
            run = buffer[bisect.bisect_right(starts, start) - 1]
            within = start - run.start
            if within + length > run.length or run.source == PAD:
                yield from cut(buffer, start, length)
            else:
                yield Run(start, length, run.source, run.offset + within)

    if not buffer:
        return ()
    return tuple(whole_rows(joined(pieces()), row)) if row else join(pieces())


def stored(value: Contents, box: Box) -> Contents:
    """The contents of a buffer in storage order, when `box`, the whole of it, holds `value`."""
    if box.contiguous:
        return value
    placed: list[tuple[int, Run]] = []
    position = 0
    for start, length in box_runs(box):
        for piece in cut(value, position, length):
            placed.append((start + piece.start - position, piece))
        position += length
    return join(piece for _, piece in sorted(placed, key=lambda item: item[0]))


def concatenated(parts: Sequence[tuple[Contents, tuple[int, ...], int]], dim: int) -> Contents:
    """`cat` of (contents, sizes, bytes of an element) along `dim`."""
    sizes = parts[0][1]
    dim %= max(len(sizes), 1)
    outer = _product(sizes[:dim])
    blocks = [_product(shape[dim:]) * item for _, shape, item in parts]

    def pieces() -> Iterator[Run]:
        for i in range(outer):
            for (contents, _, _), block in zip(parts, blocks, strict=True):
                yield from cut(contents, i * block, block)

    return join(pieces())


def padded(contents: Contents, sizes: tuple[int, ...], item: int, pads: Sequence[int]) -> Contents:
    """`constant_pad_nd` with zeros: `pads` lists (before, after) from the last dimension on."""
    for i, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        dim = len(sizes) - 1 - i
        inner = _product(sizes[dim + 1 :]) * item
        block = sizes[dim] * inner

        def pieces(
            old: Contents = contents,
            outer: int = _product(sizes[:dim]),
            block: int = block,
            low: int = before * inner,
            high: int = after * inner,
        ) -> Iterator[Run]:
            for j in range(outer):
                yield Run(0, low, PAD, 0)
                yield from cut(old, j * block - min(low, 0), block + min(low, 0) + min(high, 0))
                yield Run(0, high, PAD, 0)

        contents = join(piece for piece in pieces() if piece.length > 0)
        sizes = (*sizes[:dim], sizes[dim] + before + after, *sizes[dim + 1 :])
    return contents


def _product(sizes: Iterable[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count
