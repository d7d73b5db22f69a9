"""Numbers of parts that a site is cut into: slices of `pipeline`, pieces of each rank's rows.

>>> pieces(values, site, STRATEGIES["fused", None], chunks=0)
4

Note [Rows that come in time]
    The blocks of a gather's kernel take tiles in turn, so they come to the next rank's rows up to
    a wave of tiles before their own rank's end: at 8192 x 8192 x 2560 on four GPUs, 104 of 132
    blocks after 88 us of 107, when 33 MB have not come. So rows are awaited in quarters; and as
    each copy costs some 5 us more, three of them travel together to the rank that needs them
    first, then the fourth, and to the others two and two. Rows that come more slowly than they are
    multiplied travel whole, as only the last counts, and so do those that come much faster.
"""

from __future__ import annotations

from interlace.ir.kernels import TILE_ROWS
from interlace.ir.sizes import Int, at_hand, counted
from interlace.passes.sites.cone import lhs_of, result_of
from interlace.passes.sites.recognise import GatherSite, MatmulSite, ScatterSite
from interlace.passes.sites.values import Dataflow
from interlace.strategies import Strategy

DEFAULT_SLICES = 4
PIECE_BYTES = 16 << 20
"""Least bytes that a put should move, if nothing else speaks for smaller ones: below that a copy
engine does not reach its speed."""
BESIDE_BYTES = 8 << 20
"""A piece of own rows that is summed while others are computed: some 130 tiles of a kernel, one for
each processor."""
SLAB_FLOPS = 120 * 10**9
"""A slab of an all-reduce: its parts travel, are summed and travel back in some 120 us, while the
next is computed."""
SLAB_BYTES = 4 << 20
"""A rank's part of a slab: copies of less are slow."""
LEAST_SLABS, MOST_SLABS = 3, 8
"""Two gain nothing over a reduce-scatter and a gather."""
SMALL_BYTES = 16 << 20
"""Sums up to this size go back to the peers by one kernel, larger ones by copies."""
MOST_PIECES = 4
QUARTERS = 4
"""Pieces in which a kernel awaits a rank's rows: Note [Rows that come in time]."""
TO_THE_FIRST, TO_OTHERS = (3, 1), (2, 2)
"""Numbers of quarters that travel together, to the rank that needs them first and to others."""
TIMELY_COLUMNS = range(2048, 4096)
"""Columns of a matmul whose rows come over a link in half to all of the time that they take."""
GROUP_ROWS = 1024
"""Rows that a kernel goes through column by column before the next ones, a group of its tiles: in
pieces of 512 it reads the weight twice as often, and takes 3 % longer where memory is busy."""


def slices(values: Dataflow, site: MatmulSite, chunks: int) -> int:
    """Number of slices of a site for `pipeline`: as asked, or a few; a row each at least."""
    whole = site.op.kind == "all_reduce"
    rows = site.layout.total if whole else max(site.layout.shard)
    return counted(rows, 1, chunks or DEFAULT_SLICES)


def pieces(values: Dataflow, site: MatmulSite, strategy: Strategy, chunks: int) -> int:
    """In how many pieces each rank's rows travel: `chunks` are of all ranks.

    Pieces of a scatter let bytes leave sooner, and the last be summed alone. Those of `fused` may
    be smaller, as all but the last are summed beside the kernel, but are of GROUP_ROWS at least: of
    whole groups, where some number of them gives that. Rows that are gathered go whole, but for
    `fused`: Note [Rows that come in time].
    """
    layout, fused = site.layout, strategy.fuses
    if layout.batch != 1 or not layout.even:
        return 1
    if isinstance(site, GatherSite):
        return QUARTERS if fused and _in_quarters(values, site, chunks) else 1
    rows = layout.rows[0]
    if chunks and fused:
        most = chunks // len(layout.rows)
        return next((n for n in range(most, 1, -1) if rows % (n * TILE_ROWS) == 0), 1)
    least, height = (BESIDE_BYTES, GROUP_ROWS) if fused else (PIECE_BYTES, TILE_ROWS)
    most = counted(part_bytes(values, site), least, counted(rows, height, MOST_PIECES))
    fits = [n for n in range(most, 1, -1) if rows % (n * TILE_ROWS) == 0]
    return next((n for n in fits if rows % (n * height) == 0), fits[0] if fits else 1)


def _in_quarters(values: Dataflow, site: GatherSite, chunks: int) -> bool:
    """True if a kernel awaits rows in quarters: as asked, or where they are many and come about as
    fast as it multiplies them."""
    step, rows = QUARTERS * TILE_ROWS, site.layout.rows[0]
    result = result_of(values.calls[site.calls[0]])
    if chunks:
        wanted = chunks >= QUARTERS * len(site.layout.rows)
    else:
        columns = values.box(result).sizes[-1] if result is not None else 0
        timely = TIMELY_COLUMNS.start <= columns < TIMELY_COLUMNS.stop
        wanted = timely and part_bytes(values, site) >= PIECE_BYTES
    # as of tiles in ill_scaled, other rests need no classes of their own
    return wanted and at_hand(rows) % step == 0 and rows % step == 0


def slabs(values: Dataflow, site: MatmulSite, chunks: int) -> int:
    """In how many slabs the all-reduce behind a kernel goes; 0: it takes too little time for them.

    `chunks` are the parts that ranks have of slabs, of all ranks. The rows that a matmul contracts
    over count too: they must be as many on all ranks, as for every site.
    """
    if isinstance(site, GatherSite) or site.op.kind != "all_reduce":
        return 0
    (matmul,) = site.cone.ops
    inner = values.box(lhs_of(values.calls[matmul])).sizes[-1]
    flops = 2 * site.cone.rows * site.cone.width * inner
    most = counted(part_bytes(values, site), SLAB_BYTES, counted(flops, SLAB_FLOPS, MOST_SLABS))
    if chunks:
        most = min(most, chunks // len(site.layout.rows))
    rows = site.layout.rows[0]
    fits = (n for n in range(most, LEAST_SLABS - 1, -1) if rows % (n * TILE_ROWS) == 0)
    return next(fits, 0)


def parts(values: Dataflow, site: MatmulSite, strategy: Strategy, chunks: int) -> int:
    """Number of ranges of rows that a strategy moves, of all ranks."""
    if strategy.whole:
        return 0
    if strategy.sliced:
        return slices(values, site, chunks)
    count = (
        slabs(values, site, chunks) or pieces(values, site, strategy, chunks)
        if strategy.fuses
        else 1
    )
    return count * len(site.layout.rows)


def sums_beside(values: Dataflow, site: ScatterSite, count: int) -> bool:
    """True if the own rows, in `count` pieces, are summed while others are computed."""
    return count > 1 and part_bytes(values, site) >= count * BESIDE_BYTES


def halved(site: ScatterSite, count: int) -> bool:
    """True if the last of the own pieces is computed and summed in halves: the last sum, which
    nothing hides, is then half as long."""
    rows, step = site.layout.rows[0], 2 * count * TILE_ROWS
    return at_hand(rows) % step == 0 and rows % step == 0  # as in _in_quarters


def by_kernel(nbytes: Int) -> bool:
    """True if sums of `nbytes` a rank go back to the peers by one kernel, False for copies."""
    return nbytes <= SMALL_BYTES


def part_bytes(values: Dataflow, site: MatmulSite) -> Int:
    """Bytes of the rows that each rank gives or keeps, where all have as many."""
    if isinstance(site, GatherSite):
        dst = site.op.dst
        assert dst is not None
        return site.layout.rows[0] * site.width * values.box(dst).dtype.itemsize
    return site.layout.rows[0] * site.cone.width * values.buffers[site.cone.value].dtype.itemsize
