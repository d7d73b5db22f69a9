"""State that the checks of `validate` share: the ranks to check, the declared names, the fault;
and the checks common to ops and Programs: of declarations and the arguments of calls.

A view is resolved once for each rank that can see it differently; two ranks with the same place in
every team see the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from interlace.errors import InterlaceError
from interlace.ir.box import Box
from interlace.ir.call_names import FIX, WORDS, refusal
from interlace.ir.ops import Arg
from interlace.ir.program import Program
from interlace.ir.sizes import Int, at_hand
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
    contiguous_strides,
)
from interlace.ir.view import AsStrided, Chunk, View, varying

MAX_PLACES = 1 << 19
"""Places of ranks in teams, at most: of all ranks that there may be, in 8 teams."""
MAX_STEPS = 1 << 25
"""Steps of one rank that a Program takes to validate, at most: some seconds."""


class BrokenRule(Exception):
    """A broken rule: what, the line that says how to fix it, and which line it is about."""

    def __init__(self, tag: Tag, what: str, fix: str) -> None:
        super().__init__(what)
        self.tag, self.what, self.fix = tag, what, f"fix: {fix}"


class CheckContext:
    """The Program being checked, and what is known of it so far."""

    def __init__(self, program: Program, ranks: Iterable[int] | None = None) -> None:
        self.program, self._asked = program, ranks
        self.tag: Tag = ("header", 0)
        self.teams: dict[str, Team] = {}
        self.tables: dict[str, Table] = {}
        self.buffers: dict[str, Buffer] = {}
        self.ranks: tuple[int, ...] = ()
        self.wheres: tuple[Where, ...] = ()
        self._boxes: dict[object, tuple[Box, ...]] = {}
        self._joined: set[str] = set()
        self._steps = 0

    def spend(self, steps: int) -> None:
        """Counts what is looked at on each rank; a Program that needs too much is refused."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise self.fault(
                f"what differs between {len(self.wheres):,} ranks takes more than {MAX_STEPS:,} "
                "steps to look at",
                "write the Program for fewer ranks, or in parts",
            )

    def fault(self, what: str, fix: str) -> BrokenRule:
        """The fault to raise at the place that is being checked."""
        return BrokenRule(self.tag, what, fix)

    def unknown(self, family: str, name: str, known: Iterable[str]) -> BrokenRule:
        """The fault to raise for a name that is not there."""
        what = f"no {family} is named {name!r}"
        return self.fault(what, did_you_mean(name, known, f"{family}s are"))

    def place_ranks(self) -> None:
        """Finds the ranks to look at, once the teams are known to be well formed."""
        program = self.program
        seen: dict[tuple[int, ...], Where] = {}
        try:
            ranks = program.world if program.rank is None else (program.rank,)
            asked = ranks if self._asked is None else tuple(self._asked)
            if len(asked) * len(program.teams) > MAX_PLACES:
                raise self.fault(
                    f"{len(asked):,} ranks, each with a place in {len(program.teams):,} teams: "
                    f"{MAX_PLACES:,} places are looked up at most",
                    "write the Program with fewer teams, or for fewer ranks",
                )
            for where in program.wheres(asked):
                places = where.members
                key = tuple(places[name].index if name in places else -1 for name in self.teams)
                seen.setdefault(key, where)
        except InterlaceError as error:
            raise self.fault(str(error), "fix ranks(...), rank(...) or the teams") from None
        self.wheres = tuple(seen.values())
        self.ranks = tuple(where.rank for where in self.wheres)

    def team(self, name: str) -> Team:
        """A team of the Program, of which every rank is a member."""
        team = self.teams.get(name)
        if team is None:
            raise self.unknown("team", name, self.teams)
        if name in self._joined:
            return team
        self._joined.add(name)
        for where in self.wheres:
            if name not in where.members:
                raise self.fault(
                    f"rank {where.rank} runs this, but no group of team {name!r} has it",
                    "add the rank to a group, or give that rank a Program of its own (ranks(...))",
                )
        return team

    def indices(self, index: Index) -> tuple[int, ...]:
        """The value of an index on each rank."""
        if isinstance(index, RankIndex):
            self.team(index.team)
        self.spend(len(self.wheres))
        return tuple(where.index(index) for where in self.wheres)

    def dims(self, dim: Dim) -> tuple[Int, ...]:
        """The value of a size on each rank."""
        if not isinstance(dim, TableEntry):
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
        buffer = self.buffer(view)
        facts = buffer.shape, buffer.strides, buffer.dtype, view.steps  # layers have them alike
        found = self._boxes.get(facts)
        if found is None:
            found = self._boxes[facts] = self._resolve(view, buffer)
        return found

    def _resolve(self, view: View, buffer: Buffer) -> tuple[Box, ...]:
        depends = varying(view, buffer)
        for value in depends:
            if isinstance(value, TableEntry):
                self.dims(value)
            else:
                self.indices(value)
        for step in view.steps:
            if isinstance(step, Chunk) and isinstance(step.parts, str):
                if step.parts not in self.tables:
                    raise self.unknown("table", step.parts, self.tables)
        self.spend(len(self.wheres) * (16 if depends else 1))
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
        if len(box.sizes) > MAX_DIMS or too_long(box.sizes, box.strides, box.dtype):
            raise self.fault(
                f"{print_view(view, self.program)} has too many dimensions or elements",
                f"keep to {MAX_DIMS} dimensions, and to what 64 bits count in bytes",
            )

    def _within(self, box: Box, buffer: Buffer, where: Where, view: View) -> None:
        whole = View(buffer.name).box(buffer, where)
        end = whole.hull[1]
        if box.numel and (
            box.offset < 0 or any(step < 0 for step in box.strides) or box.hull[1] > end
        ):
            raise self.fault(
                f"{print_view(view, self.program)} reaches byte {box.hull[1]} of {buffer.name!r}, "
                f"which has {end} on rank {where.rank}",
                "keep offset + sum of (size - 1) * stride below the buffer's elements",
            )


def too_long(sizes: Sequence[Int], strides: Sequence[Int], dtype: DType, offset: int = 0) -> bool:
    """True if the bytes of its elements or reach exceed `MAX_BYTES`; an empty size counts as 1."""
    count, reach = 1, 1
    for size, stride in zip(sizes, strides, strict=True):
        count *= max(size, 1)
        reach += max(size - 1, 0) * stride
    numbers = at_hand(count), at_hand(reach)  # of all sizes it would be a fact of the class
    return max(numbers) * dtype.itemsize + offset > MAX_BYTES


def check_buffer(context: CheckContext, buffer: Buffer, kinds: tuple[str, ...]) -> None:
    """A declaration: its name is new, and kind, sizes, strides and team make sense together."""
    name = buffer.name
    if name in context.buffers or name in context.teams or name in context.tables:
        raise context.fault(
            f"{name!r} is declared already",
            "give each buffer, team and table a name of its own; a second alloc a second name",
        )
    if name == "rng":
        raise context.fault(
            "'rng' is the state of the random numbers", "give the buffer another name"
        )
    if buffer.kind not in kinds:
        raise context.fault(
            f"{name!r} is declared as {buffer.kind}", f"here a buffer is {' or '.join(kinds)}"
        )
    sizes = [context.dims(dim) for dim in buffer.shape]
    if any(size < 0 for found in sizes for size in found):
        raise context.fault(f"{name!r} has a size below 0", "give sizes >= 0")
    strides = buffer.strides
    if strides is not None and (len(strides) != len(sizes) or any(step < 0 for step in strides)):
        raise context.fault(
            f"{name!r} has {len(sizes)} sizes and strides {list(strides)}",
            "give one stride >= 0, in elements, for each dimension",
        )
    for found in set(zip(*sizes, strict=True)):
        steps = strides if strides is not None else contiguous_strides(found)
        if len(found) > MAX_DIMS or too_long(found, steps, buffer.dtype, buffer.offset):
            raise context.fault(
                f"{name!r} has too many dimensions or bytes",
                f"keep to {MAX_DIMS} dimensions, and to what 64 bits count in bytes",
            )
    if (buffer.team is not None) != (buffer.kind == "symmetric" or buffer.registered):
        raise context.fault(
            f"{name!r} is {buffer.kind} and has {'no' if buffer.team is None else 'a'} team",
            "a symmetric buffer, a registered parameter, and no other, has a team: alloc(..., "
            "symmetric=tp), or x: f32[8, 4].registered(tp)",
        )
    if buffer.registered and strides is not None and 0 in strides:
        raise context.fault(
            f"{name!r} is registered, but its elements overlap (a stride of 0)",
            "register the tensor that was expanded",
        )
    if buffer.offset < 0 or (buffer.offset and buffer.kind != "local"):
        raise context.fault(
            f"{name!r} is {buffer.kind} at offset {buffer.offset}",
            "an offset is a number of bytes >= 0 into the storage of local buffers",
        )
    if buffer.storage is not None and buffer.kind not in ("local", "symmetric"):
        raise context.fault(
            f"{name!r} is {buffer.kind} and names a storage",
            "only local and symmetric buffers share storage",
        )
    if buffer.offset % buffer.dtype.itemsize:
        raise context.fault(
            f"{name!r} starts at byte {buffer.offset}, amid an element",
            f"choose a multiple of {buffer.dtype.itemsize}",
        )
    if buffer.team is not None:
        _check_alike(context, buffer, buffer.team)


def check_operator(context: CheckContext, fn: str) -> None:
    """The name of what a call runs: no attribute of Python's, and nothing that touches files."""
    why = refusal(fn)
    if why is not None:
        raise context.fault(why, FIX)


def check_arguments(
    context: CheckContext, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
) -> None:
    """Keywords are names of arguments, and words for values of torch's are of the table."""
    for key, _ in kwargs:
        if not key.isidentifier():
            raise context.fault(
                f"{key!r} is no name of an argument", "write it as the operator's schema does"
            )
    for arg in (*args, *(value for _, value in kwargs)):
        for word in _texts_in(arg):
            if word.startswith("@") and word not in WORDS:
                raise context.fault(
                    f"no value named {word!r} that an operator could take",
                    did_you_mean(word, WORDS, "values are"),
                )


def _texts_in(arg: Arg) -> list[str]:
    if isinstance(arg, str) and not isinstance(arg, DType):
        return [arg]
    return [text for item in arg for text in _texts_in(item)] if isinstance(arg, tuple) else []


def _check_alike(context: CheckContext, buffer: Buffer, team: str) -> None:
    """Checks that memory for peers has the same size on all ranks, and that these share a host."""
    if context.team(team).hosts is not None:
        raise context.fault(
            f"peers are to reach {buffer.name!r}, and team {team!r} spans hosts, which share no "
            "memory",
            "use messages and collectives, or a team of the ranks of each host",
        )
    sizes: dict[int, set[Int]] = {}  # by the first rank of the team
    shapes = zip(*map(context.dims, (1, *buffer.shape)), strict=True)
    for where, shape in zip(context.wheres, shapes, strict=True):
        sizes.setdefault(where.members[team].ranks[0], set()).add(math.prod(shape))
    if any(len(found) > 1 for found in sizes.values()):
        found = sorted({numel for each in sizes.values() for numel in each})
        raise context.fault(
            f"{buffer.name!r} is {'registered' if buffer.registered else 'symmetric'}, but has "
            f"{found} elements on different ranks",
            "give it the largest size on every rank, and use a part of it",
        )
