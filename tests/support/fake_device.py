"""Semantics of `fake_cuda`'s logs: the order on one device, and a simulation of all devices.

    order = Order(fake.log)
    assert order.before(i, j)          # entry i is done before j starts, whatever the timing

    stuck = simulate([[log of run 1, log of run 2] for each rank], random.Random(1), look)
    assert not stuck                   # and `look` has seen all entries, in an order that may be

Each stream does its entries in order, and any stream may be next; the order that
`simulate` takes is drawn, now with one stream far ahead and now another. Words only grow, so
whether all gets done does not depend on it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.support.fake_cuda import TILES, WORD, Launch

from interlace.comm.cuda.words import reached
from interlace.ir import FusedKernel
from interlace.ir.kernels import turns

Entry = tuple[Any, ...]
Look = Callable[[int, int, Entry, Callable[[int], int]], None]
"""Rank, run (from 1 on), entry, and the last run that a rank has ended."""


def ranges(size: int, subs: int, own: int) -> list[tuple[int, int]]:
    """The order in which a scatter's kernel makes ranges, the rank's own part being the last: that
    of the parts, but own rows that are one part are made in ranges too."""
    order = turns(FusedKernel(kind="scatter_matmul", pieces=subs, own=own), size)
    if own == 1:
        order = [*order[:-1], *((0, sub) for sub in range(subs))]
    return [((distance - 1) % size, sub) for distance, sub in order]


class Order:
    """The order of the entries of one rank's log, by streams and events alone."""

    def __init__(self, log: Sequence[Entry]) -> None:
        self.log = list(log)
        self._past: list[int] = []
        last: dict[int, int] = {}
        recorded: dict[int, int] = {}
        for index, (what, stream, *rest) in enumerate(log):
            past = 1 << index
            if stream in last:
                past |= self._past[last[stream]]
            if what == "wait_event" and rest[0] in recorded:
                past |= self._past[recorded[rest[0]]]
            self._past.append(past)
            last[stream] = index
            if what == "record":
                recorded[rest[0]] = index

    def before(self, first: int, second: int) -> bool:
        """Returns True if one entry is done before the other starts."""
        return first != second and bool(self._past[second] >> first & 1)

    def find(self, *start: Any) -> list[int]:
        """The entries that begin so; None is anything."""
        return [
            index
            for index, entry in enumerate(self.log)
            if all(a is None or a == b for a, b in zip(start, entry, strict=False))
        ]

    def one(self, *start: Any) -> int:
        """The one entry that begins so."""
        (found,) = self.find(*start)
        return found


def steps(entry: Entry) -> Iterator[Entry]:
    """Yields the steps of an entry, in order."""
    what, stream, *rest = entry
    launch = rest[0] if what == "launch" else None
    if not isinstance(launch, Launch) or not (launch.gates or launch.counters):
        yield entry
        return
    others = [(launch.rank + k) % launch.size for k in range(1, launch.size)]
    if launch.kind == "scatter":
        for part, sub in ranges(launch.size, launch.subs, launch.own):
            chunk = (launch.rank + 1 + part) % launch.size
            word = (launch.size if sub == launch.subs else chunk) * launch.subs + sub % launch.subs
            half = launch.own > launch.subs and chunk == launch.rank and sub >= launch.subs - 1
            yield ("raise", stream, launch.counters + 4 * word, TILES // (2 if half else 1))
        return
    yield ("hold", stream)  # all processors, till the last chunk has come
    for chunk in others:
        for later in reversed(range(launch.subs)):
            yield ("wait", stream, launch.gates + 4 * chunk, launch.expected - later)
    yield ("let go", stream)


def simulate(
    logs: Sequence[Sequence[Sequence[Entry]]],
    rng: random.Random,
    look: Look | None = None,
    one_gpu: bool = False,
) -> list[Entry]:
    """Does what the logs say, by rank and run; the entries that are never reached are the result's
    first of each stream. Calls need a processor: a kernel that waits for peers leaves none. On
    `one_gpu` for all ranks copies need one too, of those that their rank has in its turn."""
    queues: dict[tuple[int, int], deque[tuple[int, bool, Entry]]] = {}
    left: list[list[int]] = []
    for rank, runs in enumerate(logs):
        left.append([0] * len(runs))
        recorded: dict[int, int] = {}
        count = 0
        for number, log in enumerate(runs):
            (over,) = (index for index, entry in enumerate(log) if entry[3:] == ("over",))
            for index, entry in enumerate(log):
                for what, stream, *rest in steps(entry):
                    if what == "record":
                        count += 1
                        recorded[rest[0]] = count
                        rest = [count]
                    elif what == "wait_event":
                        rest = [recorded.get(rest[0], 0)]
                    item = (number, index <= over, (what, stream, *rest))
                    queues.setdefault((rank, stream), deque()).append(item)
                    left[rank][number] += index <= over

    words: dict[tuple[int, int], int] = {}
    done = {(rank, 0) for rank in range(len(logs))}
    held = set[int]()

    def key(rank: int, address: int) -> tuple[int, int]:
        return (-1 if address >= WORD else rank), address

    def ready(rank: int, entry: Entry) -> bool:
        what, _, *rest = entry
        if what in ("call", "hold") or (one_gpu and what == "copy"):
            return rank not in held
        if what == "wait":
            return reached(words.get(key(rank, rest[0]), 0), rest[1] & 0xFFFFFFFF)
        return what != "wait_event" or (rank, rest[0]) in done

    def ended(rank: int) -> int:
        return next((run for run, rest in enumerate(left[rank]) if rest), len(left[rank]))

    ranked = sorted(queues)
    while any(queues.values()):
        if rng.random() < 0.1:
            rng.shuffle(ranked)
        able = (at for at in ranked if queues[at] and ready(at[0], queues[at][0][2]))
        at = next(able, None)
        if at is None:
            return [queue[0][2] for queue in queues.values() if queue]
        rank = at[0]
        number, counts, entry = queues[at].popleft()
        what, _, *rest = entry
        if look is not None:
            look(rank, number + 1, entry, ended)
        if what == "write":
            words[key(rank, rest[0])] = rest[1]
        elif what == "raise":
            words[key(rank, rest[0])] = words.get(key(rank, rest[0]), 0) + rest[1]
        elif what == "record":
            done.add((rank, rest[0]))
        elif what == "hold":
            held.add(rank)
        elif what == "let go":
            held.discard(rank)
        left[rank][number] -= counts
    return []
