"""reconsider: sites once more, in the whole schedule: serial, or moved by copies as a whole.

`decompose` looks at a site alone, and there chunks win. In the whole schedule one collective may
lie under computation that depends on none of it, and then cutting the matmuls gains nothing; copies
leave that computation its SMs. (The peer kernel of `exchange` is predicted to gain more, and was
measured to take more: it holds SMs that the matmuls under way need.)

    made = reconsidered(marked, made, passes, machine)     # `passes`, from decompose on, made it
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from interlace.cost import Machine, run_after_run
from interlace.ir import Program, Site
from interlace.passes.decompose import Decompose
from interlace.passes.dependencies import is_frozen
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
    """A pass from `decompose` on."""

    def run(self, program: Program) -> Program: ...


def reconsidered(
    marked: Program,
    made: Program,
    passes: Sequence[LaterPass],
    machine: Machine,
    done: Collection[int] = (),
    copies: bool = True,
) -> Program:
    """The Program that `passes` made of a `marked` one, or one that they make with other strategies
    and that is predicted to end sooner.

    Sites that are alike change together; those that were `done` before stay. `copies`: whether
    they may be used.
    """
    if marked.sizes.sizes or is_frozen(made):  # of ranks of other Programs too little is known
        return made
    decompose, *rest = passes
    assert isinstance(decompose, Decompose)

    def lowered(ways: Ways) -> Program:
        sites = tuple([site.id for site in made.sites if ways.get(site.id) != "serial"])
        copied = tuple([number for number, way in ways.items() if way == "copies"])
        program = dataclasses.replace(decompose, sites=sites, copied=copied).run(marked)
        for item in rest:
            program = item.run(program)
        return program

    def took(program: Program) -> float:
        timeline, host = run_after_run(program, machine, fold=True)
        return max(timeline.makespan_s, host)

    best = least = took(made)
    found, ways = made, dict[int, str]()
    why: dict[int, str] = {}
    long = len(made.ops) > MOST_OPS
    possible = ["copies"] * copies + ["serial"] * (not long)
    for group in _groups([site for site in made.sites if site.id not in done], long):
        ids, now = {site.id for site in group}, group[0]
        seconds: dict[str, float] = {"copies": math.inf, "serial": math.inf}
        trials: dict[str, tuple[Program, dict[int, str]]] = {}
        for way in possible:
            trial = {**ways, **dict.fromkeys(ids, way)}
            if now.strategy != way:
                other = lowered(trial)
                if any(site.strategy == way for site in other.sites if site.id in ids):
                    seconds[way], trials[way] = took(other), (other, trial)
        way = _better(now, best, least, seconds["copies"], seconds["serial"])
        if not way:
            continue
        reason = "sooner so" if seconds[way] < SOONER * best else "as soon with whole matmuls"
        best, (found, ways) = seconds[way], trials[way]
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
