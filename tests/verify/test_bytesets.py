"""Overlap and cover of strided boxes, against sets of bytes."""

from __future__ import annotations

import random

from interlace.errors import ProgramError
from interlace.ir import Box, Buffer, DType, Program, View
from interlace.ir.sizes import number, numbers
from interlace.verify.regions import covered

DTYPES = (DType.f32, DType.bf16, DType.i8)
STRIDES = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 12, 15, 24)


def bytes_of(box: Box) -> set[int]:
    """Every byte of a box."""
    starts = {number(box.offset)} if box.numel else set[int]()
    for size, stride in zip(numbers(box.sizes), numbers(box.strides), strict=True):
        starts = {start + i * stride for start in starts for i in range(size)}
    item = box.dtype.itemsize
    return {start * item + i for start in starts for i in range(item)}


def any_box(rng: random.Random) -> Box:
    """Sizes and strides without rhyme or reason."""
    dims = rng.randint(0, 3)
    sizes = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 5) for _ in range(dims))
    strides = tuple(rng.choice(STRIDES) for _ in range(dims))
    return Box(rng.randint(0, 30), sizes, strides, rng.choice(DTYPES))


def view_box(rng: random.Random) -> Box:
    """The box of some view of a buffer of 96 elements."""
    buffer, where = Buffer("x", rng.choice(DTYPES), (6, 4, 4)), Program().where(0)
    view = View("x")
    for _ in range(rng.randint(0, 3)):
        sizes = numbers(view.box(buffer, where).sizes)
        if not sizes:
            break
        dim = rng.randrange(len(sizes))
        start = rng.randint(0, sizes[dim])
        longer = rng.choice(
            (
                view.slice(dim, start, rng.randint(start, sizes[dim])),
                view.permute(*rng.sample(range(len(sizes)), len(sizes))),
                view.view(-1),
                view.view(24, 4),
            )
        )
        try:
            longer.box(buffer, where)
        except ProgramError:
            continue
        view = longer
    return view.box(buffer, where)


def meshed_box(rng: random.Random) -> Box:
    """Long dimensions that run into each other, by strides of which few divide another."""
    dims = rng.randint(1, 2)
    sizes = tuple(rng.randint(1, 12) for _ in range(dims))
    strides = tuple(rng.choice((1, 2, 3, 4, 6, 8, 9, 12)) for _ in range(dims))
    return Box(rng.randint(0, 24), sizes, strides, DType.i8)


def test_meshed_boxes_agree_with_sets(seed: int) -> None:
    rng = random.Random(seed)
    seen = {True: 0, False: 0}
    for _ in range(600):
        one, parts = meshed_box(rng), [meshed_box(rng) for _ in range(rng.randint(1, 5))]
        left = bytes_of(one).difference(*map(bytes_of, parts))
        assert covered(one, parts) == (not left), (one, parts)
        seen[not left] += 1
    assert min(seen.values()) > 30


def test_overlaps_and_covered_agree_with_sets(seed: int) -> None:
    rng = random.Random(seed)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        draw = rng.choice((any_box, view_box))
        one, other = draw(rng), draw(rng)
        assert one.overlaps(other) == bool(bytes_of(one) & bytes_of(other)), (one, other)
        parts = [draw(rng) for _ in range(rng.randint(0, 4))]
        left = bytes_of(one).difference(*map(bytes_of, parts))
        assert covered(one, parts) == (not left), (one, parts)
        seen[not left] += 1
    assert min(seen.values()) > 75


def test_large_columns_take_no_byte_runs() -> None:
    """200,000 rows would be 200,000 byte runs, more than are counted."""
    rows, columns = 200_000, 4096
    quarters = [
        Box(i * 1024, (rows, 1024), (columns, 1), DType.bf16) for i in range(4)
    ]  # fmt: skip
    whole = Box(0, (rows, columns), (columns, 1), DType.bf16)
    assert not any(one.overlaps(other) for i, one in enumerate(quarters) for other in quarters[:i])
    assert covered(whole, quarters)
    assert not covered(whole, quarters[1:])


def test_nor_do_columns_of_rows_whose_lengths_do_not_divide_each_other() -> None:
    """A matrix of 240,000 elements, taken as rows of two, of three and of six."""

    def column(width: int, first: int, count: int = 1) -> Box:
        return Box(first, (240_000 // width, count), (width, 1), DType.f32)

    whole = Box(0, (40_000, 6), (6, 1), DType.f32)
    evens, thirds = column(2, 0), column(3, 0)
    assert covered(whole, [evens, column(2, 1)])
    assert covered(column(3, 0, 2), [evens, column(2, 1)])
    assert covered(whole, [evens, thirds, column(6, 1), column(6, 5)])
    assert not covered(whole, [evens, thirds, column(6, 1)])
    assert not covered(thirds, [evens])


def test_rows_may_begin_amid_a_row_of_a_flat_buffer() -> None:
    """Halves of the columns of a matrix that lies somewhere in a bucket."""
    rows, columns, start = 128_256, 4096, 3072
    half = Box(start, (rows, columns // 2), (columns, 1), DType.f32)
    upper = Box(start, (rows // 2, columns // 2), (columns, 1), DType.f32)
    lower = Box(start + rows // 2 * columns, (rows // 2, columns // 2), (columns, 1), DType.f32)
    assert covered(half, [upper, lower])
    assert not covered(half, [upper])
    planes = Box(1000, (511, 511, 16), (511 * 80, 80, 1), DType.i8)
    assert covered(
        planes,
        [
            Box(1000, (511, 511, 9), (511 * 80, 80, 1), DType.i8),
            Box(1009, (511, 511, 7), (511 * 80, 80, 1), DType.i8),
        ],
    )


def test_of_more_runs_than_are_counted_a_box_covers_itself_alone() -> None:
    """Steps of 4 and of 6 run into each other where another box has steps of 3."""
    mesh, thirds = Box(0, (200_000, 4), (60, 6), DType.i8), Box(0, (100, 3), (11, 3), DType.i8)
    target = Box(0, (200_000, 4, 3), (60, 4, 6), DType.i8)
    assert covered(target, [thirds, target])
    assert not covered(target, [thirds, mesh])


def test_two_steps_may_divide_one_place() -> None:
    """Steps of 4 and 6, with one of 3 before them: both divide 12, and the first goes beyond."""
    target = Box(0, (4, 2), (4, 6), DType.i8)
    parts = [Box(0, (12,), (1,), DType.i8), Box(14, (1,), (1,), DType.i8)]
    parts.append(Box(0, (2,), (3,), DType.i8))
    assert not covered(target, parts)
    assert covered(target, [*parts, Box(12, (7,), (1,), DType.i8)])
