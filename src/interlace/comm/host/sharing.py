"""How the ranks of a team come to share segments: create, tell, map, unlink.

shared = share(board, "ws/1", ranks, me=0, nbytes=1 << 20, note={"slots": 2}, time_out_s=60)
shared.segments[1].bytes(0, 64)      # the memory of rank 1 of the team
shared.notes[1]["slots"]             # what it said along with it
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.comm.host.shared_memory import Segment
from interlace.comm.rendezvous.board import Board, Note, failure
from interlace.errors import InterlaceError


@dataclass(frozen=True, slots=True)
class Shared:
    """One segment per member of the team, in the order of its ranks, with each member's note."""

    segments: tuple[Segment, ...]
    notes: tuple[Note, ...]


def share(
    board: Board,
    topic: str,
    ranks: Sequence[int],
    me: int,
    nbytes: int,
    note: Note,
    time_out_s: float,
) -> Shared:
    """Every rank of `ranks` creates a segment of its own size and maps everyone's.

    All of them call this. Where one fails, all raise its error; no name of a segment stays.
    """
    mine: Segment | None = None
    problem: InterlaceError | None = None
    rank = ranks[me]
    try:
        try:
            mine = Segment.create(nbytes)
            told: Note = {"path": mine.path, "nbytes": mine.nbytes, "note": note}
        except InterlaceError as error:
            problem, told = error, failure(error)
        notes = meet(board, f"{topic}/memory", ranks, rank, told, time_out_s, problem)
        segments: list[Segment] = []
        try:
            for member, their in enumerate(notes):
                if member == me and mine is not None:
                    segments.append(mine)
                else:
                    segments.append(Segment.open(their["path"], their["nbytes"]))
            told = {}
        except InterlaceError as error:
            problem, told = error, failure(error)
        meet(board, f"{topic}/mapped memory", ranks, rank, told, time_out_s, problem)
        return Shared(tuple(segments), tuple(their["note"] for their in notes))
    finally:
        if mine is not None:
            mine.unlink()


def meet(
    board: Board,
    topic: str,
    ranks: Sequence[int],
    rank: int,
    note: Note,
    time_out_s: float,
    problem: InterlaceError | None,
) -> list[Note]:
    """Exchanges notes; a rank with a problem of its own tells it and raises it as it is."""
    if problem is not None:
        board.post(f"{topic}/{rank}", note)
        with contextlib.suppress(InterlaceError):
            board.decide(topic, rank, str(problem))  # so that nobody waits for the others first
        raise problem
    return board.exchange(topic, ranks, rank, note, time_out_s)
