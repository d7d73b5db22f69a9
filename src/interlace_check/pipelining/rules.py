"""Faults of a schedule that have nothing to do with queues: what is missing, doubled or too early.

    >>> order = PipelineOrder.of([["0F0", "0B0"], ["1B0", "1F0"]])
    >>> [finding.kind for finding in faults(order, Layout.of(order), sequences)]
    ['order']

These are what torch's runtime asserts while a step runs, on the rank that comes to it, and what it
does not look at: two losses of the last stage taken for each other, a gradient that is never
reduced, a send whose memory is used again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from interlace_check.pipelining.actions import BACKWARD, COMPUTE, RECEIVES, SENDS, WAITS, Action
from interlace_check.pipelining.report import PipeliningFinding
from interlace_check.pipelining.schedule import NEEDS, Key, Layout, PipelineOrder, Placed


def faults(
    order: PipelineOrder, layout: Layout, sequences: Sequence[Sequence[Placed]], lowered: bool
) -> Iterator[PipeliningFinding]:
    """The faults of a schedule; `sequences` is what each rank does, with its messages.

    `lowered` says that torch added the messages: then their order cannot be wrong.
    """
    yield from _placement(order, layout)
    yield from _coverage(order, layout)
    waits = any(placed.action.kind in WAITS for sequence in sequences for placed in sequence)
    for sequence in sequences:
        yield from _RankRules(layout, sequence, lowered, waits).findings()
    if not lowered:
        yield from _reductions(order, layout)
        yield from _unshards(order)


def _placement(order: PipelineOrder, layout: Layout) -> Iterator[PipeliningFinding]:
    """Stages on two ranks, and ranks without any."""
    for rank in range(layout.num_ranks):
        computes = False
        for placed in order.placed(rank):
            action = placed.action
            computes = computes or action.kind in COMPUTE
            owner = layout.rank_of.get(action.stage)
            if owner is None:
                yield PipeliningFinding(
                    "placement",
                    f"{placed}: no rank computes stage {action.stage}",
                    (placed,),
                    "compute the stage, or remove the action",
                )
            elif owner != rank:
                yield PipeliningFinding(
                    "placement",
                    f"{placed}: stage {action.stage} is on rank {owner}, which computes most of it",
                    (placed,),
                    f"move the action to rank {owner}",
                )
        if not computes:
            yield PipeliningFinding(
                "missing", f"rank {rank} computes nothing", (), "give it a stage, or remove its row"
            )


def _coverage(order: PipelineOrder, layout: Layout) -> Iterator[PipeliningFinding]:
    """Every stage computes every microbatch once, forward and backward."""
    seen: dict[str, dict[int, dict[int, Placed]]] = {kind: defaultdict(dict) for kind in COMPUTE}
    for rank in range(layout.num_ranks):
        for placed in order.placed(rank):
            kind, stage, microbatch = placed.key
            if kind not in COMPUTE or microbatch is None:
                continue
            first = seen[kind][stage].setdefault(microbatch, placed)
            if first is not placed:
                yield PipeliningFinding(
                    "duplicate",
                    f"{placed} stands also at {first}",
                    (first, placed),
                    "remove one of them",
                )
    stages = order.num_stages or layout.last_stage + 1
    for low, high in _gaps(layout.rank_of, stages):
        yield PipeliningFinding(
            "missing",
            f"{_span('stage', low, high)} computed by no rank",
            (),
            "number the stages from 0, without gaps",
        )
    every = {m for kind in seen.values() for of_stage in kind.values() for m in of_stage}
    count = order.num_microbatches or max(every, default=0) + 1
    for low, high in _gaps(every, count):
        yield PipeliningFinding(
            "missing",
            f"{_span('microbatch', low, high)} computed by no stage",
            (),
            "number the microbatches from 0, without gaps",
        )
    if seen["F"] and not any(seen[kind] for kind in ("B", "I", "W")):
        yield PipeliningFinding(
            "missing",
            "no stage computes a backward: torch refuses a schedule of forwards alone",
            (),
            "add the backwards; for inference, call eval() of the schedule of a training step",
        )
        return
    for stage in sorted(layout.rank_of):
        yield from _of_stage(stage, layout.rank_of[stage], every, seen)


def _of_stage(
    stage: int, rank: int, every: set[int], seen: dict[str, dict[int, dict[int, Placed]]]
) -> Iterator[PipeliningFinding]:
    done = {kind: seen[kind].get(stage, {}) for kind in COMPUTE}
    for microbatch in sorted(every):
        lacks: list[str] = []
        if microbatch not in done["F"]:
            lacks.append("F")
        both = [done[kind][microbatch] for kind in BACKWARD if microbatch in done[kind]]
        if not both:
            lacks.append("B")
        elif len(both) == 2:
            yield PipeliningFinding(
                "duplicate",
                f"{both[0]} and {both[1]} do the same backward",
                tuple(both),
                "keep B, or I and W",
            )
        elif both[0].action.kind == "B" and microbatch in done["W"]:
            both.append(done["W"][microbatch])
            yield PipeliningFinding(
                "duplicate",
                f"{both[0]} does the work of {both[1]} as well, and there is no I for that",
                tuple(both),
                "keep B, or I and W",
            )
        elif both[0].action.kind == "I" and microbatch not in done["W"]:
            lacks.append("W")
        for kind in lacks:
            action = Action(kind, stage, microbatch)
            yield PipeliningFinding(
                "missing",
                f"`{action}` is missing: rank {rank} has stage {stage} and never computes it",
                (),
                f"add `{action}` to rank {rank}",
            )


def _gaps(have: Iterable[int], count: int) -> Iterator[tuple[int, int]]:
    """The ranges of numbers below `count` that are not there."""
    expected = 0
    for number in [*sorted(have), count]:
        if number > expected:
            yield expected, min(number, count) - 1
        expected = max(expected, number + 1)


def _span(what: str, low: int, high: int) -> str:
    if low == high:
        return f"{what} {low} is"
    return f"{what}{'es' if what.endswith('ch') else 's'} {low} to {high} are"


class _RankRules:
    """One walk along what a rank does, with what is there at each place."""

    def __init__(
        self, layout: Layout, sequence: Sequence[Placed], lowered: bool, waits: bool
    ) -> None:
        self.layout, self.sequence, self.lowered, self.waits = layout, sequence, lowered, waits
        self.places: dict[Key, Placed] = {}
        """The first place of each action of this rank, for what comes too late."""
        for placed in sequence:
            self.places.setdefault(placed.key, placed)
        self.done: set[Key] = set()
        self.received: dict[Key, Placed] = {}
        """Receives that no computation has taken yet."""
        self.sent: dict[Key, Placed] = {}
        """Sends that are not awaited yet."""
        self.losses = -1

    def findings(self) -> Iterator[PipeliningFinding]:
        """The faults of the walk, in order."""
        for placed in self.sequence:
            kind = placed.action.kind
            if kind in COMPUTE:
                yield from self.compute(placed)
            elif kind in SENDS:
                yield from self.send(placed)
            elif kind in RECEIVES:
                yield from self.receive(placed)
            elif kind in WAITS:
                yield from self.wait(placed)
            self.done.add(placed.key)
        for placed in self.received.values() if not self.lowered else ():
            fix = "remove it with its send, or put it before the computation that needs it"
            yield PipeliningFinding(
                "unused",
                f"{placed}: no computation after it takes what it receives",
                (placed,),
                fix,
            )
        if self.waits:
            for placed in self.sent.values():
                wait = f"{placed.action.stage}WAIT_{placed.action.kind}{placed.action.microbatch}"
                yield PipeliningFinding(
                    "send-wait",
                    f"{placed} is never awaited, and other sends are",
                    (placed,),
                    f"add `{wait}` behind it",
                )

    def compute(self, placed: Placed) -> Iterator[PipeliningFinding]:
        kind, stage, microbatch = placed.key
        if placed.key in self.done:
            return  # a duplicate, which is reported as such
        before = {"B": ("F",), "I": ("F",), "W": ("I",)}.get(kind, ())
        for needed in before:
            yield from self.after(placed, (needed, stage, microbatch))
        source = self.layout.source(placed.action)
        if source is not None and source[1] in self.layout.rank_of:
            yield from self.input(placed, source)
        if kind == "F" and stage == self.layout.last_stage and microbatch is not None:
            if microbatch < self.losses:
                yield PipeliningFinding(
                    "loss-order",
                    f"{placed} comes after the forward of microbatch {self.losses}: torch "
                    "takes the losses of the last stage by position, so backwards get each other's",
                    (placed,),
                    "compute the last stage's forwards in the order of the microbatches",
                )
            self.losses = max(self.losses, microbatch)

    def input(self, placed: Placed, source: Key) -> Iterator[PipeliningFinding]:
        """What F, B or I takes from the stage beside it: on this rank, or received."""
        kind, stage, microbatch = placed.key
        if self.layout.rank_of[source[1]] == self.layout.rank_of.get(stage):
            names = ("F",) if source[0] == "SEND_F" else BACKWARD
            keys = [(name, source[1], microbatch) for name in names]
            if not any(key in self.done for key in keys):
                late = next((self.places[key] for key in keys if key in self.places), None)
                if late is not None:
                    yield self.early(placed, late)
            return
        needed = (NEEDS[kind], stage, microbatch)
        if self.received.pop(needed, None) is not None or needed in self.done or self.lowered:
            return  # if messages were added, lowering.py says which inputs never come
        late = self.places.get(needed)
        if late is not None:
            yield self.early(placed, late)
        else:
            token = Action(*needed)
            yield PipeliningFinding(
                "unmatched",
                f"{placed} needs `{token}`, which rank {placed.rank} never issues",
                (placed,),
                f"add `{token}` before it",
            )

    def after(self, placed: Placed, needed: Key) -> Iterator[PipeliningFinding]:
        if needed not in self.done:
            late = self.places.get(needed)
            if late is not None:
                yield self.early(placed, late)

    def early(self, placed: Placed, late: Placed) -> PipeliningFinding:
        return PipeliningFinding(
            "order",
            f"{placed} stands before {late}, whose result it needs",
            (placed, late),
            f"move `{late.action}` before `{placed.action}`",
        )

    def message(self, placed: Placed) -> Iterator[PipeliningFinding]:
        """What holds for both ends: another rank is there, and it goes there once."""
        peer = self.layout.peer(placed.action)
        if peer is None:
            way = "sends to" if placed.action.kind in SENDS else "receives from"
            yield PipeliningFinding(
                "placement", f"{placed} {way} a stage that does not exist", (placed,), "remove it"
            )
        elif peer == placed.rank:
            yield PipeliningFinding(
                "placement",
                f"{placed}: both stages are on rank {peer}, where torch "
                "passes results on without a message",
                (placed,),
                "remove it and its peer",
            )
        if placed.key in self.done:
            yield PipeliningFinding(
                "duplicate",
                f"{placed} stands also at {self.places[placed.key]}",
                (self.places[placed.key], placed),
                "remove one of them",
            )

    def send(self, placed: Placed) -> Iterator[PipeliningFinding]:
        yield from self.message(placed)
        kind, stage, microbatch = placed.key
        names = ("F",) if kind == "SEND_F" else BACKWARD
        keys = [(name, stage, microbatch) for name in names]
        if not any(key in self.done for key in keys):
            late = next((self.places[key] for key in keys if key in self.places), None)
            if late is not None:
                yield self.early(placed, late)
        self.sent[placed.key] = placed

    def receive(self, placed: Placed) -> Iterator[PipeliningFinding]:
        yield from self.message(placed)
        if placed.key not in self.done:
            self.received[placed.key] = placed

    def wait(self, placed: Placed) -> Iterator[PipeliningFinding]:
        kind, stage, microbatch = placed.key
        send = (kind.removeprefix("WAIT_"), stage, microbatch)
        if self.sent.pop(send, None) is None:
            token = Action(*send)
            again = " again" if placed.key in self.done else ""
            yield PipeliningFinding(
                "send-wait",
                f"{placed} awaits `{token}`{again}, which is not pending",
                (placed,),
                f"put it once, behind `{token}`",
            )


def _reductions(order: PipelineOrder, layout: Layout) -> Iterator[PipeliningFinding]:
    """REDUCE_GRAD: once a stage, behind its last backward; WAIT_REDUCE_GRAD behind it."""
    reduced: dict[int, Placed] = {}
    awaited: set[int] = set()
    waits = False
    for rank in range(layout.num_ranks):
        for placed in order.placed(rank):
            kind, stage, _ = placed.key
            if kind == "REDUCE_GRAD":
                if stage in reduced:
                    yield PipeliningFinding(
                        "reduce-grad",
                        f"{placed} stands also at {reduced[stage]}: gradients are scaled twice",
                        (reduced[stage], placed),
                        "reduce once a stage",
                    )
                reduced.setdefault(stage, placed)
            elif kind == "WAIT_REDUCE_GRAD":
                waits = True
                if stage not in reduced or stage in awaited:
                    yield PipeliningFinding(
                        "reduce-grad",
                        f"{placed} awaits no pending reduction",
                        (placed,),
                        f"put it once, behind `{stage}REDUCE_GRAD`",
                    )
                awaited.add(stage)
            elif kind in ("B", "I", "W") and stage in reduced:
                yield PipeliningFinding(
                    "reduce-grad",
                    f"{placed} stands behind {reduced[stage]}: its gradient is not reduced",
                    (reduced[stage], placed),
                    "reduce behind the stage's last backward",
                )
    for stage in sorted(layout.rank_of) if reduced else ():
        if stage not in reduced:
            yield PipeliningFinding(
                "reduce-grad",
                f"stage {stage} has no REDUCE_GRAD, and other stages have: "
                "its gradients are neither scaled nor reduced",
                (),
                f"add `{stage}REDUCE_GRAD` behind its last backward",
            )
        elif waits and stage not in awaited:
            yield PipeliningFinding(
                "reduce-grad",
                f"{reduced[stage]} is never awaited, and others are",
                (reduced[stage],),
                f"add `{stage}WAIT_REDUCE_GRAD` behind it",
            )


def _unshards(order: PipelineOrder) -> Iterator[PipeliningFinding]:
    """UNSHARD, computations and RESHARD of a stage alternate, where the schedule has any."""
    for rank in range(len(order.cells)):
        kinds = {placed.action.kind for placed in order.placed(rank)}
        if "UNSHARD" not in kinds and "RESHARD" not in kinds:
            continue
        state: dict[int, str] = {}  # "pending" until a computation has used it, then "used"
        held: dict[int, Placed] = {}
        for placed in order.placed(rank):
            kind, stage, _ = placed.key
            if kind == "UNSHARD":
                if stage in state:
                    yield _unshard(placed, "the stage is unsharded already", "reshard it before")
                state[stage], held[stage] = "pending", placed
            elif kind == "RESHARD":
                if state.pop(stage, "") != "used":
                    yield _unshard(
                        placed,
                        "no computation has used the stage since it was unsharded",
                        "put it behind the stage's computations",
                    )
            elif kind in COMPUTE:
                if stage not in state:
                    yield _unshard(placed, "the stage is not unsharded", "unshard it before")
                state[stage] = "used"
        for stage in state:
            if stage in held:
                yield _unshard(held[stage], "the stage is never resharded", "reshard it at the end")


def _unshard(placed: Placed, why: str, fix: str) -> PipeliningFinding:
    return PipeliningFinding("unshard", f"{placed}: {why}", (placed,), fix)
