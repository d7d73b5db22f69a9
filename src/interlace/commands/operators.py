"""Whether the operators that a schedule calls exist, as far as the PyTorch that is here can say.

remarks = look_up(programs)    # ProgramError for an operator that PyTorch does not have

What the passes know by name is there; for any other name PyTorch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from interlace.errors import ProgramError

if TYPE_CHECKING:
    from interlace.ir import Program
    from interlace.verify import Finding


def look_up(programs: Sequence[Program]) -> tuple[Finding, ...]:
    """What to remark about operators; raises for one that is missing where it should be."""
    from interlace.verify import Finding

    return tuple(
        Finding("unknown-operator", message, level="remark") for message in _remarks(programs)
    )


def _remarks(programs: Sequence[Program]) -> list[str]:
    from interlace.ir.call_names import FUNCTIONS, KNOWN_NAMESPACES
    from interlace.ir.call_names import OPERATORS as OURS
    from interlace.ir.operators import OPERATORS, POINTWISE

    known = {*FUNCTIONS, *OURS, *OPERATORS, *POINTWISE.values()}
    calls: dict[str, str] = {}  # the first place of each name
    for program in programs:
        for fn, place in _calls(program):
            if fn not in known:
                calls.setdefault(fn, place)
    own = {fn: at for fn, at in calls.items() if fn.partition(".")[0] in KNOWN_NAMESPACES}
    remarks = [
        f"{at}: {fn!r} is not known to Interlace, which takes it for granted that this operator "
        "touches its arguments and results alone"
        for fn, at in calls.items()
        if fn not in own
    ]
    if not own:
        return remarks
    try:
        from interlace.runtime.operators import resolve
    except ImportError:
        return [*remarks, "whether the operators exist was not looked up: PyTorch is not here"]
    for fn, place in own.items():
        try:
            resolve(fn)
        except ProgramError as error:
            raise ProgramError(f"{place}: {error}") from None
    return remarks


def _calls(program: Program) -> Iterator[tuple[str, str]]:
    """Every operator that a Program calls, and where."""
    from interlace.ir import Call
    from interlace.ir.program import spots

    regions = {region.name for region in program.regions}
    for _, op in spots(program.ops):
        if isinstance(op, Call) and op.fn not in regions:
            yield op.fn, str(op.loc) or program.name
    for region in program.regions:
        for node in region.body:
            yield node.fn, f"region {region.name!r} of {program.name}"
