"""Rewrite: a list of ops as a pass changes it, by the places that ops had in the list before.

rewrite = Rewrite(program.ops)
rewrite.replace(3)                          # op 3 goes
rewrite.before(5, Wait(event="e1"))
rewrite.after(2, Record(event="e1"))
program = program.replace(ops=rewrite.ops())
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from interlace.ir import Alloc, Buffer, Group, Op


def tagged(op: Op, **common: Any) -> Op:
    """An op, and what it groups, with another stream or another site."""
    if isinstance(op, Group):
        common["ops"] = tuple([dataclasses.replace(member, **common) for member in op.ops])
    return dataclasses.replace(op, **common)


def declaring(alloc: Op, buffer: Buffer) -> Op:
    """An Alloc, of another buffer."""
    assert isinstance(alloc, Alloc)
    return dataclasses.replace(alloc, buffer=buffer)


class Rewrite:
    """The changes to a list of ops. What is added at one place stays in the order of adding."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = ops
        self._before: defaultdict[int, list[Op]] = defaultdict(list)
        self._after: defaultdict[int, list[Op]] = defaultdict(list)
        self._instead: dict[int, tuple[Op, ...]] = {}

    def before(self, index: int, *ops: Op) -> None:
        """Adds ops right before one."""
        self._before[index] += ops

    def after(self, index: int, *ops: Op) -> None:
        """Adds ops right after one."""
        self._after[index] += ops

    def replace(self, index: int, *ops: Op) -> None:
        """Puts ops in the place of one; none: it goes."""
        self._instead[index] = ops

    def ops(self) -> tuple[Op, ...]:
        """The list that it has become."""
        made: list[Op] = []
        for index, op in enumerate(self._ops):
            made += self._before.get(index, ())
            made += self._instead.get(index, (op,))
            made += self._after.get(index, ())
        return tuple(made)
