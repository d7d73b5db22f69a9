"""Streams that buffers belong to, and when a run lets go of those that the Program does not free.

>>> released_after(program)
{7: ['gathered']}
"""

from __future__ import annotations

from interlace.ir.ops import views_in
from interlace.ir.program import Program


def callers(program: Program) -> str:
    """The stream that is the caller's: `main`, or the first if none is called so."""
    names = program.streams()
    return "main" if "main" in names or not names else names[0]


def homes(program: Program) -> dict[str, str]:
    """The stream that each buffer of a run is allocated on."""
    main = callers(program)
    found = {buffer.name: main for buffer in program.params}
    for op in program.ops:
        if (taken := op.ordering().takes) is not None:
            found[taken.name] = main
        for access in op.writes():
            found.setdefault(access.view.buffer, op.stream)
    return found


def released_after(program: Program) -> dict[int, list[str]]:
    """Fresh buffers released after each op: used by one stream alone. The Program's own Frees and
    returned buffers are left out."""
    kept = {view.buffer for arg in program.returned() for view in views_in(arg)}
    kept |= {freed for op in program.ops if (freed := op.ordering().frees) is not None}
    streams = {name: {stream} for name, stream in homes(program).items()}
    last: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for access in (*op.reads(), *op.writes()):
            streams.setdefault(access.view.buffer, set()).add(op.stream)
            last[access.view.buffer] = index
    found: dict[int, list[str]] = {}
    for buffer in program.buffers().values():
        name = buffer.name
        if buffer.kind != "fresh" or name in kept or name not in last:
            continue
        if len(streams[name]) == 1:
            found.setdefault(last[name], []).append(name)
    return found
