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
MOST_BYTES = 1.3, 1.1
"""What a rank may own: so many times the mean, or the largest parameter, whichever is more."""


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """What a plan needs to know of a parameter."""

    name: str
    numel: int
    dtype: str
    itemsize: int
    cost: float
    """Of its update, in any unit that all share."""

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
    """What rank r owns begins at bounds[r] and ends at bounds[r + 1]."""
    numel: int
    """Elements of the buffer: with the padding, a multiple of the number of ranks."""

    def messages(self) -> tuple[BucketMessage, ...]:
        """What lies in the shard of a rank that does not own it, in order of place."""
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


def own(items: Sequence[ParameterCost], ranks: int, bucket_bytes: int) -> Ownership:
    """Owners balanced by cost, and buckets of at most `bucket_bytes` or of one parameter."""
    owners = assign(items, ranks)
    return Ownership(
        owners, tuple(placed(items, b, owners, ranks) for b in _filled(items, bucket_bytes))
    )


def assign(items: Sequence[ParameterCost], ranks: int) -> tuple[int, ...]:
    """An owner for each: the largest first (its share of all cost, or of all bytes), each to the
    rank with the least cost whose bytes allow it.

    Where no rank has room under `MOST_BYTES`, the one with the fewest bytes takes it.
    """
    nbytes = [item.padded * item.itemsize for item in items]
    every = sum(item.cost for item in items)
    most = max(MOST_BYTES[0] * sum(nbytes) / ranks, MOST_BYTES[1] * max(nbytes))
    share = [
        max(item.cost / every if every else 0, size / sum(nbytes))
        for item, size in zip(items, nbytes, strict=True)
    ]
    cost, held, owners = [0.0] * ranks, [0] * ranks, [0] * len(items)
    for number in sorted(range(len(items)), key=lambda i: (-share[i], i)):
        room = [rank for rank in range(ranks) if held[rank] + nbytes[number] <= most]
        if room:
            owner = min(room, key=lambda rank: (cost[rank], held[rank]))
        else:
            owner = min(range(ranks), key=lambda rank: (held[rank], cost[rank]))
        owners[number] = owner
        cost[owner] += items[number].cost
        held[owner] += nbytes[number]
    return tuple(owners)


def _filled(items: Sequence[ParameterCost], bucket_bytes: int) -> list[list[int]]:
    """Numbers of parameters in buckets of one dtype, by the first of each."""
    filled: list[list[int]] = []
    last: dict[str, tuple[list[int], int]] = {}
    for number, item in enumerate(items):
        nbytes = item.padded * item.itemsize
        bucket, size = last.get(item.dtype, ([], bucket_bytes))
        if size + nbytes > bucket_bytes:
            bucket, size = [], 0
            filled.append(bucket)
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
