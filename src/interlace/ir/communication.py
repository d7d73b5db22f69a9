"""How much communication a Program has, in words, whether or not it states sites.

>>> told(load("all_gather_linear.ilc"))
'1 one-sided copy'
"""

from __future__ import annotations

from interlace.ir.ops import Collective, Get, Group, Put, Recv, Send
from interlace.ir.program import Program, spots

_WORDS = {
    "collective": (Collective,),
    "one-sided copy": (Put, Get),
    "send": (Send,),
    "receive": (Recv,),
}


def told(program: Program) -> str:
    """The numbers of collectives, one-sided copies and messages of one rank; empty: none."""
    found = [op for _, op in spots(program.ops)]
    ops = [each for op in found for each in (op.ops if isinstance(op, Group) else (op,))]
    counts = {word: sum(isinstance(op, kinds) for op in ops) for word, kinds in _WORDS.items()}
    return ", ".join(f"{n} {_plural(word, n)}" for word, n in counts.items() if n)


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
