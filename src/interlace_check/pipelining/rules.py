"""Faults of a schedule that have nothing to do with queues: actions missing, doubled or too early.

    >>> order = PipelineOrder.of([["0F0", "0B0"], ["1B0", "1F0"]])
    >>> [finding.kind for finding in faults(order, Layout.of(order), sequences)]
    ['order']

These are what torch's runtime asserts while a step runs, on the rank that comes to it, and what it
does not look at: two losses of the last stage taken for each other, a receive for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from interlace_check.pipelining.actions import BACKWARD, COMPUTE, RECEIVES, SENDS, Action
from interlace_check.pipelining.report import PipeliningFinding, fault
from interlace_check.pipelining.schedule import NEEDS, Key, Layout, PipelineOrder, Placed

Findings = Iterator[PipeliningFinding]
AFTER = {"B": ("F",), "I": ("F",), "W": ("I",), "SEND_F": ("F",), "SEND_B": BACKWARD}
"""Kinds of which one comes before, at the same stage and microbatch, where it is there at all."""


def faults(order: PipelineOrder, layout: Layout, sequences: Sequence[Sequence[Placed]]) -> Findings:
    """The faults of a schedule; `sequences` is what each rank does."""
    yield from _placement(order, layout)
    yield from _coverage(order, layout)
    for sequence in sequences:
        yield from _RankRules(layout, sequence).findings()


def _placement(order: PipelineOrder, layout: Layout) -> Findings:
    """Stages on two ranks, and ranks without any."""
    for rank in range(layout.num_ranks):
        computes = False
        for placed in order.placed(rank):
            computes = computes or placed.action.kind in COMPUTE
            stage = placed.action.stage
            owner = layout.rank_of.get(stage)
            if owner is None:
                message = f"{placed}: no rank computes stage {stage}"
                yield fault("placement", message, "compute the stage, or remove the action", placed)
            elif owner != rank:
                message = f"{placed}: stage {stage} is on rank {owner}, which computes most of it"
                yield fault("placement", message, f"move the action to rank {owner}", placed)
        if not computes:
            fix = "give it a stage, or remove its row"
            yield fault("missing", f"rank {rank} computes nothing", fix)


def _coverage(order: PipelineOrder, layout: Layout) -> Findings:
    """Every stage computes every microbatch once, forward and backward."""
    seen: dict[str, dict[int, dict[int, Placed]]] = {kind: defaultdict(dict) for kind in COMPUTE}
    for rank in range(layout.num_ranks):
        for placed in order.placed(rank):
            kind, stage, microbatch = placed.key
            if kind in COMPUTE and microbatch is not None:
                first = seen[kind][stage].setdefault(microbatch, placed)
                if first is not placed:
                    yield _doubled(first, placed)
    every = {m for kind in seen.values() for of_stage in kind.values() for m in of_stage}
    stages = order.num_stages or layout.last_stage + 1
    microbatches = order.num_microbatches or max(every, default=0) + 1
    for what, plural, numbers, count, by in (
        ("stage", "stages", layout.rank_of, stages, "rank"),
        ("microbatch", "microbatches", every, microbatches, "stage"),
    ):
        for low, high in _gaps(numbers, count):
            span = f"{what} {low} is" if low == high else f"{plural} {low} to {high} are"
            fix = f"number the {plural} from 0, without gaps"
            yield fault("missing", f"{span} computed by no {by}", fix)
    if seen["F"] and not any(seen[kind] for kind in ("B", "I", "W")):
        message = "no stage computes a backward: torch refuses a schedule of forwards alone"
        fix = "add the backwards; for inference, call eval() of the schedule of a training step"
        yield fault("missing", message, fix)
        return
    for stage in sorted(layout.rank_of):
        done = {kind: seen[kind].get(stage, {}) for kind in COMPUTE}
        for microbatch in sorted(every):
            yield from _computed(stage, layout.rank_of[stage], microbatch, done)


def _computed(
    stage: int, rank: int, microbatch: int, done: dict[str, dict[int, Placed]]
) -> Findings:
    """One microbatch of a stage: F, and either B or both I and W."""
    f, b, i, w = (done[kind].get(microbatch) for kind in ("F", "B", "I", "W"))
    lacks = [] if f else ["F"]
    if b and i:
        yield fault("duplicate", f"{b} and {i} do the same backward", "keep B, or I and W", b, i)
    elif b and w:
        message = f"{b} does the work of {w} as well, and there is no I for that"
        yield fault("duplicate", message, "keep B, or I and W", b, w)
    elif not b and not i:
        lacks.append("B")
    elif i and not w:
        lacks.append("W")
    for kind in lacks:
        action = Action(kind, stage, microbatch)
        message = f"`{action}` is missing: rank {rank} has stage {stage} and never computes it"
        yield fault("missing", message, f"add `{action}` to rank {rank}")


def _gaps(have: Iterable[int], count: int) -> Iterator[tuple[int, int]]:
    """The ranges of numbers below `count` that are not there."""
    expected = 0
    for number in [*sorted(have), count]:
        if number > expected:
            yield expected, min(number, count) - 1
        expected = max(expected, number + 1)


def _doubled(first: Placed, again: Placed) -> PipeliningFinding:
    message = f"{again} stands also at {first}"
    return fault("duplicate", message, "remove one of them", first, again)


class _RankRules:
    """One walk along what a rank does, with what is there at each place."""

    def __init__(self, layout: Layout, sequence: Sequence[Placed]) -> None:
        self.layout, self.sequence = layout, sequence
        self.places: dict[Key, Placed] = {}
        """The first place of each action of this rank, for what comes too late."""
        for placed in sequence:
            self.places.setdefault(placed.key, placed)
        self.done: set[Key] = set()
        self.received: dict[Key, Placed] = {}
        """Receives that no computation has taken yet."""
        self.losses = -1

    def findings(self) -> Findings:
        """The faults of the walk, in order."""
        for placed in self.sequence:
            kind = placed.action.kind
            if kind in COMPUTE and placed.key not in self.done:  # a duplicate is reported as such
                yield from self.compute(placed)
            elif kind in SENDS or kind in RECEIVES:
                yield from self.message(placed)
            self.done.add(placed.key)
        for placed in self.received.values():
            message = f"{placed}: no computation after it takes what it receives"
            fix = "remove it with its send, or put it before the computation that needs it"
            yield fault("unused", message, fix, placed)

    def compute(self, placed: Placed) -> Findings:
        kind, stage, microbatch = placed.key
        yield from self.after(placed, stage, AFTER.get(kind, ()))
        source = self.layout.source(placed.action)
        if source is not None and source[1] in self.layout.rank_of:
            yield from self.input(placed, source)
        if kind == "F" and stage == self.layout.last_stage and microbatch is not None:
            if microbatch < self.losses:
                message = (
                    f"{placed} comes after the forward of microbatch {self.losses}: torch "
                    "takes the losses of the last stage by position, so backwards get each other's"
                )
                fix = "compute the last stage's forwards in the order of the microbatches"
                yield fault("loss-order", message, fix, placed)
            self.losses = max(self.losses, microbatch)

    def input(self, placed: Placed, source: Key) -> Findings:
        """The input of F, B or I from the stage beside it: of this rank, or received."""
        kind, stage, microbatch = placed.key
        if self.layout.rank_of[source[1]] == self.layout.rank_of.get(stage):
            yield from self.after(placed, source[1], AFTER[source[0]])
            return
        needed = (NEEDS[kind], stage, microbatch)
        if self.received.pop(needed, None) is not None or needed in self.done:
            return
        if needed in self.places:
            yield from self.after(placed, stage, (NEEDS[kind],))
        else:
            token = Action(*needed)
            message = f"{placed} needs `{token}`, which rank {placed.rank} never issues"
            yield fault("unmatched", message, f"add `{token}` before it", placed)

    def after(self, placed: Placed, stage: int, kinds: Sequence[str]) -> Findings:
        """One of these kinds comes before, unless the rank has none of them."""
        keys = [(kind, stage, placed.action.microbatch) for kind in kinds]
        late = next((self.places[key] for key in keys if key in self.places), None)
        if late is not None and not any(key in self.done for key in keys):
            message = f"{placed} stands before {late}, whose result it needs"
            fix = f"move `{late.action}` before `{placed.action}`"
            yield fault("order", message, fix, placed, late)

    def message(self, placed: Placed) -> Findings:
        """Another rank is at the other end, the message goes there once, and after its result."""
        kind, stage, _ = placed.key
        peer = self.layout.peer(placed.action)
        if peer is None:
            way = "sends to" if kind in SENDS else "receives from"
            message = f"{placed} {way} a stage that does not exist"
            yield fault("placement", message, "remove it", placed)
        elif peer == placed.rank:
            message = (
                f"{placed}: both stages are on rank {peer}, where torch passes results on without "
                "a message"
            )
            yield fault("placement", message, "remove it and its peer", placed)
        if placed.key in self.done:
            yield _doubled(self.places[placed.key], placed)
        if kind in SENDS:
            yield from self.after(placed, stage, AFTER[kind])
        elif placed.key not in self.done:
            self.received[placed.key] = placed
