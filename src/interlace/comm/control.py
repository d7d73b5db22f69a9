"""State that the ranks of a team share while they run: one block of shared memory per team.

Each rank writes its own part and reads the others':

    error      a kind and a message: what made this rank stop; every wait of its peers looks here
    entries    (run, tag and name of the Program) of its last runs: ranks that call Programs in
               different order are told so, by name, before any data moves
    progress   the op that each stream is at, and since when: who is late, in a time-out's message
    reached    how many collectives of each backend it has got to in this run
    attends    the meeting in the store that it waits in: no run of the team goes on meanwhile
    resets     that it is in reset(), whatever made it stop before, and who called that first
    asked      how often ranks told one another a number, and the last two that this one told

`run` counts the Programs that this process ran on the team, whatever Executor ran them, so the same
number means the same call on every rank.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

from interlace.comm.host.signals import BoundedWait, fence, order_cells, tell
from interlace.comm.rendezvous.board import named
from interlace.comm.rendezvous.liveness import PROBE_EVERY_S, PeerProcess
from interlace.errors import AgreementError, InterlaceError, PeerError
from interlace.ir import VALUE_BITS

ERROR, ERROR_LENGTH = range(2)
ENTERED, EXITED, ATTENDS, RESETS, ASKED, ANSWERS = 8, 9, 10, 11, 12, 13
"""In a cache line that peers do not read in every run, as they do the error's."""
REACHED = 16
PROGRESS, STREAMS = 24, 8
"""Two cells for each of the first streams: where it is, and since when."""
DONE = (1 << VALUE_BITS) - 1
RING = PROGRESS + 2 * STREAMS
RING_ENTRIES, RING_CELLS = 64, 20
RUN, TAG, NAME_LENGTH, NAME = range(4)
ERROR_TEXT = RING + RING_ENTRIES * RING_CELLS
ERROR_BYTES = 4096
NBYTES = ERROR_TEXT * 8 + ERROR_BYTES

FAILED, DISAGREED, PASSED_ON, RESETTING = 1, 2, 3, 4
"""Kinds in the error cell: an error of this rank, of several, or one heard of another rank; or
this rank is in reset(), which concerns ranks that wait for it in a later run."""


class Control:
    """The control block of one team, seen from one of its ranks."""

    def __init__(
        self,
        team: str,
        ranks: Sequence[int],
        me: int,
        cells: Sequence[memoryview],
        lives: Sequence[PeerProcess],
        word: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self.team, self.ranks, self.me = team, tuple(ranks), me
        self._lives = lives
        self._cells = [*cells]
        self._mine = self.cells = cells[me]
        self._peers = [(n, life) for n, life in enumerate(lives) if n != me]
        self._op_text: Callable[[int], str] | None = None
        self._word, self._attended = word, 0
        self._met: list[int] = [0] * len(self.ranks)
        self._reached = [[(each, REACHED + n) for each in cells] for n in range(PROGRESS - REACHED)]
        """The cells of all ranks for each backend's collectives."""
        self.run = self._mine[ENTERED]
        """The number of the run that this rank entered last,"""
        self._entered = RING
        """where its entry is in each rank's ring,"""
        self._tag = 0
        """and its tag."""
        self._next_probe = 0.0
        """When the processes of the peers are looked at again; 0 where one has ended."""

    def enter(self, tag: int, name: str, op_text: Callable[[int], str] | None = None) -> int:
        """Enters the next run, with this Program, and gives its number; `op_text` tells ops by
        index."""
        mine, self._op_text, self._tag = self._mine, op_text, tag
        run = self.run + 1
        self._entered = at = RING + run % RING_ENTRIES * RING_CELLS
        if mine[at + TAG] != tag:  # else the entry of 64 runs ago names the same Program
            mine[at + RUN] = 0
            order_cells()
            mine[at + TAG] = tag
            text = name.encode()[: (RING_CELLS - NAME) * 8]
            mine[at + NAME_LENGTH] = len(text)
            self._write((at + NAME) * 8, text)
            order_cells()
        mine[at + RUN] = run
        order_cells()
        # What is told of this run later, signals and slots, has a fence of its own before it.
        self.run = mine[ENTERED] = self._met[self.me] = run
        return run

    def leave(self, run: int | None = None) -> None:
        """The run that this rank entered last is over, or all up to that one."""
        mine = self._mine
        mine[EXITED] = self.run if run is None else max(run, mine[EXITED])

    def meet(self, peer: int, wait: BoundedWait) -> None:
        """Before the first contact of a run: the peer has entered it, with the same Program."""
        run, theirs, at = self.run, self._cells[peer], self._entered
        if self._met[peer] == run:
            return
        if theirs[ENTERED] < run:
            wait.until(lambda: theirs[ENTERED] >= run, lambda: self.where([peer]))
        order_cells()
        if theirs[at + TAG] != self._tag:  # else also where the entry is another run's by now
            self._compare(peer, run)
        self._met[peer] = run

    def attend(self, meeting: str) -> None:
        """From now on this rank waits in a meeting; or, if that is empty, no longer."""
        mark = zlib.crc32(meeting.encode())
        self._mine[ATTENDS] = mark
        self._attended = mark or self._attended
        self._publish()

    def _publish(self) -> None:
        """Nothing: the peers read these cells."""

    def check_run(self) -> None:
        """Raises where waiting on in a run is pointless: a rank has stopped, a peer runs another
        Program, or waits in a meeting that this rank has not come to."""
        self.check()
        if (error := self.disagreement()) is not None:
            raise error
        for peer, _ in self._peers:
            if self._cells[peer][ATTENDS]:
                self._check_attends(peer)

    def _check_attends(self, peer: int) -> None:
        """Raises where the peer waits in a meeting that this rank has not come to."""
        theirs, run = self._cells[peer], self._mine[ENTERED]
        if not (attends := theirs[ATTENDS]) or attends == self._attended:
            return
        fence()
        if theirs[ENTERED] >= run:
            return
        us, them = self._who(self.me), self._who(peer)
        raise AgreementError(
            f"{them} compiles or prepares a Program with team {self.team}, and {us} did not come, "
            f"for it waits for {them} in run {run}: {them} recompiled alone. "
            "Give all ranks inputs of the same sizes at the same time; dynamic=True spares most "
            "compiling, not those of a new class of sizes. If an interrupt ended a compilation of "
            f"{them}: all ranks call interlace.reset() and torch.compiler.reset() (and close() of "
            "what interlace.compile made)"
        )

    def _compare(self, peer: int, run: int) -> None:
        mine, theirs = self._entry(self.me, run), self._entry(peer, run)
        if mine is None or theirs is None or mine[0] == theirs[0]:
            return
        pairs = sorted([(self.me, mine), (peer, theirs)])
        calls = [f"{self._who(m)} called {name!r} ({tag:08x})" for m, (tag, name) in pairs]
        called = ", ".join(calls)
        error = AgreementError(
            f"ranks call Programs in different order: in run {run} of team {self.team}, {called}. "
            "Every rank of a team must run the same Programs in the same order: look for a branch "
            "that depends on the rank or on its data"
        )
        self.fail(error)
        raise error

    def disagreement(self) -> InterlaceError | None:
        """The error if a peer called another Program in a run that both have entered lately."""
        for peer, _ in self._peers:
            both = min(self._mine[ENTERED], self._cells[peer][ENTERED])
            for run in range(max(self._met[peer] + 1, both - RING_ENTRIES + 2), both + 1):
                try:
                    self._compare(peer, run)
                except AgreementError as error:
                    return error
            self._met[peer] = max(self._met[peer], both)
        return None

    def _entry(self, member: int, run: int) -> tuple[int, str] | None:
        cells = self._cells[member]
        at = RING + run % RING_ENTRIES * RING_CELLS
        if cells[at + RUN] != run:
            return None
        order_cells()
        length = min(cells[at + NAME_LENGTH], (RING_CELLS - NAME) * 8)
        found = cells[at + TAG], self._read(member, (at + NAME) * 8, length)
        fence()
        return found if cells[at + RUN] == run else None

    def fail(self, error: BaseException, kind: int | None = None) -> None:
        """Tells every peer that this rank stopped, and why. The first word stays."""
        if self._mine[ERROR] not in (0, RESETTING):
            return
        ours = isinstance(error, InterlaceError)
        told = str(error) if ours else f"{type(error).__name__}: {error}"
        text = told.encode()[:ERROR_BYTES]
        self._write(ERROR_TEXT * 8, text)
        self._mine[ERROR_LENGTH] = len(text)
        fence()
        kinds = {AgreementError: DISAGREED, PeerError: PASSED_ON}
        self._mine[ERROR] = kinds.get(type(error), FAILED) if kind is None else kind

    def failure(self) -> InterlaceError | None:
        """The error if a rank stopped: its word, the end of its process, or a word passed on."""
        passed_on: InterlaceError | None = None
        for member, cells in enumerate(self._cells):
            kind = cells[ERROR]
            if not kind:
                continue
            text = self._told(member)
            if kind == DISAGREED:
                return AgreementError(text)
            if kind == FAILED:
                return PeerError(f"{self._who(member)} of team {self.team} stopped: {text}")
            if kind == PASSED_ON or self._needs(member):
                passed_on = PeerError(text)
        for member, life in enumerate(self._lives):
            # One that ended after this run has given all that it needs; one with a word ended
            # because of another.
            if not self._needs(member) or life.alive() or self._cells[member][ERROR]:
                continue
            rank = self.ranks[member]
            if not (word := self._word(rank)):
                return PeerError(
                    f"rank {rank} of team {self.team} died: its process has ended "
                    f"({self.where([member])})"
                )
            passed_on = passed_on or PeerError(f"rank {rank} stopped: {word}")
        return passed_on

    def heard(self) -> InterlaceError | None:
        """`failure`, for who asks many times a second."""
        return None if self.quiet() else self.failure()

    def cause(self) -> InterlaceError | None:
        """The error if a rank stopped, after a transfer of this rank's failed or stalled."""
        return self.failure()

    def _who(self, member: int) -> str:
        return f"rank {self.ranks[member]}"

    def resetting(self) -> int | None:
        """The rank that called reset() first, as the peers that are there say: they come to no
        other meeting until this rank comes there."""
        told = (self._cells[member][RESETS] for member, _ in self._peers)
        return next((mark - 1 for mark in told if mark), None)

    def _told(self, member: int) -> str:
        """The message of a member whose error cell is set."""
        fence()
        length = min(self._cells[member][ERROR_LENGTH], ERROR_BYTES)
        return self._read(member, ERROR_TEXT * 8, length)

    def _needs(self, member: int) -> bool:
        """True if this rank's run may still need that member: one that ended it has given all."""
        return self._cells[member][EXITED] < self._mine[ENTERED]

    def quiet(self) -> bool:
        """True if no rank has stopped; if one has, `failure` returns the error."""
        for cells in self._cells:
            if cells[ERROR]:
                return False
        return time.monotonic() < self._next_probe or self._all_live()

    def _all_live(self) -> bool:
        """True if no peer that this rank needs has ended; asks the system every `PROBE_EVERY_S`."""
        ended = [member for member, life in self._peers if not life.alive()]
        self._next_probe = 0.0 if ended else time.monotonic() + PROBE_EVERY_S
        return not any(map(self._needs, ended))

    def check(self) -> None:
        if (error := self.heard()) is not None:
            raise error

    @property
    def failed(self) -> bool:
        return self._mine[ERROR] not in (0, RESETTING)

    def reach(self, backend: int, count: int, wait: BoundedWait) -> None:
        """Returns when every rank got to collective number `count` of this run: a rendezvous."""
        mark = self.run << VALUE_BITS | count
        tell(self._reached[backend][self.me : self.me + 1], mark)
        wait.for_marks(self._reached[backend], mark, self.where)
        for peer in range(len(self.ranks)):
            self.meet(peer, wait)

    @property
    def asked(self) -> str:
        """Names what the ranks asked of one another last: the run before it, and how often."""
        return f"{self._mine[ENTERED]}.{self._mine[ASKED]}"

    def exchange(self, number: int, timeout_s: float, what: str) -> tuple[int, ...]:
        """The numbers of all ranks, which ask for one another's in the same order. No store is
        asked; `what` is for messages."""
        mine, cells = self._mine, self._cells
        count = mine[ASKED] + 1
        at = ANSWERS + count % 2  # a peer may ask once more before this rank has read
        mine[at] = number
        order_cells()
        mine[ASKED] = count

        def answered() -> bool:
            beyond = [peer for peer, _ in self._peers if cells[peer][ENTERED] > mine[ENTERED]]
            fence()
            missing = [peer for peer, _ in self._peers if cells[peer][ASKED] < count]
            met = 0, self._attended
            passed = [p for p in missing if p in beyond or cells[p][ATTENDS] not in met]
            if passed:
                entry = self._entry(passed[0], cells[passed[0]][ENTERED])
                error = AgreementError(
                    f"{self._who(self.me)} of team {self.team} calls {what} for the first time, "
                    f"and {self._who(passed[0])} does not: it runs {entry[1] if entry else '?'!r}, "
                    "or prepares another. Every rank gives a layer the same arguments, in the same "
                    "order, and makes its weights anew when the others do"
                )
                self.fail(error)
                raise error
            return not missing

        def check() -> None:
            if (first := self.resetting()) is not None:
                raise called_reset(first)
            self.check()

        wait = BoundedWait(timeout_s, lambda: f"{what} of team {self.team}", check)
        wait.until(answered, lambda: self.where(sorted(self._unasked(count))))
        return tuple(theirs[at] for theirs in cells)

    def _unasked(self, count: int) -> set[int]:
        return {peer for peer, _ in self._peers if self._cells[peer][ASKED] < count}

    def where(self, members: Sequence[int]) -> str:
        """Who is missing, and where each of them stands."""
        if not members:
            return ""
        first = f"waiting for {named([self.ranks[member] for member in members])}:"
        return "\n  ".join([first, *(f"rank {self.ranks[m]} {self._stand(m)}" for m in members)])

    def _stand(self, member: int) -> str:
        cells, mine = self._cells[member], self._mine[ENTERED]
        entered, now = cells[ENTERED], time.monotonic_ns()
        stopped = "; its process is stopped" if self._lives[member].stopped() else ""
        if entered < mine:
            state = "is between runs" if cells[EXITED] == entered else "is still in it"
            last = f"the last it entered is {entered}, and it {state}{stopped}"
            return f"has not entered run {mine}: {last}"
        known = self._op_text if entered == mine else None
        stands: list[str] = []
        for stream in range(STREAMS):
            run, op = divmod(cells[PROGRESS + 2 * stream], 1 << VALUE_BITS)
            if run == entered and op != DONE:
                since = (now - cells[PROGRESS + 2 * stream + 1]) / 1e9
                text = known(op) if known else f"op {op}"
                stands.append(f"at {text} for {since:.3g} s")
        where = " and ".join(stands) or "between two ops"
        return f"is in run {entered}, {where}{stopped}"

    def behind(self) -> str:
        """Who may hold up what all ranks have begun: those that are stopped, else all others that
        are still in this run."""
        inside = [n for n, _ in self._peers if self._needs(n)]
        stopped = [n for n in inside if self._lives[n].stopped()]
        return self.where(stopped or inside)

    def begin_reset(self) -> None:
        first = self.resetting()
        first = self.ranks[self.me] if first is None else first
        self._mine[RESETS] = first + 1
        self.fail(called_reset(first), RESETTING)
        self._publish()

    def give_up_reset(self, error: BaseException) -> None:
        """If this rank is in reset(), it leaves by an error: the team stays out of order."""
        if self._mine[RESETS]:
            self._mine[RESETS] = 0
            self.fail(error)
            self._publish()

    def reset(self, run: int) -> None:
        """Forgets this rank's own words, between two barriers. Runs count on from `run`, the
        highest of any rank, so that old stamps are lower than new ones."""
        mine = self._mine
        for at in range(ERROR_TEXT):
            mine[at] = 0
        self.run = mine[ENTERED] = mine[EXITED] = run
        self._met = [0] * len(self.ranks)

    def _write(self, offset: int, data: bytes) -> None:
        self._mine.cast("B")[offset : offset + len(data)] = data

    def _read(self, member: int, offset: int, length: int) -> str:
        data = bytes(self._cells[member].cast("B")[offset : offset + length])
        return data.decode(errors="replace")


def progress_of(cells: Sequence[int], streams: int, of_run: int) -> list[tuple[int, float]]:
    """The op that each of the first streams is at in run `of_run` (0: none yet), and for how many
    seconds; as op -1 before its first, -2 after its last and once another run was entered."""
    if not of_run or of_run != cells[ENTERED]:
        return [(-2 if of_run else -1, 0.0)] * streams
    now, found = time.monotonic_ns(), list[tuple[int, float]]()
    for at in range(PROGRESS, PROGRESS + 2 * streams, 2):
        run, op = divmod(cells[at], 1 << VALUE_BITS)
        op = -1 if run != cells[ENTERED] else -2 if op == DONE else op
        found.append((op, (now - cells[at + 1]) / 1e9))
    return found


def called_reset(rank: int) -> PeerError:
    return PeerError(
        f"rank {rank} called reset(), as after an error of its own code: every rank of its teams "
        "calls interlace.reset()"
    )
