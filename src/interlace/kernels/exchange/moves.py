"""Tables of what each rank sends and takes in a collective of small tensors, for one kernel.

    moves = moves_of("reduce_scatter", parts=(8, 8, 4), rank=2, size=3)
    moves.send_n        # (8, 8, 4): so many elements of my source go to ranks 0, 1 and 2
    moves.take_n        # (4, 4, 4): and so many come from each for my part

`send[o]` says which elements of this rank's source go to rank o, `take[s]` where those of rank s
belong in its destination. Every kind of collective is a pair of such tables, with or without a
reduction; a large `all_reduce` is a reduce-scatter whose result is pushed on (`twice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

GRAIN = 128
"""Elements that a rank's area of staging, and a rank's part of a two-shot reduction, are multiples
of: addresses stay aligned whatever the element type."""

ONE_SHOT_NBYTES = 512 << 10
"""Up to so many bytes an all-reduce of more than two ranks sends everything to everybody: each byte
once to each, in one step. Beyond, two steps that move 2 / size of that are faster."""

MERGING = ("reduce_scatter", "all_reduce", "reduce")


@dataclass(frozen=True, slots=True)
class Moves:
    """One collective as one rank sees it, in elements."""

    rank: int
    size: int
    send_at: tuple[int, ...]
    send_n: tuple[int, ...]
    take_at: tuple[int, ...]
    take_n: tuple[int, ...]
    reduces: bool
    """Incoming parts are summed into the part at `take_at[rank]`, from the rank's own at
    `send_at[rank]` and the others'; else each rank's has a place of its own."""
    twice: bool
    """The sum is pushed on to all, and theirs come to `take_at`."""
    largest: int
    """The most elements that any rank sends to any other: the same number on every rank."""

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        """Where what is sent and taken begins, and how much it is, for each rank."""
        return self.send_at, self.send_n, self.take_at, self.take_n

    @property
    def slot(self) -> int:
        """Elements of the area of staging that each writer has."""
        return rounded(self.largest)

    @property
    def staged(self) -> int:
        """Elements of staging that a call needs."""
        return self.size * self.slot * (2 if self.twice else 1)

    @property
    def alike(self) -> bool:
        """True where every rank gets the same of this one's source."""
        return len(set(zip(self.send_at, self.send_n, strict=True))) == 1

    @property
    def source(self) -> int:
        """Elements that the source must have."""
        return _end(self.send_at, self.send_n)

    @property
    def taken(self) -> int:
        """Elements that the destination must have."""
        return _end(self.take_at, self.take_n)


def rounded(elements: int) -> int:
    """So many elements or a few more, a multiple of `GRAIN`."""
    return -(-elements // GRAIN) * GRAIN


def _end(at: Sequence[int], num: Sequence[int]) -> int:
    return max((start + count for start, count in zip(at, num, strict=True) if count), default=0)


def starts(parts: Sequence[int]) -> tuple[int, ...]:
    """Where each part begins."""
    return tuple(accumulate(parts[:-1], initial=0))


def balanced(total: int, size: int) -> tuple[int, ...]:
    """A total cut into `size` parts of whole grains, the last ones shorter or empty."""
    each = rounded(-(-total // size))
    return tuple(max(0, min(each, total - rank * each)) for rank in range(size))


def in_one_shot(nbytes: int, size: int) -> bool:
    """Returns true where an all-reduce of so many bytes is done in one step."""
    return size <= 2 or nbytes <= ONE_SHOT_NBYTES


def moves_of(
    kind: str,
    parts: Sequence[int],
    rank: int,
    size: int,
    *,
    root: int = 0,
    merges: bool = False,
    one_shot: bool = True,
) -> Moves:
    """The tables of a collective; `parts` has the elements of each rank's part, or the whole once.
    `merges`: an all-to-all in which every rank sends a part of its own size to all.
    """
    parts = tuple(parts)
    own = parts[rank if len(parts) == size else 0] if parts else 0
    total, none = sum(parts), (0,) * size
    most, everyone = max(parts, default=0), range(size)
    from_root = tuple(int(member == root) for member in everyone)

    def tables(
        *found: Sequence[int], reduces: bool = False, twice: bool = False, largest: int = most
    ) -> Moves:
        send_at, send_n, take_at, take_n = map(tuple, found)
        return Moves(rank, size, send_at, send_n, take_at, take_n, reduces, twice, largest)

    match kind:
        case "all_gather":
            return tables(none, (own,) * size, starts(parts), parts)
        case "gather":
            taken = parts if rank == root else none
            return tables(none, [own * it for it in from_root], starts(parts), taken)
        case "scatter":
            sent = parts if rank == root else none
            return tables(starts(parts), sent, none, [own * it for it in from_root])
        case "broadcast":
            sent = (total,) * size if rank == root else none
            return tables(none, sent, none, [total * it for it in from_root], largest=total)
        case "all_to_all" if merges:
            alike = (own,) * size
            return tables(starts(alike), alike, starts(parts), parts)
        case "all_to_all":
            alike = (own,) * size
            return tables(starts(parts), parts, starts(alike), alike)
        case "reduce_scatter":
            return tables(starts(parts), parts, none, (own,) * size, reduces=True)
        case "reduce":
            sent = [total * it for it in from_root]
            taken = (total if rank == root else 0,) * size
            return tables(none, sent, none, taken, reduces=True, largest=total)
        case "all_reduce" if one_shot:
            alike = (total,) * size
            return tables(none, alike, none, alike, reduces=True, largest=total)
        case "all_reduce":
            cut = balanced(total, size)
            at = starts(cut)
            return tables(at, cut, at, cut, reduces=True, twice=True, largest=cut[0])
        case "barrier":
            return tables(none, none, none, none, largest=0)
        case _:
            raise AssertionError(f"there is no collective {kind!r}")
