"""Structural validation: what must hold before a schedule can mean anything.

Names are unique and declared before use, views lie within their buffers on every rank, shapes and
element types agree, teams and peers exist. Whether the schedule is *sound* (races, deadlocks,
lifetimes) is for `interlace.verify`.

    >>> validate(parse(text), text)
    ProgramError: schedule.ilc:7: no buffer is named 'ful'
        6 |     full = alloc(f32[8, 4])
      > 7 |     main: copy(x, ful)
    did you mean 'full'?
"""

from __future__ import annotations

from interlace.errors import InterlaceError, ProgramError
from interlace.ir.check_context import Context, Fault
from interlace.ir.check_ops import OpChecker
from interlace.ir.check_program import check_header, check_results
from interlace.ir.program import Program
from interlace.ir.text.printer import print_lines
from interlace.ir.text.spelling import excerpt, lines_of


def validate(program: Program, text: str | None = None) -> Program:
    """Raises ProgramError for the first rule that a Program breaks; gives the Program back.

    The error shows the line of the printed Program, or of `text`, which is what it was parsed from.
    """
    try:
        context = Context(program)
        check_header(context)
        ops = OpChecker(context)
        for place, op in enumerate(program.ops):
            context.tag = ("op", place)
            ops.check(op)
        check_results(context)
    except Fault as fault:
        raise ProgramError(_message(program, fault, text)) from None
    return program


def _message(program: Program, fault: Fault, text: str | None) -> str:
    family, place = fault.tag
    loc = program.ops[place].loc if family == "op" else None
    if text is not None and loc is not None and loc.line and not loc.module:
        return f"{loc}: {fault.what}\n{excerpt(lines_of(text), loc.line)}\n{fault.fix}"
    try:
        lines = print_lines(program)
    except (InterlaceError, TypeError, ValueError):  # it holds what no text can say
        return f"{program.name}: {fault.what}\n{fault.fix}"
    line = next((i for i, found in enumerate(lines) if found.tag == fault.tag), 0) + 1
    head = f"{program.name}, line {line}"
    if loc is not None and str(loc):
        head = f"{head}, from {loc}"
    shown = excerpt([found.text for found in lines], line)
    return f"{head}: {fault.what}\n{shown}\n{fault.fix}"
