"""Whether the ranks agree: members of collectives, ends of messages, takes of slots, signals.

These compare what the ranks say, one run of each, without regard to when. A collective that only
some ranks issue is reported here (where the sequences part) and as the deadlock that it makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from interlace.ir.ops import KINDS, Collective, Recv, Send
from interlace.ir.order import Queue, Signal, Slot
from interlace.ir.types import contiguous_strides
from interlace.ir.view import Box
from interlace.verify.accesses.regions import Regions
from interlace.verify.explain import Explainer
from interlace.verify.happens_before.build import GraphBuilder
from interlace.verify.happens_before.graph import Frame, IssuedOp
from interlace.verify.happens_before.source import Item, Version
from interlace.verify.report import Finding


def mismatches(builder: GraphBuilder, explainer: Explainer, regions: Regions) -> list[Finding]:
    """All findings of disagreement, and the remarks on signals that nobody awaits."""
    matcher = _Matcher(builder, explainer, regions)
    matcher.collectives()
    matcher.messages()
    matcher.slots()
    matcher.signals()
    return matcher.findings


class _Matcher:
    def __init__(self, builder: GraphBuilder, explainer: Explainer, regions: Regions) -> None:
        self.builder = builder
        self.explainer = explainer
        self.regions = regions
        self.findings: list[Finding] = []
        self.alike: set[tuple[object, ...]] = set()
        """Sets of members that were found to agree."""

    def report(
        self, message: str, fix: str, issues: Sequence[IssuedOp], roles: Sequence[str]
    ) -> None:
        ops = [
            self.explainer.ref(frame.place, item, role)
            for (frame, item, *_), role in zip(issues, roles, strict=True)
        ]
        ranks = tuple(sorted({frame.place.rank for frame, *_ in issues}))
        self.findings.append(Finding("mismatch", message, tuple(ops), fix, ranks=ranks))

    def box(self, issue: IssuedOp, side: str) -> Box | None:
        """The box of `src` or `dst` of an op, on its rank."""
        frame, item, *_ = issue
        view = getattr(item.op, side)
        for touch in item.touches:
            if view is not None and touch.spot.view == view and touch.write == (side == "dst"):
                return self.regions.at(touch.spot, frame.place.where).exact
        return None

    # Collectives

    def collectives(self) -> None:
        for queue, members in self.builder.meetings.queues.items():
            first = self.builder.first_run(queue[0], members)
            counts = {len(issues) for issues in first.values()}
            for k in range(min(counts)):
                met = [issues[k] for issues in first.values()]
                if not self.agree(queue, k, met):
                    break  # what follows is the same fault
            else:
                if len(counts) > 1:
                    self.missing(queue, first)

    def missing(self, queue: Queue, first: Mapping[int, Sequence[IssuedOp]]) -> None:
        """Some members issue more collectives than others."""
        least = min(first, key=lambda rank: len(first[rank]))
        most = max(first, key=lambda rank: len(first[rank]))
        count = len(first[least])
        issue = first[most][count]
        team = queue[0].name
        message = (
            f"rank {most} issues {_times(len(first[most]), 'collective')} of team {team} in a run, "
            f"rank {least} issues {count}"
        )
        fix = f"issue it on rank {least} too, or on no rank"
        for (other, backend), members in self.builder.meetings.queues.items():
            if other != queue[0] or backend == queue[1]:
                continue
            if len(members.get(least, ())) > len(members.get(most, ())):
                message += (
                    f", which issues more on {_backend(backend)} than on {_backend(queue[1])}"
                )
                fix = f"name the same backend on every rank of team {team}"
        self.report(message, fix, [issue], [f"is number {count + 1}, which rank {least} lacks"])

    def agree(self, queue: Queue, k: int, met: Sequence[IssuedOp]) -> bool:
        key = tuple((item, *self.rank_facts(frame, item)) for frame, item, *_ in met)
        if key in self.alike:
            return True
        problem = self.differs(met)
        if problem is None:
            self.alike.add(key)
            return True
        what, one, other, said = problem
        self.report(
            f"collective {k + 1} of team {queue[0].name}: its members disagree on the {what}",
            f"give both the same {what}, or issue the collectives of the team in one order",
            [met[one], met[other]],
            [f"has {what} {said[0]}", f"has {what} {said[1]}"],
        )
        return False

    def rank_facts(self, frame: Frame, item: Item) -> tuple[object, ...]:
        """What may differ between ranks that issue the same line: boxes and the root."""
        where, op = frame.place.where, item.op
        assert isinstance(op, Collective)
        root = None if op.root is None else where.index(op.root)
        return root, *(self.regions.at(touch.spot, where) for touch in item.touches)

    def differs(self, met: Sequence[IssuedOp]) -> tuple[str, int, int, tuple[str, str]] | None:
        """The first fact that two members disagree on: what, which two, what they say."""
        facts = [self.facts(issue) for issue in met]
        for name in facts[0]:
            known = [(i, fact[name]) for i, fact in enumerate(facts) if fact[name] is not None]
            for i, value in known[1:]:
                if value != known[0][1]:
                    return name, known[0][0], i, (str(known[0][1]), str(value))
        return self.sizes(met)

    def facts(self, issue: IssuedOp) -> dict[str, object]:
        frame, item, *_ = issue
        op, where = item.op, frame.place.where
        assert isinstance(op, Collective)
        src, dst = self.box(issue, "src"), self.box(issue, "dst")
        known = src or dst
        row, even = KINDS[op.kind], op.splits is None
        parts = op.kind == "all_to_all" and not even  # one side holds all, the other its own parts
        return {
            "kind": op.kind,
            "reduction": op.reduce or "none",
            "root": "none" if op.root is None else str(where.index(op.root)),
            "splits": "even" if op.splits is None else str(where.table(op.splits).values),
            "element type": None if known is None else str(known.dtype),
            "cut side": _cut_side(src, dst, where.table(op.splits).values)
            if parts and op.splits is not None
            else None,
            "source shape": _shape(src, whole=row.scales != "gather" and not parts, even=even)
            if row.reads == "all"
            else None,
            "destination shape": _shape(dst, whole=row.scales != "scatter" and not parts, even=even)
            if row.writes == "all"
            else None,
        }

    def sizes(self, met: Sequence[IssuedOp]) -> tuple[str, int, int, tuple[str, str]] | None:
        """Whether what goes in is as much as what comes out."""
        op = met[0][1].op
        assert isinstance(op, Collective)
        row = KINDS[op.kind]
        source = [self.box(issue, "src") for issue in met]
        target = [self.box(issue, "dst") for issue in met]
        if row.reads == "none":
            return None
        all_in, all_out = (sum(box.numel for box in side if box) for side in (source, target))
        for i, issue in enumerate(met):
            src, dst = source[i], target[i]
            if row.scales == "gather":
                given = all_in
                wanted = dst.numel if dst is not None else given
            elif row.scales == "scatter":
                wanted = all_out
                given = src.numel if src is not None else wanted
            elif op.kind == "all_to_all" and op.splits is not None:
                given, wanted = all_in, all_out
            else:
                given = src.numel if src is not None else -1
                wanted = dst.numel if dst is not None else -1
                if given < 0 or wanted < 0 or (row.rooted and not _is_root(issue)):
                    continue
            if given != wanted:
                said = f"of {given} elements in", f"of {wanted} elements out"
                return "size", i, i, said
        return None

    # Messages, slots, signals

    def messages(self) -> None:
        for (team, sender, receiver), ends in self.builder.meetings.channels.items():
            sends, receives = ([e for e in end if e[0].run == 0] for end in ends)
            for k, (send, receive) in enumerate(zip(sends, receives, strict=False)):
                src, dst = self.box(send, "src"), self.box(receive, "dst")
                one, two = send[1].op, receive[1].op
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
                        self.report(
                            f"message {k + 1} of team {team.name} from rank {sender} to rank "
                            f"{receiver}: its ends disagree on the {what}",
                            f"give both the same {what}",
                            [send, receive],
                            [f"sends {what} {given}", f"receives {what} {wanted}"],
                        )
                        break
            if len(sends) != len(receives):
                more, less = (sends, receives) if len(sends) > len(receives) else (receives, sends)
                self.report(
                    f"team {team.name}: rank {sender} sends {_times(len(sends), 'message')} "
                    f"to rank {receiver} in a run, which receives {len(receives)}",
                    "add the other end, or take this one out",
                    [more[len(less)]],
                    ["has no other end"],
                )

    def slots(self) -> None:
        for (team, name), members in self.builder.meetings.taken.items():
            first = self.builder.first_run(team, members)
            least = min(first, key=lambda rank: len(first[rank]))
            most = max(first, key=lambda rank: len(first[rank]))
            count = len(first[least])
            for k in range(count):
                sizes = {rank: self.nbytes(issues[k]) for rank, issues in first.items()}
                other = next((r for r in sizes if sizes[r] != sizes[most]), None)
                if other is not None:
                    self.report(
                        f"slot {name} of team {team.name}, take {k + 1}: "
                        "ranks disagree on its size",
                        "allocate the largest size on every rank, and use a part of it",
                        [first[most][k], first[other][k]],
                        [f"takes {sizes[most]} bytes", f"takes {sizes[other]} bytes"],
                    )
                    break
            if len(first[most]) != count:
                self.report(
                    f"slot {name} of team {team.name}: rank {most} takes it "
                    f"{_times(len(first[most]), 'time')} in a run, rank {least} "
                    f"{_times(count, 'time')}",
                    f"allocate and free it on rank {least} as well",
                    [first[most][count]],
                    [f"is a take that rank {least} lacks"],
                )

    def nbytes(self, issue: IssuedOp) -> int:
        frame, item, *_ = issue
        return self.regions.at(frame.place.source.versions[item.version].spot, frame.place.where).hi

    def signals(self) -> None:
        awaited = {signal for signal, *_ in self.builder.meetings.awaited}
        told: set[tuple[object, ...]] = set()
        for (signal, run), raised in self.builder.meetings.raised.items():
            if run:
                continue
            name, _, writer, reader = signal
            for (value, one), (higher, two) in pairwise(raised):
                grows, key = higher > value, (one.source, one.item.index, two.item.index)
                if key in told or (grows and self.ordered(one.end, two.end)):
                    continue
                told.add(key)
                if grows:
                    message = f"two notifies raise signal {name} in no order"
                    fix = "raise a signal on one stream alone, or order the two with an event"
                else:
                    message = f"signal {name} from rank {writer} to rank {reader} does not grow"
                    fix = "give the later notify a larger value"
                ops = (
                    self.explainer.ref(one.frame.place, one.item, f"raises it to {value}"),
                    self.explainer.ref(two.frame.place, two.item, f"raises it to {higher}"),
                )
                self.findings.append(Finding("signal", message, ops, fix, ranks=(writer,)))
            first = raised[0][1]
            key = (first.source, first.item.index)
            if signal not in awaited and key not in told:
                told.add(key)
                message = f"rank {reader} never awaits signal {name} of rank {writer}"
                ops = (self.explainer.ref(first.frame.place, first.item, f"raises {name}"),)
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
            new = {*graph.preds[node]} - seen
            seen |= new
            left += new
        return one in seen


def _is_root(issue: IssuedOp) -> bool:
    frame, item, *_ = issue
    return item.is_root(frame.place.where)


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _backend(name: str | None) -> str:
    return "the team's own backend" if name is None else f"backend {name}"


def _cut_side(src: Box | None, dst: Box | None, rows: tuple[int, ...]) -> str | None:
    """Which side of an uneven all-to-all holds the parts of all ranks, as the table cuts them; None
    where a rank's own part is the mean, so that both sides have as many rows."""
    if src is None or dst is None or src.sizes[0] == dst.sizes[0]:
        return None
    return "source" if src.sizes[0] == sum(rows) else "destination"


def _shape(box: Box | None, *, whole: bool, even: bool) -> str | None:
    """What all members' boxes must have in common: all of the shape, or all but the rows."""
    if box is None:
        return None
    rows = box.sizes[:1] if whole or even else ("*",)
    return str([*rows, *box.sizes[1:]])


def disagreements(builder: GraphBuilder, explainer: Explainer, regions: Regions) -> list[Finding]:
    """A finding of kind `mismatch` for each parameter that some rank lacks or has otherwise.

    What one rank reads or writes of a peer's is the peer's parameter of the same name. So each
    Program of the set must have it: registered with that team, of the same kind, element type,
    sizes and strides, since a rank finds a peer's elements where its own would be.
    """
    frames = {frame.place.rank: frame for frame in builder.graph.frames if frame.run == 0}
    told: dict[Slot, dict[int, tuple[Frame, Version]]] = {}
    for rank, frame in frames.items():
        for number, version in enumerate(frame.place.source.versions):
            if version.registered:
                slot = builder.slot(frame.place, number)
                told.setdefault(slot, {})[rank] = frame, version
    findings: list[Finding] = []
    for (team, name), has in told.items():
        first, (frame, version) = next(iter(has.items()))
        wanted = _facts(frame, version, regions)
        for rank in team.ranks:
            if rank not in frames:
                continue
            if rank not in has:
                said = f"rank {rank} has no such parameter"
            elif (facts := _facts(*has[rank], regions)) != wanted:
                said = f"on rank {rank} it is an {facts[0]} {facts[1]}, not {wanted[1]}"
                if facts[1] == wanted[1]:
                    said = f"on rank {rank} it is an {facts[0]}, not an {wanted[0]}"
            else:
                continue
            enter = frame.place.source.enter
            assert enter is not None
            role = f"registers the {wanted[0]} {name}: {wanted[1]}"
            findings.append(
                Finding(
                    "mismatch",
                    f"rank {first} registers {name} with team {team.name}, and {said}",
                    (explainer.ref(frame.place, enter, role, name),),
                    f"register {name} with {team.name} on every rank of it, with the same element "
                    "type, sizes and strides",
                    ranks=tuple(sorted({first, rank})),
                )
            )
            break
    return findings


def _facts(frame: Frame, version: Version, regions: Regions) -> tuple[str, str]:
    """Its kind, and how its elements lie."""
    box = regions.at(version.spot, frame.place.where).box
    text = f"{box.dtype}{list(box.sizes)}"
    usual = contiguous_strides(box.sizes)
    steps = zip(box.sizes, box.strides, usual, strict=True)
    if box.numel and any(size > 1 and one != other for size, one, other in steps):
        text += f".strides({', '.join(map(str, box.strides))})"
    return version.buffer.kind, text


def shared_names(builder: GraphBuilder, explainer: Explainer) -> list[Finding]:
    """Signals of two teams that have a name, a writer and a reader in common."""
    if len({signal[1].name for signal, run in builder.meetings.raised if run == 0}) < 2:
        return []
    first: dict[tuple[str, int, int], Signal] = {}
    found: dict[tuple[str, str, str], Finding] = {}
    for (signal, run), raised in builder.meetings.raised.items():
        name, team, writer, reader = signal
        other = first.setdefault((name, writer, reader), signal)
        key = name, other[1].name, team.name
        if run == 0 and other[1] is not team and key not in found:
            ops = [
                explainer.ref(
                    raises[0][1].frame.place, raises[0][1].item, f"raises {name} of team {of.name}"
                )
                for of, raises in ((other[1], builder.meetings.raised[other, 0]), (team, raised))
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
