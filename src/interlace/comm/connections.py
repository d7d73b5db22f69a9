"""A team's backends of torch: the user's own where they serve, others that the team connects.

    connections = Connections(group, store, board, key, ranks, rank, "tp")
    gloo = connections.get("gloo", "cpu", None, "connect/1", time_out_s=60)    # all ranks, together

Note [Connected by all or by none]
    Ranks connect in a meeting (Note [All or none] in board.py), another one whenever they prepare a
    Program or reset: what a rank keeps, all keep, and who tries again finds nothing of the meeting
    before in the store, such as the id that NCCL's ranks meet by. The user's backend serves in the
    first meeting only, and none that is marked as spent: one that a failed run was on, or NCCL's
    whose ranks did not meet, which is aborted, whoever made it. What the first rank there finds of
    the mark holds for all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from interlace.comm.backends import connect, end, require_backend
from interlace.comm.cuda.aborts import abort
from interlace.comm.rendezvous.board import Board
from interlace.errors import BackendError, InterlaceError, TeamError

Key = tuple[str, str]
"""The name of a backend, and the type of its device."""


class Connections:
    """The backends of a team, each connected when it is first asked for."""

    def __init__(
        self,
        group: weakref.ref[dist.ProcessGroup],
        store: dist.Store,
        board: Board,
        key: str,
        ranks: Sequence[int],
        rank: int,
        team: str,
    ) -> None:
        self._group, self._store, self._board, self._key = group, store, board, key
        self._ranks, self._rank, self._team = ranks, rank, team
        self.topic = key
        """Where the team's notes are."""
        self._kept: dict[Key, Any] = {}
        self.made: list[Any] = []
        """What the team connected itself."""

    @property
    def whose(self) -> str:
        """This rank's part of the team, for messages."""
        return f"team {self._team} on rank {self._rank}"

    def users(self, device: str) -> Any:
        """The backend that the user's group has for a device, if any."""
        group = self._group()
        if group is None:
            raise TeamError(f"the process group of team {self._team} was destroyed")
        try:
            return group._get_backend(torch.device(device))
        except RuntimeError:
            return None

    def name(self, name: str | None, device: str) -> str:
        """What `None` means for this group and device; checks that the backend exists."""
        if name is None:
            mine = self.users(device)
            usual = "gloo" if device == "cpu" else "nccl"
            name = str(mine.name()) if mine is not None else usual
        require_backend(name)
        if name == "nccl" and device == "cpu":
            raise BackendError(
                f"the backend 'nccl' is not there for tensors of the CPU (team {self._team}): run "
                "the Program on device 'cuda', or choose gloo or peer"
            )
        return name

    def get(
        self, name: str, device: str, on: torch.device | None, where: str, time_out_s: float
    ) -> Any:
        """The backend; `where` its ranks meet to connect it, NCCL's with their devices `on`."""
        key = (name, device)
        if key not in self._kept:
            self._kept[key] = self._connect(key, on, where, time_out_s)
        return self._kept[key]

    def renew(self, on: torch.device | None, where: str, time_out_s: float) -> None:
        """Connects all that are kept anew, and forgets those of before."""
        for key in sorted(self._kept):
            self._spend(key)
            self._kept[key] = self._connect(key, on, where, time_out_s)

    def end(self, time_out_s: float) -> None:
        """Ends what the team connected."""
        end(self.made, time_out_s, self.whose)

    def close(self, time_out_s: float, failed: bool) -> None:
        """Ends and forgets all; `failed` says whether runs on them did."""
        if failed:
            with contextlib.suppress(InterlaceError):
                for key in self._kept:
                    self._spend(key)
        self._kept.clear()
        self.end(time_out_s)

    def _spend(self, key: Key) -> None:
        """Says, also to teams of this group that come later, that the user's backend is no good."""
        self._board.post(self._mark(key), {})

    def _mark(self, key: Key) -> str:
        return f"{self._key}/{'/'.join(key)}/spent"

    def _connect(self, key: Key, on: torch.device | None, where: str, time_out_s: float) -> Any:
        """The user's backend or a new one, once all ranks have it: see the Note above."""
        name, device = key
        topic = f"{self.topic}/{name}/{device}"
        place, unspent = f"{topic}/{where}", self._board.read(self._mark(key)) is None
        first, serves = self._board.first(f"{topic}/first", [where, unspent])
        users = self.users(device) if serves and first == where else None
        theirs = users is not None and users.name() == name
        backend: Any = users if theirs else None
        joined = False

        def look() -> None:
            if self._board.is_over(place):
                self._board.decide(place, self._rank)  # raises what a peer gave up for

        try:
            with self._board.attending([place], self._rank):
                look()
                if backend is None:
                    store = c10d.PrefixStore(f"interlace/{place}/backend", self._store)
                    me, size = self._ranks.index(self._rank), len(self._ranks)
                    ended = lambda: self._board.ended(self._ranks) & {*self._ranks}  # noqa: E731
                    known = self.whose, look, ended
                    backend = connect(name, store, me, size, time_out_s, *known)
                    self.made.append(backend)
                if name == "nccl":
                    from interlace.comm.cuda.connecting import join  # which needs the CUDA driver

                    join(backend, on, time_out_s, self.whose, self._board.ended, look)
                    joined = True
            self._board.exchange(place, self._ranks, self._rank, {}, time_out_s)
        except BaseException:
            if theirs and name == "nccl":
                with contextlib.suppress(InterlaceError):
                    self._spend(key)
            if joined:  # and a peer has not
                abort([backend])
            raise
        return backend
