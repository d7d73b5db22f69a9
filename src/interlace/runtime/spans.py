"""When each op of a run ran, as a Timeline.

timeline = measured(program, rank=0, spans=[(0, 0.0, 0.5)])    # op 0, from 0 to half a second
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.cost import Span, Timeline, op_kind, op_name
from interlace.ir import Program


def measured(program: Program, rank: int, spans: Sequence[tuple[int, float, float]]) -> Timeline:
    """The timeline of one rank, from the index, start and end (in seconds) of its ops."""
    ops = program.ops
    return Timeline(
        tuple(
            Span(
                *(rank, ops[index].stream, index, op_name(ops[index]), start, end),
                site=ops[index].site,
                kind=op_kind(ops[index]),
            )
            for index, start, end in sorted(spans)
        ),
        name=program.name,
        source="measured",
    )
