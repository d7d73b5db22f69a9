"""Whether the ranks agree: members of collectives, ends of messages, takes of slots, signals.

These compare what the ranks say, one run of each, without regard to when. A collective that only
some ranks issue is reported here (where the sequences part) and as the deadlock that it makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

from interlace.ir.ops import KINDS, Collective, Recv, Send
from interlace.ir.order import Queue, Signal, Slot
from interlace.ir.sizes import Int
from interlace.ir.types import contiguous_strides
from interlace.ir.view import Box
from interlace.verify.accesses.regions import Regions
from interlace.verify.explain import Explainer
from interlace.verify.happens_before.build import GraphBuilder
from interlace.verify.happens_before.graph import Frame, IssuedOp
from interlace.verify.happens_before.source import Version
from interlace.verify.report import Finding, OpRef

Difference = tuple[str, tuple[int, str], tuple[int, str]]
"""What two members disagree on, and for each its number and what it says."""


def mismatches(builder: GraphBuilder, explainer: Explainer) -> list[Finding]:
    """All findings of disagreement, and the remarks on signals that nobody awaits."""
    matcher = Matcher(builder, explainer)
    matcher.collectives()
    matcher.messages()
    matcher.slots()
    matcher.signals()
    return matcher.findings


class Matcher:
    """Compares what ranks say of what they meet in."""

    def __init__(self, builder: GraphBuilder, explainer: Explainer) -> None:
        self.builder = builder
        self.meetings = builder.meetings
        self.explainer = explainer
        self.regions = builder.regions
        self.findings: list[Finding] = []
        self.alike: set[tuple[object, ...]] = set()
        """Sets of members that were found to agree."""

    def report(
        self, message: str, fix: str, *ops: tuple[IssuedOp, str], queue: Queue | None = None
    ) -> None:
        """A mismatch of ops, each with its role; of collectives, with their queue."""
        refs = tuple(self.ref(issue, role) for issue, role in ops)
        ranks = tuple(sorted({issue.frame.place.rank for issue, _ in ops}))
        propose = partial(self.explainer.fixes.lacking, self.builder, queue) if queue else None
        self.findings.append(Finding("mismatch", message, refs, fix, "error", ranks, propose))

    def ref(self, issue: IssuedOp, role: str) -> OpRef:
        return self.explainer.ref(issue.frame.place, issue.item, role)

    def box(self, issue: IssuedOp, side: str) -> Box | None:
        """The box of `src` or `dst` of an op, on its rank."""
        view = getattr(issue.item.op, side)
        for touch in issue.item.touches:
            if view is not None and touch.spot.view == view and touch.write == (side == "dst"):
                return self.regions.at(touch.spot, issue.frame.place.where).exact
        return None

    # Collectives

    def collectives(self) -> None:
        for queue, members in self.meetings.queues.items():
            first = self.builder.first_run(queue[0], members)
            counts = {len(issues) for issues in first.values()}
            for k in range(min(counts)):
                if not self.agree(queue, k, [issues[k] for issues in first.values()]):
                    break  # what follows is the same fault
            else:
                if len(counts) > 1:
                    self.missing(queue, first)

    def missing(self, queue: Queue, first: Mapping[int, Sequence[IssuedOp]]) -> None:
        """Some members issue more collectives than others."""
        least, most = _extremes(first)
        count, team = len(first[least]), queue[0].name
        message = (
            f"rank {most} issues {_times(len(first[most]), 'collective')} of team {team} in a run, "
            f"rank {least} issues {count}"
        )
        fix, likely = f"issue it on rank {least} too, or on no rank", queue
        self.regions.spend(2 * len(self.meetings.queues))
        for (other, backend), members in self.meetings.queues.items():
            if other != queue[0] or backend == queue[1]:
                continue
            if len(members.get(least, ())) > len(members.get(most, ())):
                message += (
                    f", which issues more on {_backend(backend)} than on {_backend(queue[1])}"
                )
                fix = f"name the same backend on every rank of team {team}"
                likely = None
        for namesake, _ in self.meetings.queues:
            if namesake.name == team and namesake != queue[0] and least in namesake.ranks:
                message += f", where the ranks of {team} are {list(namesake.ranks)}"
                fix = f"give team {team} the same ranks, in one order, in all Programs"
                likely = None
                break
        role = f"is number {count + 1}, which rank {least} lacks"
        self.report(message, fix, (first[most][count], role), queue=likely)

    def agree(self, queue: Queue, k: int, met: Sequence[IssuedOp]) -> bool:
        key = tuple(self.identity(at) for at in met)
        problem = None if key in self.alike else self.differs(met)
        if problem is None:
            self.alike.add(key)
            return True
        what, *sides = problem
        self.report(
            f"collective {k + 1} of team {queue[0].name}: its members disagree on the {what}",
            f"give both the same {what}, or issue the collectives of the team in one order",
            *((met[i], f"has {what} {value}") for i, value in sides),
            queue=queue,
        )
        return False

    def identity(self, at: IssuedOp) -> tuple[object, ...]:
        """An op, and what differs between the ranks that issue it: boxes and the root."""
        where, op = at.frame.place.where, at.item.op
        assert isinstance(op, Collective)
        root = None if op.root is None else where.index(op.root)
        return at.item, root, *(self.regions.at(touch.spot, where) for touch in at.item.touches)

    def differs(
        self, met: Sequence[IssuedOp], counts: Sequence[int] | None = None
    ) -> Difference | None:
        """The first fact that two members disagree on; each may stand for a number of them."""
        facts = [self.facts(issue) for issue in met]
        for name in facts[0]:
            known = [(i, str(fact[name])) for i, fact in enumerate(facts) if fact[name] is not None]
            for other in known[1:]:
                if other[1] != known[0][1]:
                    return name, known[0], other
        return self.sizes(met, [1] * len(met) if counts is None else counts)

    def facts(self, issue: IssuedOp) -> dict[str, object]:
        """What all members must say alike; None: a member says nothing of it."""
        op, where = issue.item.op, issue.frame.place.where
        assert isinstance(op, Collective)
        src, dst = self.box(issue, "src"), self.box(issue, "dst")
        row, known = KINDS[op.kind], src or dst
        table = None if op.splits is None else where.table(op.splits).values
        parts = op.kind == "all_to_all" and table is not None  # a side holds all, or its own parts
        sides = {"source": (src, row.reads, "gather"), "destination": (dst, row.writes, "scatter")}
        shapes = {
            f"{side} shape": _shape(box, op.splits is None or (row.scales != apart and not parts))
            if who == "all"
            else None
            for side, (box, who, apart) in sides.items()
        }
        return {
            "kind": op.kind,
            "reduction": op.reduce or "none",
            "root": "none" if op.root is None else where.index(op.root),
            "splits": "even" if table is None else table,
            "element type": None if known is None else known.dtype,
            "cut side": _cut_side(src, dst, table) if parts and table is not None else None,
            **shapes,
        }

    def sizes(self, met: Sequence[IssuedOp], counts: Sequence[int]) -> Difference | None:
        """Whether what goes in is as much as what comes out."""
        op = met[0].item.op
        assert isinstance(op, Collective)
        row = KINDS[op.kind]
        boxes = [(self.box(issue, "src"), self.box(issue, "dst")) for issue in met]
        all_in, all_out = (
            sum(box.numel * count for box, count in zip(side, counts, strict=True) if box)
            for side in zip(*boxes, strict=True)
        )
        for i, (src, dst) in enumerate(boxes):
            given = None if src is None else src.numel
            wanted = None if dst is None else dst.numel
            if row.scales == "gather":
                given = all_in
            elif row.scales == "scatter":
                wanted = all_out
            elif op.kind == "all_to_all" and op.splits is not None:
                given, wanted = all_in, all_out
            elif row.rooted and not met[i].item.is_root(met[i].frame.place.where):
                continue
            if row.reads != "none" and None not in (given, wanted) and given != wanted:
                said = f"of {given} elements in", f"of {wanted} elements out"
                return "size", (i, said[0]), (i, said[1])
        return None

    # Messages, slots, signals

    def messages(self) -> None:
        reported: set[tuple[object, ...]] = set()
        for (team, sender, receiver), ends in self.meetings.channels.items():
            sends, receives = ([e for e in end if e.frame.run == 0] for end in ends)
            for k, (send, receive) in enumerate(zip(sends, receives, strict=False)):
                src, dst = self.box(send, "src"), self.box(receive, "dst")
                one, two = send.item.op, receive.item.op
                assert isinstance(one, Send)
                assert isinstance(two, Recv)
                assert src is not None
                assert dst is not None
                for what, given, wanted in (
                    ("size", src.numel, dst.numel),
                    ("element type", src.dtype, dst.dtype),
                    ("backend", one.backend, two.backend),
                ):
                    if given != wanted:
                        same = (send.source, send.item.index, receive.source, receive.item.index)
                        if (what, same) in reported:
                            break  # of other ranks
                        reported.add((what, same))
                        self.report(
                            f"message {k + 1} of team {team.name} from rank {sender} to rank "
                            f"{receiver}: its ends disagree on the {what}",
                            f"give both the same {what}",
                            (send, f"sends {what} {given}"),
                            (receive, f"receives {what} {wanted}"),
                        )
                        break
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
        for (team, name), members in self.meetings.taken.items():
            first = self.builder.first_run(team, members)
            least, most = _extremes(first)
            count, of = len(first[least]), f"slot {name} of team {team.name}"
            for k in range(count):
                sizes = {rank: self.nbytes(issues[k]) for rank, issues in first.items()}
                other = next((r for r in sizes if sizes[r] != sizes[most]), None)
                if other is not None:
                    self.report(
                        f"{of}, take {k + 1}: ranks disagree on its size",
                        "allocate the largest size on every rank, and use a part of it",
                        *((first[r][k], f"takes {sizes[r]} bytes") for r in (most, other)),
                    )
                    break
            if len(first[most]) != count:
                self.report(
                    f"{of}: rank {most} takes it {_times(len(first[most]), 'time')} in a run, "
                    f"rank {least} {_times(count, 'time')}",
                    f"allocate and free it on rank {least} as well",
                    (first[most][count], f"is a take that rank {least} lacks"),
                )

    def nbytes(self, issue: IssuedOp) -> Int:
        spot = issue.source.versions[issue.item.version].spot
        return self.regions.at(spot, issue.frame.place.where).hi

    def signals(self) -> None:
        awaited = {signal for signal, *_ in self.meetings.awaited}
        reported: set[tuple[object, ...]] = set()
        for (signal, run), raised in self.meetings.raised.items():
            if run:
                continue
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
                propose = partial(self.explainer.fixes.notifies, [op.at for op in ops])
                self.findings.append(
                    Finding("signal", message, ops, fix, "error", (writer,), propose)
                )
            first = raised[0][1]
            key = (first.source, first.item.index)
            if signal not in awaited and key not in reported:
                reported.add(key)
                message = f"rank {reader} never awaits signal {name} of rank {writer}"
                ops = (self.ref(first, f"raises {name}"),)
                fix = "expect it where it is needed, or take the notify out"
                self.findings.append(
                    Finding("unexpected-notify", message, ops, fix, "remark", (writer,))
                )

    def ordered(self, one: int, other: int) -> bool:
        """Whether one comes before the other, if they come at all."""
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


def _extremes(first: Mapping[int, Sequence[IssuedOp]]) -> tuple[int, int]:
    """The first rank that issues fewest and the first that issues most."""
    least = min(first, key=lambda rank: len(first[rank]))
    return least, max(first, key=lambda rank: len(first[rank]))


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _backend(name: str | None) -> str:
    return "the team's own backend" if name is None else f"backend {name}"


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


def disagreements(builder: GraphBuilder, explainer: Explainer) -> list[Finding]:
    """A finding of kind `mismatch` for each registered parameter that ranks do not all have alike.

    What one rank reads or writes of a peer's is the peer's parameter of the same name: registered
    with that team, of the same kind, element type, sizes and strides, since a rank finds a peer's
    elements where its own would be.
    """
    frames = {frame.place.rank: frame for frame in builder.graph.frames if frame.run == 0}
    registered: dict[Slot, dict[int, tuple[str, str]]] = {}
    for rank, frame in frames.items():
        for number, version in enumerate(frame.place.source.versions):
            if version.registered:
                slot = builder.slot(frame.place, number)
                registered.setdefault(slot, {})[rank] = facts_of(frame, version, builder.regions)
    findings: list[Finding] = []
    for (team, name), has in registered.items():
        first, wanted = next(iter(has.items()))
        rank = next((r for r in team.ranks if r in frames and has.get(r) != wanted), None)
        if rank is None:
            continue
        if rank not in has:
            said = f"rank {rank} has no such parameter"
        else:
            kind, layout = has[rank]
            otherwise = f"{kind}, not an {wanted[0]}"
            if layout != wanted[1]:
                otherwise = f"{kind} {layout}, not {wanted[1]}"
            said = f"on rank {rank} it is an {otherwise}"
        place = frames[first].place
        assert place.source.enter is not None
        role = f"registers the {wanted[0]} {name}: {wanted[1]}"
        findings.append(
            Finding(
                "mismatch",
                f"rank {first} registers {name} with team {team.name}, and {said}",
                (explainer.ref(place, place.source.enter, role, name),),
                f"register {name} with {team.name} on every rank of it, with the same element "
                "type, sizes and strides",
                ranks=tuple(sorted({first, rank})),
            )
        )
    return findings


def facts_of(frame: Frame, version: Version, regions: Regions) -> tuple[str, str]:
    """The kind of a parameter, and how its elements lie."""
    box = regions.at(version.spot, frame.place.where).box
    text = f"{box.dtype}{list(box.sizes)}"
    usual = contiguous_strides(box.sizes)
    steps = zip(box.sizes, box.strides, usual, strict=True)
    if box.numel and any(size > 1 and one != other for size, one, other in steps):
        text += f".strides({', '.join(map(str, box.strides))})"
    return version.buffer.kind, text


def shared_names(builder: GraphBuilder, explainer: Explainer) -> list[Finding]:
    """A remark for signals of two teams that have a name, a writer and a reader in common."""
    raised = {signal: at for (signal, run), at in builder.meetings.raised.items() if run == 0}
    first: dict[tuple[str, int, int], Signal] = {}
    found: dict[tuple[str, str, str], Finding] = {}
    for signal in raised:
        name, team, writer, reader = signal
        other = first.setdefault((name, writer, reader), signal)
        key = name, other[1].name, team.name
        if other[1] is team or key in found:
            continue
        firsts = [(one, raised[one][0][1]) for one in (other, signal)]
        ops = [
            explainer.ref(at.frame.place, at.item, f"raises {name} of team {one[1].name}")
            for one, at in firsts
        ]
        found[key] = Finding(
            "shared-name",
            f"signal {name} of team {other[1].name} and signal {name} of team {team.name} are "
            f"two signals, though rank {writer} raises both for rank {reader}",
            tuple(ops),
            "give each a name of its own",
            "remark",
            (writer,),
        )
    return list(found.values())
