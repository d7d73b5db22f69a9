"""Amount of communication in a Program, in words, and the named sizes that it depends on.

>>> told(load("all_gather_linear.ilc"))
'1 one-sided copy'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from interlace.ir.ops import Collective, Get, Group, Op, Put, Recv, Send
from interlace.ir.program import Program, spots
from interlace.ir.size_class import deciding
from interlace.ir.sizes import names_of
from interlace.ir.types import Buffer

_BETWEEN_RANKS = Collective | Put | Get | Send | Recv
_WORDS = {
    "collective": (Collective,),
    "one-sided copy": (Put, Get),
    "send": (Send,),
    "receive": (Recv,),
}


def told(program: Program) -> str:
    """The numbers of collectives, one-sided copies and messages of one rank; empty: none."""
    ops = _single(program)
    counts = {word: sum(isinstance(op, kinds) for op in ops) for word, kinds in _WORDS.items()}
    return ", ".join(f"{n} {_plural(word, n)}" for word, n in counts.items() if n)


def exchanged_sizes(program: Program) -> frozenset[str]:
    """The named sizes that what ranks exchange depends on: all ranks must run the same of them."""
    tables = [size for table in program.tables for size in table.values]
    buffers = program.buffers().values()
    shared = {b.name: b for b in buffers if b.kind == "symmetric" or b.registered}
    found: list[object] = [*tables, *_dimensions(shared.values())]
    box = program.boxes(program.world[0] if program.rank is None else program.rank)
    with deciding(program.sizes):
        for op in _single(program):
            between = isinstance(op, _BETWEEN_RANKS)
            for access in (*op.reads(), *op.writes()):
                reached = access.view.buffer in shared  # by peers, where this rank does not look
                if between or reached:
                    part = box(access.view)
                    found += (*part.sizes, *part.strides, part.offset) if reached else part.sizes
    return names_of(found)


def lasting_sizes(program: Program) -> frozenset[str]:
    """The named sizes that memory which stays between runs depends on."""
    kinds = ("local", "symmetric")
    return names_of(_dimensions(b for b in program.buffers().values() if b.kind in kinds))


def _dimensions(buffers: Iterable[Buffer]) -> Iterator[object]:
    return (size for b in buffers for size in (*b.shape, *(b.strides or ())))


def _single(program: Program) -> list[Op]:
    """All ops, those of groups one by one."""
    found = [op for _, op in spots(program.ops)]
    return [each for op in found for each in (op.ops if isinstance(op, Group) else (op,))]


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
