"""Ranges that `torch.profiler` shows of a run: one for each op, by its Program and its site.

    names = range_names(program)
    if profiler._is_profiler_enabled:       # torch's own flag; a run without a profiler reads it
        step = in_range(names[op.site], step)

Ranges of streams that have a thread of their own, as all but the first have on the CPU, are shown
with `_ExperimentalConfig(profile_all_threads=True)`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch.autograd import profiler

from interlace.ir import Program


def range_names(program: Program) -> defaultdict[int | None, str]:
    """Name of the ranges of each site's ops; all other ops have that of the Program."""
    own = f"interlace {program.name}"
    names: defaultdict[int | None, str] = defaultdict(lambda: own)
    for site in program.sites:
        place = f"{site.module} " if site.module else ""
        names[site.id] = f"{own}: {place}{site.kind} ({site.strategy})"
    return names


def in_range(name: str, run: Callable[[], object]) -> Callable[[], None]:
    """`run`, in a range of this name."""

    def ranged() -> None:
        with profiler.record_function(name):
            run()

    return ranged
