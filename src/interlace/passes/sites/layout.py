"""How the rows of a matrix are dealt to the ranks of a team: the one shape that strategies chunk.

`Layout(batch=2, rows=(3, 3, 2), pitch=(3, 3, 3))`: the matrix is two stacks of 3 + 3 + 2 rows; of
each stack the first three rows are rank 0's, and so on; a rank's shard holds its rows of every
stack, the stacks 3 rows apart (rank 2's last row is padding). Contents of any other shape are
refused, with the reason.

    >>> Layout(2, (3, 3, 2), (3, 3, 3)).total
    16
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from interlace.passes.sites.rows import PAD, Contents, Refused, Run, cut, join, whole_rows


@dataclass(frozen=True, slots=True)
class Layout:
    """`batch` stacks, each with `rows[r]` rows of rank r, `pitch[r]` apart in its shard."""

    batch: int
    rows: tuple[int, ...]
    pitch: tuple[int, ...]

    @property
    def total(self) -> int:
        """Rows of the matrix."""
        return self.batch * sum(self.rows)

    @property
    def shard(self) -> tuple[int, ...]:
        """Rows of each rank's shard, padding included."""
        return tuple(self.batch * pitch for pitch in self.pitch)

    @property
    def padded(self) -> bool:
        """Whether a shard has rows that are no rows of the matrix."""
        return self.rows != self.pitch


def chunk_sizes(total: int, parts: int) -> tuple[int, ...]:
    """The sizes that `torch.chunk` gives, with zeros for the parts that it leaves out."""
    size = -(-total // parts)
    return tuple(max(0, min(size, total - i * size)) for i in range(parts))


def balanced_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by one at most."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def gather_layout(
    contents: Contents, row_bytes: int, shard_bytes: Sequence[int], what: str = "gathered"
) -> Layout:
    """The layout of a matrix made of the shards of a gather, or Refused."""
    runs = in_rows(contents, row_bytes)
    if any(size % row_bytes for size in shard_bytes):
        raise Refused("a row of the matmul is spread over several ranks' shards")
    if any(run.source == PAD for run in runs):
        raise Refused(f"padding stands between the {what} rows")
    shards = [size // row_bytes for size in shard_bytes]
    used = [sum(run.length for run in runs if run.source == r) for r in range(len(shards))]

    def pieces(layout: Layout) -> Iterator[Run]:
        for b in range(layout.batch):
            for rank, rows in enumerate(layout.rows):
                yield Run(0, rows, rank, b * layout.pitch[rank])

    return _fit(runs, used, shards, pieces, what)


def scatter_layout(
    contents: Contents, row_bytes: int, part_bytes: Sequence[int], total: int
) -> Layout:
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

    def pieces(layout: Layout) -> Iterator[Run]:
        for rank, rows in enumerate(layout.rows):
            for b in range(layout.batch):
                yield Run(0, rows, 0, b * sum(layout.rows) + sum(layout.rows[:rank]))
                yield Run(0, layout.pitch[rank] - rows, PAD, 0)

    return _fit(runs, used, parts, pieces, "scattered")


def _fit(
    runs: Contents,
    used: list[int],
    shards: list[int],
    pieces: Callable[[Layout], Iterable[Run]],
    what: str,
) -> Layout:
    """The layout with the fewest stacks whose pieces, joined, are these runs."""
    most = math.gcd(*used, *shards) or 1
    problem = ""
    for batch in (b for b in range(1, most + 1) if most % b == 0):
        rows, pitch = (tuple(n // batch for n in counts) for counts in (used, shards))
        layout = Layout(batch, rows, pitch)
        if join(pieces(layout)) == runs:
            problem = _dropped(layout, what)
            if not problem:
                return layout
    if not problem and sum(used) < sum(shards):
        problem = _only(sum(used), sum(shards), what)
    raise Refused(problem or f"the {what} rows are not in the order of the ranks")


def _dropped(layout: Layout, what: str) -> str:
    """What is wrong if rows are left out that are not the padding of uneven shards."""
    even = chunk_sizes(sum(layout.rows), len(layout.rows))
    if not layout.padded or (layout.rows == even and set(layout.pitch) == {even[0]}):
        return ""
    return _only(layout.total, sum(layout.shard), what)


def _only(used: int, held: int, what: str) -> str:
    part = f"only {used} of {held} {what} rows are used"
    return f"{part} (a select or slice of the sharded dimension)"


def in_rows(contents: Contents, row_bytes: int) -> Contents:
    """The runs counted in rows, or Refused where they cut a row."""
    return tuple(
        Run(run.start // row_bytes, run.length // row_bytes, run.source, run.offset // row_bytes)
        for run in whole_rows(contents, row_bytes)
    )
