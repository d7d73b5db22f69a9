"""What a Program calls, and whether it may: operators of others only where they are named.

    refuse_others(program)                       # ProgramError where it calls mylib.scale.default
    refuse_others(program, allowed={"mylib"})    # a namespace, or the operator's full name

A schedule from a file is a stranger's, and what this process or a library of it registered does
whatever it does: reads files, sends, looks at memory that is not its own. Who made a Program from a
graph of this process knows the operators of it, and names them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from interlace.errors import ProgramError
from interlace.ir.call_names import KNOWN_NAMESPACES, is_known
from interlace.ir.ops import Call
from interlace.ir.program import Program, spots


def called(program: Program) -> Iterator[tuple[str, str]]:
    """Every operator that a Program calls, and where."""
    regions = {region.name for region in program.regions}
    for _, op in spots(program.ops):
        if isinstance(op, Call) and op.fn not in regions:
            yield op.fn, str(op.loc) or program.name
    for region in program.regions:
        for node in region.body:
            yield node.fn, f"region {region.name!r} of {program.name}"


def others(program: Program) -> frozenset[str]:
    """The operators of a Program that are neither PyTorch's own nor Interlace's."""
    return frozenset(fn for fn, _ in called(program) if not is_known(fn))


def refuse_others(program: Program, allowed: Collection[str] = ()) -> None:
    """Raises ProgramError for a call of an operator of others that is not allowed."""
    for fn, place in called(program):
        if not (is_known(fn) or fn in allowed or fn.partition(".")[0] in allowed):
            raise ProgramError(
                f"{place}: a schedule may not call {fn!r}, for it is of none of "
                f"{', '.join(KNOWN_NAMESPACES)}: if you know that it touches its arguments and "
                f"results alone, name it (Executor(..., operators=[{fn!r}]), or "
                f"interlace check --operators {fn})"
            )
