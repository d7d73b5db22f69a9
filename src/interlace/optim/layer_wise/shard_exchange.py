"""Which rank makes which sharded matrix orthogonal, and the Programs that move shards.

    matrices = [ParameterCost("layers.0.up", 14336 * 4096 // 8, "bf16", 2, cost=2.4e11), ...]
    exchanges = exchanges_of(matrices, ranks=8, bucket_bytes=64 << 20)
    exchanges[0].to_owners("to_owners_0", 8, rank)

Note [Parts]
    A bucket holds matrices that follow one another. A rank's shards of them lie in one buffer, by
    owner: part s of that buffer goes to rank s. All shards of a matrix are as long, those that have
    fewer rows (the last ones) are padded, as FSDP2 does in its own collectives; so a part is as
    long on every rank, and the exchange is one all-to-all whose parts a table gives, each way.

Note [Owners in each bucket]
    Ranks meet twice in each bucket, so work must be even in each, and not only in all of them: a
    bucket has at least as many matrices as there are ranks, and the owners of each are chosen with
    what they have to do in those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from interlace.ir import Program, parse
from interlace.optim.layer_wise.flat_weights import shown
from interlace.optim.layer_wise.ownership import BucketPlan, ParameterCost, placed


@dataclass(frozen=True, slots=True)
class ShardExchange:
    """How one bucket's shards come to the owners of whole matrices, and back."""

    plan: BucketPlan
    """Of the buffer of this rank's shards; `items` are numbers of matrices."""
    about: str
    """The matrices, for messages."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Elements that each rank sends to the owner s, and has from it."""
        return tuple(stop - start for start, stop in pairwise(self.plan.bounds))

    def to_owners(self, name: str, ranks: int, rank: int) -> Program:
        """Shards of all matrices to all shards of the own ones."""
        return self._program(name, ranks, "shards, owned")

    def to_shards(self, name: str, ranks: int, rank: int) -> Program:
        """And back."""
        return self._program(name, ranks, "owned, shards")

    def _program(self, name: str, ranks: int, way: str) -> Program:
        parts = self.parts
        own = ", ".join(str(ranks * part) for part in parts)
        return parse(
            f"def {name}(dp: Team[{ranks}], shards: bf16[{sum(parts)}], owned: bf16[own[dp.rank]]):"
            f"\n    parts = table(dp, {', '.join(map(str, parts))})"
            f"\n    own = table(dp, {own})"
            f'\n    comm: all_to_all({way}, splits=parts, team=dp, loc="{self.about}")'
        )


def exchanges_of(
    matrices: Sequence[ParameterCost], ranks: int, bucket_bytes: int
) -> list[ShardExchange]:
    """Buckets of the matrices in their order, whose numbers of elements are those of a shard.

    A bucket has as many matrices as there are ranks, and more while a rank's shards of it are at
    most `bucket_bytes`; what is left for the last, if it is less, is in the one before.
    """
    owners, loads = [0] * len(matrices), [0.0] * ranks
    exchanges: list[ShardExchange] = []
    for bucket in _filled(matrices, ranks, bucket_bytes):
        for number in sorted(bucket, key=lambda number: (-matrices[number].cost, number)):
            owners[number] = loads.index(min(loads))
            loads[owners[number]] += matrices[number].cost
        names = [matrices[number].name for number in bucket]
        exchanges.append(ShardExchange(placed(matrices, bucket, owners, ranks), shown(names)))
    return exchanges


def _filled(matrices: Sequence[ParameterCost], ranks: int, bucket_bytes: int) -> list[list[int]]:
    filled: list[list[int]] = [[]]
    size = 0
    for number, matrix in enumerate(matrices):
        nbytes = matrix.padded * matrix.itemsize
        if len(filled[-1]) >= ranks and size + nbytes > bucket_bytes:
            filled.append([])
            size = 0
        filled[-1].append(number)
        size += nbytes
    if len(filled) > 1 and len(filled[-1]) < ranks:  # too few for all ranks
        last = filled.pop()
        filled[-1].extend(last)
    return filled
