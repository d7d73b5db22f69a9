"""Notes that ranks leave for one another in the store of torch.distributed.

Set-up happens through them: small JSON texts under a topic, read by polling, so that every wait is
bounded and a note that says "I failed" ends it at once.

    board = Board(store, ranks=(0, 1, 2), rank=0)
    notes = board.collect({1: "host/1", 2: "host/2"}, timeout_s=10)   # of the ranks that came
    notes = board.exchange("host", {"boot": "..."}, timeout_s=10)     # all ranks', or none

Note [All or none]
    A rank that gives up leaves its notes behind, and the others may have read them by then. So each
    meeting has one verdict, which the store takes once: "all came" from whoever saw all notes, or
    "given up". Whichever is there first holds for all ranks. A meeting that is held again (to
    prepare the next Program, to reset) has numbered rounds, and a round with a verdict is over: who
    comes late, or again, finds the others in the first one without.

Note [Who is gone]
    Before its first meeting a process says in the store which one it is; nobody waits for it once
    it has ended. Of a rank that never came that far, a closed connection of gloo tells it. A rank
    that leaves because of an error leaves word of it, which is passed on: it is not the culprit.
    The store may outlive processes: what was said before this one began does not count. Hosts count
    from the starts of their own, so between them wall clocks tell.
    Where rank 0 holds the store, words go with it. So it stays for a moment, until the others have
    left theirs, and who finds the store lost stays too: a process that has ended by then ended
    before.

Note [Words and echoes]
    torchrun starts a job anew over the store of its first attempt, where notes of ranks stand that
    are gone. So each rank tells a random word of its own, and which words it has heard: a rank that
    has heard mine is there now. The name of a meeting is made of the words of all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from interlace.comm.rendezvous.liveness import (
    Note,
    PeerProcess,
    disconnected,
    identity,
    lost_store,
    moment,
    precedes,
    silent_store,
)
from interlace.comm.rendezvous.patience import LONGER, Errand, Patience
from interlace.errors import (
    AgreementError,
    BackendError,
    CommTimeoutError,
    InterlaceError,
    PeerError,
    SharedMemoryError,
)
from interlace.torch_private import uses_agents_store

if TYPE_CHECKING:
    from interlace.comm.teams import TeamComm

T = TypeVar("T")

_ERRORS = {e.__name__: e for e in (SharedMemoryError, BackendError, AgreementError, PeerError)}
STORE_S = 300.0
"""Time for the store to answer where no time-out is known."""
SLICE_S = 0.05
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.02
LOOK_EVERY_S, PROBE_EVERY_S = 0.25, 1.0
"""Intervals between checks of ranks of unknown state: in the store, and of their connections."""
WORD_S = 1.0
STAY_S, HOLD_S = 1.0, 0.4
"""Longest stay for the others of a rank that leaves by an error: Note [Who is gone]."""


class Board:
    """Notes that some ranks leave under a prefix of a `torch.distributed` store, seen from one."""

    def __init__(
        self,
        store: dist.Store,
        ranks: Iterable[int],
        rank: int,
        prefix: str = "interlace",
        limit_s: float = STORE_S,
        mirrors: Sequence[int] = (),
    ) -> None:
        """`mirrors`: ranks that are this one, too; it leaves its notes in the names of all."""
        self.store, self._mirrors = store, mirrors
        self.ranks, self.rank = tuple(ranks), rank
        self.me = self.ranks.index(rank) if rank in self.ranks else 0
        self._prefix = prefix
        self.limit_s = limit_s
        """Time for the store to answer: a process that holds it may be stopped."""
        self._unanswered: Errand[Any] | None = None
        self.lives: dict[int, PeerProcess] = {}
        """The processes of ranks, as far as they are known: Note [Who is gone]."""
        self._gone: set[int] = set()
        self.probe = disconnected
        """Returns True if the process of a rank, of which nothing else is known, has ended."""
        self.look: Callable[[], object] = lambda: None
        """Called in every wait for notes; raises where a peer called reset()."""
        self._left_word = self._is_lost = self._stayed = False
        self._next_look = self.next_probe = 0.0
        self._past: list[tuple[frozenset[int], list[str]]] = []
        """Meetings in which all came, with what this rank left there: `forget` removes it."""

    def post(self, topic: str, note: Note) -> None:
        self._set(f"{self._prefix}/{topic}", note)

    def count(self, topic: str) -> int:
        """One more than the last time this was asked, by anybody."""
        return self.ask(lambda: int(self.store.add(f"{self._prefix}/{topic}", 1)))

    def read(self, topic: str) -> Note | None:
        return self.read_all([topic])[0]

    def read_all(self, topics: Iterable[str]) -> list[Note | None]:
        return self._get([f"{self._prefix}/{topic}" for topic in topics])

    def first(self, topic: str, mine: Any) -> Any:
        """Returns the first value that a rank left under the topic: `mine`, or another's."""
        key, text = f"{self._prefix}/{topic}", json.dumps(mine)
        return json.loads(self.ask(lambda: self.store.compare_set(key, "", text)))

    def announce(self) -> None:
        self._left_word = False
        self._set(_process(self.rank), {"process": identity(), **moment()})

    def leave_word(self, error: BaseException) -> None:
        """Says why this rank stops, as far as the store can be told quickly."""
        why = str(error) or type(error).__name__
        note = {"process": identity(), **moment(), "word": why}
        self._left_word, text = True, json.dumps(note)
        Errand(lambda: self.store.set(_process(self.rank), text)).is_back(WORD_S)

    def stay(self) -> None:
        """Before this rank leaves by an error: Note [Who is gone]."""
        if self._is_lost:
            stayed, self._stayed = self._stayed, True
            time.sleep(0.0 if stayed else STAY_S)
        elif self._holds:
            patience, self._next_look = Patience(HOLD_S), 0.0
            with contextlib.suppress(InterlaceError):
                self.ended(self.ranks)  # so that their processes are known
            others = {rank: life for rank, life in self.lives.items() if rank != self.rank}
            while not patience.is_over() and not self._is_lost:
                staying = [rank for rank, life in others.items() if life.alive()]
                if all(map(self.word, staying)):
                    return
                time.sleep(SLICE_S)

    @property
    def _holds(self) -> bool:
        """True if this process holds the store, by the ways that torch makes one."""
        return self.rank == 0 and not uses_agents_store()

    def word(self, rank: int) -> str:
        stayed, self._stayed = self._stayed, True  # nobody leaves for this
        try:
            (note,) = self._get([_process(rank)])
        except InterlaceError:
            return ""
        finally:
            self._stayed = stayed
        return "" if note is None or precedes(note) else note.get("word", "")

    def ended(self, ranks: Collection[int] = ()) -> set[int]:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY_S
            new = [rank for rank in ranks if rank not in self.lives]
            for rank, note in zip(new, self._get([_process(r) for r in new]), strict=True):
                if note is not None and not precedes(note):
                    with contextlib.suppress(SharedMemoryError):  # set-up says so
                        self.lives[rank] = PeerProcess.of(*note["process"])
        if now >= self.next_probe:
            self.next_probe = now + PROBE_EVERY_S
            unknown = [r for r in ranks if r not in self.lives or not self.lives[r].seen]
            for rank in unknown:
                call = Errand(lambda rank=rank: self.probe(rank))  # gloo may connect only now
                if call.is_back(SLICE_S) and call.result():
                    self._gone.add(rank)
        return self._gone | {rank for rank, life in self.lives.items() if not life.alive()}

    def farewell(self, gone: Sequence[int], what: str) -> str:
        """The message about ranks whose processes have ended, and who is to blame."""
        words = {rank: self.word(rank) for rank in gone}
        if culprits := [rank for rank in gone if not words[rank]]:
            who = named(culprits)
            return f"{who} cannot {what} any more: the process has ended. Start the job anew"
        return f"{named(gone[:1])} cannot {what} any more, for it stopped: {words[gone[0]]}"

    def poll(
        self,
        ranks: Iterable[int],
        missing: Callable[[], Collection[int]],
        what: str,
        timeout_s: float,
        look: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Asks `missing`, first of these ranks, until it names none, one of them has ended, or
        `look` raises; the ranks that it named last. `what` is for messages."""
        self.limit_s = timeout_s
        patience, pause, absent = Patience(timeout_s), SHORTEST_PAUSE_S, [*ranks]

        def late() -> str:
            return f"{named(absent)} did not come to {what}"

        while True:
            ended = self.ended(absent)  # who ended had left its notes by then
            absent = sorted(missing())
            if not absent or not ended.isdisjoint(absent) or patience.is_over(late):
                return absent
            try:
                look()  # an error says more than the reset after it
                self.look()
            except PeerError:  # who has reset since may have come to this before
                if missing():
                    raise
                return []
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_S)

    def absence(
        self, absent: Sequence[int], come: Iterable[int], what: str, timeout_s: float
    ) -> str:
        """Why ranks did not come to what the others came to."""
        if gone := sorted(self.ended(absent) & {*absent}):
            return self.farewell(gone, f"come to {what}")
        who, others = named(absent), named(sorted(come))
        return (
            f"{who} did not come to {what} within {timeout_s:g} s, as {others} did: see whether "
            "it failed, stalled, did not recompile as the others did, or took another path through "
            f"the model; {LONGER}"
        )

    def collect(
        self,
        topics: Mapping[int, str],
        timeout_s: float,
        meetings: Sequence[str] = (),
        look: Callable[[], object] = lambda: None,
    ) -> dict[int, Note]:
        """The notes of these topics, by rank, that came in time, or before a meeting was over."""
        found: dict[int, Note] = {}

        def missing() -> list[int]:
            awaited = [rank for rank in topics if rank not in found]
            keys = [f"{self._prefix}/{topics[rank]}" for rank in awaited]
            over, notes = self._look(keys, meetings)
            found.update((r, n) for r, n in zip(awaited, notes, strict=True) if n is not None)
            return [] if over else [rank for rank in topics if rank not in found]

        what = repr(_purpose(next(iter(topics.values())))) if topics else ""
        self.poll(topics, missing, what, timeout_s, look)
        return found

    def exchange(
        self,
        topic: str,
        note: Note,
        timeout_s: float,
        look: Callable[[], object] = lambda: None,
        problem: InterlaceError | None = None,
    ) -> list[Note]:
        """Every rank's note, in the order of the ranks; a missing rank, a failed one or `look`
        raises, as does a `problem`, which the others are told: Note [All or none]. The last word of
        the topic that is no number says what it is for."""
        topics = {rank: f"{topic}/{rank}" for rank in self.ranks}
        mine = topics[self.rank]
        if problem is not None:
            self.post(mine, failure(problem))
            with contextlib.suppress(InterlaceError):
                self.decide(topic, str(problem))  # so that nobody waits for the others first
            raise problem
        self.limit_s = timeout_s
        self.post(mine, note)
        with self.attending([topic]):
            found = self.collect(topics, timeout_s, [topic], look)
            for rank in topics:
                if (error := found.get(rank, {}).get("error")) is not None:
                    raise as_told(rank, error)
            missing, why = [rank for rank in topics if rank not in found], ""
            if missing:
                why = self.absence(missing, found, repr(_purpose(topic)), timeout_s)
            self.decide(topic, why)
        if missing:  # all had come, as a peer saw
            found = self.collect(topics, timeout_s)
        numbered = topic.rpartition("/")[2].isdigit()
        verdict = [] if numbered or self.rank != self.ranks[0] else [f"{topic}/verdict"]
        self.forget(self.ranks, [mine, *verdict])
        return [found[rank] for rank in topics]

    def forget(self, ranks: Collection[int], topics: Iterable[str]) -> None:
        """Removes from the store what was left for these ranks in earlier meetings, which they have
        read; `topics` is what this rank leaves now."""
        here = frozenset(ranks)
        over = [topic for there, left in self._past if there <= here for topic in left]
        self._past = [past for past in self._past if not past[0] <= here] + [(here, [*topics])]
        keys = [key for topic in over for key in self._keys(f"{self._prefix}/{topic}")]
        if keys:
            with contextlib.suppress(InterlaceError):  # a store that cannot: it stays there
                self.ask(lambda: [self.store.delete_key(key) for key in keys])

    def round(self, topic: str, after: int) -> int:
        """The number of the first round of a topic, after that one, that is not over."""
        number = after + 1
        while self.is_over(f"{topic}/{number}"):
            number += 1
        return number

    def is_over(self, topic: str) -> bool:
        return self.ask(lambda: self.store.check([f"{self._prefix}/{topic}/verdict"]))

    def decide(self, topic: str, why: str = "") -> None:
        """Says that all came, or why this rank gives up; raises if the first verdict is that one
        gave up."""
        rank, why = self.first(f"{topic}/verdict", [self.rank, why])
        if why:
            raise AgreementError(why if rank == self.rank else f"rank {rank} gave up: {why}")

    @contextlib.contextmanager
    def attending(self, topics: Sequence[str]) -> Iterator[None]:
        """Who leaves meetings by an error gives them up, since its notes say that it is there."""
        try:
            yield
        except BaseException as error:
            for topic in topics:
                with contextlib.suppress(InterlaceError):
                    self.decide(topic, str(error) or type(error).__name__)
            self.leave_word(error)
            if isinstance(error, InterlaceError):  # an interrupt does not wait
                self.stay()
            raise
        if self._left_word:  # it went on
            self.announce()

    def _set(self, key: str, note: Note) -> None:
        text = json.dumps(note)
        self.ask(lambda: [self.store.set(each, text) for each in self._keys(key)])

    def _keys(self, key: str) -> list[str]:
        """The key, and of a note of this rank's those of the ranks that it is, too."""
        own = f"/{self.rank}"
        if not (self._mirrors and key.endswith(own)):
            return [key]
        return [f"{key.removesuffix(own)}/{rank}" for rank in self._mirrors]

    def _get(self, keys: Sequence[str]) -> list[Note | None]:
        return self._look(keys)[1] if keys else []

    def _look(
        self, keys: Sequence[str], meetings: Sequence[str] = ()
    ) -> tuple[bool, list[Note | None]]:
        """In one question: whether a meeting is over, and the notes under keys. In this order, for
        a note is left before its verdict."""
        store, verdicts = self.store, [[f"{self._prefix}/{m}/verdict"] for m in meetings]

        def question() -> tuple[bool, list[bytes | None]]:
            over = any(map(store.check, verdicts))
            return over, [store.get(key) if store.check([key]) else None for key in keys]

        over, texts = self.ask(question)
        return over, [None if text is None else json.loads(text) for text in texts]

    def ask(self, question: Callable[[], T]) -> T:
        """The store's answer. Its process may be stopped, and no time-out of its own ends that."""
        before, patience = self._unanswered, Patience(self.limit_s)
        if before is not None and not before.is_back(SLICE_S):
            raise CommTimeoutError(silent_store(self.limit_s))
        call, self._unanswered = Errand(question), None
        while not call.is_back(SLICE_S):
            if patience.is_over():
                self._unanswered = call
                raise CommTimeoutError(silent_store(self.limit_s))
        try:
            return call.result()
        except RuntimeError as error:
            why = lost_store(error, self.rank, self.lives, self._is_lost)
            self._is_lost = True
            self.stay()
            raise PeerError(why) from error


def _purpose(topic: str) -> str:
    """The last word of a topic that is no number: it says what the meeting is for."""
    return next(word for word in reversed(topic.split("/")) if not word.isdigit())


def _process(rank: int) -> str:
    return f"interlace/process/{rank}"


def failure(error: InterlaceError) -> Note:
    return {"error": [type(error).__name__, str(error)]}


def as_told(rank: int, error: Sequence[str]) -> InterlaceError:
    """The error that a rank told in its note, as the others raise it."""
    return _ERRORS.get(error[0], PeerError)(f"rank {rank}: {error[1]}")


def named(ranks: Sequence[int]) -> str:
    texts = [str(rank) for rank in ranks]
    if len(texts) == 1:
        return f"rank {texts[0]}"
    return f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


@dataclass(slots=True)
class Party:
    """A set of ranks, seen from one of them."""

    topic: str
    ranks: tuple[int, ...]
    host: str = ""
    """This rank's."""
    facts: dict[int, Note] = field(default_factory=dict[int, Note])
    """The host and the process of each rank, once they have met."""
    word: str = field(default_factory=lambda: secrets.token_hex(8))
    name: str = ""
    missing: list[int] = field(default_factory=list[int])
    told: Note = field(default_factory=dict[str, object])

    def look(self, board: Board) -> None:
        """Hears the others, and tells them what has been heard."""
        me, others = str(board.rank), [rank for rank in self.ranks if rank != board.rank]
        notes = board.read_all([f"{self.topic}/{rank}" for rank in others])
        heard = dict(zip(others, notes, strict=True))
        words = {str(rank): note["word"] for rank, note in heard.items() if note} | {me: self.word}
        if words != self.told.get("heard"):
            own = {"host": self.host, "process": identity()}
            self.told = {"word": self.word, "heard": words, **own}
            board.post(f"{self.topic}/{me}", self.told)
        self.missing = [
            rank for rank, note in heard.items() if not note or note["heard"].get(me) != self.word
        ]
        if not self.missing:
            self.facts = {rank: note for rank, note in heard.items() if note}
            self.facts[board.rank] = self.told
            self.name = hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest()[:16]


def greet(
    board: Board,
    parties: Sequence[Party],
    what: str,
    timeout_s: float,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Finds the names of these parties; all their ranks call it, to do `what` (for messages)."""
    if not parties:
        return
    everyone = {rank for party in parties for rank in party.ranks}
    board.limit_s = timeout_s
    board.announce()

    def missing() -> set[int]:
        for party in parties:
            if not party.name:
                party.look(board)
        return {rank for party in parties if not party.name for rank in party.missing}

    with board.attending(()):
        if absent := board.poll(everyone - {board.rank}, missing, what, timeout_s, look):
            raise AgreementError(board.absence(absent, everyone - {*absent}, what, timeout_s))


def meet(teams: Sequence[TeamComm], what: str, timeout_s: float) -> None:
    """The processes of each team find one another, once; all their ranks call it, to do `what`."""
    new, why = [team for team in teams if not team.topic], ""
    try:
        with contextlib.ExitStack() as attended:
            looks = [attended.enter_context(team.attending("")) for team in teams if new]
            hear = lambda: [look() for look in looks]  # noqa: E731
            greet(teams[0].board, [team.party for team in new], what, timeout_s, hear)
    except BaseException as error:
        why = str(error) or type(error).__name__
        raise
    finally:
        for team in new:
            if team.party.name:
                team.name_topics()
        for team in (team for team in teams if why and team.topic):
            with contextlib.suppress(InterlaceError):
                number = team.board.round(f"{team.topic}/prepare", team.num_prepared)
                team.board.decide(f"{team.topic}/prepare/{number}", why)
