"""Steps as findings show them: node, source line, stream.

reference(step, 0, "writes mul").text   # "mul = aten.mul.Tensor(add, 2)"
"""

from __future__ import annotations

from interlace.verify.report import OpRef
from interlace_check.graphs.steps import MAIN, Place, Step


def reference(step: Step, rank: int, role: str) -> OpRef:
    """A step in a finding. Its `line` is the node's place in the graph, from 1."""
    return at_place(step.place, rank, role, step.stream)


def at_place(place: Place, rank: int, role: str, stream: str = "") -> OpRef:
    """A node in a finding."""
    return OpRef(rank, place.number, stream, f"{place.name} = {place.text}", role, loc=place.loc)


def stream_words(stream: str) -> str:
    """A stream in a sentence."""
    return "the caller's stream" if stream == MAIN else stream
