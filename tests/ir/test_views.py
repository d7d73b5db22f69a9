"""Views resolve to the boxes that torch gives, and boxes overlap where their bytes do."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from interlace.errors import InterlaceError, ProgramError
from interlace.ir import (
    Box,
    Buffer,
    DType,
    Program,
    RankIndex,
    Table,
    TableEntry,
    Team,
    View,
)
from interlace.ir.sizes import number, numbers
from interlace.ir.types import Where
from interlace.verify.regions import MAX_RUNS

TEAM = Team("tp", 3)
ROWS = Table("rows", "tp", (2, 0, 4))
TORCH = {DType.f32: torch.float32, DType.u8: torch.uint8, DType.i64: torch.int64}
TORCH |= {DType.bf16: torch.bfloat16}


def where(rank: int) -> Where:
    return Program(teams=(TEAM,), tables=(ROWS,)).where(rank)


def random_step(rng: random.Random, view: View, tensor: torch.Tensor, rank: int):
    """A step of a view, and the same done by torch; either may refuse."""
    sizes = tensor.shape
    dim = rng.randrange(-1, max(tensor.dim(), 1))
    offset = rng.randint(-1, 3)
    index = (rank + offset) % 3
    match rng.randrange(10):
        case 0:
            step = view.chunk(RankIndex("tp", offset), 3, dim)
            if not tensor.dim() or sizes[dim] % 3:
                return step, None
            part = sizes[dim] // 3
            return step, lambda: tensor.narrow(dim, index * part, part)
        case 1:
            start = sum(numbers(ROWS.values)[:index])
            step = view.chunk(RankIndex("tp", offset), ROWS, dim)
            if not tensor.dim() or sizes[dim] != 6:
                return step, None
            return step, lambda: tensor.narrow(dim, start, number(ROWS.values[index]))
        case 2:
            start, stop = rng.randint(0, 3), rng.randint(0, 6)
            return view.slice(dim, start, stop), lambda: tensor.narrow(dim, start, stop - start)
        case 3:
            stop = TableEntry("rows", RankIndex("tp", offset))
            return view.slice(dim, 0, stop), lambda: tensor.narrow(
                dim, 0, number(ROWS.values[index])
            )
        case 4:
            place = rng.randint(0, 5)
            return view.select(dim, place), lambda: tensor.select(dim, place)
        case 5:
            dims = list(range(tensor.dim()))
            rng.shuffle(dims)
            return view.permute(*dims), lambda: tensor.permute(dims)
        case 6:
            count = tensor.numel()
            shape = rng.choice(((-1,), (2, -1), (3, -1), (1, -1), (count,), (2, 3, -1), (count, 1)))
            return view.view(*shape), lambda: tensor.view(shape)
        case 7:
            shape = rng.choice(((-1, 4), (2, -1, -1), (3, -1), (5, -1, -1, -1)))
            return view.expand(*shape), lambda: tensor.expand(shape)
        case 8:
            dtype = rng.choice(tuple(TORCH))
            if not tensor.numel() or sizes[-1:] == (1,):  # a stride that means nothing
                dtype = next(name for name, found in TORCH.items() if found == tensor.dtype)
            return view.cast(dtype), lambda: tensor.view(TORCH[dtype])
        case _:
            unit = rng.choice((1, 2))
            return view.as_strided((2, 2), (unit, 3), 1), lambda: tensor.as_strided(
                (2, 2), (unit, 3), 1
            )


def test_boxes_are_what_torch_gives(seed: int) -> None:
    rng = random.Random(seed)
    agreed = refused = 0
    for _ in range(4000):
        rank = rng.randrange(3)
        dtype = rng.choice(tuple(TORCH))
        shape = rng.choice(((6, 4), (6, 6), (2, 6, 3), (12,), (), (0, 4), (6, 1, 4)))
        buffer = Buffer("x", dtype, shape)
        tensor = torch.empty(shape, dtype=TORCH[dtype])
        view = View("x")
        for _ in range(rng.randint(1, 4)):
            longer, by_torch = random_step(rng, view, tensor, rank)
            try:
                box = longer.box(buffer, where(rank))
                if box.numel and box.hull[1] > View("x").box(buffer, where(rank)).hull[1]:
                    box = None  # for `validate` to find
            except ProgramError:
                box = None
            try:
                expected = by_torch() if by_torch is not None else None
            except (RuntimeError, IndexError):
                expected = None
            if box is None or expected is None:
                assert (box is None) == (expected is None), (longer, buffer, tensor.shape, box)
                refused += 1
                continue
            view, tensor = longer, expected
            assert box.sizes == tuple(tensor.shape), longer
            assert TORCH[box.dtype] == tensor.dtype
            if tensor.numel():
                assert box.offset == tensor.storage_offset(), longer
                pairs = zip(box.sizes, box.strides, tensor.stride(), strict=True)
                assert all(mine == its for size, mine, its in pairs if size > 1), longer
            assert box.contiguous == tensor.is_contiguous(), longer
            assert (box.numel, box.nbytes) == (tensor.numel(), tensor.nbytes)
            agreed += 1
    assert agreed > 1000
    assert refused > 500


def bytes_of(box: Box) -> set[int]:
    starts = {number(box.offset)}
    for size, stride in zip(numbers(box.sizes), numbers(box.strides), strict=True):
        starts = {start + i * stride for start in starts for i in range(size)}
    item = box.dtype.itemsize
    return {start * item + i for start in starts for i in range(item)}


def random_box(rng: random.Random) -> Box:
    dims = rng.randint(0, 3)
    sizes = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 4) for _ in range(dims))
    strides = tuple(rng.randint(0, 9) for _ in range(dims))
    return Box(rng.randint(0, 12), sizes, strides, rng.choice((DType.u8, DType.bf16, DType.f32)))


def test_boxes_overlap_where_their_bytes_do(seed: int) -> None:
    rng = random.Random(seed)
    seen = {True: 0, False: 0}
    for _ in range(5000):
        a, b = random_box(rng), random_box(rng)
        share = bool(bytes_of(a) & bytes_of(b))
        assert a.overlaps(b) == b.overlaps(a) == share, (a, b)
        seen[share] += 1
        first, last = a.hull
        touched = bytes_of(a) or {first}
        assert (first, max(last, first + 1)) == (min(touched), max(touched) + 1)
    assert min(seen.values()) > 500


def test_boxes_of_many_runs_are_compared_byte_by_byte() -> None:
    evens = Box(0, (MAX_RUNS + 1,), (2,), DType.u8)
    odds = Box(1, (MAX_RUNS + 1,), (2,), DType.u8)
    assert not evens.overlaps(odds)
    assert evens.overlaps(evens)
    assert not evens.overlaps(Box(2 * MAX_RUNS + 1, (4,), (1,), DType.u8))


def test_unknown_names_of_a_place() -> None:
    with pytest.raises(InterlaceError, match="in no team named 'dp'"):
        where(0).index(RankIndex("dp"))
    with pytest.raises(ProgramError, match=r"no table named 'row'; known are \['rows'\]"):
        where(0).table("row")
    with pytest.raises(ProgramError, match="has 3 entries, not one at 3"):
        where(0).dim(TableEntry("rows", 3))


def test_what_overlaps_itself_is_what_has_two_elements_in_one_place(seed: int) -> None:
    rng = random.Random(seed)
    met = {False: 0, True: 0}
    for _ in range(3000):
        rank = rng.randint(0, 4)
        sizes = tuple(rng.randint(0 if rng.random() < 0.05 else 1, 5) for _ in range(rank))
        strides = tuple(rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 12, 20, 31)) for _ in range(rank))
        box = Box(rng.randint(0, 3), sizes, strides, DType.f32)
        places = [
            sum(map(int.__mul__, index, strides)) for index in itertools.product(*map(range, sizes))
        ]
        assert box.overlaps_itself == (len(set(places)) < len(places)), (seed, box)
        met[box.overlaps_itself] += 1
    assert min(met.values()) > 300, met
