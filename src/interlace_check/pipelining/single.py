"""The steps of torch's schedules with one stage a rank, GPipe and 1F1B, which have no cells.

    >>> plan = one_f_one_b(rank=0, num_stages=2, num_microbatches=2)
    >>> [str(placed.action) for step in plan if step.what == "issue" for placed in step.actions]
    ['0SEND_F0', '0SEND_F1', '0RECV_B0', '0RECV_B1']

1F1B issues the send of a forward together with the receive of the next backward, and the send of a
backward together with the receive of the next forward: a batch, without which both ranks would send
first. What a step awaits is what these schedules await in torch 2.13 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable

from interlace_check.pipelining.actions import Action
from interlace_check.pipelining.schedule import Placed, Step


class _Writer:
    """Writes the steps of a rank whose stage has its number; each action gets the next index."""

    def __init__(self, rank: int, num_stages: int) -> None:
        self.rank, self.num_stages = rank, num_stages
        self.steps: list[Step] = []
        self.count = 0

    def place(self, kind: str, microbatch: int) -> tuple[Placed, ...]:
        """An action; none for a message beyond the ends of the pipeline."""
        first, last = self.rank == 0, self.rank == self.num_stages - 1
        if (kind in ("RECV_F", "SEND_B") and first) or (kind in ("SEND_F", "RECV_B") and last):
            return ()
        self.count += 1
        return (Placed(self.rank, self.count - 1, Action(kind, self.rank, microbatch)),)

    def compute(self, kind: str, microbatch: int) -> None:
        self.steps.append(Step("compute", self.place(kind, microbatch)))

    def issue(self, *messages: tuple[str, int]) -> tuple[Placed, ...]:
        placed = tuple(one for kind, number in messages for one in self.place(kind, number))
        if placed:
            self.steps.append(Step("issue", placed))
        return placed

    def wait(self, placed: tuple[Placed, ...]) -> None:
        if placed:
            self.steps.append(Step("await", placed))


def gpipe(rank: int, num_stages: int, num_microbatches: int) -> list[Step]:
    """All forwards, then all backwards."""
    writer = _Writer(rank, num_stages)
    for way, kind in (("F", "F"), ("B", "B")):
        sent: list[tuple[Placed, ...]] = []
        for m in range(num_microbatches):
            writer.wait(writer.issue((f"RECV_{way}", m)))
            writer.compute(kind, m)
            sent.append(writer.issue((f"SEND_{way}", m)))
        for placed in sent:
            writer.wait(placed)
    return writer.steps


def one_f_one_b(rank: int, num_stages: int, num_microbatches: int) -> list[Step]:
    """A warm-up of forwards, then a backward and a forward in turn, then the other backwards."""
    writer = _Writer(rank, num_stages)
    warm_up = min(num_microbatches, num_stages - rank)
    sent: tuple[Placed, ...] = ()
    for m in range(warm_up):
        writer.wait(writer.issue(("RECV_F", m)))
        writer.compute("F", m)
        writer.wait(sent)
        sent = writer.issue(("SEND_F", m)) if m != warm_up - 1 else ()
    for backward in range(num_microbatches):
        forward = warm_up + backward  # the one after this backward, if there is one
        if forward <= num_microbatches:
            writer.wait(writer.issue(("SEND_F", forward - 1), ("RECV_B", backward)))
        else:
            writer.wait(writer.issue(("RECV_B", backward)))
        writer.compute("B", backward)
        if forward < num_microbatches:
            writer.wait(writer.issue(("SEND_B", backward), ("RECV_F", forward)))
            writer.compute("F", forward)
        else:
            writer.wait(sent if forward > num_microbatches else ())
            sent = writer.issue(("SEND_B", backward))
    writer.wait(sent)
    return writer.steps


SINGLE: dict[str, Callable[[int, int, int], list[Step]]] = {
    "ScheduleGPipe": gpipe,
    "Schedule1F1B": one_f_one_b,
}
"""Functions that return the steps of a rank, by the name of torch's class."""
