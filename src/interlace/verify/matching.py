"""Whether the ranks agree: members of collectives, ends of messages, takes of slots, signals.

These compare what the ranks say, one run of each, without regard to when. A collective that only
some ranks issue is reported here (where the sequences part) and as the deadlock that it makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from interlace.ir.ops import KINDS, Collective, Recv, Send
from interlace.ir.order import Queue
from interlace.ir.view import Box
from interlace.verify.accesses.regions import Regions
from interlace.verify.explain import Explainer
from interlace.verify.happens_before.build import Builder
from interlace.verify.happens_before.graph import Frame, Point
from interlace.verify.happens_before.source import Item
from interlace.verify.report import Finding


def mismatches(builder: Builder, explainer: Explainer, regions: Regions) -> list[Finding]:
    """All findings of disagreement, and the remarks on signals that nobody awaits."""
    matcher = _Matcher(builder, explainer, regions)
    matcher.collectives()
    matcher.messages()
    matcher.slots()
    matcher.signals()
    return matcher.findings


class _Matcher:
    def __init__(self, builder: Builder, explainer: Explainer, regions: Regions) -> None:
        self.builder = builder
        self.explainer = explainer
        self.regions = regions
        self.findings: list[Finding] = []
        self.alike: set[tuple[object, ...]] = set()
        """Sets of members that were found to agree."""

    def report(self, message: str, fix: str, issues: Sequence[Point], roles: Sequence[str]) -> None:
        ops = [
            self.explainer.ref(frame, item, role)
            for (frame, item, *_), role in zip(issues, roles, strict=True)
        ]
        ranks = tuple(sorted({frame.place.rank for frame, *_ in issues}))
        self.findings.append(Finding("mismatch", message, tuple(ops), fix, ranks=ranks))

    def box(self, issue: Point, side: str) -> Box | None:
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
            first = {
                rank: [issue for issue in members.get(rank, ()) if issue[0].run == 0]
                for rank in queue[0].ranks
                if rank in self.builder.ranks
            }
            counts = {len(issues) for issues in first.values()}
            for k in range(min(counts)):
                met = [issues[k] for issues in first.values()]
                if not self.agree(queue, k, met):
                    break  # what follows is the same fault
            else:
                if len(counts) > 1:
                    self.missing(queue, first)

    def missing(self, queue: Queue, first: Mapping[int, Sequence[Point]]) -> None:
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

    def agree(self, queue: Queue, k: int, met: Sequence[Point]) -> bool:
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

    def differs(self, met: Sequence[Point]) -> tuple[str, int, int, tuple[str, str]] | None:
        """The first fact that two members disagree on: what, which two, what they say."""
        facts = [self.facts(issue) for issue in met]
        for name in facts[0]:
            known = [(i, fact[name]) for i, fact in enumerate(facts) if fact[name] is not None]
            for i, value in known[1:]:
                if value != known[0][1]:
                    return name, known[0][0], i, (str(known[0][1]), str(value))
        return self.sizes(met)

    def facts(self, issue: Point) -> dict[str, object]:
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

    def sizes(self, met: Sequence[Point]) -> tuple[str, int, int, tuple[str, str]] | None:
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
            first = {
                rank: [issue for issue in members.get(rank, ()) if issue[0].run == 0]
                for rank in team.ranks
                if rank in self.builder.ranks
            }
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

    def nbytes(self, issue: Point) -> int:
        frame, item, *_ = issue
        return self.regions.at(frame.place.source.versions[item.version].spot, frame.place.where).hi

    def signals(self) -> None:
        awaited = {signal for signal, *_ in self.builder.meetings.awaited}
        told: set[tuple[object, ...]] = set()
        for (signal, run), raised in self.builder.meetings.raised.items():
            for one, two in pairwise(raised):
                (value, (frame, item, _, node)), (value_2, (frame_2, item_2, _, node_2)) = one, two
                grows, key = value_2 > value, (frame.place.source, item.index, item_2.index)
                if run or key in told or (grows and self.ordered(node, node_2)):
                    continue
                told.add(key)
                message = (
                    f"signal {signal[0]} from rank {signal[2]} to rank {signal[3]} does not grow"
                    if not grows
                    else f"two notifies raise signal {signal[0]} in no order"
                )
                fix = "give the later notify a larger value" if not grows else (
                    "raise a signal on one stream alone, or order the two with an event"
                )  # fmt: skip
                ops = (
                    self.explainer.ref(frame, item, f"raises it to {value}"),
                    self.explainer.ref(frame_2, item_2, f"raises it to {value_2}"),
                )
                self.findings.append(Finding("signal", message, ops, fix, ranks=(signal[2],)))
            frame, item, *_ = raised[0][1]
            key = (frame.place.source, item.index)
            if not run and signal not in awaited and key not in told:
                told.add(key)
                message = f"rank {signal[3]} never awaits signal {signal[0]} of rank {signal[2]}"
                self.findings.append(
                    Finding(
                        "unexpected-notify",
                        message,
                        (self.explainer.ref(frame, item, f"raises {signal[0]}"),),
                        "expect it where it is needed, or take the notify out",
                        "remark",
                        (signal[2],),
                    )
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


def _is_root(issue: Point) -> bool:
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
