"""Where tensors that a run makes may go before its end."""

from __future__ import annotations

from interlace.ir import Free, Program, views_in


def releases(program: Program) -> dict[int, list[str]]:
    """By op: the fresh buffers that may go after it, which one stream has all uses of.

    The Program's own Frees say it otherwise, and what is returned stays.
    """
    kept = {view.buffer for arg in program.returned() for view in views_in(arg)}
    kept |= {op.buffer for op in program.ops if isinstance(op, Free)}
    streams: dict[str, set[str]] = {}
    last: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for access in (*op.reads(), *op.writes()):
            streams.setdefault(access.view.buffer, set()).add(op.stream)
            last[access.view.buffer] = index
    found: dict[int, list[str]] = {}
    for buffer in program.buffers().values():
        name = buffer.name
        if buffer.kind == "fresh" and name not in kept and len(streams.get(name, ())) == 1:
            found.setdefault(last[name], []).append(name)
    return found
