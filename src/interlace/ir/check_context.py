"""What the checks of `validate` share: the ranks to look at, the declared names, and the fault.

A view is resolved once for each rank that can see it differently; two ranks with the same place in
every team see the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from interlace.errors import InterlaceError
from interlace.ir.box import Box
from interlace.ir.program import Program
from interlace.ir.text.printer import Tag, print_view
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import (
    MAX_BYTES,
    MAX_DIMS,
    Buffer,
    Dim,
    DType,
    Index,
    RankIndex,
    Table,
    TableEntry,
    Team,
    Where,
)
from interlace.ir.view import AsStrided, Chunk, Slice, View


class Fault(Exception):
    """A broken rule: what, how to mend it, and which line it is about."""

    def __init__(self, tag: Tag, what: str, fix: str) -> None:
        super().__init__(what)
        self.tag, self.what, self.fix = tag, what, fix


class Context:
    """The Program being checked, and what is known of it so far."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tag: Tag = ("header", 0)
        self.teams: dict[str, Team] = {}
        self.tables: dict[str, Table] = {}
        self.buffers: dict[str, Buffer] = {}
        self.ranks: tuple[int, ...] = ()
        self.wheres: tuple[Where, ...] = ()
        self._boxes: dict[View, tuple[Box, ...]] = {}

    def fault(self, what: str, fix: str) -> Fault:
        """The fault to raise at the place that is being checked."""
        return Fault(self.tag, what, fix)

    def unknown(self, family: str, name: str, known: Iterable[str]) -> Fault:
        """The fault to raise for a name that is not there."""
        what = f"no {family} is named {name!r}"
        return self.fault(what, did_you_mean(name, known, f"{family}s are"))

    def place_ranks(self) -> None:
        """Finds the ranks to look at, once the teams are known to be well formed."""
        program = self.program
        seen: dict[tuple[int, ...], Where] = {}
        try:
            ranks = program.world if program.rank is None else (program.rank,)
            for where in program.wheres(ranks):
                places = where.members
                key = tuple(places[name].index if name in places else -1 for name in self.teams)
                seen.setdefault(key, where)
        except InterlaceError as error:
            raise self.fault(str(error), "mend ranks(...), rank(...) or the teams") from None
        self.wheres = tuple(seen.values())
        self.ranks = tuple(where.rank for where in self.wheres)

    def team(self, name: str) -> Team:
        """A team of the Program, of which every rank is a member."""
        team = self.teams.get(name)
        if team is None:
            raise self.unknown("team", name, self.teams)
        for where in self.wheres:
            if name not in where.members:
                raise self.fault(
                    f"rank {where.rank} runs this, but no group of team {name!r} has it",
                    "add the rank to a group, or give that rank a Program of its own (ranks(...))",
                )
        return team

    def indices(self, index: Index) -> tuple[int, ...]:
        """What an index is on each rank."""
        if isinstance(index, RankIndex):
            self.team(index.team)
        return tuple(where.index(index) for where in self.wheres)

    def dims(self, dim: Dim) -> tuple[int, ...]:
        """What a size is on each rank."""
        if isinstance(dim, int):
            return (dim,) * len(self.wheres)
        if dim.table not in self.tables:
            raise self.unknown("table", dim.table, self.tables)
        self.indices(dim.index)
        try:
            return tuple(where.dim(dim) for where in self.wheres)
        except InterlaceError as error:
            raise self.fault(str(error), "index a table with a rank of its team") from None

    def declare(self, buffer: Buffer) -> None:
        """Makes a buffer known from here on."""
        self.buffers[buffer.name] = buffer

    def buffer(self, view: View) -> Buffer:
        """The buffer of a view."""
        buffer = self.buffers.get(view.buffer)
        if buffer is None:
            later = self.program.buffers()
            if view.buffer in later:
                what = f"{view.buffer!r} is used before it is declared"
                raise self.fault(what, "move its alloc, or the call that makes it, up")
            raise self.unknown("buffer", view.buffer, self.buffers)
        return buffer

    def boxes(self, view: View) -> tuple[Box, ...]:
        """The box of a view on each rank."""
        found = self._boxes.get(view)
        if found is None:
            found = self._boxes[view] = self._resolve(view, self.buffer(view))
        return found

    def _resolve(self, view: View, buffer: Buffer) -> tuple[Box, ...]:
        depends = any(isinstance(dim, TableEntry) for dim in buffer.shape)
        for step in view.steps:
            match step:
                case Chunk(index=index, parts=parts):
                    self.indices(index)
                    depends = depends or isinstance(index, RankIndex)
                    if isinstance(parts, str) and parts not in self.tables:
                        raise self.unknown("table", parts, self.tables)
                case Slice(start=start, stop=stop):
                    self.dims(start)
                    self.dims(stop)
                    depends = depends or isinstance(start, TableEntry)
                    depends = depends or isinstance(stop, TableEntry)
                case _:
                    pass
        boxes: list[Box] = []
        for where in self.wheres if depends else self.wheres[:1]:
            try:
                box = view.box(buffer, where)
            except InterlaceError as error:
                shown = print_view(view, self.program)
                cause = error.__cause__
                reason = "no such dimension" if isinstance(cause, IndexError) else cause or error
                what = f"{shown} does not exist on rank {where.rank}: {reason}"
                fix = f"choose a view within {buffer.name!r}"
                raise self.fault(what, fix) from None
            if any(isinstance(step, AsStrided) for step in view.steps):
                self._within(box, buffer, where, view)
            self._spans(box, view)
            boxes.append(box)
        return tuple(boxes) if depends else tuple(boxes) * len(self.wheres)

    def _spans(self, box: Box, view: View) -> None:
        if len(box.sizes) > MAX_DIMS or span(box.sizes, box.strides, box.dtype) > MAX_BYTES:
            raise self.fault(
                f"{print_view(view, self.program)} has too many dimensions or elements",
                f"keep to {MAX_DIMS} dimensions, and to what 64 bits count in bytes",
            )

    def _within(self, box: Box, buffer: Buffer, where: Where, view: View) -> None:
        whole = View(buffer.name).box(buffer, where)
        end = whole.hull[1]
        if box.numel and (box.offset < 0 or min(box.strides, default=0) < 0 or box.hull[1] > end):
            raise self.fault(
                f"{print_view(view, self.program)} reaches byte {box.hull[1]} of {buffer.name!r}, "
                f"which has {end} on rank {where.rank}",
                "keep offset + sum of (size - 1) * stride below the buffer's elements",
            )


def span(sizes: Sequence[int], strides: Sequence[int], dtype: DType) -> int:
    """Bytes that a layout counts with: its elements or its reach, an empty size as if it were 1."""
    count, reach = 1, 1
    for size, stride in zip(sizes, strides, strict=True):
        count *= max(size, 1)
        reach += max(size - 1, 0) * stride
    return max(count, reach) * dtype.itemsize
