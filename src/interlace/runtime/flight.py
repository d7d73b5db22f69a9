"""The flight log: where each stream of this rank is, for the errors that say what went wrong.

log = Flight(program, rank)
log.stands["comm"] = 12          # the stream begins op 12
print(log.text(12), log.tail())
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

from interlace.ir import Fused, Program
from interlace.ir.text.printer import print_op

NUM_SHOWN = 4
"""Ops of each stream that a message shows, the last one included."""
WIDTH = 400
"""Of a longer op, as one of many parts is, a message shows the beginning."""


class Flight:
    """What the streams of one Executor are doing."""

    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._rank = rank
        self._order: dict[str, list[int]] = {}
        for index, op in enumerate(program.ops):
            self._order.setdefault(op.stream, []).append(index)
        self.stands: dict[str, int] = dict.fromkeys(self._order, -1)
        """For each stream, the op that it began last; -1 before the first, -2 after the last."""
        self.since: dict[str, float] = dict.fromkeys(self._order, 0.0)
        """When it began it, or the run, by `time.perf_counter`."""
        self._tell: Callable[[], Mapping[str, tuple[int, float]]] | None = None

    def follow(self, tell: Callable[[], Mapping[str, tuple[int, float]]]) -> None:
        """From now on `tell` says of each stream at which op it is and for how many seconds."""
        self._tell = tell

    def _catch_up(self) -> None:
        if self._tell is not None:
            now, told = time.perf_counter(), self._tell()
            self.stands = {stream: op for stream, (op, _) in told.items()}
            self.since = {stream: now - held for stream, (_, held) in told.items()}

    def begin(self) -> None:
        """A new run: no stream has begun an op, and the time of waiting counts from now."""
        self.stands = dict.fromkeys(self._order, -1)
        self.since = dict.fromkeys(self._order, time.perf_counter())

    @property
    def last_begun(self) -> float:
        """When a stream last began an op, by `time.perf_counter`."""
        self._catch_up()
        return max(self.since.values(), default=0.0)

    def text(self, index: int, member: int | None = None) -> str:
        """An op (or a member of a Fused), with its number, its module and its source line."""
        if not 0 <= index < len(self._program.ops):
            return f"op {index}"
        op = self._program.ops[index]
        place = f", from {op.loc}" if str(op.loc) else ""
        if isinstance(op, Fused) and member is not None:
            shown = print_op(op.members[member], self._program)
            part = f"part {_part(op, member)} of op {index}"
            return f"`{shown}` ({part} of {self._program.name}{place})"
        shown = print_op(op, self._program)
        shown = shown if len(shown) <= WIDTH else f"{shown[:WIDTH]} ..."
        return f"`{shown}` (op {index} of {self._program.name}{place})"

    def describe(self, index: int, member: int | None = None) -> str:
        """An op of this rank, for the head of a message."""
        return f"rank {self._rank}, {self.text(index, member)}"

    def tail(self) -> str:
        """The last ops of every stream."""
        self._catch_up()
        now = time.perf_counter()
        lines = [f"what the streams of rank {self._rank} did last:"]
        for stream, order in self._order.items():
            stands = self.stands[stream]
            if stands < 0:
                lines.append(f"  {stream}: {'not begun' if stands == -1 else 'done'}")
                continue
            at = order.index(stands)
            for index in order[max(0, at - NUM_SHOWN + 1) : at]:
                lines.append(f"  {stream}: {self.text(index)} done")
            held = now - self.since[stream]
            lines.append(f"  {stream}: {self.text(stands)} begun {held:.3g} s ago")
        return "\n".join(lines)


def _part(op: Fused, member: int) -> int:
    """The part, from 1, that a member of a Fused stands in."""
    ends = itertools.accumulate(map(len, op.parts))
    return next(number for number, end in enumerate(ends, 1) if member < end)
