"""A site alone: its ops as a Program of their own, which is what a prediction plays.

program = isolated(values, collective, ops, names)        # all ranks; what ops only read is given
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from interlace.ir import (
    Alloc,
    Buffer,
    Call,
    Collective,
    Dim,
    Op,
    Program,
    RankIndex,
    Team,
    View,
    map_views,
)
from interlace.ir.types import TableEntry
from interlace.passes.sites.values import Values
from interlace.passes.strategies.emitter import Names


def isolated(
    values: Values, collective: Collective, ops: Sequence[Op], names: Names | None
) -> Program:
    """The ops of a site as a Program of all its ranks: what they only read are its inputs."""
    program, team = values.program, values.program.team(collective.team)
    ops = [_for_all(op, collective, team, program.rank) for op in ops]
    known = dict(values.buffers)
    made: set[str] = set()
    used: dict[str, None] = {}
    for op in ops:
        for buffer in _declared(op):
            made.add(buffer.name)
            known[buffer.name] = buffer
        used.update((access.view.buffer, None) for access in (*op.reads(), *op.writes()))
    params: list[Buffer] = []
    for name in used:
        if name not in made:
            kind = "output" if known[name].kind == "output" else "input"
            shape = _shape(known[name], collective, team, program.rank)
            params.append(dataclasses.replace(known[name], kind=kind, shape=shape))
    tables = tuple(names.tables) if names is not None else program.tables
    alone = Program(
        name=program.name,
        teams=program.teams,
        tables=tables,
        params=tuple(params),
        ops=tuple(ops),
        results=(),
        regions=program.regions,
        ranks=program.ranks,
    )
    if _teams_in(alone) <= {team.name}:
        mine = tuple(table for table in tables if table.team == team.name)
        alone = alone.replace(teams=(Team(team.name, team.size),), tables=mine, ranks=None)
    return alone


def _for_all(op: Op, collective: Collective, team: Team, rank: int | None) -> Op:
    if isinstance(op, Alloc):
        shape = _shape(op.buffer, collective, team, rank)
        return dataclasses.replace(op, buffer=dataclasses.replace(op.buffer, shape=shape))
    return op


def _shape(buffer: Buffer, collective: Collective, team: Team, rank: int | None) -> tuple[Dim, ...]:
    """A shape for all ranks: in one rank's own Program an uneven shard has that rank's size."""
    shard = collective.src if collective.kind == "all_gather" else collective.dst
    if rank is None or collective.splits is None or shard != View(buffer.name):
        return buffer.shape
    return (TableEntry(collective.splits, team.rank), *buffer.shape[1:])


def _declared(op: Op) -> tuple[Buffer, ...]:
    match op:
        case Alloc(buffer=buffer):
            return (buffer,)
        case Call(fresh=fresh):
            return fresh
        case _:
            return ()


def _teams_in(program: Program) -> set[str]:
    """The teams that sizes, views and collectives name."""
    teams = {op.team for op in program.ops if isinstance(op, Collective)}
    owners = {table.name: table.team for table in program.tables}
    for buffer in program.buffers().values():
        teams.update(owners[dim.table] for dim in buffer.shape if isinstance(dim, TableEntry))

    def look(view: View) -> View:
        for step in view.steps:
            for name in ("index", "start", "stop", "parts"):
                value = getattr(step, name, None)
                if isinstance(value, RankIndex):
                    teams.add(value.team)
                elif isinstance(value, TableEntry):
                    teams.add(owners[value.table])
                elif isinstance(value, str):
                    teams.add(owners[value])
        return view

    for op in program.ops:
        map_views(op, look)
    return teams
