"""Whether several strided boxes cover one.

A box of a large matrix is thousands of byte runs, so runs are not what we count. All boxes in a
question are written in one mixed radix, whose places are the strides that occur (in bytes): a box
is then a short list of *bricks*, one interval for each place, and cover is subtraction of
intervals.

    >>> halves = [Box(k * 2048, (8192, 2048), (4096, 1), DType.f32) for k in (0, 1)]
    >>> covered(Box(0, (8192, 4096), (4096, 1), DType.f32), halves)
    True

Where strides do not divide each other the byte runs of `Box` answer instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from interlace.ir.view import Box, byte_runs

Interval = tuple[int, int]
Brick = tuple[Interval, ...]
"""For each place of the radix, from the smallest: the digits from `start` up to `stop`."""


def covered(target: Box, parts: Sequence[Box]) -> bool:
    """Whether every byte of `target` is in one of `parts`. Never says so wrongly."""
    radix = _radix((target, *parts))
    if radix is not None:
        left = _bricks(target, radix)
        if left is not None:
            for part in parts:
                for brick in _bricks(part, radix) or ():
                    left = [rest for piece in left for rest in _subtract(piece, brick)]
            if not left:
                return True
            if all(_bricks(part, radix) is not None for part in parts):
                return False
    return _covered_by_runs(target, parts)


def _radix(boxes: Iterable[Box]) -> tuple[int, ...] | None:
    """The strides of all boxes in bytes, ascending from 1; None unless each divides the next."""
    found = {1}
    for box in boxes:
        item = box.dtype.itemsize
        found.add(item)
        found.update(
            stride * item
            for size, stride in zip(box.sizes, box.strides, strict=True)
            if size > 1 and stride > 0
        )
    places = tuple(sorted(found))
    if any(high % low for low, high in pairwise(places)):
        return None
    return places


def _bricks(box: Box, radix: tuple[int, ...]) -> list[Brick] | None:
    """The bricks of a box, or None where its dimensions run into each other."""
    if box.numel == 0:
        return []
    item = box.dtype.itemsize
    extents = {1: item} if item > 1 else {}
    for size, stride in zip(box.sizes, box.strides, strict=True):
        if size > 1 and stride > 0:
            step = stride * item
            if step in extents:
                return None
            extents[step] = size
    return _fill(box.offset * item, extents, radix)


def _fill(offset: int, extents: dict[int, int], radix: tuple[int, ...]) -> list[Brick] | None:
    """Bricks of `offset` plus every combination of `extents[place]` steps of each place."""
    digits: list[Interval] = []
    carried, origin = 1, 1  # whole blocks that the run starting at place `origin` fills below
    for i, place in enumerate(radix):
        own = extents.get(place, 1)
        if carried > 1 and own > 1:
            return None
        if carried == 1:
            origin = place
        extent = max(own, carried)
        carried = 1
        start = offset // place
        if i + 1 == len(radix):
            digits.append((start, start + extent))
            continue
        base = radix[i + 1] // place
        start %= base
        if start + extent <= base:
            digits.append((start, start + extent))
        elif start == 0 and extent % base == 0:
            digits.append((0, base))
            carried = extent // base
        else:
            return _split(offset, extents, radix, origin, radix[i + 1])
    return [tuple(digits)]


def _split(
    offset: int, extents: dict[int, int], radix: tuple[int, ...], place: int, border: int
) -> list[Brick] | None:
    """A run that crosses multiples of `border`: up to the first, whole blocks, and the rest."""
    if any(step > place for step in extents):
        return None
    count, block = extents[place], border // place
    first = -(offset // place) % block
    whole = (count - first) // block * block
    found: list[Brick] = []
    for part in (first, whole, count - first - whole):
        if part:
            bricks = _fill(offset, {**extents, place: part}, radix)
            if bricks is None:
                return None
            found += bricks
            offset += part * place
    return found


def _meet(one: Brick, other: Brick) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _subtract(brick: Brick, hole: Brick) -> list[Brick]:
    """What is left of `brick` outside `hole`."""
    if not _meet(brick, hole):
        return [brick]
    found: list[Brick] = []
    core = list(brick)
    for i, ((start, stop), (low, high)) in enumerate(zip(brick, hole, strict=True)):
        for piece in ((start, min(low, stop)), (max(high, start), stop)):
            if piece[0] < piece[1]:
                found.append((*core[:i], piece, *core[i + 1 :]))
        core[i] = (max(start, low), min(stop, high))
    return found


def _covered_by_runs(target: Box, parts: Sequence[Box]) -> bool:
    wanted = byte_runs(target)
    if wanted is None:
        return any(part == target for part in parts)
    runs = sorted(run for part in parts for run in byte_runs(part) or ())
    reached = at = 0
    for start, stop in wanted:
        reached = max(reached, start)
        while reached < stop and at < len(runs) and runs[at][0] <= reached:
            reached = max(reached, runs[at][1])
            at += 1
        if reached < stop:
            return False
    return True
