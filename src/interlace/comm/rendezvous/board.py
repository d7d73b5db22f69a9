"""Notes that ranks leave for one another in the store of torch.distributed.

Set-up happens through them: small JSON texts under a topic, read by polling, so that every wait is
bounded and a note that says "I failed" ends it at once.

    board = Board(store)
    board.post("host/0", {"boot": "..."})
    notes = board.collect({1: "host/1", 2: "host/2"}, time_out_s=10)   # of the ranks that came
    notes = board.exchange("host", ranks, 0, {"boot": "..."}, time_out_s=10)   # all ranks', or none

Note [All or none]
    A rank that gives up leaves its notes behind, and the others may have read them by then. So each
    meeting has one verdict, which the store takes once: "all came" from whoever saw all notes, or
    "given up" from whoever waits no longer. Whichever is there first holds for all ranks. A meeting
    that is held again and again (to prepare the next Program, to reset) has numbered rounds, and a
    round with a verdict is over: who comes late, or comes again, finds the others in the first one
    without. So ranks that tried it a different number of times need not count alike.

Note [Who is gone]
    Before its first meeting a process says in the store which one it is, and from then on nobody
    waits for it once it has ended. Of a rank that never came that far, a closed connection of gloo
    tells it. Who leaves because of an error leaves word of it, which holds until it announces
    itself again: a process that ended after such a word is not the culprit, and its word is passed
    on. The store may outlive processes, so what was said before this one began does not count.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from interlace.comm.rendezvous.liveness import Life, disconnected, identity, precedes, uptime
from interlace.comm.rendezvous.patience import LONGER, Errand, Patience
from interlace.errors import (
    AgreementError,
    BackendError,
    CommTimeoutError,
    InterlaceError,
    PeerError,
    SharedMemoryError,
)

Note = dict[str, Any]

_ERRORS: dict[str, type[InterlaceError]] = {
    cls.__name__: cls for cls in (SharedMemoryError, BackendError, AgreementError, PeerError)
}


STORE_S = 300.0
"""How long the store may take to answer where no time-out is known."""
SLICE_S = 0.05
LOOK_EVERY_S, PROBE_EVERY_S = 0.25, 1.0
"""How often it is asked after ranks of which nothing is known: the store, and their connections."""
WORD_S = 1.0
"""How long leaving word may take."""


class Board:
    """Notes under a prefix of a `torch.distributed` store, seen from one rank."""

    def __init__(self, store: Any, prefix: str = "interlace", limit_s: float = STORE_S) -> None:
        self._store = store
        self._prefix = prefix
        self.limit_s = limit_s
        """How long the store may take to answer: a process that holds it may be stopped."""
        self._unanswered: Errand | None = None
        self.lives: dict[int, Life] = {}
        """The processes of ranks, as far as they are known: Note [Who is gone]."""
        self._gone: set[int] = set()
        self._left_word = False
        self._next_look = self._next_probe = 0.0
        self._past: list[tuple[frozenset[int], list[str]]] = []
        """Meetings in which all came, with what this rank left there: `forget` removes it."""

    def post(self, topic: str, note: Note) -> None:
        """Leaves a note."""
        self._set(f"{self._prefix}/{topic}", note)

    def count(self, topic: str) -> int:
        """One more than the last time this was asked, by anybody."""
        return self._ask(lambda: int(self._store.add(f"{self._prefix}/{topic}", 1)))

    def read(self, topic: str) -> Note | None:
        """The note, if it is there."""
        return self._get(f"{self._prefix}/{topic}")

    def first(self, topic: str, mine: Any) -> Any:
        """Of all that ranks leave there, what was the first: this, or another's."""
        key, text = f"{self._prefix}/{topic}", json.dumps(mine)
        return json.loads(self._ask(lambda: self._store.compare_set(key, "", text)))

    # -- processes: Note [Who is gone] -----------------------------------------------------------

    def announce(self, rank: int) -> None:
        """Says which process this rank is."""
        self._left_word = False
        self._set(_process(rank), {"process": identity(), "at": uptime()})

    def leave_word(self, rank: int, error: BaseException) -> None:
        """Says why this rank stops, as far as the store can be told quickly."""
        why = str(error) or type(error).__name__
        note = {"process": identity(), "at": uptime(), "word": why}
        self._left_word, text = True, json.dumps(note)
        Errand(lambda: self._store.set(_process(rank), text)).is_back(WORD_S)

    def word(self, rank: int) -> str:
        """Why a rank stopped, if it left word."""
        try:
            note = self._get(_process(rank)) or {}
        except InterlaceError:
            return ""
        return "" if precedes(note.get("at", 0.0)) else note.get("word", "")

    def ended(self, ranks: Collection[Any] = ()) -> set[Any]:
        """The ranks whose process has ended: of those that are known, and of these."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            for rank in ranks:
                if rank not in self.lives and (life := self._life(rank)) is not None:
                    self.lives[rank] = life
        if now >= self._next_probe:
            self._next_probe = now + PROBE_EVERY_S
            unknown = [r for r in ranks if r not in self.lives or not self.lives[r].seen]
            self._gone |= {rank for rank in unknown if _disconnected(rank)}
        return self._gone | {rank for rank, life in self.lives.items() if not life.alive()}

    def _life(self, rank: int) -> Life | None:
        note = self._get(_process(rank))
        return None if note is None or precedes(note["at"]) else Life.of(*note["process"])

    def farewell(self, gone: Sequence[int], what: str) -> str:
        """What became of ranks whose processes have ended, and who is to blame."""
        words = {rank: self.word(rank) for rank in gone}
        culprits = [rank for rank in gone if not words[rank]]
        if culprits:
            return (
                f"{named(culprits)} cannot {what} any more: the process has ended. Start the job "
                "anew"
            )
        return f"rank {gone[0]} cannot {what} any more, for it stopped: {words[gone[0]]}"

    # -- meetings --------------------------------------------------------------------------------

    def collect(
        self,
        topics: Mapping[int, str],
        time_out_s: float,
        meetings: Sequence[str] = (),
        ended: Callable[[Collection[int]], Collection[Any]] = lambda ranks: (),
        look: Callable[[], object] = lambda: None,
    ) -> dict[int, Note]:
        """The notes of these topics that came within the time-out, or before one of the meetings
        had its verdict, or one that is missing was of those that have `ended`. What `look` raises
        ends it too."""
        self.limit_s = time_out_s
        found: dict[int, Note] = {}
        pause, over = 0.0002, False

        def missing() -> list[int]:
            return [key for key in topics if key not in found]

        def late() -> str:
            absent = missing()
            return f"{named(absent)} did not come to {_purpose(topics[absent[0]])!r}"

        patience = Patience(time_out_s)
        while True:
            last = ended(missing())  # who ended had left its notes by then
            for key in missing():
                if (note := self.read(topics[key])) is not None:
                    found[key] = note
            over = over or any(key in last for key in missing())
            if over or len(found) == len(topics) or patience.is_over(late):
                return found
            over = any(self.is_over(meeting) for meeting in meetings)
            if not over:  # else once more: a note is left before its verdict
                look()
                time.sleep(pause)
                pause = min(pause * 1.5, 0.02)

    def exchange(
        self,
        topic: str,
        ranks: Sequence[int],
        me: int,
        note: Note,
        time_out_s: float,
        look: Callable[[], object] = lambda: None,
    ) -> list[Note]:
        """Every rank's note, in the order of `ranks`; a missing rank or a failed one raises, and
        what `look` raises ends the wait.

        See Note [All or none]. The last word of the topic that is no number says what it is.
        """
        topics = {rank: f"{topic}/{rank}" for rank in ranks}
        self.limit_s = time_out_s
        self.post(topics[me], note)
        with self.attending([topic], me):
            found = self.collect(topics, time_out_s, [topic], self.ended, look)
            for rank in ranks:
                if (error := found.get(rank, {}).get("error")) is not None:
                    raise as_told(rank, error)
            missing, why = [rank for rank in ranks if rank not in found], ""
            if missing:
                what = _purpose(topic)
                why = (
                    f"{named(missing)} did not come to {what!r} within {time_out_s:g} s, as rank "
                    f"{me} and its team {list(ranks)} did: see whether it failed, stalled or took "
                    f"another path through the model; {LONGER}"
                )
                if gone := sorted(self.ended(missing) & {*missing}):
                    why = self.farewell(gone, f"come to {what!r}")
            self.decide(topic, me, why)
        if missing:  # all had come, as a peer saw
            found = self.collect(topics, time_out_s)
        once = me == ranks[0] and not topic.rpartition("/")[2].isdigit()  # no numbered round
        self.forget(ranks, [topics[me], *([f"{topic}/verdict"] if once else [])])
        return [found[rank] for rank in ranks]

    def forget(self, ranks: Collection[int], topics: Iterable[str]) -> None:
        """All these ranks have come, so they have read what was left for them in meetings before:
        that goes from the store. `topics` is what this rank leaves now, to go with a later one."""
        here = frozenset(ranks)
        over = [topic for there, left in self._past if there <= here for topic in left]
        self._past = [past for past in self._past if not past[0] <= here] + [(here, [*topics])]
        with contextlib.suppress(InterlaceError):  # a store that cannot: it stays there
            for topic in over:
                self._ask(lambda topic=topic: self._store.delete_key(f"{self._prefix}/{topic}"))

    # -- verdicts: Note [All or none] ------------------------------------------------------------

    def round(self, topic: str, after: int) -> int:
        """The number of the first round of a topic, after that one, that is not over."""
        number = after + 1
        while self.is_over(f"{topic}/{number}"):
            number += 1
        return number

    def is_over(self, topic: str) -> bool:
        """Whether a meeting has its verdict."""
        return self._ask(lambda: self._store.check([f"{self._prefix}/{topic}/verdict"]))

    def decide(self, topic: str, me: int, why: str = "") -> None:
        """Says that all came, or why this rank gives up; raises if the verdict is that one gave up.

        Of all that ranks say, the first is the verdict.
        """
        rank, why = self.first(f"{topic}/verdict", [me, why])
        if why:
            raise AgreementError(why if rank == me else f"rank {rank} gave up: {why}")

    def give_up(self, topic: str, after: int, me: int, why: str) -> None:
        """Ends the next round of a topic: this rank does not come to it."""
        with contextlib.suppress(AgreementError):
            self.decide(f"{topic}/{self.round(topic, after)}", me, why)

    @contextlib.contextmanager
    def attending(self, topics: Sequence[str], me: int) -> Iterator[None]:
        """Who leaves meetings by an error gives them up, since its notes say that it is there."""
        try:
            yield
        except BaseException as error:
            for topic in topics:
                with contextlib.suppress(InterlaceError):
                    self.decide(topic, me, str(error) or type(error).__name__)
            self.leave_word(me, error)
            raise
        if self._left_word:  # it went on
            self.announce(me)

    def _set(self, key: str, note: Note) -> None:
        text = json.dumps(note)
        self._ask(lambda: self._store.set(key, text))

    def _get(self, key: str) -> Note | None:
        text = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if text is None else json.loads(text)

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The store's answer. Its process may be stopped, and no time-out of its own ends that."""
        before, patience = self._unanswered, Patience(self.limit_s)
        if before is not None and not before.is_back(SLICE_S):
            raise self._silent()
        call, self._unanswered = Errand(question), None
        while not call.is_back(SLICE_S):
            if patience.is_over():
                self._unanswered = call
                raise self._silent()
        try:
            return call.result()
        except RuntimeError as error:
            raise PeerError(self._lost(error)) from error

    def _lost(self, error: RuntimeError) -> str:
        """What to say of a store that is gone. Words went with it; but whose process has ended is
        known without, and rank 0, which may hold it, leaves when it has heard of another's end."""
        what = f"the store of torch.distributed does not answer ({error})"
        holder = "the process that holds it (rank 0, or the launcher)"
        if ended := [r for r, life in sorted(self.lives.items()) if r and not life.alive()]:
            return f"the process of {named(ended)} has ended, and {what}: {holder} has left since"
        return f"{what}: {holder} is gone"

    def _silent(self) -> CommTimeoutError:
        return CommTimeoutError(
            f"the store of torch.distributed has not answered for {self.limit_s:g} s: the process "
            "that holds it (rank 0, or the launcher) is stopped, or its host is overloaded; "
            f"{LONGER}"
        )


def _purpose(topic: str) -> str:
    """The last word of a topic that is no number: it says what the meeting is for."""
    return next(word for word in reversed(topic.split("/")) if not word.isdigit())


def _process(rank: int) -> str:
    """Where a rank says which process it is: one place in a store, whatever the prefix."""
    return f"interlace/process/{rank}"


def _disconnected(rank: int) -> bool:
    call = Errand(lambda: disconnected(rank))  # gloo connects only now, where it is told to
    return call.is_back(SLICE_S) and call.result()


def failure(error: InterlaceError) -> Note:
    """The note that tells the others that this rank failed."""
    return {"error": [type(error).__name__, str(error)]}


def as_told(rank: int, error: Sequence[str]) -> InterlaceError:
    """The error that a rank told in its note, as the others raise it."""
    return _ERRORS.get(error[0], PeerError)(f"rank {rank}: {error[1]}")


def named(ranks: Sequence[int]) -> str:
    """`rank 2`, or `ranks 1 and 3`."""
    texts = [str(rank) for rank in ranks]
    if len(texts) == 1:
        return f"rank {texts[0]}"
    return f"ranks {', '.join(texts[:-1])} and {texts[-1]}"
