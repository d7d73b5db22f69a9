"""Uses of buffers: the ops that declare, read and write each, by their places in the list.

>>> uses = Uses(program)
>>> uses.makers["y"], uses.users["y"], uses.allocs["y"]
([3], [5, 7], 2)
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from interlace.ir import Buffer, Op, Program, Put, views_in
from interlace.ir.overlap import touched_by

Placed = tuple[int, Put]
"""A put and its place in the list."""


def used_by(ops: Iterable[Op]) -> set[str]:
    """The buffers that ops read or write, a peer's copies included."""
    return {access.view.buffer for op in ops for access in (*op.reads(), *op.writes())}


def returned_by(program: Program) -> set[str]:
    """The buffers that a run returns, or parts of them."""
    return {view.buffer for arg in program.returned() for view in views_in(arg)}


def allocs_of(ops: Iterable[Op]) -> dict[str, int]:
    """The Alloc of each buffer that has one."""
    declared = ((i, op.ordering().takes) for i, op in enumerate(ops))
    return {buffer.name: i for i, buffer in declared if buffer is not None}


def puts_of(program: Program, sites: Container[int | None]) -> dict[int | None, list[Placed]]:
    """The puts of each of these sites that has any, with their places in the list."""
    found: dict[int | None, list[Placed]] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Put) and op.site in sites:
            found.setdefault(op.site, []).append((index, op))
    return found


class Uses:
    """Index of the uses of a Program's buffers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffers: Mapping[str, Buffer] = program.buffers()
        self.calls, self.collectives = program.calls(), program.collectives()
        self.allocs, self.returned = allocs_of(program.ops), returned_by(program)
        self.touched = touched_by(program)
        self.makers: dict[str, list[int]] = {}
        """For each buffer the ops that write it,"""
        self.users: dict[str, list[int]] = {}
        """and those that read it."""
        for i, both in enumerate(self.touched):
            for known, accesses in zip((self.users, self.makers), both, strict=True):
                for name in dict.fromkeys(access.view.buffer for access in accesses):
                    known.setdefault(name, []).append(i)
