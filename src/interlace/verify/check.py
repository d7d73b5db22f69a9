"""`check`: whether a set of Programs can go wrong in any order that their ranks allow.

>>> report = check(interlace.ir.parse(text))
>>> report.sound
True
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from interlace.ir.program import Program
from interlace.verify.build import Builder
from interlace.verify.deadlock import deadlocks
from interlace.verify.explain import Explainer
from interlace.verify.lower import lower
from interlace.verify.matching import mismatches
from interlace.verify.regions import Regions
from interlace.verify.registered import disagreements
from interlace.verify.report import Finding, Report
from interlace.verify.sweep import Fault, Sweep

MAX_FINDINGS = 100
"""More faults than these are counted and not listed."""


def check(
    programs: Program | Sequence[Program],
    *,
    runs: int = 3,
    in_order: bool = False,
    unroll: bool = False,
) -> Report:
    """Checks Programs that run together, over `runs` runs in a row that no barrier joins.

    An SPMD Program stands for all of its ranks; a sequence is a set that covers disjoint ranks.
    `in_order` checks the twin that runs all ops of a rank on one stream, in list order. `unroll`
    visits all runs even where the first stands for all of them (build.py says when); the verdict
    does not depend on it.
    """
    began = time.perf_counter()
    together = [programs] if isinstance(programs, Program) else list(programs)
    regions = Regions()
    sources = [lower(program, regions, in_order) for program in together]
    builder = Builder(sources)
    graph = builder.build(max(runs, 1), unroll)
    sweep = Sweep(graph, regions, lambda frame, version: builder.slot(frame.place, version))
    sweep.run()

    explainer = Explainer()
    findings = [explainer.flaw(source, flaw) for source in sources for flaw in source.flaws]
    findings += mismatches(builder, explainer, regions)
    findings += disagreements(builder, explainer, regions)
    findings += deadlocks(builder, explainer)
    faults = _told(sweep.faults.values())
    findings += [explainer.faults(same) for same in faults[:MAX_FINDINGS]]
    left_out = max(0, len(faults) - MAX_FINDINGS)
    findings.sort(key=_rank_of_kind)
    return Report(
        tuple(findings[:MAX_FINDINGS]),
        sum(len(place.source.items) for place in builder.places),
        len(builder.places),
        time.perf_counter() - began,
        left_out + max(0, len(findings) - MAX_FINDINGS),
    )


def _told(faults: Iterable[list[Fault]]) -> list[list[Fault]]:
    """The faults worth telling: a read that races with a write is no read of what nothing wrote."""
    found = list(faults)
    racing = {
        (entry.node, entry.content)
        for same in found
        for fault in same
        for first, second in [(fault.first, fault.second)]
        if first is not None and fault.kind == "race" and not (first.free or second.free)
        for entry in (first, second)
    }
    told: list[list[Fault]] = []
    for same in found:
        if same[0].first is None:
            same = [f for f in same if (f.second.node, f.second.content) not in racing]
        if same:
            told.append(same)
    return told


_FIRST = ("mismatch", "deadlock", "event", "signal", "race")


def _rank_of_kind(finding: Finding) -> tuple[bool, int]:
    order = _FIRST.index(finding.kind) if finding.kind in _FIRST else len(_FIRST)
    return finding.level == "remark", order
