"""A pipeline schedule as a set of Programs, one a rank, under a model of communication.

    >>> ranks = to_programs(plans, layout, "pair")
    >>> print(ranks[1].program)                  # may be checked, simulated and saved like any

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

from interlace.ir.build import Handle
from interlace.ir.ops import Loc
from interlace.ir.types import Team
from interlace_check.pipelining.actions import BACKWARD, SENDS, Action
from interlace_check.pipelining.matching import communicator, is_mixed
from interlace_check.pipelining.schedule import Layout, Placed, Step
from interlace_check.tracing import OriginBuilder

COMPUTE_STREAM = "compute"


def to_programs(
    plans: Sequence[Sequence[Step]], layout: Layout, model: str
) -> tuple[RankProgram, ...]:
    """The Program of each rank; `model` is a key of `report.MODELS`."""
    ranks = tuple([RankProgram(rank, layout, model) for rank in range(len(plans))])
    for rank, plan in zip(ranks, plans, strict=True):
        rank.write(plan)
    return ranks


class RankProgram(OriginBuilder[tuple[Placed, ...]]):
    """The Program of one rank; an op stands for the actions that it does, or prepares some."""

    def __init__(self, rank: int, layout: Layout, model: str) -> None:
        ranks = tuple(range(layout.num_ranks))
        teams = [Team(name, len(ranks), (ranks,)) for name in ("pp", "batched")]
        super().__init__(f"rank_{rank}", teams, (rank,), nothing=())
        self.rank, self.layout, self.model = rank, layout, model
        self.x = self.input("x", "f32", (1,))
        self.values: dict[str, Handle] = {}
        """Buffers that hold something by now."""
        self.length = 0
        """Ops of stream `compute` so far."""
        self.behind: dict[str, int] = {}
        """Number of these ops that each queue comes after."""
        self.recorded = 0
        self.awaitable: dict[Placed, str] = {}
        """The event of each message that may still be awaited."""

    def write(self, plan: Sequence[Step]) -> None:
        """All ops of the rank."""
        awaited = {placed for step in plan if step.what == "await" for placed in step.actions}
        for step in plan:
            if step.what == "compute":
                self.compute(step.actions[0])
            elif step.what == "issue":
                self.issue(step, awaited)
            else:
                for placed in step.actions:
                    event = self.awaitable.pop(placed, None)
                    if event is not None:
                        self.length += 1
                        self.at(COMPUTE_STREAM, (placed,))
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
        self.at(COMPUTE_STREAM, (placed,), Loc(str(placed)))
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

    def issue(self, step: Step, awaited: set[Placed]) -> None:
        """Messages that are issued together: as one group, where they are a batch of NCCL's."""
        messages: list[tuple[Placed, int]] = []
        for placed in step.actions:
            peer = self.layout.peer(placed.action)
            if peer is not None and peer != self.rank:  # else rules.py says so
                messages.append((placed, peer))
        team = communicator(step, self.model)
        for placed, _ in messages:
            self.room(placed.action)
        if self.model != "direction" and is_mixed(step) and len(messages) > 1:
            queue = self.queue(team, *messages[0])
            batch = tuple(placed for placed, _ in messages)
            self.follow(queue)
            self.at(queue, batch, Loc(str(batch[0])))
            with self.group():
                for placed, peer in messages:
                    self.message(placed, peer, team)
            self.note(queue, batch, awaited)
            return
        for placed, peer in messages:
            queue = self.queue(team, placed, peer)
            self.follow(queue)
            self.at(queue, (placed,), Loc(str(placed)))
            self.message(placed, peer, team)
            self.note(queue, (placed,), awaited)

    def queue(self, team: str, placed: Placed, peer: int) -> str:
        """The stream of a message."""
        if self.model == "rank" or team == "batched":
            return "queue"
        if self.model == "pair":
            return f"with_{peer}"
        return f"to_{peer}" if placed.action.kind in SENDS else f"from_{peer}"

    def room(self, action: Action) -> None:
        """Memory for what a receive brings."""
        name = f"{action.kind}_{action.stage}_{action.microbatch}"
        if action.kind not in SENDS and name not in self.values:
            self.at(COMPUTE_STREAM, ())
            self.values[name] = self.alloc(name, "f32", (1,))

    def message(self, placed: Placed, peer: int, team: str) -> None:
        """One end of a message."""
        action = placed.action
        if action.kind in SENDS:
            name = f"{action.kind[-1]}_{action.stage}_{action.microbatch}"
            self.send(self.values.get(name, self.x), peer, team=team)
        else:
            name = f"{action.kind}_{action.stage}_{action.microbatch}"
            self.recv(self.values[name], peer, team=team)

    def follow(self, queue: str) -> None:
        """Puts a queue behind what stream `compute` holds so far."""
        if self.behind.get(queue, 0) == self.length:
            return
        event = f"compute_{self.length}"
        if self.recorded != self.length:
            self.at(COMPUTE_STREAM, ())
            self.record(event)
            self.recorded = self.length
        self.behind[queue] = self.length
        self.at(queue, ())
        self.wait(event)

    def note(self, queue: str, messages: Sequence[Placed], awaited: set[Placed]) -> None:
        """Records an event behind messages that are awaited."""
        if any(placed in awaited for placed in messages):
            event = f"done_{len(self.ops)}"
            self.at(queue, ())
            self.record(event)
            self.awaitable.update(dict.fromkeys(messages, event))


def _name(action: Action) -> str:
    kind = "B" if action.kind in BACKWARD else action.kind
    return f"{kind}_{action.stage}_{action.microbatch}"
