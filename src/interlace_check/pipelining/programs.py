"""A pipeline schedule as a set of Programs, one a rank, under a model of communication.

    >>> made = to_programs(plans, layout, "pair")
    >>> print(made.programs[1])                  # may be checked, simulated and saved like any

What c10d does is written out: computations run on stream `compute`; a message is put on the stream
of its queue, behind what `compute` holds at that moment; `Work.wait()` lets `compute` wait for it.
Whether the host waits as well (gloo) or goes on (NCCL) makes no difference: a message never begins
before the computations that are listed before it.

The three models differ in the queues alone (`report.MODELS`). A batch of sends and receives is one
`group`, on NCCL's communicator of the whole team; where each direction has its own queue, its
messages go their own ways (gloo, and torch's per-edge communicators).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.ir import (
    Alloc,
    Buffer,
    Call,
    DType,
    Group,
    Loc,
    Op,
    Program,
    Record,
    Recv,
    Send,
    Team,
    View,
    Wait,
)
from interlace_check.pipelining.actions import BACKWARD, SENDS, Action
from interlace_check.pipelining.matching import communicator, is_mixed
from interlace_check.pipelining.schedule import Layout, Placed, Step

COMPUTE_STREAM = "compute"


@dataclass(frozen=True, slots=True)
class RankPrograms:
    """The Programs of all ranks, and which action each op stands for."""

    programs: tuple[Program, ...]
    origins: tuple[tuple[tuple[Placed, ...], ...], ...]
    """By Program and op: the actions that it does; none for what only prepares them."""


def to_programs(plans: Sequence[Sequence[Step]], layout: Layout, model: str) -> RankPrograms:
    """One Program a rank; `model` is a key of `report.MODELS`."""
    writers = [_Writer(rank, plan, layout, model).write() for rank, plan in enumerate(plans)]
    return RankPrograms(
        tuple(writer.program() for writer in writers),
        tuple(tuple(writer.origins) for writer in writers),
    )


@dataclass
class _Writer:
    """Writes the ops of one rank."""

    rank: int
    plan: Sequence[Step]
    layout: Layout
    model: str
    ops: list[Op] = field(default_factory=list)
    origins: list[tuple[Placed, ...]] = field(default_factory=list)
    made: set[str] = field(default_factory=set)
    """Buffers that hold something by now."""
    length: int = 0
    """Ops of stream `compute` so far, and how many of them each queue is behind."""
    behind: dict[str, int] = field(default_factory=dict)
    recorded: int = 0
    pending: dict[Placed, str] = field(default_factory=dict)
    """The event of each message that may still be awaited."""

    def write(self) -> _Writer:
        awaited = {placed for step in self.plan if step.what == "await" for placed in step.actions}
        for step in self.plan:
            if step.what == "compute":
                self.compute(step.actions[0])
            elif step.what == "issue":
                self.issue(step, awaited)
            else:
                for placed in step.actions:
                    event = self.pending.pop(placed, None)
                    if event is not None:
                        self.length += 1
                        self.add(Wait(event=event, stream=COMPUTE_STREAM), placed)
        return self

    def program(self) -> Program:
        ranks = tuple(range(self.layout.num_ranks))
        teams = tuple(Team(name, len(ranks), (ranks,)) for name in ("pp", "batched"))
        return Program(
            name=f"rank_{self.rank}",
            teams=teams,
            params=(Buffer("x", DType.f32, (1,), "input"),),
            ops=tuple(self.ops),
            results=(),
            ranks=(self.rank,),
        )

    def add(self, op: Op, *origin: Placed) -> None:
        self.ops.append(op)
        self.origins.append(origin)

    def compute(self, placed: Placed) -> None:
        """A computation: from what it takes, if that is there, to a buffer of its own."""
        self.length += 1
        taken = [name for name in self.inputs(placed.action) if name in self.made] or ["x"]
        name = _name(placed.action)
        fresh = () if name in self.made else (Buffer(name, DType.f32, (1,), "fresh"),)
        self.made.add(name)
        self.add(
            Call(
                fn="aten.add.Tensor" if len(taken) > 1 else "aten.neg.default",
                args=tuple(map(View, taken[:2])),
                fresh=fresh,
                stream=COMPUTE_STREAM,
                loc=Loc(str(placed)),
            ),
            placed,
        )

    def inputs(self, action: Action) -> list[str]:
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
        took = f"{kind}_{source[1]}_{microbatch}" if local else f"RECV_{kind}_{stage}_{microbatch}"
        return [took] if action.kind == "F" else [took, saved]

    def issue(self, step: Step, awaited: set[Placed]) -> None:
        """Messages that are issued together: as one group, where they are a batch of NCCL's."""
        ends: list[tuple[Placed, str, Send | Recv]] = []
        for placed in step.actions:
            peer = self.layout.peer(placed.action)
            if peer is not None and peer != self.rank:  # else rules.py says so
                queue = self.queue(step, placed.action, peer)
                ends.append((placed, queue, self.end(placed, peer, queue, step)))
        if self.model != "direction" and is_mixed(step) and len(ends) > 1:
            queue = ends[0][1]
            placed = [end[0] for end in ends]
            self.follow(queue)
            self.add(Group(ops=tuple(end[2] for end in ends), stream=queue), *placed)
            self.record(queue, placed, awaited)
            return
        for placed, queue, op in ends:
            self.follow(queue)
            self.add(op, placed)
            self.record(queue, [placed], awaited)

    def queue(self, step: Step, action: Action, peer: int) -> str:
        """The stream of a message."""
        if self.model == "rank" or communicator(step, self.model) == "batched":
            return "queue"
        if self.model == "pair":
            return f"with_{peer}"
        return f"to_{peer}" if action.kind in SENDS else f"from_{peer}"

    def end(self, placed: Placed, peer: int, queue: str, step: Step) -> Send | Recv:
        action = placed.action
        team, loc = communicator(step, self.model), Loc(str(placed))
        if action.kind in SENDS:
            name = f"{action.kind[-1]}_{action.stage}_{action.microbatch}"
            source = View(name if name in self.made else "x")
            return Send(src=source, peer=peer, team=team, stream=queue, loc=loc)
        name = f"{action.kind}_{action.stage}_{action.microbatch}"
        if name not in self.made:
            self.made.add(name)
            buffer = Buffer(name, DType.f32, (1,), "local")
            self.add(Alloc(buffer=buffer, stream=COMPUTE_STREAM))
        return Recv(dst=View(name), peer=peer, team=team, stream=queue, loc=loc)

    def follow(self, queue: str) -> None:
        """Puts a queue behind what stream `compute` holds so far."""
        if self.behind.get(queue, 0) == self.length:
            return
        event = f"compute_{self.length}"
        if self.recorded != self.length:
            self.add(Record(event=event, stream=COMPUTE_STREAM))
            self.recorded = self.length
        self.behind[queue] = self.length
        self.add(Wait(event=event, stream=queue))

    def record(self, queue: str, messages: Sequence[Placed], awaited: set[Placed]) -> None:
        if any(placed in awaited for placed in messages):
            event = f"done_{len(self.ops)}"
            self.add(Record(event=event, stream=queue))
            self.pending.update(dict.fromkeys(messages, event))


def _name(action: Action) -> str:
    kind = "B" if action.kind in BACKWARD else action.kind
    return f"{kind}_{action.stage}_{action.microbatch}"
