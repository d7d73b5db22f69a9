"""What a view holds, against each byte looked up alone."""

from __future__ import annotations

import itertools
import random

import pytest

from interlace.ir import Box, DType
from interlace.ir.sizes import NamedSize, SizeClass, at, deciding, named, number
from interlace.passes.sites.rows import (
    COLUMNS,
    PAD,
    ByteRun,
    Contents,
    Refused,
    box_runs,
    in_rows,
    join,
    seen,
)


def random_contents(rng: random.Random, count: int) -> Contents:
    """`count` elements of four bytes in some runs, some of them zeros."""
    pieces: list[ByteRun] = []
    while count:
        length = rng.randint(1, count)
        source = rng.choice((PAD, 0, 1, 2))
        offset = 0 if source == PAD else 4 * rng.randint(0, 5)
        pieces.append(ByteRun(0, 4 * length, source, offset))
        count -= length
    return join(pieces)


def random_box(rng: random.Random, count: int) -> Box:
    """Some elements of a buffer of `count`, in any order, also one many times."""
    sizes = [rng.randint(0 if rng.random() < 0.1 else 1, 4) for _ in range(rng.randint(1, 3))]
    strides = [rng.choice((0, 1, 1, size, 2 * size, 3)) for size in reversed(sizes)]
    reach = sum((max(n, 1) - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    if reach >= count:
        return random_box(rng, count)
    return Box(rng.randint(0, count - 1 - reach), tuple(sizes), tuple(strides), DType.f32)


def byte_by_byte(buffer: Contents, box: Box) -> Contents:
    held = [
        (run.source, 0 if run.source == PAD else run.offset + i)
        for run in buffer
        for i in range(run.length)
    ]
    found: list[ByteRun] = []
    for index in itertools.product(*map(range, box.sizes)):
        at = box.offset + sum(i * stride for i, stride in zip(index, box.strides, strict=True))
        found += [ByteRun(0, 1, *held[4 * at + i]) for i in range(4)]
    return join(found)


def test_a_view_holds_what_each_of_its_bytes_is(seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    for _ in range(1000):
        buffer = random_contents(rng, rng.randint(1, 48))
        box = random_box(rng, sum(number(run.length) for run in buffer) // 4)
        wanted = byte_by_byte(buffer, box)
        assert seen(buffer, box) == wanted, (buffer, box)
        assert join(wanted) == wanted
        starts = [run.start for run in wanted]
        assert (
            starts
            == list(itertools.accumulate((r.length for r in wanted[:-1]), initial=0))[: len(starts)]
        )
        row = 4 * (box.sizes[-1] or 1)
        if any(run.length % row or run.offset % row for run in wanted):
            refused += 1
            with pytest.raises(Refused, match=COLUMNS):
                seen(buffer, box, row)
            with pytest.raises(Refused, match=COLUMNS):
                in_rows(wanted, row)
        else:
            assert seen(buffer, box, row) == wanted
            assert len(in_rows(wanted, row)) == len(wanted)
    assert 100 < refused < 900


def test_a_transposed_matrix_is_refused_at_once() -> None:
    rows = Box(0, (1 << 14, 1 << 14), (1, 1 << 14), DType.f32)
    with pytest.raises(Refused, match=COLUMNS):
        seen((ByteRun(0, rows.nbytes, 0, 0),), rows, 4 << 14)


def test_stretches_that_named_sizes_part() -> None:
    """Heads of rows whose number is a name: as for each number, and for the whole class."""
    rows = named("S")
    with deciding(SizeClass((NamedSize("S", value=6),))) as known:
        runs = [*box_runs(Box(rows, (2, 3, 4 * rows), (12 * rows, 4 * rows, 1), DType.f32))]
        parted = [*box_runs(Box(0, (3, 2, 8), (8, 24 * rows, 1), DType.f32))]
    for value in (6, 7, 50):
        own = Box(value, (2, 3, 4 * value), (12 * value, 4 * value, 1), DType.f32)
        assert known.size_class().holds({"S": value})
        for found, box in (
            (runs, own),
            (parted, Box(0, (3, 2, 8), (8, 24 * value, 1), DType.f32)),
        ):
            numbers = [tuple(at(n, {"S": value}) for n in run) for run in found]
            assert numbers == [*box_runs(box)]
