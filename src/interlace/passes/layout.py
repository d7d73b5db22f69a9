"""How the rows of a matrix are dealt to the ranks of a team: the one shape that strategies chunk.

`Layout(batch=2, rows=(3, 3, 2), pitch=(3, 3, 3))`: the matrix is two stacks of 3 + 3 + 2 rows; of
each stack the first three rows are rank 0's, and so on; a rank's shard holds its rows of every
stack, the stacks 3 rows apart (rank 2's last row is padding). Contents of any other shape are
refused, with the reason.

    >>> Layout(2, (3, 3, 2), (3, 3, 3)).total
    16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.passes.rows import PAD, Contents, Refused, Run, cut


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


def gather_layout(contents: Contents, row_bytes: int, shard_bytes: Sequence[int]) -> Layout:
    """The layout of a matrix made of the shards of a gather, or Refused."""
    ranks = len(shard_bytes)
    runs = in_rows(contents, row_bytes)
    if any(size % row_bytes for size in shard_bytes):
        raise Refused("a row of the matmul is spread over several ranks' shards")
    if any(run.source == PAD for run in runs):
        raise Refused("padding stands between the gathered rows")
    shard = [size // row_bytes for size in shard_bytes]
    batch = max(1, sum(run.source == runs[0].source for run in runs)) if runs else 1
    rows = [0] * ranks
    for run in runs:
        rows[run.source] = rows[run.source] or run.length
    if any(size % batch for size in shard):
        raise Refused("the gathered rows are not in the order of the ranks")
    layout = Layout(batch, tuple(rows), tuple(size // batch for size in shard))
    check_rows(layout, "gathered")
    expected = [
        (rank, b * layout.pitch[rank], layout.rows[rank])
        for b in range(batch)
        for rank in range(ranks)
        if layout.rows[rank]
    ]
    if [(run.source, run.offset, run.length) for run in runs] != expected:
        raise Refused("the gathered rows are not in the order of the ranks")
    return layout


def scatter_layout(
    contents: Contents, row_bytes: int, part_bytes: Sequence[int], total: int
) -> Layout:
    """The layout of a matrix of `total` rows that is put in order for a scatter, or Refused."""
    in_rows(contents, row_bytes)
    if any(size % row_bytes for size in part_bytes):
        raise Refused("a row of the matmul is scattered over several ranks")
    parts: list[list[Run]] = []
    start = 0
    for size in part_bytes:
        parts.append(in_rows(tuple(cut(contents, start, size)), row_bytes))
        start += size
    filled = [[run for run in part if run.source != PAD] for part in parts]
    batch = max(1, *map(len, filled))
    rows = tuple(part[0].length if part else 0 for part in filled)
    pitches = [size // row_bytes for size in part_bytes]
    if total % batch or any(size % batch for size in pitches):
        raise Refused("the scattered rows are not in the order of the ranks")
    layout = Layout(batch, rows, tuple(size // batch for size in pitches))
    if layout.total != total:
        raise Refused("rows of the matmul are dropped or repeated before the scatter")
    check_rows(layout, "scattered")
    height = total // batch
    for rank, part in enumerate(filled):
        first = sum(rows[:rank])
        wanted = [b * height + first for b in range(batch)] if rows[rank] else []
        places = [run.start - sum(pitches[:rank]) for run in part]
        if (
            [run.offset for run in part] != wanted
            or any(run.length != rows[rank] for run in part)
            or places != [b * layout.pitch[rank] for b in range(len(part))]
        ):
            raise Refused("the scattered rows are not in the order of the ranks")
    return layout


def check_rows(layout: Layout, what: str) -> None:
    """Rows left out must be the padding of uneven shards, as `torch.chunk` cuts them."""
    if layout.padded:
        even = chunk_sizes(sum(layout.rows), len(layout.rows))
        if layout.rows != even or any(pitch != even[0] for pitch in layout.pitch):
            raise Refused(
                f"only {sum(layout.rows)} of {sum(layout.pitch)} {what} rows are used "
                "(a select or slice of the sharded dimension)"
            )


def in_rows(contents: Contents, row_bytes: int) -> list[Run]:
    """The runs counted in rows, or Refused where they cut a row."""
    if any(
        run.length % row_bytes or (run.source != PAD and run.offset % row_bytes) for run in contents
    ):
        raise Refused("the columns, not the rows, are what the ranks hold parts of")
    return [
        Run(run.start // row_bytes, run.length // row_bytes, run.source, run.offset // row_bytes)
        for run in contents
    ]
