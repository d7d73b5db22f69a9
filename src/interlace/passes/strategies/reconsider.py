"""reconsider: sites once more, in the whole schedule: serial, or moved by copies as a whole.

`decompose` looks at a site alone, and there chunks win. In the whole schedule one collective may
lie under computation that depends on none of it, and then cutting the matmuls gains nothing; copies
leave that computation its SMs. (The peer kernel of `exchange` is predicted to gain more, and was
measured to take more: it holds SMs that the matmuls under way need.)

    made = reconsidered(marked, decomposed, made, later, machine)    # the `later` passes made it
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from interlace.cost import Machine
from interlace.ir import Program, Site
from interlace.passes.decompose import COPIES, written
from interlace.passes.dependencies import is_frozen
from interlace.passes.find_sites import Analysis
from interlace.passes.strategies.choose import Choice, seconds
from interlace.passes.strategies.whole import unmovable
from interlace.strategies import row_of

SOONER = 0.999
"""A schedule that takes more than this share of another is no better,"""
WHOLE = 1.01
"""or this, where copies leave matmuls whole that others cut, each piece with a kernel of its own:
four of these were measured to take up to 9 % longer than one; or where the other has a collective's
kernel beside matmuls, which hold up each other. No prediction says either."""
MOST_OPS = 400
"""Ops of a lowered Program of some three layers: longer ones, where each trial takes a second and
more, get two trials, of all serial sites and of all that are cut."""

Ways = Mapping[int, str]
"""`serial` or `copies` for each site; other sites have the strategies that `decompose` chooses."""


class LaterPass(Protocol):
    """A pass behind `decompose`."""

    def run(self, program: Program) -> Program: ...


def reconsidered(
    marked: Program,
    decomposed: Program,
    made: Program,
    later: Iterable[LaterPass],
    machine: Machine,
    done: Collection[int] = (),
    copies: bool = True,
) -> Program:
    """The Program that `later` passes made of the `decomposed` form of a `marked` one, or one that
    they make with other strategies and that is predicted to end sooner.

    Sites that are alike change together; those that were `done` before stay. `copies`: whether
    they may be used.
    """
    if marked.sizes.sizes or is_frozen(made):  # of ranks of other Programs too little is known
        return made
    analysis = Analysis.of(marked)
    movable = {
        op.site for op in marked.collectives().values() if not unmovable(analysis.values, op)
    }

    def lowered(ways: Ways) -> Program:
        sites = {site.id: site for site in decomposed.sites}
        for number, way in ways.items():
            site = marked.site(number)
            if way == "serial":
                sites[number] = site
            elif number in movable:
                sites[number] = Choice(COPIES, reason="requested").on(site)
        program = written(analysis, sites, machine.device == "cuda")
        for item in later:
            program = item.run(program)
        return program

    best = least = seconds(made, machine)
    found, ways = made, dict[int, str]()
    why: dict[int, str] = {}
    long = len(made.ops) > MOST_OPS
    possible = ["copies"] * copies + ["serial"] * (not long)
    for group in _groups([site for site in made.sites if site.id not in done], long):
        ids, now = {site.id for site in group}, group[0]
        times: dict[str, float] = {"copies": math.inf, "serial": math.inf}
        trials: dict[str, tuple[Program, dict[int, str]]] = {}
        for way in possible:
            trial = {**ways, **dict.fromkeys(ids, way)}
            if now.strategy != way:
                other = lowered(trial)
                if any(site.strategy == way for site in other.sites if site.id in ids):
                    times[way], trials[way] = seconds(other, machine), (other, trial)
        way = _better(now, best, least, times["copies"], times["serial"])
        if not way:
            continue
        reason = "sooner so" if times[way] < SOONER * best else "as soon with whole matmuls"
        best, (found, ways) = times[way], trials[way]
        least = min(least, best)
        text = f"the whole schedule is predicted to end {reason} ({machine.name})"
        why |= {site.id: text for site in found.sites if site.id in ids and site.strategy == way}
    alone = {site.id: site.serial_ms for site in made.sites}
    sites = [
        dataclasses.replace(s, reason=why[s.id], serial_ms=alone[s.id], predicted_ms=alone[s.id])
        if s.id in why
        else s
        for s in found.sites
    ]
    return found.replace(sites=tuple(sites))


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
