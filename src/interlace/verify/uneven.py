"""Which collective of which rank is one too many, or which rank lacks one.

Where the sequences of two ranks part is not where they differ in length: they are compared like two
texts, and what stands in one alone is reported, with edits that make all ranks issue the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from interlace.ir.ops import Collective, Op
from interlace.ir.order import Queue
from interlace.verify.explain import Explainer
from interlace.verify.fixing.edits import Edit, Fix
from interlace.verify.happens_before.build import GraphBuilder
from interlace.verify.happens_before.graph import IssuedOp
from interlace.verify.happens_before.source import LoweredProgram
from interlace.verify.report import Finding

NEIGHBOURS = 64
"""Ops before a collective that are looked for on a rank that lacks it."""
MAX_ISSUED = 400
"""Collectives of one rank that are compared at most."""
MAX_COMPARED = 256
"""Findings, sequences of ranks and collectives that are lacking, of which fixes are sought."""


class Uneven:
    """The collectives that only some ranks of a team issue."""

    def __init__(self, builder: GraphBuilder, explainer: Explainer) -> None:
        self.builder = builder
        self.explainer = explainer
        self._left = MAX_COMPARED

    def explained(self, finding: Finding) -> Finding:
        """The finding with what to add or remove, if it is about collectives that ranks lack."""
        self._left -= 1
        queue = self._queue(finding) if self._left >= 0 else None
        if queue is None:
            return finding
        others = [q for q in self.builder.meetings.queues if q[0] == queue[0] and q != queue]
        issues = self._issues(queue)
        sequences = {rank: tuple(map(_fact, mine)) for rank, mine in issues.items()}
        popular = Counter(sequences.values()).most_common()
        popular.sort(key=lambda pair: (-pair[1], len(pair[0])))
        fixes: list[Fix] = []
        words: list[str] = []
        for wanted, _ in popular:
            if self._left <= 0:
                break
            like = next(rank for rank, sequence in sequences.items() if sequence == wanted)
            ranks = [rank for rank, sequence in sequences.items() if sequence != wanted]
            edits = [edit for rank in ranks for edit in self._edits(issues, rank, like, words)]
            fixes += [tuple(dict.fromkeys(edits))] if edits else []
        if not words:
            return finding
        return dataclasses.replace(
            finding,
            words=finding.words if others else "; ".join(dict.fromkeys(words[:2])),
            candidates=(*self._backends(queue, others), *fixes, *finding.candidates),
        )

    def _backends(self, queue: Queue, others: list[Queue]) -> Iterator[Fix]:
        """What some ranks issue on another backend than the rest, on the same."""
        pairs = [(q, p) for p in others for q in (queue, p)] + [(p, queue) for p in others]
        for one, other in pairs:
            issues = self._issues(one)
            most = max(map(len, issues.values()))
            edits: list[Edit] = []
            for at in [at for mine in issues.values() if len(mine) == most for at in mine]:
                assert isinstance(at.item.op, Collective)
                new = dataclasses.replace(at.item.op, backend=other[1])
                edits.append(Edit(at.source.number, new, index=at.item.index))
            yield tuple(dict.fromkeys(edits))

    def _queue(self, finding: Finding) -> Queue | None:
        """The team and backend of the collective that a finding names."""
        spots = {op.at for op in finding.ops}
        for queue, members in self.builder.meetings.queues.items():
            for at in [at for mine in members.values() for at in mine]:
                if at.frame.run == 0 and (at.source.number, at.item.index) in spots:
                    return queue
        return None

    def _issues(self, queue: Queue) -> dict[int, list[IssuedOp]]:
        """The collectives of a queue that each rank issues in its first run."""
        first = self.builder.first_run(queue[0], self.builder.meetings.queues[queue])
        return {rank: mine[:MAX_ISSUED] for rank, mine in first.items()}

    def _edits(
        self, issues: dict[int, list[IssuedOp]], rank: int, like: int, words: list[str]
    ) -> list[Edit]:
        """What makes the sequence of one rank that of another; adds to the words."""
        self._left -= 1
        mine, theirs = issues[rank], issues[like]
        source = next(p.source for p in self.builder.places if p.rank == rank)
        k, found = source.number, list[Edit]()
        facts = (list(map(_fact, mine)), list(map(_fact, theirs)))
        for tag, low, high, start, stop in SequenceMatcher(
            None, *facts, autojunk=False
        ).get_opcodes():
            if tag == "equal":
                continue
            if tag == "replace" and high - low == stop - start:
                for one, two in zip(mine[low:high], theirs[start:stop], strict=True):
                    found.append(_alike(one, two))
                    words.append(
                        f"{self._quoted(one)} on rank {rank}) meets {self._quoted(two)} on rank "
                        f"{like}): give both the same, or issue them in one order"
                    )
                continue
            for at in mine[low:high]:
                words.append(self._lacks(at, rank, like))
                found.append(Edit(k, index=at.item.index))
            for at in theirs[start:stop]:
                self._left -= 1
                if self._left < 0:
                    break
                words.append(self._lacks(at, like, rank))
                behind = _behind(at.source.program.ops, at.item.index, source.program.ops)
                if low:
                    behind = max(behind, mine[low - 1].item.index)
                if low < len(mine):
                    behind = min(behind, mine[low].item.index - 1)
                found.append(Edit(k, at.item.op, anchor=max(behind, 0), after=behind >= 0))
        return _moved(found, source)

    def _quoted(self, at: IssuedOp) -> str:
        text = self.explainer.text(at.source, at.item.index)
        return f"`{text}` (line {self.explainer.line(at.source, at.item.index)}"

    def _lacks(self, at: IssuedOp, rank: int, other: int) -> str:
        return (
            f"rank {rank} issues {self._quoted(at)}), which rank {other} lacks: issue it on "
            f"rank {other} too, or remove it on rank {rank}"
        )


def _alike(one: IssuedOp, two: IssuedOp) -> Edit:
    """The collective of one rank with what another's says, on the views that it has."""
    mine, theirs = one.item.op, two.item.op
    assert isinstance(mine, Collective)
    assert isinstance(theirs, Collective)
    changes = {name: getattr(theirs, name) for name in ("kind", "reduce", "root", "splits")}
    return Edit(one.source.number, dataclasses.replace(mine, **changes), index=one.item.index)


def _behind(ops: Sequence[Op], index: int, others: Sequence[Op]) -> int:
    """The last op of another rank that matches one before this; -1 where there is none."""
    near = ops[max(0, index - NEIGHBOURS) : index]
    sorts, wanted = list(map(_sort, others)), list(map(_sort, near))
    blocks = SequenceMatcher(None, wanted, sorts, autojunk=False).get_matching_blocks()
    return max((block.b + block.size - 1 for block in blocks if block.size), default=-1)


def _sort(op: Op) -> tuple[object, ...]:
    """What an op and the same op of another rank have in common."""
    names = (getattr(op, name, None) for name in ("kind", "fn", "event", "signal"))
    return type(op).__name__, op.stream, *names


def _moved(edits: list[Edit], source: LoweredProgram) -> list[Edit]:
    """The edits, with an op that is removed here and added there moved instead."""
    found = list(edits)
    for gone in [edit for edit in edits if edit.op is None and edit.index is not None]:
        op = source.program.ops[gone.index or 0]
        new = next((e for e in found if e.index is None and e.op == op), None)
        if new is not None:
            found[found.index(new)] = dataclasses.replace(new, op=None, index=gone.index)
            found.remove(gone)
    return found


def _fact(at: IssuedOp) -> tuple[object, ...]:
    """What two ranks that issue the same collective agree on."""
    op, where = at.item.op, at.frame.place.where
    assert isinstance(op, Collective)
    root = None if op.root is None else where.index(op.root)
    buffers = [None if view is None else view.buffer for view in (op.src, op.dst)]
    return op.kind, op.reduce, root, *buffers
