"""Handles: views as one writes them by hand, in a builder.

full[p.tp.rank + 1]        chunk 1 further than this rank's, of as many as the team has ranks
x[:, 0:8].permute(1, 0)    a slice, then the steps that torch has
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from interlace.errors import ProgramError
from interlace.ir.program import Program
from interlace.ir.text.printer import print_view
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import (
    Buffer,
    DType,
    Index,
    RankIndex,
    Table,
    Team,
    even_parts,
    team_sizes,
)
from interlace.ir.view import Cast, Step, Steps, View


@dataclass(slots=True)
class Scope:
    """What handles are resolved with: the teams, tables and buffers of the Program being built."""

    teams: tuple[Team, ...]
    ranks: tuple[int, ...] | None = None
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])

    def parts(self, index: Index) -> int:
        """How many chunks `x[index]` cuts dimension 0 into."""
        if isinstance(index, RankIndex):
            sizes: Mapping[str, int] = team_sizes(self.teams)
            if index.team not in sizes:
                fix = did_you_mean(index.team, sizes, "teams are")
                raise ProgramError(f"no team is named {index.team!r}: {fix}")
            return sizes[index.team]
        even = even_parts(self.teams)
        if even is None:
            raise ProgramError(
                f"[{index}] is a chunk of as many as the team has ranks, and it is unclear which "
                f"team: write .chunk({index}, parts)"
            )
        return even


@dataclass(frozen=True, slots=True)
class Handle(Steps):
    """A view of a buffer; each step gives another handle. `ir` is the `View` itself."""

    scope: Scope = field(repr=False, compare=False)
    ir: View

    def __getitem__(self, key: Index | slice | tuple[slice, ...]) -> Handle:
        """A chunk of dimension 0 (`x[1]`, `x[p.tp.rank]`), or slices (`x[2:4]`, `x[:, 2:4]`)."""
        if isinstance(key, int | RankIndex):
            return self.chunk(key, self.scope.parts(key))
        found = self
        for dim, part in enumerate(key if isinstance(key, tuple) else (key,)):
            if part.step not in (None, 1):
                raise ProgramError(f"{self} has slices without steps only: write start:stop")
            if part.start is not None or part.stop is not None:
                start = 0 if part.start is None else part.start
                stop = self.shape[dim] if part.stop is None else part.stop
                found = found.slice(dim, start, stop)
        return found

    def __str__(self) -> str:
        return print_view(self.ir, Program(teams=self.scope.teams))

    @property
    def buffer(self) -> Buffer:
        """The buffer that it is a view of."""
        return self.scope.buffers[self.ir.buffer]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, where every rank has the same."""
        frame = Program(
            teams=self.scope.teams,
            tables=tuple(self.scope.tables.values()),
            ranks=self.scope.ranks,
        )
        found = {self.ir.box(self.buffer, frame.where(rank)).sizes for rank in frame.world}
        if len(found) != 1:
            raise ProgramError(
                f"{self} has sizes {sorted(found)} on different ranks: give both ends of a slice"
            )
        return found.pop()

    def then(self, step: Step) -> Handle:
        return Handle(self.scope, self.ir.then(step))

    def t(self) -> Handle:
        """The transpose of a matrix."""
        return self.permute(1, 0)

    def cast(self, dtype: DType | str) -> Handle:
        """The same bytes as another element type."""
        return self.then(Cast(element_type(dtype)))


def element_type(dtype: DType | str) -> DType:
    """An element type by its name, such as `"bf16"`."""
    try:
        return DType(dtype)
    except ValueError:
        fix = did_you_mean(dtype, (known.value for known in DType), "element types are")
        raise ProgramError(f"no element type is named {dtype!r}: {fix}") from None
