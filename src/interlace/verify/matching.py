"""Checks that ranks agree: members of collectives, ends of messages, takes of slots, signals.

These compare what the ranks say, one run of each, without regard to when. A collective that only
some ranks issue is reported here (where the sequences part) and as the deadlock that it makes.

    op           facts that those who meet in it must have in common
    Collective   kind, reduction, root, splits, element type, shapes (which fit each other on every
                 rank by itself: `validate` sees to that); where counts are data, not the rows
    Send, Recv   size, element type, backend
    Alloc        size, of a slot

Where some ranks stand for all (turns.py, fold.py), the builder says which, and these are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from interlace.ir.ops import KINDS
from interlace.ir.order import Queue, TeamKey
from interlace.ir.sizes import Int
from interlace.ir.view import Box
from interlace.verify.build import GraphBuilder
from interlace.verify.graph import IssuedOp
from interlace.verify.report import Finding, OpRef
from interlace.verify.source import Item

if TYPE_CHECKING:
    from interlace.verify.explain import Explainer

Difference = tuple[str, tuple[int, str], tuple[int, str]]
"""A fact that two members disagree on, and for each its number and its value."""


FIXES = {
    "members": "give both the same {}, or issue the collectives of the team in one order",
    "ends": "give both the same {}",
    "ranks": "allocate the largest {} on every rank, and use a part of it",
}
"""The fix for a disagreement of those who meet in an op."""


def _met(item: Item) -> tuple[str, str]:
    """Who meets in an op, and what each of them does there."""
    if item.ordering.takes is not None:
        return "ranks", "takes"
    if item.ordering.messages:
        return "ends", "sends" if item.ordering.messages[0].sends else "receives"
    return "members", "has"


def mismatches(builder: GraphBuilder, explain: Callable[[], Explainer]) -> list[Finding]:
    """All findings of disagreement, and the remarks on signals."""
    matcher = _Matcher(builder, explain)
    matcher.collectives()
    matcher.messages()
    matcher.slots()
    matcher.signals()
    return matcher.findings


class _Matcher:
    """Compares what ranks say of what they meet in."""

    def __init__(self, builder: GraphBuilder, explain: Callable[[], Explainer]) -> None:
        self.builder = builder
        self.meetings = builder.meetings
        self.explain = explain
        self.regions = builder.regions
        self.findings: list[Finding] = []

    def report(self, message: str, fix: str, *ops: tuple[IssuedOp, str]) -> None:
        """A mismatch of ops, each with its role."""
        refs = tuple(self.ref(issue, role) for issue, role in ops)
        ranks = tuple(sorted({issue.place.rank for issue, _ in ops}))
        self.findings.append(Finding("mismatch", message, refs, fix, "error", ranks))

    def differ(self, name: str, met: Sequence[IssuedOp], problem: Difference) -> None:
        """A mismatch of two who meet."""
        what, *sides = problem
        (who, _), *_ = rows = [_met(met[i].item) for i, _ in sides]
        roles = [f"{verb} {what} {side[1]}" for (_, verb), side in zip(rows, sides, strict=True)]
        ops = [(met[i], role) for (i, _), role in zip(sides, roles, strict=True)]
        self.report(f"{name}: its {who} disagree on the {what}", FIXES[who].format(what), *ops)

    def ref(self, issue: IssuedOp, role: str) -> OpRef:
        return self.explain().ref(issue.place, issue.item, role)

    def box(self, issue: IssuedOp, side: str) -> Box | None:
        """The box of `src` or `dst` of a collective, on its rank."""
        for touch in issue.item.touches:
            if touch.write == (side == "dst"):
                return self.regions.at(touch.spot, issue.place.where).exact
        return None

    def differs(self, met: Sequence[IssuedOp]) -> Difference | None:
        """The first fact that two members disagree on."""
        facts = [self.facts(issue) for issue in met]
        for name in facts[0]:
            known = [(i, str(fact[name])) for i, fact in enumerate(facts) if fact[name] is not None]
            for other in known[1:]:
                if other[1] != known[0][1]:
                    return name, known[0], other
        return None

    def facts(self, issue: IssuedOp) -> dict[str, object]:
        """The facts that all who meet must have in common; None: this member does not give it."""
        item, where = issue.item, issue.place.where
        if item.ordering.takes is not None:
            spot = issue.source.versions[issue.item.version].spot
            return {"size": f"{self.regions.at(spot, where).hi} bytes"}
        if item.ordering.messages:
            ((end,), (touch,)) = item.ordering.messages, item.touches
            box = self.regions.at(touch.spot, where).exact
            return {"size": box.numel, "element type": box.dtype, "backend": f"{end.backend}"}
        op = item.collective
        assert op is not None
        src, dst = self.box(issue, "src"), self.box(issue, "dst")
        row, known = KINDS[op.kind], src or dst
        table = None if op.splits is None else where.table(op.splits).values
        parts = op.kind == "all_to_all" and table is not None  # a side holds all, or its own parts
        counted = op.sent is not None
        sides = {"source": (src, row.reads, "gather"), "destination": (dst, row.writes, "scatter")}
        shapes = {
            f"{side} shape": _shape(
                box, not counted and (op.splits is None or (row.scales != apart and not parts))
            )
            if who == "all"
            else None
            for side, (box, who, apart) in sides.items()
        }
        return {
            "kind": op.kind,
            "reduction": op.reduce or "none",
            "root": "none" if op.root is None else where.index(op.root),
            "splits": "data" if counted else "even" if table is None else table,
            "element type": None if known is None else known.dtype,
            "cut side": _cut_side(src, dst, table) if parts and table is not None else None,
            **shapes,
        }

    # Who meets

    def collectives(self) -> None:
        builder, standing = self.builder, dict[TeamKey, list[int]]()
        for queue, members in [*self.meetings.queues.items()]:
            ranks = builder.members(queue[0], next(iter(members)))
            if queue[0] not in standing:
                self.regions.spend(len(ranks))
                standing[queue[0]] = list(dict.fromkeys(map(self.meetings.first, ranks)))
            issued = {rank: self.meetings.queue(queue, rank) for rank in standing[queue[0]]}
            counts = {len(mine) for mine in issued.values()}
            for k in range(min(counts)):
                met = [mine[k] for mine in issued.values()]
                problem = self.differs(met)
                if problem is not None:  # what follows is the same fault
                    self.differ(f"collective {k + 1} of team {queue[0].name}", met, problem)
                    break
            else:
                if len(counts) > 1:
                    self.missing(queue, issued)

    def missing(self, queue: Queue, issued: Mapping[int, Sequence[IssuedOp]]) -> None:
        """Some members issue more collectives than others."""
        least, most = _extremes(issued)
        count, (key, backend) = len(issued[least]), queue
        team, on = key.name, "" if backend is None else f" on backend {backend}"
        message = (
            f"rank {most} issues {_times(len(issued[most]), 'collective')} of team {team}{on} in a "
            f"run, rank {least} issues {count}"
        )
        fix = f"issue it on rank {least} too, or on no rank"
        for namesake, _ in self.meetings.queues:
            if namesake.name == team and namesake != key and least in namesake.ranks:
                message += f", where the ranks of {team} are {list(namesake.ranks)}"
                fix = f"give team {team} the same ranks, in one order, in all Programs"
                break
        role = f"is number {count + 1}, which rank {least} lacks"
        self.report(message, fix, (issued[most][count], role))

    def messages(self) -> None:
        reported: set[tuple[object, ...]] = set()
        builder = self.builder
        for channel in [*self.meetings.channels]:
            team, sender, receiver = channel
            sends, receives = (
                self.meetings.ends(channel, True),
                self.meetings.ends(channel, False),
            )
            for k, (send, receive) in enumerate(zip(sends, receives, strict=False)):
                met = builder.on(send, sender), builder.on(receive, receiver)
                problem = self.differs(met)
                same = (send.source, send.item.index, receive.source, receive.item.index)
                if problem is not None and (problem[0], same) not in reported:
                    reported.add((problem[0], same))  # on other ranks it is the same fault
                    name = (
                        f"message {k + 1} of team {team.name} from rank {sender} to rank {receiver}"
                    )
                    self.differ(name, met, problem)
            if len(sends) != len(receives):
                less, more = sorted((sends, receives), key=len)
                alone = more[len(less)]
                same = (alone.source, alone.item.index, len(sends), len(receives))
                if same in reported:
                    continue
                reported.add(same)
                self.report(
                    f"team {team.name}: rank {sender} sends {_times(len(sends), 'message')} "
                    f"to rank {receiver} in a run, which receives {len(receives)}",
                    "add the other end, or take this one out",
                    (alone, "has no other end"),
                )

    def slots(self) -> None:
        for slot, takers in [*self.meetings.taken.items()]:
            members = self.builder.members(slot[0], next(iter(takers)))
            ranks = dict.fromkeys(map(self.meetings.first, members))
            taken = {rank: self.meetings.takes(slot, rank) for rank in ranks}
            least, most = _extremes(taken)
            count, name = len(taken[least]), f"slot {slot[1]} of team {slot[0].name}"
            absent = next((r for r in slot[0].ranks if self.meetings.first(r) not in taken), None)
            if absent is not None:
                self.report(
                    f"{name}: no Program of the set runs on rank {absent}, which never frees it",
                    "check it with the Programs of all ranks of the team",
                    (taken[most][0], "takes it"),
                )
            for k in range(count):
                met = [issues[k] for issues in taken.values()]
                problem = self.differs(met)
                if problem is not None:
                    self.differ(f"{name}, take {k + 1}", met, problem)
                    break
            if len(taken[most]) != count:
                self.report(
                    f"{name}: rank {most} takes it {_times(len(taken[most]), 'time')} in a run, "
                    f"rank {least} {_times(count, 'time')}",
                    f"allocate and free it on rank {least} as well",
                    (taken[most][count], f"is a take that rank {least} lacks"),
                )

    # Signals

    def signals(self) -> None:
        awaited = {signal for signal, *_ in self.meetings.awaited}
        reported: set[tuple[object, ...]] = set()
        for signal, raised in self.meetings.raised.items():
            name, _, writer, reader = signal
            for (value, one), (higher, two) in pairwise(raised):
                grows, key = higher > value, (one.source, one.item.index, two.item.index)
                if key in reported or (grows and self.ordered(one.end, two.end)):
                    continue
                reported.add(key)
                message = f"signal {name} from rank {writer} to rank {reader} does not grow"
                fix = "give the later notify a larger value"
                if grows:
                    message = f"two notifies raise signal {name} in no order"
                    fix = "raise a signal on one stream alone, or order the two with an event"
                values = ((one, value), (two, higher))
                ops = tuple(self.ref(at, f"raises it to {level}") for at, level in values)
                self.findings.append(Finding("signal", message, ops, fix, ranks=(writer,)))
            first = raised[0][1]
            key = (first.source, first.item.index)
            if self.builder.of_reader(signal) not in awaited and key not in reported:
                reported.add(key)
                message = f"rank {reader} never awaits signal {name} of rank {writer}"
                ops = (self.ref(first, f"raises {name}"),)
                fix = "expect it where it is needed, or take the notify out"
                self.findings.append(
                    Finding("unexpected-notify", message, ops, fix, "remark", (writer,))
                )

    def ordered(self, one: int, other: int) -> bool:
        """Returns True if node `one` comes before the other, if they come at all."""
        graph = self.builder.graph
        if graph.clocks[other] is not None:
            return graph.before(one, other)
        seen, left = {other}, [other]
        for node in left:  # grows while it is walked
            self.regions.spend(16)
            new = {*graph.preds[node]} - seen
            seen |= new
            left += new
        return one in seen


def _extremes(issued: Mapping[int, Sequence[IssuedOp]]) -> tuple[int, int]:
    """The first rank that issues fewest and the first that issues most."""
    least = min(issued, key=lambda rank: len(issued[rank]))
    return least, max(issued, key=lambda rank: len(issued[rank]))


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _cut_side(src: Box | None, dst: Box | None, rows: tuple[Int, ...]) -> str | None:
    """Which side of an uneven all-to-all holds the parts of all ranks, as the table cuts them; None
    where a rank's own part is the mean, so that both sides have as many rows."""
    if src is None or dst is None or src.sizes[0] == dst.sizes[0]:
        return None
    return "source" if src.sizes[0] == sum(rows) else "destination"


def _shape(box: Box | None, with_rows: bool) -> list[object] | None:
    """The shape that all members' boxes must have in common, with or without the rows."""
    if box is None:
        return None
    return [*(box.sizes[:1] if with_rows else ("*",)), *box.sizes[1:]]
