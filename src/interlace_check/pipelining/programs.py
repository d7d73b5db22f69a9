"""A pipeline schedule as a set of Programs, one a rank, under a model of communication.

    >>> ranks = to_programs(sequences, layout, "pair")
    >>> print(ranks[1].program)                  # may be checked, simulated and saved like any

What c10d does is written out: computations run on stream `compute`; a message is put on the stream
of its queue, behind what `compute` holds at that moment; `Work.wait()` lets `compute` wait for it:
a computation for its receive, a WAIT_SEND for its send. Whether the host waits as well (gloo) or
goes on (NCCL) makes no difference: a message never begins before the computations that are listed
before it.

The three models differ in the queues alone (`report.MODELS`).
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.ir.build import Handle
from interlace.ir.ops import Loc
from interlace.ir.types import Team
from interlace_check.pipelining.actions import BACKWARD, COMPUTE, RECEIVES, SENDS, WAITS, Action
from interlace_check.pipelining.schedule import NEEDS, Key, Layout, Placed
from interlace_check.tracing import OriginBuilder

COMPUTE_STREAM = "compute"


def to_programs(
    sequences: Sequence[Sequence[Placed]], layout: Layout, model: str
) -> tuple[PipelineProgram, ...]:
    """The Program of each rank; `model` is a key of `report.MODELS`."""
    ranks = tuple([PipelineProgram(rank, layout, model) for rank in range(len(sequences))])
    for rank, sequence in zip(ranks, sequences, strict=True):
        rank.write(sequence)
    return ranks


class PipelineProgram(OriginBuilder[Placed | None]):
    """The Program of one rank; an op stands for the action that it does, if it does one."""

    def __init__(self, rank: int, layout: Layout, model: str) -> None:
        ranks = tuple(range(layout.num_ranks))
        super().__init__(f"rank_{rank}", [Team("pp", len(ranks), (ranks,))], (rank,), nothing=None)
        self.rank, self.layout, self.model = rank, layout, model
        self.x = self.input("x", "f32", (1,))
        self.values: dict[str, Handle] = {}
        """Buffers that hold something by now."""
        self.length = 0
        """Ops of stream `compute` so far."""
        self.behind: dict[str, int] = {}
        """Number of these ops that each queue comes after."""
        self.recorded = 0
        self.pending: dict[Key, tuple[Placed, str]] = {}
        """Messages that may still be awaited, each with its event."""

    def write(self, sequence: Sequence[Placed]) -> None:
        """All ops of the rank."""
        for placed in sequence:
            kind, stage, microbatch = placed.key
            if kind in SENDS or kind in RECEIVES:
                self.issue(placed)
            elif kind in WAITS:
                self.expect((kind.removeprefix("WAIT_"), stage, microbatch))
            elif kind in COMPUTE:
                self.expect((NEEDS.get(kind, ""), stage, microbatch))
                self.compute(placed)

    def expect(self, message: Key) -> None:
        """Stream `compute` waits for a message, if it is pending."""
        placed, event = self.pending.pop(message, (None, ""))
        if placed is not None:
            self.length += 1
            self.at(COMPUTE_STREAM, placed)
            self.wait(event)

    def compute(self, placed: Placed) -> None:
        """A computation: from what it takes, if that is there, to a buffer of its own."""
        self.length += 1
        name = _name(placed.action)
        taken = [self.values[each] for each in self.reads(placed.action) if each in self.values]
        taken = taken or [self.x]
        out: list[Handle] = []
        if name not in self.values:
            out = [self.fresh(name, "f32", (1,))]
            self.values[name] = out[0]
        fn = "aten.add.Tensor" if len(taken) > 1 else "aten.neg.default"
        self.at(COMPUTE_STREAM, placed, Loc(str(placed)))
        self.call(fn, *taken[:2], out=out)

    def reads(self, action: Action) -> list[str]:
        """The buffers that a computation reads."""
        stage, microbatch = action.stage, action.microbatch
        saved = f"F_{stage}_{microbatch}"
        if action.kind == "W":
            return [saved, f"B_{stage}_{microbatch}"]
        source = self.layout.source(action)
        if source is None:
            return [] if action.kind == "F" else [saved]
        kind = "F" if source[0] == "SEND_F" else "B"
        local = self.layout.rank_of.get(source[1]) == self.rank
        local_or_received = (
            f"{kind}_{source[1]}_{microbatch}" if local else f"RECV_{kind}_{stage}_{microbatch}"
        )
        return [local_or_received] if action.kind == "F" else [local_or_received, saved]

    def issue(self, placed: Placed) -> None:
        """A send, or a receive into memory of its own; none to nobody, as rules.py says."""
        action, peer = placed.action, self.layout.peer(placed.action)
        if peer is None or peer == self.rank:
            return
        sends = action.kind in SENDS
        name = f"{action.kind[-1] if sends else action.kind}_{action.stage}_{action.microbatch}"
        if not sends and name not in self.values:
            self.at(COMPUTE_STREAM, None)
            self.values[name] = self.alloc(name, "f32", (1,))
        queue = self.queue(sends, peer)
        self.follow(queue)
        self.at(queue, placed, Loc(str(placed)))
        if sends:
            self.send(self.values.get(name, self.x), peer, team="pp")
        else:
            self.recv(self.values[name], peer, team="pp")
        self.at(queue, None)
        self.pending[placed.key] = placed, self.record(f"done_{len(self.ops)}")

    def queue(self, sends: bool, peer: int) -> str:
        """The stream of a message."""
        if self.model == "rank":
            return "queue"
        if self.model == "pair":
            return f"with_{peer}"
        return f"to_{peer}" if sends else f"from_{peer}"

    def follow(self, queue: str) -> None:
        """Puts a queue behind what stream `compute` holds so far."""
        if self.behind.get(queue, 0) == self.length:
            return
        event = f"compute_{self.length}"
        if self.recorded != self.length:
            self.at(COMPUTE_STREAM, None)
            self.record(event)
            self.recorded = self.length
        self.behind[queue] = self.length
        self.at(queue, None)
        self.wait(event)


def _name(action: Action) -> str:
    kind = "B" if action.kind in BACKWARD else action.kind
    return f"{kind}_{action.stage}_{action.microbatch}"
