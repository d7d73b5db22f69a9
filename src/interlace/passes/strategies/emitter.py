"""Writes the ops of one site: names, tables, views of chunks, and the calls that fill them.

What depends on the rank is emitted as text for all ranks: an index is `tp.rank + k`, and a size
that differs between ranks is an entry of a per-rank table. Where all ranks agree, it is a number.

    >>> emitter.part(View("y"), emitter.rank + 1, (3, 3, 2))
    View(buffer='y', steps=(Chunk(index=RankIndex('tp', 1), parts='rows', dim=0),))
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from interlace.ir import (
    Alloc,
    Arg,
    Buffer,
    Call,
    Chunk,
    Collective,
    Copy,
    Dim,
    DType,
    Expect,
    Free,
    Get,
    Group,
    Index,
    Loc,
    Notify,
    Op,
    Others,
    Program,
    Put,
    RankIndex,
    Recv,
    Send,
    Slice,
    Table,
    TableEntry,
    Team,
    View,
)
from interlace.ir.sizes import Int
from interlace.strategies import Path

NOWHERE = Loc()
chunk_at = functools.lru_cache(4096)(Chunk)
"""A Chunk, made once for all sites that have it."""


class PathStep(NamedTuple):
    """Step k of a path, as ranks relative to this one."""

    chunk: RankIndex
    to: RankIndex
    source: RankIndex
    sent: RankIndex


Pieces = tuple[Slice | None, ...]
"""Ranges of a rank's rows, one for each piece that goes together; None is all."""


def rank_at(team: Team, offset: int) -> RankIndex:
    """The rank at an offset from this one, the long way round taken out."""
    return team.rank + (offset % team.size if offset >= 0 else -(-offset % team.size))


@functools.lru_cache(64)
def steps_of(team: Team, path: Path) -> tuple[PathStep, ...]:
    """The steps 1 .. W-1 of a path in a team."""
    offsets = path.chunk, path.to, path.source, path.sent
    steps = range(1, team.size)
    return tuple([PathStep(*[rank_at(team, offset.at(k)) for offset in offsets]) for k in steps])


def cut(view: View, within: Slice | None) -> View:
    """A view, or only some rows of it."""
    return view if within is None else view.then(within)


class Names:
    """The names and tables of a Program, to which sites add."""

    def __init__(self, program: Program) -> None:
        self.tables = list(program.tables)
        self.taken = {buffer.name for buffer in program.buffers().values()}
        self.taken |= {item.name for item in (*program.tables, *program.teams, *program.regions)}
        orders = [op.ordering() for op in program.ops]
        levels = [level for order in orders for level in (order.raises, order.expects)]
        self.taken |= {level.signal for level in levels if level is not None}

    def copy(self) -> Names:
        """The same names, to which others may be added apart from these."""
        made = copy.copy(self)
        made.tables, made.taken = [*self.tables], set(self.taken)
        return made

    def new(self, wanted: str) -> str:
        """A name that nothing has yet: `wanted`, or that with a number."""
        name, number = wanted, 1
        while name in self.taken:
            number += 1
            name = f"{wanted}_{number}"
        self.taken.add(name)
        return name

    def table(self, team: str, values: Sequence[Int]) -> str:
        """The name of the table with these values."""
        for table in self.tables:
            if table.team == team and table.values == tuple(values):
                return table.name
        self.tables.append(Table(self.new("rows"), team, tuple(values)))
        return self.tables[-1].name


class Emitter:
    """The ops of one site, as they are written; `kernels`: a copy inside of a rank is a kernel."""

    def __init__(
        self,
        names: Names,
        team: Team,
        collective: Collective,
        site: int | None,
        kernels: bool = False,
    ) -> None:
        self.names, self.team, self.serial, self.site = names, team, collective, site
        self.kernels = kernels
        self.size, self.rank = team.size, team.rank
        self.ops: list[Op] = []
        self._scratch: dict[tuple[str, tuple[Int, ...]], View] = {}

    def steps(self, path: Path) -> tuple[PathStep, ...]:
        """The steps 1 .. W-1 of a path."""
        return steps_of(self.team, path)

    # rank-dependent sizes and views

    def dim(self, values: Sequence[Int], index: Index) -> Dim:
        """`values[index]`: a number where all ranks agree, else an entry of a table."""
        if isinstance(index, int):
            return values[index]
        if len(set(values)) == 1:
            return values[0]
        return TableEntry(self.names.table(self.team.name, values), index)

    def chunk(self, index: Index, sizes: Sequence[Int], dim: int = 0) -> Chunk:
        """Part `index` of a dimension that consists of parts of these sizes, as a step."""
        even = len(set(sizes)) == 1
        parts = self.size if even else self.names.table(self.team.name, sizes)
        return chunk_at(index, parts, dim)

    def part(self, view: View, index: Index, sizes: Sequence[Int], dim: int = 0) -> View:
        """Part `index` of a dimension of a view that consists of parts of these sizes."""
        return view.then(self.chunk(index, sizes, dim))

    def head(
        self, view: View, values: Sequence[Int], index: Index, size: Int, dim: int = 0
    ) -> View:
        """The first `values[index]` of a dimension of `size`."""
        if set(values) == {size}:
            return view
        return view.slice(dim, 0, self.dim(values, index))

    # buffers

    def alloc(self, name: str, dtype: DType, shape: tuple[Dim, ...], kind: str = "local") -> View:
        """A new buffer of that (or a similar) name; a symmetric one is the team's."""
        team = self.team.name if kind == "symmetric" else None
        buffer = Buffer(self.names.new(name), dtype, shape, kind, team)
        self.emit(Alloc, buffer=buffer)
        return View(buffer.name)

    def declare(self, buffer: Buffer, kind: str) -> View:
        """A buffer of the serial Program, now of this kind."""
        made = buffer if buffer.kind == kind else dataclasses.replace(buffer, kind=kind)
        self.emit(Alloc, buffer=made)
        return View(buffer.name)

    def scratch(self, name: str, dtype: DType, shape: tuple[Int, ...]) -> View:
        """A local buffer that chunks of one size use one after another."""
        if (name, shape) not in self._scratch:
            self._scratch[name, shape] = self.alloc(name, dtype, shape)
        return self._scratch[name, shape]

    # ops

    def emit(self, kind: type[Op], loc: Loc = NOWHERE, **fields: Any) -> None:
        """Adds an op to the site; without a location it has the collective's."""
        loc = loc if loc != NOWHERE else self.serial.loc
        self.ops.append(kind(site=self.site, loc=loc, **fields))

    def call(self, fn: str, args: tuple[Arg, ...], out: View) -> None:
        """A call that writes into given memory."""
        self.emit(Call, fn=fn, args=args, outs=(out,))

    def like(self, op: Call | Collective, **changes: Any) -> None:
        """An op of the serial Program with some fields changed."""
        loc = op.loc if op.loc != NOWHERE else self.serial.loc
        self.ops.append(dataclasses.replace(op, site=self.site, loc=loc, **changes))

    def copy(self, src: View, dst: View, loc: Loc = NOWHERE) -> None:
        """`src` into `dst`, unless they are the same."""
        if src != dst:
            self.emit(Copy, loc, src=src, dst=dst)

    def own(self, src: View, dst: View) -> None:
        """`copy`, where it is the first thing that peers wait for: Note [Own parts] in whole.py."""
        if self.kernels and src != dst:
            self.ops.append(Copy(src=src, dst=dst, loc=self.serial.loc))
        else:
            self.copy(src, dst)

    def collective(self, kind: str, src: View, dst: View, **fields: object) -> None:
        """A collective like the serial one, of this kind."""
        changed = {"reduce": None, "splits": None, **fields}
        self.like(self.serial, kind=kind, src=src, dst=dst, **changed)

    def exchange(self, src: View, to: Index, dst: View, source: Index) -> None:
        """One message to a rank and one from another, which begin and end together."""
        common: dict[str, Any] = {"site": self.site, "loc": self.serial.loc}
        common |= {"team": self.team.name, "backend": self.serial.backend}
        ends = Send(src=src, peer=to, **common), Recv(dst=dst, peer=source, **common)
        self.emit(Group, ops=ends)

    def put(self, src: View, dst: View, peer: Index, signal: str, value: int = 1) -> None:
        """`src` into `dst` of a peer, which is then notified."""
        self.emit(Put, src=src, dst=dst, peer=peer, team=self.team.name)
        self.notify(signal, peer, value)

    def get(self, src: View, peer: Index, dst: View, signal: str, value: int = 1) -> None:
        """`src` of a peer into `dst`, once the peer has raised the signal."""
        self.expect(signal, peer, value)
        self.emit(Get, src=src, peer=peer, team=self.team.name, dst=dst)

    def notify(self, signal: str, peer: Index | Others, value: int = 1) -> None:
        """Raises a signal."""
        self.emit(Notify, signal=signal, peer=peer, team=self.team.name, value=value)

    def expect(self, signal: str, peer: Index, value: int = 1) -> None:
        """Waits for a signal."""
        self.emit(Expect, signal=signal, peer=peer, team=self.team.name, value=value)

    def free(self, view: View) -> None:
        """Gives a symmetric buffer back."""
        self.emit(Free, buffer=view.buffer)

    def sum_slots(self, slots: View, out: View) -> None:
        """The sum over the first dimension in the order of the ranks."""
        self.call("interlace.sum_slots", (slots,), out)
