"""Draws collectives of all kinds, and what goes on beside one or right after it.

A collective's end on one rank says nothing of the other ranks' sources and destinations. So what
follows one here often takes a peer's end for its own, its own for a peer's, or awaits nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.ir import (
    KINDS,
    Buffer,
    Collective,
    Copy,
    Get,
    Op,
    Put,
    RankIndex,
    Table,
    Team,
    View,
)

if TYPE_CHECKING:
    import random

    from tests.fuzzing.draw import Draw


def uneven(team: Team, rows: int, rng: random.Random) -> Table:
    """A table of uneven parts, some of them empty."""
    cuts = sorted(rng.randint(0, rows) for _ in range(team.size - 1))
    ends = zip((0, *cuts), (*cuts, rows), strict=True)
    return Table(f"rows_{team.name}", team.name, tuple(stop - start for start, stop in ends))


def draw_collective(draw: Draw, slot: View | None = None) -> Collective:
    """Any kind, between any buffers; one side of it is (a part of) `slot`, if given."""
    rng, team = draw.rng, draw.team()
    name = rng.choice([*KINDS, "all_gather", "all_reduce"])
    name = "all_to_all" if draw.counted == 1 and rng.random() < 0.7 else name
    kind = KINDS[name]
    wide = [View(b.name) for b in draw.live if b.shape[0] == draw.rows_of_all]
    if team.size < draw.size:  # as many rows as its ranks have together
        first = rng.choice((0, draw.rows_of_all - 2 * team.size))
        wide = [view.slice(0, first, first + 2 * team.size) for view in wide]
        slot = None if slot is None else slot.slice(0, first, first + 2 * team.size)
    src, dst = rng.choice(wide), rng.choice(wide)
    if slot is not None:
        src, dst = rng.choice(((slot, dst), (src, slot), (src, slot)))
    table = next(table for table in draw.tables if table.team == team.name)
    splits = table if kind.scales and rng.random() < 0.25 else None

    def part(view: View) -> View:
        if splits is not None:
            return view.chunk(RankIndex(team.name), splits)
        if team.size < draw.size:
            return view.slice(0, 0, 2)
        return draw.rows_in(view) if view == slot or rng.random() < 0.5 else draw.rows(draw.some())

    small = name != "all_to_all" and rng.random() < 0.6
    if kind.scales == "gather" or (not kind.scales and small):
        src = part(src)
    if kind.scales == "scatter" or (not kind.scales and small):
        dst = part(dst)
    if not kind.scales and name != "all_to_all" and rng.random() < 0.4:  # in place
        src, dst = (src, src) if src.buffer == (slot or dst).buffer else (dst, dst)
    counts: tuple[View | None, View | None] = (None, None)
    if name == "all_to_all" and rng.random() < draw.counted:
        counts = draw.counts_of(team)
        if src.buffer == dst.buffer and rng.random() < 0.8:  # which is a fault by itself
            draw.alloc("symmetric")
            dst = View(draw.live[-1].name)
            dst = dst if team.size == draw.size else dst.slice(0, 0, 2 * team.size)
        src, dst = (part(view) if rng.random() < 0.2 else view for view in (src, dst))
    moves = kind.reads != "none"
    return Collective(
        kind=name,
        team=team.name,
        src=src if moves else None,
        dst=dst if moves else None,
        reduce="sum" if kind.reduces else None,
        root=rng.randrange(team.size) if kind.rooted else None,
        splits=None if splits is None else splits.name,
        sent=counts[0],
        received=counts[1],
        backend=rng.choice((None, None, None, "gloo")),
        stream=draw.stream(),
    )


def draw_in_flight(draw: Draw, slot: Buffer) -> None:
    """A collective on what peers reach, and a Get, a Put or a use that meets it there."""
    rng, whole = draw.rng, View(slot.name)
    k = rng.choice((1, -1))
    op, team = draw_collective(draw, whole), slot.team or "tp"
    draw.add(op)
    sink = draw.stream() if rng.random() < 0.6 else op.stream
    between = rng.random()
    if between < 0.3:  # the peer's end
        draw.announce(op.stream, sink, RankIndex(team, -k), RankIndex(team, k))
    elif between < 0.45:
        draw.add(Collective(kind="barrier", team=op.team, stream=op.stream))
    elif between < 0.6:
        draw.add(draw_collective(draw))
    if rng.random() < 0.3 and sink != op.stream:
        draw.order(op.stream, sink)
    views = [v for v in (op.src, op.dst) if v is not None and v.buffer == slot.name]
    there = draw.rows_in(rng.choice(views) if views and op.splits is None else whole)
    if draw.sizes(there)[0] > 2:
        there = there.slice(0, 0, 2)
    here, peer = draw.rows(draw.some()), RankIndex(team, k)
    then = rng.random()
    after: Op
    if then < 0.35:
        after = Get(src=there, dst=here, peer=peer, team=team, stream=sink)
    elif then < 0.6:
        after = Put(src=here, dst=there, peer=peer, team=team, stream=sink)
    elif then < 0.85:
        after = Copy(src=there, dst=here, stream=sink)
    else:
        after = Copy(src=here, dst=there, stream=sink)
    if rng.random() < 0.6:
        draw.add(after)
    else:
        draw.ops.append(after)
    if rng.random() < 0.3:  # I am done with what is yours
        draw.announce(sink, draw.stream(), RankIndex(team, k), RankIndex(team, -k))
