"""Notes that ranks leave for one another in the store of torch.distributed.

Set-up happens through them: small JSON texts under a topic, read by polling, so that every wait is
bounded and a note that says "I failed" ends it at once.

    board = Board(store)
    board.post("host/0", {"boot": "..."})
    notes = board.collect({1: "host/1", 2: "host/2"}, time_out_s=10)   # those that came, by key
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from interlace.errors import (
    AgreementError,
    BackendError,
    InterlaceError,
    PeerError,
    SharedMemoryError,
)

Note = dict[str, Any]
Key = TypeVar("Key")

_ERRORS: dict[str, type[InterlaceError]] = {
    cls.__name__: cls for cls in (SharedMemoryError, BackendError, AgreementError, PeerError)
}


class Board:
    """Notes under a prefix of a `torch.distributed` store."""

    def __init__(self, store: Any, prefix: str = "interlace") -> None:
        self._store = store
        self._prefix = prefix

    def post(self, topic: str, note: Note) -> None:
        """Leaves a note."""
        text = json.dumps(note)
        self._ask(lambda: self._store.set(f"{self._prefix}/{topic}", text))

    def count(self, topic: str) -> int:
        """One more than the last time this was asked, by anybody."""
        return self._ask(lambda: int(self._store.add(f"{self._prefix}/{topic}", 1)))

    def read(self, topic: str) -> Note | None:
        """The note, if it is there."""
        key = f"{self._prefix}/{topic}"
        if not self._ask(lambda: self._store.check([key])):
            return None
        return json.loads(self._ask(lambda: self._store.get(key)))

    def collect(self, topics: Mapping[Key, str], time_out_s: float) -> dict[Key, Note]:
        """The notes of these topics that came within the time-out."""
        deadline = time.monotonic() + time_out_s
        found: dict[Key, Note] = {}
        pause = 0.0002
        while True:
            for key, topic in topics.items():
                if key not in found and (note := self.read(topic)) is not None:
                    found[key] = note
            if len(found) == len(topics) or time.monotonic() > deadline:
                return found
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def exchange(
        self, topic: str, ranks: Sequence[int], me: int, note: Note, time_out_s: float
    ) -> list[Note]:
        """Every rank's note, in the order of `ranks`; a missing rank or a failed one raises."""
        self.post(f"{topic}/{me}", note)
        found = self.collect({rank: f"{topic}/{rank}" for rank in ranks}, time_out_s)
        for rank in ranks:
            if (error := found.get(rank, {}).get("error")) is not None:
                raise as_told(rank, error)
        missing = [rank for rank in ranks if rank not in found]
        if missing:
            raise AgreementError(
                f"{named(missing)} did not come to {topic.split('/')[-1]!r} within {time_out_s:g} "
                f"s, as rank {me} and its team {list(ranks)} did: see whether it failed, stalled "
                "or took another path through the model"
            )
        return [found[rank] for rank in ranks]

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise PeerError(
                f"the store of torch.distributed does not answer ({error}): the process that "
                "holds it (rank 0, or the launcher) is gone"
            ) from error


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
