"""Memory of a run as a picture: bytes of each kind during each op, one above the other.

It is an SVG in the page, drawn from the Program alone (`cost/memory.py`), so it has no times: ops
follow one another in the order of the list, as in torch's own picture of memory. Pointing at a
column tells its op; of a long Program a column has several ops, and shows the one that holds most.

    memory_figures([Run((program,))])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from interlace.cost.memory import IN_WORDS, KINDS, RunMemory, run_memory
from interlace.cost.op_times import op_name
from interlace.trace.tracks import Run

WIDE, HIGH, LEFT, BELOW = 840.0, 170.0, 64.0, 16.0
COLUMNS = 300
"""Columns of a picture, at most."""
STACKED = ("slots", "temporaries", "outputs", "inputs")
"""The kinds from the ground up: what stays as it is lies below what changes."""


def memory_figures(runs: Sequence[Run]) -> Iterator[tuple[str, RunMemory, str]]:
    """The name, the memory and the picture of each run that has a Program."""
    for run in runs:
        if run.programs:
            memory = run_memory(run.programs)
            yield run.name or run.programs[0].name, memory, _picture(memory)


def human(nbytes: float) -> str:
    """Bytes in words, such as `1.5 GB`."""
    power = min(3, max(0, int(math.log10(nbytes) // 3))) if nbytes else 0
    return f"{nbytes / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB')[power]}"


def _columns(memory: RunMemory) -> list[int]:
    """The op that each column shows."""
    totals = memory.totals
    num = min(len(totals), COLUMNS)
    edges = [len(totals) * column // num for column in range(num + 1)]
    found = [range(a, b) for a, b in itertools.pairwise(edges)]
    return [max(ops, key=lambda op: (totals[op], op == memory.peak_op)) for ops in found]


def _picture(memory: RunMemory) -> str:
    peak, shown = max(memory.peak, 1), _columns(memory)
    step, ground = (WIDE - LEFT) / len(shown), HIGH - BELOW

    def height(nbytes: int) -> float:
        return ground - (ground - 14) * nbytes / peak

    parts, below = list[str](), [0] * len(shown)
    for kind in STACKED:
        level = memory.levels[kind]
        above = [low + level[op] for low, op in zip(below, shown, strict=True)]
        if above != below:
            edge = [*_edge(above, step, height), *reversed(list(_edge(below, step, height)))]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
            parts.append(f'<polygon class="{kind}" points="{points}"/>')
        below = above
    for part in (0, 1, 2):
        y = height(peak * part // 2)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = human(peak * part / 2) if part else "0"
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{text}</text>')
    top = LEFT + step * (shown.index(memory.peak_op) + 0.5)
    parts.append(f'<path class="peak" d="M{top:.1f} 12l-4 -7h8z"/>')
    parts.append(f'<text x="{LEFT}" y="{HIGH - 2}">op 0</text>')
    last = len(memory.totals) - 1
    parts.append(f'<text class="end" x="{WIDE}" y="{HIGH - 2}">op {last}</text>')
    for column, op in enumerate(shown):
        at = f'x="{LEFT + column * step:.2f}" y="0" width="{step:.2f}" height="{ground}"'
        parts.append(f'<rect class="column" {at}><title>{escape(_said(memory, op))}</title></rect>')
    label = escape(f"memory over ops: {memory.line()}")
    box = f"0 0 {WIDE:g} {HIGH:g}"
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _edge(
    levels: Sequence[int], step: float, height: Callable[[int], float]
) -> Iterator[tuple[float, float]]:
    """The upper edge of a stack of columns, from left to right."""
    for column, level in enumerate(levels):
        yield LEFT + column * step, height(level)
        yield LEFT + (column + 1) * step, height(level)


def _said(memory: RunMemory, index: int) -> str:
    """Text of a column: its op, and what is alive during it."""
    ops = memory.program.ops
    name = f"{op_name(ops[index])} {ops[index].loc.module}".strip() if ops else ""
    kinds = [
        f"{memory.levels[kind][index]:,} of {words}"
        for kind, words in zip(KINDS, IN_WORDS, strict=True)
        if memory.levels[kind][index]
    ]
    return f"op {index} {name}: {memory.totals[index]:,} bytes: {', '.join(kinds)}"
