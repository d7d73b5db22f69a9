"""Element types, rank-dependent integers, teams, tables and buffers: the nouns of a Program.

A Program is one text for all ranks. What differs between ranks is an `Index` (`tp.rank + 1`,
counted modulo the team) or a `TableEntry` (`rows[tp.rank]`, an entry of a per-rank table). `Where`
says which rank asks, and resolves both to integers:

    >>> team = Team("tp", 4)
    >>> where = Where.of(rank=3, teams=(team,), tables=(Table("rows", "tp", (3, 3, 2, 2)),))
    >>> where.index(RankIndex("tp", 1)), where.dim(TableEntry("rows", RankIndex("tp", 1)))
    (0, 3)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from interlace.errors import ProgramError, TeamError

VALUE_BITS = 24
"""Bits of what a signal may be raised to: transports count runs above them, or wrap around."""


class DType(StrEnum):
    """Element type, by its short name."""

    f64 = "f64"
    f32 = "f32"
    bf16 = "bf16"
    f16 = "f16"
    f8e4m3 = "f8e4m3"
    f8e5m2 = "f8e5m2"
    i64 = "i64"
    i32 = "i32"
    i16 = "i16"
    i8 = "i8"
    u64 = "u64"
    u32 = "u32"
    u16 = "u16"
    u8 = "u8"
    bool = "bool"
    c64 = "c64"
    c128 = "c128"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self.value]


_ITEMSIZE = {
    **{"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "f8e4m3": 1, "f8e5m2": 1, "i64": 8, "i32": 4},
    **{"i16": 2, "i8": 1, "u64": 8, "u32": 4, "u16": 2, "u8": 1, "bool": 1, "c64": 8, "c128": 16},
}


@dataclass(frozen=True, slots=True)
class RankIndex:
    """`(rank of this process in team + offset) % team size`; printed `tp.rank + 1`."""

    team: str
    offset: int = 0

    def __add__(self, offset: int) -> RankIndex:
        return RankIndex(self.team, self.offset + offset)

    def __sub__(self, offset: int) -> RankIndex:
        return RankIndex(self.team, self.offset - offset)

    def __str__(self) -> str:
        sign = f" {'+' if self.offset > 0 else '-'} {abs(self.offset)}" if self.offset else ""
        return f"{self.team}.rank{sign}"


@dataclass(frozen=True, slots=True)
class Others:
    """Every other rank of a team; printed `tp.others`."""

    team: str

    def __str__(self) -> str:
        return f"{self.team}.others"


Index = int | RankIndex


@dataclass(frozen=True, slots=True)
class TableEntry:
    """An entry of a per-rank table; printed `rows[tp.rank]`."""

    table: str
    index: Index

    def __str__(self) -> str:
        return f"{self.table}[{self.index}]"


Dim = int | TableEntry


@dataclass(frozen=True, slots=True)
class Table:
    """One integer for each rank of a team, such as the rows that each rank holds."""

    name: str
    team: str
    values: tuple[int, ...]

    def __getitem__(self, index: Index) -> TableEntry:
        """The entry of a rank, as a size; printed `rows[tp.rank]`."""
        return TableEntry(self.name, index)

    def start(self, index: int) -> int:
        """Sum of the entries before `index`: where chunk `index` begins."""
        return sum(self.values[:index])


@dataclass(frozen=True, slots=True)
class Team:
    """An ordered set of ranks.

    Without `groups` it is a mesh axis: the teams of a Program, in order, span its ranks row by row
    (the first axis varies slowest, as in `init_device_mesh`). With `groups` it names global ranks:
    each group is one instance of the team, and every rank stands in at most one.
    """

    name: str
    size: int
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def rank(self) -> RankIndex:
        """The rank of the process that runs the Program, in this team."""
        return RankIndex(self.name)

    @property
    def others(self) -> Others:
        """Every other rank of this team."""
        return Others(self.name)


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's place in a team: its index, and the global ranks of the whole team, in order."""

    index: int
    ranks: tuple[int, ...]


def members(teams: tuple[Team, ...], ranks: tuple[int, ...] | None, rank: int) -> dict[str, Member]:
    """The place of global `rank` in each team of a Program that runs on `ranks` (None: all)."""
    ranks = _ranks(teams, ranks)
    if rank not in ranks:
        raise TeamError(f"rank {rank} is not among the Program's ranks {list(ranks)}")
    return _members_at(teams, ranks, ranks.index(rank), {})


def all_members(
    teams: tuple[Team, ...], ranks: tuple[int, ...] | None
) -> dict[int, dict[str, Member]]:
    """The same for every rank; ranks of one team share its tuple of ranks."""
    ranks, shared = _ranks(teams, ranks), dict[tuple[str, int], tuple[int, ...]]()
    return {rank: _members_at(teams, ranks, i, shared) for i, rank in enumerate(ranks)}


def _ranks(teams: tuple[Team, ...], ranks: tuple[int, ...] | None) -> tuple[int, ...]:
    axes = [team for team in teams if team.groups is None]
    world = math.prod(team.size for team in axes)
    if ranks is None:
        explicit = {r for team in teams if team.groups for group in team.groups for r in group}
        ranks = tuple(range(world)) if axes or not explicit else tuple(sorted(explicit))
    if axes and len(ranks) != world:
        raise TeamError(
            f"teams {', '.join(f'{a.name}[{a.size}]' for a in axes)} span {world} ranks, but the "
            f"Program runs on {len(ranks)}: give it {world} ranks or other team sizes"
        )
    return ranks


def _members_at(
    teams: tuple[Team, ...],
    ranks: tuple[int, ...],
    position: int,
    shared: dict[tuple[str, int], tuple[int, ...]],
) -> dict[str, Member]:
    """`shared` keeps the ranks of each team, by its name and the position of its first rank."""
    found: dict[str, Member] = {}
    stride = len(ranks)
    for team in teams:
        if team.groups is None:
            stride //= team.size
            index = position // stride % team.size
            first = position - index * stride
            group = shared.get((team.name, first))
            if group is None:
                stop = first + stride * team.size
                group = shared[team.name, first] = ranks[first:stop:stride]
            found[team.name] = Member(index, group)
        else:
            rank = ranks[position]
            group = next((group for group in team.groups if rank in group), None)
            if group is not None:
                found[team.name] = Member(group.index(rank), group)
    return found


@dataclass(frozen=True, slots=True)
class Where:
    """Who asks: resolves `Index` and `Dim` to integers for one rank."""

    rank: int
    members: Mapping[str, Member]
    tables: Mapping[str, Table]

    @classmethod
    def of(
        cls,
        rank: int,
        teams: tuple[Team, ...],
        tables: tuple[Table, ...] = (),
        ranks: tuple[int, ...] | None = None,
    ) -> Where:
        """The place of global `rank` in a Program with these teams and tables."""
        return cls(rank, members(teams, ranks, rank), {table.name: table for table in tables})

    def member(self, team: str) -> Member:
        """This rank's place in `team`."""
        member = self.members.get(team)
        if member is None:
            raise TeamError(f"rank {self.rank} is in no team named {team!r}")
        return member

    def index(self, index: Index) -> int:
        """The integer that `index` stands for on this rank."""
        if isinstance(index, int):
            return index
        member = self.member(index.team)
        return (member.index + index.offset) % len(member.ranks)

    def dim(self, dim: Dim) -> int:
        """The integer that `dim` stands for on this rank."""
        if isinstance(dim, int):
            return dim
        values = self.table(dim.table).values
        index = self.index(dim.index)
        if not 0 <= index < len(values):
            raise ProgramError(f"table {dim.table} has {len(values)} entries, not one at {index}")
        return values[index]

    def table(self, name: str) -> Table:
        """The table of that name."""
        table = self.tables.get(name)
        if table is None:
            raise ProgramError(f"no table named {name!r}; known are {sorted(self.tables)}")
        return table


KINDS = ("input", "output", "local", "symmetric", "fresh")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Named storage.

    `kind` says where the storage comes from: `input` and `output` from the caller (an input may be
    written), `local` from the Executor's arena, `symmetric` from the pool of `team` (present on
    every rank and readable by its peers), `fresh` from torch, anew in every run.

    An input or output with a `team` is registered with it: one and the same tensor in every run,
    which peers read and write where it lies.
    """

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    kind: str = "local"
    team: str | None = None
    strides: tuple[int, ...] | None = None
    """Elements; None is contiguous (row-major)."""
    storage: str | None = None
    """Local buffers with the same storage name share its bytes, each from its `offset`."""
    offset: int = 0
    """Bytes from the start of `storage`."""

    @property
    def registered(self) -> bool:
        """Whether it is memory of the caller's that peers reach."""
        return self.team is not None and self.kind in ("input", "output")


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
