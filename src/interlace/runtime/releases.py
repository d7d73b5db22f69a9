"""Where tensors that a run makes may go before its end, and whose memory they are.

Note [Whose memory]
    A tensor's memory goes back at once to the stream that it was allocated on, whose next ops may
    be given it. Another stream that still reads it must be made known to the allocator. Allocs are
    made before a run, on the caller's stream; what a Call gives is made on the Call's.
"""

from __future__ import annotations

from interlace.ir import Alloc, Free, Program, views_in


def callers(program: Program) -> str:
    """The stream that is the caller's: `main`, or the first if none is called so."""
    names = program.streams() or ("main",)
    return "main" if "main" in names else names[0]


def homes(program: Program) -> dict[str, str]:
    """The stream that each buffer of a run is allocated on."""
    found, main = dict[str, str](), callers(program)
    for op in program.ops:
        if isinstance(op, Alloc):
            found[op.buffer.name] = main
        for access in op.writes():
            found.setdefault(access.view.buffer, op.stream)
    return found


def releases(program: Program) -> dict[int, list[str]]:
    """By op: the fresh buffers that may go after it, which one stream makes and has all uses of.

    The Program's own Frees say it otherwise, and what is returned stays.
    """
    kept = {view.buffer for arg in program.returned() for view in views_in(arg)}
    kept |= {op.buffer for op in program.ops if isinstance(op, Free)}
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
