"""Ranks that are there now find a name for what they do together, which no rank of before knows.

    party = Party("tp/0-1", ranks=(0, 1), me=0)
    greet(board, [party], "prepare Program 'forward'", time_out_s=60)
    party.name                                   # the same on all ranks

Note [Words and echoes]
    A store may outlive the processes that use it: torchrun starts a job anew over the store of its
    first attempt, where notes of ranks stand that are gone. So each rank tells a random word of its
    own, and which words it has heard. A rank that has heard mine is there now. The name is made of
    the words of all, so it is the same on all ranks, and a meeting under it has notes of these
    processes alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from interlace.comm.rendezvous.board import Board, Note, named
from interlace.comm.rendezvous.patience import LONGER, Patience
from interlace.errors import AgreementError, InterlaceError

if TYPE_CHECKING:
    from interlace.comm.teams import TeamComm

LONGEST_PAUSE_S = 0.02


@dataclass(slots=True)
class Party:
    """A set of ranks, seen from one of them."""

    topic: str
    ranks: tuple[int, ...]
    me: int
    word: str = field(default_factory=lambda: secrets.token_hex(8))
    name: str = ""
    """What all of them have found."""
    missing: list[int] = field(default_factory=list[int])
    """Those that have not heard this rank yet."""
    told: Note = field(default_factory=dict[str, object])

    def look(self, board: Board) -> None:
        """Hears the others, and tells them what has been heard."""
        me = str(self.me)
        heard = {rank: board.read(f"{self.topic}/{rank}") for rank in self.ranks if rank != self.me}
        words = {str(rank): note["word"] for rank, note in heard.items() if note} | {me: self.word}
        if words != self.told.get("heard"):
            self.told = {"word": self.word, "heard": words}
            board.post(f"{self.topic}/{me}", self.told)
        self.missing = [
            rank for rank, note in heard.items() if not note or note["heard"].get(me) != self.word
        ]
        if not self.missing:
            self.name = hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest()[:16]


def greet(
    board: Board,
    parties: Sequence[Party],
    what: str,
    time_out_s: float,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Finds the names of these parties; all their ranks call it, to do `what` (for messages).

    What `look` raises ends the wait.
    """
    if not parties:
        return
    board.limit_s = time_out_s
    board.announce(parties[0].me)
    patience, pause = Patience(time_out_s), 0.0002
    missing = {rank for party in parties for rank in party.ranks} - {parties[0].me}

    def late() -> str:
        return f"{named(sorted(missing))} did not come to {what}"

    with board.attending((), parties[0].me):
        while True:
            ended = board.ended(missing)  # who ended had told its word by then
            for party in parties:
                if not party.name:
                    party.look(board)
            missing = {rank for party in parties if not party.name for rank in party.missing}
            if not missing:
                return
            if gone := sorted(ended & missing):
                raise AgreementError(board.farewell(gone, f"come to {what}"))
            if patience.is_over(late):
                come = {rank for party in parties for rank in party.ranks} - missing
                raise AgreementError(
                    f"{late()} within {time_out_s:g} s, as {named(sorted(come))} did: see whether "
                    "it failed, stalled, did not recompile as the others did, or took another path "
                    f"through the model; {LONGER}"
                )
            look()
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_S)


def meet(teams: Sequence[TeamComm], what: str, time_out_s: float) -> None:
    """The processes of each team find one another, once; all their ranks call it, to do `what`."""
    new, why = [team for team in teams if not team.topic], ""
    try:
        greet(teams[0].board, [team.party for team in new], what, time_out_s)
    except BaseException as error:
        why = str(error) or type(error).__name__
        raise
    finally:
        for team in new:
            if team.party.name:
                team.found()
        for team in (team for team in teams if why and team.topic):
            with contextlib.suppress(InterlaceError):
                team.board.give_up(f"{team.topic}/prepare", team.num_prepared, team.rank, why)
