"""fuse: what one kernel is to do of a site becomes one op.

The last pass. A site with the strategy `fused` was decomposed into chunks and puts like any other;
here the chunks of each matmul, with the signals that they await and the events that they record,
become the parts of one `Fused`:

    main: fused(
        part(call("aten.mm.out", x, w, out=y[tp.rank])),
        part(expect(arrived, tp.rank + 1), call("aten.mm.out", slots[tp.rank + 1], w, out=...)),
        ...)

Before a reduction each part records the event that its put waits for, or the sum beside the kernel.

What else stands between the chunks on their stream goes before the op, or after it. The op takes
the place in the list of the last chunk, or of the first thing that waits for one of them. Parts are
not ordered, so the result is proved once more; if that fails, or the chunks cannot be brought
together, they stay as they are: peer copies, with a remark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from interlace.ir import (
    Alloc,
    Call,
    Expect,
    Free,
    Fused,
    FusedMember,
    Notify,
    Op,
    Program,
    Record,
    Remark,
    Wait,
)
from interlace.passes.base import add_remarks
from interlace.passes.order.groups import groups
from interlace.verify import check


@dataclass(frozen=True)
class Fuse:
    """Makes one op of what one kernel is to do."""

    name: ClassVar[str] = "fuse"

    def run(self, program: Program) -> Program:
        """The Program with the chunks of its fused sites brought together."""
        found = groups(program)
        if not found:
            return program
        made, apart = self._all(program, [True] * len(found))
        if not _sound(made, program):
            # rare: one by one, to see which of them cannot be
            kept = [False] * len(found)
            for number in range(len(found)):
                kept[number] = True
                kept[number] = _sound(self._all(program, kept)[0], program)
            made, apart = self._all(program, kept)
        return _told(made, apart)

    def _all(self, program: Program, wanted: Sequence[bool]) -> tuple[Program, dict[int, str]]:
        """The Program with these groups fused, and why sites have one that is not."""
        apart: dict[int, str] = {}
        for members, want in reversed(list(zip(groups(program), wanted, strict=True))):
            site = program.ops[members[0]].site
            assert site is not None
            why = "its parts would race" if not want else ""
            if want:
                try:
                    program = program.replace(ops=tuple(_Bringing(program.ops, members).together()))
                except _Apart as reason:
                    why = str(reason)
            if why:
                apart[site] = why
        return program, apart


class _Apart(Exception):
    """The chunks cannot be brought together, and why."""


def _sound(made: Program, before: Program) -> bool:
    """Whether fusing did no harm. (A rank's own Program is never sound without those of others.)"""
    found = check(made)
    return found.sound or len(found.errors) <= len(check(before).errors) > 0


def _told(program: Program, apart: dict[int, str]) -> Program:
    """The sites that are not, or not all, fused say so."""
    fused = {op.site for op in program.ops if isinstance(op, Fused)}
    sites = tuple(
        dataclasses.replace(site, strategy="peer", protocol="put", reason=f"not fused: {why}")
        if (why := apart.get(site.id, "")) and site.id not in fused
        else site
        for site in program.sites
    )
    remarks = [
        Remark(Fuse.name, f"a matmul stays in chunks: {why}", site) for site, why in apart.items()
    ]
    return add_remarks(program.replace(sites=sites), remarks)


class _Bringing:
    """Brings the chunks of one matmul together."""

    def __init__(self, ops: Sequence[Op], members: tuple[int, ...]) -> None:
        self.ops, self.members = ops, members
        self.first, self.last = members[0], members[-1]
        self.stream = ops[self.first].stream
        self.parts: list[list[FusedMember]] = []
        self.before: list[Op] = []
        self.after: list[Op] = []
        self.waits: list[Wait] = []
        self.recorded: set[str] = set()

    def together(self) -> list[Op]:
        """All ops, with the Fused in place of its members."""
        ops, first, last = self.ops, self.first, self.last
        self._sort()
        turn = next(
            (
                i
                for i in range(first, last + 1)
                if ops[i].stream != self.stream and self._awaits(ops[i])
            ),
            last + 1,
        )
        known = {op.event for op in ops[:turn] if isinstance(op, Record)} - self.recorded
        for wait in self.waits:
            if wait.event not in known:
                raise _Apart(f"one of its chunks waits for {wait.event}, which comes after it")
        own = ops[first]
        parts = tuple(map(tuple, self.parts))
        fused = Fused(parts=parts, stream=own.stream, site=own.site, loc=own.loc)
        early, late = (
            [op for op in ops[start:stop] if op.stream != self.stream]
            for start, stop in ((first, turn), (turn, last + 1))
        )
        middle = [*early, *self.before, *self.waits, fused, *late, *self.after]
        return [*ops[:first], *middle, *ops[last + 1 :]]

    def _awaits(self, op: Op) -> bool:
        return isinstance(op, Wait) and op.event in self.recorded

    def _sort(self) -> None:
        """Deals what stands on the stream to the parts, or before or after them."""
        expects: list[Expect] = []
        inside = False  # whether an event recorded here is one of the chunk before it
        for index in range(self.first, self.last + 1):
            op = self.ops[index]
            if op.stream != self.stream:
                if index in self.members:
                    raise _Apart("its chunks are on several streams")
                continue
            match op:
                case Call() if index in self.members:
                    self.parts.append([*expects, op])
                    expects, inside = [], True
                case Expect(site=site) if site == self.ops[self.first].site:
                    expects.append(op)
                case Record() if inside:
                    self.parts[-1].append(op)
                    self.recorded.add(op.event)
                case Wait():
                    self.waits.append(op)
                case Alloc():
                    self.before.append(op)
                case Free() | Notify():
                    self.after.append(op)
                    inside = False
                case _:
                    raise _Apart(f"{_name(op)} stands between its chunks")


def _name(op: Op) -> str:
    return op.fn if isinstance(op, Call) else type(op).__name__
