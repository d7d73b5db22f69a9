"""Which rank updates which parameter, and where parameters lie in flat buffers: numbers alone.

    items = [ParameterCost("layers.0.up", 14336 * 4096, "bf16", 2, cost=2.4e11), ...]
    plan = own(items, ranks=8, bucket_bytes=64 << 20)
    plan.owners[0]                       # the rank that updates layers.0.up
    plan.buckets[0].messages()           # what ranks send one another before the all-gather

Note [Owners and shards]
    A bucket holds parameters that follow one another in the model. In its buffer they stand by
    owner, so that what a rank owns is one region, and the buffer is cut into as many even shards as
    there are ranks. Where a region does not end with its shard, what sticks out is sent: before the
    all-gather from the owner to the rank whose shard it lies in, and after the reduce-scatter the
    other way. So owners are chosen for the cost of all updates, over all buckets, and the gather is
    still one plain all-gather, almost without padding. At most about one shard a rank is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ALIGNMENT = 64
"""Elements that each parameter's place begins at a multiple of."""
SMALL = 16
"""Such a part of `bucket_bytes` the first bucket has."""
MOST_BYTES = 1.3, 1.1
"""Limit of a rank's bytes: so many times the mean, or the largest parameter, whichever is more."""


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """Size, dtype and update cost of a parameter, from which a plan is made."""

    name: str
    numel: int
    dtype: str
    itemsize: int
    cost: float
    """Cost of its update, in any unit that all share."""
    homed: bool = False
    """True if its place holds a shard, and one of the ranks that hold shards updates the whole."""

    @property
    def padded(self) -> int:
        """Elements of its place."""
        return -(-self.numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class BucketMessage:
    """Elements of a bucket that the owner does not hold in its own shard."""

    start: int
    stop: int
    owner: int
    holder: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Some parameters of one dtype in a flat buffer."""

    items: tuple[int, ...]
    """Their numbers, in the order in which they lie there: by owner."""
    starts: tuple[int, ...]
    """Where each begins, in elements."""
    bounds: tuple[int, ...]
    """Ranges of the owners: rank r owns bounds[r] to bounds[r + 1]."""
    numel: int
    """Elements of the buffer: with the padding, a multiple of the number of ranks."""

    @property
    def largest(self) -> int:
        """Elements of the owner that has most."""
        return max(stop - start for start, stop in pairwise(self.bounds))

    def messages(self) -> tuple[BucketMessage, ...]:
        """Elements that lie in the shard of a rank that does not own them, in order of place."""
        ranks = len(self.bounds) - 1
        shard = self.numel // ranks
        found: list[BucketMessage] = []
        for owner, (start, stop) in enumerate(pairwise(self.bounds)):
            while start < stop:
                holder = start // shard
                end = min(stop, (holder + 1) * shard)
                if holder != owner:
                    found.append(BucketMessage(start, end, owner, holder))
                start = end
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owners of all parameters, and their buckets in the order of the model."""

    owners: tuple[int, ...]
    buckets: tuple[BucketPlan, ...]
    homes: tuple[int | None, ...]
    """Where one rank of an owner's `shards` updates the whole: which one."""


def own(
    items: Sequence[ParameterCost], ranks: int, bucket_bytes: int, shards: int = 1
) -> Ownership:
    """Owners balanced by cost, and buckets of at most `bucket_bytes` or of one parameter.

    Each of the `ranks` is as many as `shards`, with a shard each.
    """
    owners, homes = assign(items, ranks, shards)
    buckets = tuple(placed(items, b, owners, ranks) for b in _filled(items, bucket_bytes))
    return Ownership(owners, buckets, homes)


def assign(
    items: Sequence[ParameterCost], ranks: int, shards: int = 1
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """An owner for each, and a home where one is needed: the largest first (its share of all cost,
    or of all bytes), each to the rank with the least cost whose bytes allow it.

    What has a home costs that rank alone, else all `shards` of the owner. Where no rank has room
    under `MOST_BYTES`, the one with the fewest bytes takes it.
    """
    nbytes = [item.padded * item.itemsize * (shards if item.homed else 1) for item in items]
    times = [1 if item.homed else shards for item in items]
    every = sum(item.cost * n for item, n in zip(items, times, strict=True))
    total = sum(size * n for size, n in zip(nbytes, times, strict=True))
    most = max(MOST_BYTES[0] * total / (ranks * shards), MOST_BYTES[1] * max(nbytes))
    share = [
        max(item.cost / every if every else 0, size / total)
        for item, size in zip(items, nbytes, strict=True)
    ]
    cost, held = ([[0.0] * shards for _ in range(ranks)] for _ in range(2))
    owners = [0] * len(items)
    homes: list[int | None] = [None] * len(items)
    for number in sorted(range(len(items)), key=lambda number: (-share[number], number)):
        item, size = items[number], nbytes[number]
        places = [
            (max(cost[o][s] for o, s in cells), max(held[o][s] for o, s in cells), cells)
            for cells in _cells(item, ranks, shards)
        ]
        room = [place for place in places if place[1] + size <= most]
        _, _, cells = min(room) if room else min(places, key=lambda p: (p[1], p[0], p[2]))
        for owner, shard in cells:
            cost[owner][shard] += item.cost
            held[owner][shard] += size
        owners[number] = cells[0][0]
        homes[number] = cells[0][1] if item.homed else None
    return tuple(owners), tuple(homes)


def _cells(item: ParameterCost, ranks: int, shards: int) -> list[tuple[tuple[int, int], ...]]:
    """The places that an item may have: each a rank, with one of its shards or all of them."""
    if item.homed:
        return [((owner, shard),) for owner in range(ranks) for shard in range(shards)]
    return [tuple((owner, shard) for shard in range(shards)) for owner in range(ranks)]


def _filled(items: Sequence[ParameterCost], bucket_bytes: int) -> list[list[int]]:
    """Numbers of parameters in buckets of one dtype, by the first of each.

    The first ones are small, and have no more than all before them: nothing runs under the gather
    of the first, and little under that of the next; nor has a backward much left for the last
    reductions, which are theirs.
    """
    filled: list[list[int]] = []
    last: dict[str, tuple[list[int], int]] = {}
    before, most = 0, bucket_bytes // SMALL
    for number, item in enumerate(items):
        nbytes = item.padded * item.itemsize
        before += nbytes
        bucket, size = last.get(item.dtype, ([], bucket_bytes))
        if size + nbytes > most:
            bucket, size = [], 0
            filled.append(bucket)
            most = min(bucket_bytes, max(most, before - nbytes))
        bucket.append(number)
        last[item.dtype] = bucket, size + nbytes
    return filled


def placed(
    items: Sequence[ParameterCost], bucket: Sequence[int], owners: Sequence[int], ranks: int
) -> BucketPlan:
    numbers = sorted(bucket, key=lambda number: owners[number])
    starts, bounds, end = [], [0], 0
    for rank in range(ranks):
        for number in (n for n in numbers if owners[n] == rank):
            starts.append(end)
            end += items[number].padded
        bounds.append(end)
    shard = -(-end // (ranks * ALIGNMENT)) * ALIGNMENT
    return BucketPlan(tuple(numbers), tuple(starts), tuple(bounds), max(shard, ALIGNMENT) * ranks)


def explained(
    items: Sequence[ParameterCost], plan: Ownership, shards: int, layouts: Sequence[str]
) -> list[str]:
    """Lines: who owns what, and where it lies; `layouts` tell how each item is sharded."""
    ranks = len(plan.buckets[0].bounds) - 1
    costs, held = ([[0.0] * shards for _ in range(ranks)] for _ in range(2))
    for item, owner, home in zip(items, plan.owners, plan.homes, strict=True):
        for part in range(shards) if home is None else [home]:
            costs[owner][part] += item.cost
            held[owner][part] += item.numel * item.itemsize * (1 if home is None else shards)
    used, laid = sum(item.numel for item in items), sum(bucket.numel for bucket in plan.buckets)
    lines = [
        f"{len(items)} parameters of {ranks} ranks in {len(plan.buckets)} buckets, "
        f"{100 * (laid / used - 1):.1f} % padding"
    ]
    for rank in range(ranks):
        for part in range(shards):
            who = f"rank {rank}" + (f", shard {part}" if shards > 1 else "")
            lines.append(f"{who}: cost {costs[rank][part]:.4g}, {held[rank][part]:.0f} bytes")
    for index, bucket in enumerate(plan.buckets):
        lines.append(f"bucket {index}: {bucket.numel} elements")
        for number, start in zip(bucket.items, bucket.starts, strict=True):
            home = f", home {plan.homes[number]}" if items[number].homed else ""
            line = f"    {start}: {items[number].name}, of rank {plan.owners[number]}"
            lines.append(line + layouts[number] + home)
    return lines
