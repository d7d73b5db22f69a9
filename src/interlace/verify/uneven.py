"""Which collective of which rank is one too many, or which rank lacks one.

    found = [uneven(finding, builder, explainer) for finding in findings]

Where the sequences of two ranks part is not where they differ in length: they are compared like two
texts, and what stands in one alone is told, with the edits that make all ranks issue the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from interlace.ir.ops import Collective, Op
from interlace.ir.order import Queue
from interlace.verify.explain import Explainer
from interlace.verify.fixing.circles import notifies
from interlace.verify.fixing.edits import Edit, Fix
from interlace.verify.happens_before.build import Builder
from interlace.verify.happens_before.graph import Frame
from interlace.verify.happens_before.source import Item, Source
from interlace.verify.report import Finding

Facts = tuple[tuple[object, ...], ...]
"""The collectives that one rank issues, each as what ranks agree on."""
NEIGHBOURS = 64
"""Ops before a collective that are looked for on a rank that lacks it."""
MAX_ISSUED = 2_000
"""Collectives of one rank that are compared at most."""


class Uneven:
    """The collectives that only some ranks of a team issue."""

    def __init__(self, builder: Builder, explainer: Explainer) -> None:
        self.builder = builder
        self.explainer = explainer

    def told(self, finding: Finding) -> Finding:
        """The finding with what has to be added or removed, if that is what it is about."""
        if finding.kind == "signal" and len(finding.ops) > 1 and finding.level == "error":
            grown = notifies(self.explainer.edges, [op.at for op in finding.ops])
            return dataclasses.replace(finding, candidates=grown)
        queue = self._queue(finding)
        if queue is None:
            return finding
        others = [q for q in self.builder.meetings.queues if q[0] == queue[0] and q != queue]
        issues = self._issues(queue)
        sequences = {rank: tuple(map(_fact, mine)) for rank, mine in issues.items()}
        if len(set(sequences.values())) < 2:
            return finding
        backends = tuple(self._backends(queue, others))
        popular = Counter(sequences.values()).most_common()
        popular.sort(key=lambda pair: (-pair[1], len(pair[0])))
        fixes: list[Fix] = []
        words: list[str] = []
        for wanted, _ in popular:
            edits: list[Edit] = []
            like = next(rank for rank, sequence in sequences.items() if sequence == wanted)
            for rank, sequence in sequences.items():
                if sequence != wanted:
                    edits += self._edits(issues, rank, like, sequence, wanted, words)
            fixes.append(tuple(dict.fromkeys(edits)))
        fixes = [fix for fix in fixes if fix]
        if not words:
            return finding
        return dataclasses.replace(
            finding,
            words=finding.words if others else "; ".join(dict.fromkeys(words[:2])),
            candidates=(*backends, *fixes, *finding.candidates),
        )

    def _backends(self, queue: Queue, others: list[Queue]) -> Iterator[Fix]:
        """What some ranks issue on another backend than the rest, on the same."""
        for one, other in [(q, p) for p in others for q in (queue, p)] + [
            (p, queue) for p in others
        ]:
            issues = self._issues(one)
            most = max(map(len, issues.values()))
            edits: list[Edit] = []
            for mine in issues.values():
                for frame, item in mine if 0 < len(mine) == most else ():
                    assert isinstance(item.op, Collective)
                    new = dataclasses.replace(item.op, backend=other[1])
                    k = self.explainer.edges.number(frame.place.source)
                    edits.append(Edit(k, new, index=item.index))
            yield tuple(dict.fromkeys(edits))

    def _queue(self, finding: Finding) -> Queue | None:
        """The team and backend of the collective that a finding names."""
        spots = {op.at for op in finding.ops}
        number = self.explainer.edges.number
        for queue, members in self.builder.meetings.queues.items():
            for mine in members.values():
                for frame, item, *_ in mine:
                    if frame.run == 0 and (number(frame.place.source), item.index) in spots:
                        return queue
        return None

    def _issues(self, queue: Queue) -> dict[int, list[tuple[Frame, Item]]]:
        members = self.builder.meetings.queues[queue]
        return {
            rank: [(f, i) for f, i, *_ in members.get(rank, ()) if f.run == 0][:MAX_ISSUED]
            for rank in queue[0].ranks
            if rank in self.builder.ranks
        }

    def _edits(
        self,
        issues: dict[int, list[tuple[Frame, Item]]],
        rank: int,
        like: int,
        sequence: Facts,
        wanted: Facts,
        words: list[str],
    ) -> list[Edit]:
        """What makes the sequence of one rank that of another."""
        mine, theirs = issues[rank], issues[like]
        place = next(p for p in self.builder.places if p.rank == rank)
        k, found = self.explainer.edges.number(place.source), list[Edit]()
        for tag, low, high, start, stop in SequenceMatcher(
            None, sequence, wanted, autojunk=False
        ).get_opcodes():
            if tag == "equal":
                continue
            if tag == "replace" and high - low == stop - start:
                found += self._alike(k, mine[low:high], theirs[start:stop])
                for one, two in zip(mine[low:high], theirs[start:stop], strict=True):
                    words.append(self._differ(mine, one[1], rank, theirs, two[1], like))
                continue
            for _, item in mine[low:high]:
                words.append(self._say(mine, item, rank, like))
                found.append(Edit(k, index=item.index))
            for _, item in theirs[start:stop]:
                words.append(self._say(theirs, item, like, rank))
                behind = _behind(
                    theirs[0][0].place.source.program.ops, item.index, place.source.program.ops
                )
                if low:
                    behind = max(behind, mine[low - 1][1].index)
                if low < len(mine):
                    behind = min(behind, mine[low][1].index - 1)
                if behind < 0:
                    found.append(Edit(k, item.op, anchor=0))
                else:
                    found.append(Edit(k, item.op, anchor=behind, after=True))
        return _moved(found, place.source)

    def _alike(
        self, k: int, mine: list[tuple[Frame, Item]], theirs: list[tuple[Frame, Item]]
    ) -> list[Edit]:
        """The collectives of one rank with what another's say, on the views that they have."""
        found: list[Edit] = []
        for (_, one), (_, two) in zip(mine, theirs, strict=True):
            if isinstance(one.op, Collective) and isinstance(two.op, Collective):
                told = two.op
                new = dataclasses.replace(
                    one.op, kind=told.kind, reduce=told.reduce, root=told.root, splits=told.splits
                )
                found.append(Edit(k, new, index=one.index))
        return found

    def _differ(
        self,
        mine: list[tuple[Frame, Item]],
        one: Item,
        rank: int,
        theirs: list[tuple[Frame, Item]],
        two: Item,
        like: int,
    ) -> str:
        said: list[str] = []
        for issues, item, who in ((mine, one, rank), (theirs, two, like)):
            source = issues[0][0].place.source
            text, line = (
                self.explainer.text(source, item.index),
                self.explainer.line(source, item.index),
            )
            said.append(f"`{text}` (line {line} on rank {who})")
        return f"{said[0]} meets {said[1]}: give both the same, or issue them in one order"

    def _say(self, issues: list[tuple[Frame, Item]], item: Item, rank: int, other: int) -> str:
        source = issues[0][0].place.source
        line, text = (
            self.explainer.line(source, item.index),
            self.explainer.text(source, item.index),
        )
        return (
            f"rank {rank} issues `{text}` (line {line}), which rank {other} lacks: issue it on "
            f"rank {other} too, or remove it on rank {rank}"
        )


def _behind(ops: Sequence[Op], index: int, others: Sequence[Op]) -> int:
    """The last op of another rank that stands for one before this; -1 where there is none."""
    near = range(max(0, index - NEIGHBOURS), index)
    texts, wanted = [_sort(op) for op in others], [_sort(ops[i]) for i in near]
    blocks = SequenceMatcher(None, wanted, texts, autojunk=False).get_matching_blocks()
    return max((block.b + block.size - 1 for block in blocks if block.size), default=-1)


def _sort(op: Op) -> tuple[object, ...]:
    """What an op and the same op of another rank have in common."""
    names = (getattr(op, name, None) for name in ("kind", "fn", "event", "signal"))
    return type(op).__name__, op.stream, *names


def _moved(edits: list[Edit], source: Source) -> list[Edit]:
    """The edits, with an op that is removed here and added there moved instead."""
    found = list(edits)
    for gone in [edit for edit in edits if edit.op is None and edit.index is not None]:
        op = source.program.ops[gone.index or 0]
        new = next((e for e in found if e.index is None and e.op == op), None)
        if new is not None:
            found[found.index(new)] = Edit(new.program, None, gone.index, new.anchor, new.after)
            found.remove(gone)
    return found


def _fact(issue: tuple[Frame, Item]) -> tuple[object, ...]:
    """What two ranks that issue the same collective agree on."""
    frame, item = issue
    op, where = item.op, frame.place.where
    root = getattr(op, "root", None)
    views = [getattr(op, side) for side in ("src", "dst")]
    assert item.ordering.meets
    return (
        getattr(op, "kind", ""),
        getattr(op, "reduce", None),
        None if root is None else where.index(root),
        *(None if view is None else view.buffer for view in views),
    )
