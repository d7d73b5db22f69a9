"""Element types, rank-dependent integers, teams, tables and buffers: the nouns of a Program.

A Program is one text for all ranks. What differs between ranks is an `Index` (`tp.rank + 1`,
counted modulo the team) or a `TableEntry` (`rows[tp.rank]`); `Where` resolves both for one rank:

    >>> where = Program(teams=(Team("tp", 4),)).where(rank=3)
    >>> where.index(RankIndex("tp", 1))
    0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from types import UnionType
from typing import Literal, ParamSpec

from interlace.errors import ProgramError, TeamError
from interlace.ir.sizes import Int, Size

P = ParamSpec("P")
MAX_RANKS = 1 << 16
"""Ranks of a world: what is checked is checked for each of them."""
MAX_DIMS = 64
"""Dimensions of a buffer or a view, as in torch."""
MAX_BYTES = (1 << 63) - 1
"""Bytes that a buffer or a view may span: torch counts with 64 bits."""
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


Dim = Int | TableEntry


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
    hosts: tuple[tuple[int, ...], ...] | None = None
    """Where it spans hosts, which share no memory: those of its ranks that are on each."""

    @property
    def rank(self) -> RankIndex:
        """The rank of the process that runs the Program, in this team."""
        return RankIndex(self.name)

    @property
    def others(self) -> Others:
        """Every other rank of this team."""
        return Others(self.name)

    def apart(self, one: int, other: int) -> bool:
        """True if these two of its ranks are on different hosts."""
        return self.hosts is not None and not any(one in h and other in h for h in self.hosts)


def team_sizes(teams: Sequence[Team]) -> dict[str, int]:
    """Parts that `x[tp.rank]` cuts dimension 0 into, by team."""
    return {team.name: team.size for team in reversed(teams)}


def even_parts(teams: Sequence[Team]) -> int | None:
    """Parts that `x[2]` cuts dimension 0 into: the teams' size, if they all have the same."""
    sizes = {team.size for team in teams}
    return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's place in a team: its index, and the global ranks of the whole team, in order."""

    index: int
    ranks: tuple[int, ...]


class TeamLayout:
    """The ranks that run a Program (None: all of its teams), and the place of each in its teams.

    Ranks of one instance of a team share one tuple of its ranks: large worlds have many.
    """

    def __init__(self, teams: tuple[Team, ...], ranks: tuple[int, ...] | None) -> None:
        axes = [team for team in teams if team.groups is None]
        world = math.prod(team.size for team in axes)
        check_world(world)
        if ranks is None:
            ranks = spanned(teams)
        if axes and len(ranks) != world:
            raise TeamError(
                f"teams {', '.join(f'{a.name}[{a.size}]' for a in axes)} span {world} ranks, but "
                f"the Program runs on {len(ranks)}: give it {world} ranks or other team sizes"
            )
        check_world(len(ranks))
        self.ranks = ranks
        self._teams, self._world = teams, world
        self._positions = {rank: position for position, rank in enumerate(ranks)}
        self._groups = {
            team.name: {
                rank: Member(index, group)
                for group in reversed(team.groups)
                for index, rank in enumerate(group)
            }
            for team in teams
            if team.groups is not None
        }
        self._axes: dict[tuple[str, int], tuple[int, ...]] = {}

    def members(self, rank: int) -> dict[str, Member]:
        """The place of global `rank` in each team."""
        position = self._positions.get(rank)
        if position is None:
            raise TeamError(f"rank {rank} is not among the Program's ranks {_some(self.ranks)}")
        found: dict[str, Member] = {}
        stride = self._world
        for team in self._teams:
            if team.groups is None:
                stride //= team.size
                index = position // stride % team.size
                first = position - index * stride
                ranks = self._axes.get((team.name, first))
                if ranks is None:
                    ranks = self.ranks[first : first + team.size * stride : stride]
                    self._axes[team.name, first] = ranks
                found[team.name] = Member(index, ranks)
            else:
                member = self._groups[team.name].get(rank)
                if member is not None:
                    found[team.name] = member
        return found


def spanned(teams: Sequence[Team]) -> tuple[int, ...]:
    """The global ranks of a mesh, or without a mesh those in the groups."""
    axes = [team.size for team in teams if team.groups is None]
    listed = {rank for team in teams for group in team.groups or () for rank in group}
    check_world(math.prod(axes))
    return tuple(range(math.prod(axes))) if axes or not listed else tuple(sorted(listed))


def check_world(size: int) -> None:
    """Raises `TeamError` for a world of more ranks than are supported."""
    if size > MAX_RANKS:
        raise TeamError(f"a world of {size} ranks: {MAX_RANKS} are the most that it can have")


def _some(ranks: Sequence[int]) -> str:
    return f"{[*ranks[:16]]} and {len(ranks) - 16} more" if len(ranks) > 16 else f"{[*ranks]}"


@dataclass(frozen=True, slots=True)
class Where:
    """Who asks: resolves `Index` and `Dim` to integers for one rank."""

    rank: int
    members: Mapping[str, Member]
    tables: Mapping[str, Table]

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

    def peer(self, team: str, index: Index) -> int:
        """The global rank of the member of a team with this index."""
        ranks, at = self.member(team).ranks, self.index(index)
        if not 0 <= at < len(ranks):
            raise TeamError(f"team {team} has {len(ranks)} ranks, and no rank {at}")
        return ranks[at]

    def dim(self, dim: Dim) -> Int:
        """The size that `dim` stands for on this rank."""
        if isinstance(dim, int | Size):
            return dim
        values = self.table(dim.table).values
        index = self.index(dim.index)
        if not 0 <= index < len(values):
            raise ProgramError(f"table {dim.table} has {len(values)} entries, not one at {index}")
        return values[index]

    def value(self, value: Index | Dim) -> Int:
        """The integer that an index or a size stands for on this rank."""
        return self.index(value) if isinstance(value, RankIndex) else self.dim(value)

    def table(self, name: str) -> Table:
        """The table of that name."""
        table = self.tables.get(name)
        if table is None:
            raise ProgramError(f"no table named {name!r}; known are {sorted(self.tables)}")
        return table


@dataclass(frozen=True, slots=True)
class Buffer:
    """Named storage.

    `kind` says where the storage comes from: `input` and `output` from the caller (an input may be
    written), `local` from the arena, `symmetric` from the pool of `team` (present on
    every rank and readable by its peers), `fresh` from torch, anew in every run.

    An input or output with a `team` is registered with it: one and the same tensor in every run,
    which peers read and write where it lies.
    """

    name: str
    dtype: DType
    shape: tuple[Dim, ...]
    kind: str = "local"
    team: str | None = None
    strides: tuple[Int, ...] | None = None
    """Elements; None is contiguous (row-major)."""
    storage: str | None = None
    """Local buffers with the same storage name share its bytes, each from its `offset`."""
    offset: int = 0
    """Bytes from the start of `storage`: a number for all sizes of a class."""

    @property
    def registered(self) -> bool:
        """True if it is memory of the caller that peers reach."""
        return self.team is not None and self.kind in ("input", "output")


def contiguous_strides(sizes: tuple[Int, ...]) -> tuple[Int, ...]:
    """Row-major strides in elements."""
    strides: list[Int] = []
    step: Int = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size if size > 1 else 1
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Written:
    """The way a field is written in text, beyond its type and default: see roles.py."""

    role: str = ""
    keyword: str = ""
    """Its keyword, where that is not the field's name."""
    positional: bool = False
    """It may be given by position though it has a default."""
    named: bool = False
    """The printer writes its keyword though it may be given by position."""
    always: bool = False
    """The printer writes it though it has its default."""
    rest: bool = False
    """It is a tuple that takes all further positional arguments."""
    words: Collection[str] = ()
    """Values that are the call's own word, as in `all_gather(x, y)`."""
    access: Literal["", "read", "write"] = ""
    """For a view: the op reads or writes it,"""
    of_peer: bool = False
    """in the memory of its peer."""
    holds: UnionType | None = None
    """Which ops it holds."""
    holding: str = ""
    """The same in words, for errors."""


def _metadata(details: Callable[P, Written]) -> Callable[P, dict[str, Written]]:
    return lambda *args, **kwargs: {"written": details(*args, **kwargs)}


written = _metadata(Written)
"""Metadata for a field, from the details of a `Written`."""
NAME = written("name")
"""A name: of an event, a signal, a buffer."""
TEAM = written("team")
"""The name of a team: that of the op's peer, or the only one, where a text gives none."""
COMMON = written("common")
"""A field that every op has."""


@dataclass(frozen=True, slots=True)
class Table:
    """One integer for each rank of a team, such as the rows that each rank holds."""

    name: str = field(metadata=COMMON)
    team: str = field(metadata=NAME)
    values: tuple[Int, ...] = field(metadata=written(rest=True))
    starts: tuple[Int, ...] = field(init=False, repr=False, compare=False, metadata=COMMON)
    """Where chunk i begins: the sum of the entries before it; then the sum of all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", tuple(accumulate(self.values, initial=0)))

    def __getitem__(self, index: Index) -> TableEntry:
        """The entry of a rank, as a size; printed `rows[tp.rank]`."""
        return TableEntry(self.name, index)
