"""The flight log: where each stream of this rank is, for the errors that say what went wrong; and
when its ops ran, as a Timeline.

    log = Flight(program, rank)
    log.follow(lambda run: [(12, 0.5)])  # what tells where the streams are
    print(log.text(12), log.tail())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from interlace.cost import Span, Timeline, op_kind, op_name
from interlace.ir import Program
from interlace.ir.text.printer import print_op

NUM_SHOWN = 4
"""Ops of each stream that a message shows, the last one included."""
WIDTH = 400
"""Most characters of an op in a message; a longer op, as one of many parts is, is cut."""


class Flight:
    def __init__(self, program: Program, rank: int) -> None:
        self._program = program
        self._rank = rank
        self._order: dict[str, list[int]] = {name: [] for name in program.streams()}
        for index, op in enumerate(program.ops):
            self._order[op.stream].append(index)
        self._progress: Callable[[int], Sequence[tuple[int, float]]] = lambda _: (
            [(-1, 0.0)] * len(self._order)
        )
        self.run = 0
        """The run of its team that the Executor entered last."""

    def follow(self, progress: Callable[[int], Sequence[tuple[int, float]]]) -> None:
        """From now on `progress` gives for `run`, for each stream of the Program, the op that it
        began last and how many seconds ago; op -1 before its first, -2 after its last."""
        self._progress = progress

    @property
    def stands(self) -> Mapping[str, tuple[int, float]]:
        return dict(zip(self._order, self._progress(self.run), strict=True))

    def text(self, index: int) -> str:
        """An op, with its number, its module and its source line."""
        if not 0 <= index < len(self._program.ops):
            return f"op {index}"
        op = self._program.ops[index]
        place = f", from {op.loc}" if str(op.loc) else ""
        shown = print_op(op, self._program)
        shown = shown if len(shown) <= WIDTH else f"{shown[:WIDTH]} ..."
        return f"`{shown}` (op {index} of {self._program.name}{place})"

    def describe(self, index: int) -> str:
        return f"rank {self._rank}, {self.text(index)}"

    def tail(self) -> str:
        lines = [f"what the streams of rank {self._rank} did last:"]
        for stream, (stands, held) in self.stands.items():
            if stands < 0:
                lines.append(f"  {stream}: {'not begun' if stands == -1 else 'done'}")
                continue
            order = self._order[stream]
            at = order.index(stands)
            for index in order[max(0, at - NUM_SHOWN + 1) : at]:
                lines.append(f"  {stream}: {self.text(index)} done")
            lines.append(f"  {stream}: {self.text(stands)} begun {held:.3g} s ago")
        return "\n".join(lines)


def measured(program: Program, rank: int, spans: Sequence[tuple[int, float, float]]) -> Timeline:
    """The timeline of one rank, from the index, start and end (in seconds) of its ops."""
    ops = program.ops
    return Timeline(
        tuple(
            Span(
                *(rank, ops[index].stream, index, op_name(ops[index]), start, end),
                site=ops[index].site,
                kind=op_kind(ops[index]),
            )
            for index, start, end in sorted(spans)
        ),
        name=program.name,
        source="measured",
    )
