"""reconsider: sites once more, in the whole schedule: serial, or moved by copies as a whole.

`decompose` looks at a site alone, and there chunks win. In the whole schedule one collective may
lie under computation that depends on none of it, and then cutting the matmuls gains nothing; copies
leave that computation its SMs. (The peer kernel of `exchange` is predicted to gain more, and was
measured to take more: it holds SMs that the matmuls under way need.)

    sites = reconsidered(analysis, sites, machine, ("copies", "serial"), price)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from interlace.cost import Machine
from interlace.ir import Program, Site
from interlace.passes.find_sites import Analysis
from interlace.passes.strategies.choose import Choice
from interlace.passes.strategies.whole import unmovable
from interlace.passes.strategies.write import COPIES, written
from interlace.strategies import row_of

SOONER = 0.999
"""A schedule that takes more than this share of another is no better,"""
WHOLE = 1.01
"""or this, where copies leave matmuls whole that others cut, each piece with a kernel of its own:
four of these were measured to take up to 9 % longer than one; or where the other has a collective's
kernel beside matmuls, which hold up each other. No prediction says either."""
MOST_OPS = 400
"""Ops of a scheduled Program of some three layers: longer ones, where each trial takes a second and
more, get two trials, of all serial sites and of all that are cut."""

Price = Callable[[Program], tuple[Program, float]]
"""Schedules a decomposed Program: gives that, and the seconds that it is predicted to take."""


def reconsidered(
    analysis: Analysis,
    chosen: Mapping[int, Site],
    machine: Machine,
    ways: Sequence[str],
    price: Price,
) -> dict[int, Site]:
    """The Sites of a serial Program: as `chosen`, or one of the `ways` (`copies`, `serial`) with
    which the whole Program is predicted to end sooner.

    Sites that are alike change together; those that were overlapped before stay.
    """
    gpu = machine.device == "cuda"
    collectives = analysis.program.collectives().values()
    movable = {op.site for op in collectives if not unmovable(analysis.values, op)}
    scheduled, best = price(written(analysis, chosen, gpu))
    least, sites = best, dict(chosen)
    long = len(scheduled.ops) > MOST_OPS
    others = [site for site in scheduled.sites if site.id not in analysis.done]
    for group in _groups(others, long):
        now, times = group[0], {"copies": math.inf, "serial": math.inf}
        trials: dict[str, dict[int, Site]] = {}
        for way in ways:
            row = COPIES if way == "copies" else None
            ids = [site.id for site in group if row is None or site.id in movable]
            if ids and now.strategy != way and not (long and way == "serial"):
                trials[way] = {number: Choice(row).on(sites[number]) for number in ids}
                times[way] = price(written(analysis, {**sites, **trials[way]}, gpu))[1]
        way = _better(now, best, least, times["copies"], times["serial"])
        if not way:
            continue
        reason = "sooner so" if times[way] < SOONER * best else "as soon with whole matmuls"
        best = times[way]
        least = min(least, best)
        text = f"the whole schedule is predicted to end {reason} ({machine.name})"
        for number, site in trials[way].items():
            alone = sites[number].serial_ms
            changes = {"reason": text, "serial_ms": alone, "predicted_ms": alone}
            sites[number] = dataclasses.replace(site, **changes)
    return sites


def _groups(sites: list[Site], long: bool) -> Iterator[list[Site]]:
    """Sites that are alike; in a `long` Program those that are serial, and those that are cut."""
    if long:
        serial = [site for site in sites if site.strategy == "serial"]
        yield from filter(None, (serial, [site for site in sites if _cut(site)]))
        return
    alike: dict[Site, list[Site]] = {}
    for site in sites:
        alike.setdefault(dataclasses.replace(site, id=0, module=""), []).append(site)
    yield from alike.values()


def _cut(site: Site) -> bool:
    """True if the site's matmuls are cut, each piece with a kernel of its own."""
    row = row_of(site.strategy, site.protocol)
    return row is not None and not row.whole and not row.fuses


def _better(now: Site, best: float, least: float, copies: float, serial: float) -> str:
    """Which of two ways to take in place of what takes `best`; empty: none. `least` is the shortest
    time seen, so that what is gained by `WHOLE` is not paid for twice."""
    if copies < SOONER * min(best, serial):
        return "copies"
    sooner = serial < SOONER * best
    if copies < WHOLE * min(least, serial) and (sooner or _cut(now)):
        return "copies"
    return "serial" if sooner else ""
