"""How much communication a Program has, in words, whether or not it states sites.

>>> told(load("all_gather_linear.ilc"))
'1 one-sided copy'
"""

from __future__ import annotations

from interlace.ir.ops import Collective, Get, Put, Recv, Send
from interlace.ir.program import Program, spots

_WORDS = {
    "collective": (Collective,),
    "one-sided copy": (Put, Get),
    "message": (Send, Recv),
}


def told(program: Program) -> str:
    """The numbers of collectives, one-sided copies and messages (each end counts) of one rank;
    empty if there are none."""
    ops = [op for _, op in spots(program.ops)]
    counts = {word: sum(isinstance(op, kinds) for op in ops) for word, kinds in _WORDS.items()}
    return ", ".join(f"{n} {_plural(word, n)}" for word, n in counts.items() if n)


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
