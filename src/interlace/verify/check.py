"""`check`: whether a set of Programs can go wrong in any order that their ranks allow."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

from interlace.errors import OptionError, ProgramError, SizeError
from interlace.ir.program import Program, ProgramOrPath, no_collections, together
from interlace.ir.sizes import FIXED, deciding
from interlace.ir.types import Others
from interlace.ir.validate import validate
from interlace.verify.build import GraphBuilder
from interlace.verify.deadlock import deadlocks, launch_order
from interlace.verify.fold import FoldedSweep, Unfit, refuse
from interlace.verify.in_place import in_place
from interlace.verify.matching import mismatches
from interlace.verify.regions import Regions
from interlace.verify.report import MAX_FINDINGS, Finding, Report
from interlace.verify.source import LoweredProgram, lower, takes_blocks
from interlace.verify.sweep import MAX_REPEATS, AccessFault, Sweep
from interlace.verify.turns import Turns

if TYPE_CHECKING:
    from interlace.verify.explain import Explainer

T = TypeVar("T")
MAX_OPS = 1 << 20
"""Ops of all ranks that are visited in one check, at most; one that signals all other ranks of a
team counts for each."""
FIRST = {"mismatch": 0, "deadlock": 1, "event": 2, "signal": 3, "race": 4}
"""Kinds that are listed before the others."""


def check(
    programs: ProgramOrPath | Sequence[ProgramOrPath],
    *,
    in_order: bool = False,
    fold: bool = True,
    runs: None = None,
) -> Report:
    """Proves that Programs cannot go wrong, in any order in which their ranks may run.

    The report holds for any number of runs in a row that no barrier joins. Of Programs with named
    sizes it holds for a class of sizes, which it names; where they are unsound, or one name has
    several values in a set, for the values at hand. Programs are taken to be valid, as
    `interlace.load` and `interlace.compile` give them.

    Args:
        programs: an SPMD Program, which stands for all of its ranks; a sequence of Programs that
            cover disjoint ranks; or the path of a schedule's file.
        in_order: checks the reference run, in which a rank runs its ops on one stream, as listed.
        fold: visits one rank of those that are proved to do the same; False visits all. The verdict
            does not depend on it.

    Returns:
        A report. That a schedule is unsound is no error: see `Report.sound`.

    Raises:
        ParseError: a file cannot be read.
        OptionError: an argument is neither a Program nor a path (`interlace.parse` reads a text).
        ProgramError: a Program breaks a structural rule, where that was noticed.

    Examples:
        >>> report = interlace.check(program)
        >>> report.sound, report.num_ranks
        (True, 2)
    """
    if runs is not None:
        raise OptionError(
            "interlace.check: `runs` went, since a check is for any number of runs in a row. "
            "fix: leave it out"
        )
    with no_collections():
        listed = together(programs, "interlace.check")
        return _check_class(listed, in_order, fold)


def _check_class(listed: Sequence[Program], in_order: bool, fold: bool) -> Report:
    """A check of a class of sizes, where Programs have named ones."""
    again = partial(_check, in_order=in_order, fold=fold)
    named = {pair for program in listed for pair in program.sizes.values.items()}
    if len(named) > len(dict(named)):
        return again([program.at(program.sizes.values) for program in listed])
    sizes = FIXED
    for program in listed:
        sizes &= program.sizes
    if not sizes.sizes:
        return again(listed)
    try:
        with deciding(sizes) as known:
            for program in listed:
                validate(program)  # for the whole class, too
            report = again(listed)
        if report.sound:
            return dataclasses.replace(report, sizes=known.size_class())
        first = str(report.errors[0]).splitlines()[0]
        why = f"for a class of them the verifier cannot tell that it is sound ({first})"
    except SizeError as error:
        why = str(error)
    report = again([program.at(sizes.values) for program in listed])
    return dataclasses.replace(report, sizes=sizes.alone(), single=why)


def _check(together: Sequence[Program], in_order: bool, fold: bool) -> Report:
    began = time.perf_counter()
    regions = Regions()
    sources = [lower(program, regions, in_order, k) for k, program in enumerate(together)]
    num_ops = sum(len(source.items) * len(source.ranks) for source in sources)
    turns = Turns.of(sources) if fold and not takes_blocks(sources) else None
    if turns is not None:
        _refuse_too_many(sources, {*turns.visited})
        with contextlib.suppress(Unfit):
            builder = GraphBuilder(sources, regions, turns)
            if not _findings(sources, builder, FoldedSweep(builder), refuse):
                seconds, told = time.perf_counter() - began, turns.told()
                ranks = len(turns.first)
                return Report((), num_ops, ranks, seconds, symmetry=told, in_order=in_order)
    _refuse_too_many(sources, {rank for source in sources for rank in source.ranks})
    builder = GraphBuilder(sources, regions)
    sweep = Sweep(builder)
    explain = cache(partial(_explainer, sources, partial(_check, fold=fold, in_order=in_order)))
    findings = _findings(sources, builder, sweep, explain)
    faults = _reported(sweep)
    listed = _of_every_kind(faults, lambda same: same[0].kind)
    findings += [explain().faults(same) for same in listed]
    left_out = len(faults) - len(listed) + max(0, len(findings) - MAX_FINDINGS)
    findings = _of_every_kind(findings, lambda finding: finding.level + finding.kind)
    findings.sort(key=lambda found: (found.level == "remark", FIRST.get(found.kind, len(FIRST))))
    report = Report(
        tuple(findings),
        num_ops,
        len(builder.places),
        time.perf_counter() - began,
        left_out,
        in_order=in_order,
    )
    if not report.sound:
        explain().fixes.complete(report)
    return report


def _findings(
    sources: Sequence[LoweredProgram],
    builder: GraphBuilder,
    sweep: Sweep,
    explain: Callable[[], Explainer],
) -> list[Finding]:
    """All findings but those of the sweep, which is run."""
    builder.build()
    launched = launch_order(builder, explain)  # the sweep of a fold adds a node
    sweep.run()
    first_places = {place.source: place for place in reversed(builder.places)}
    findings = [
        explain().flaw(first_places[source], flaw)
        for source in sources
        if source in first_places
        for flaw in source.flaws
    ]
    findings += in_place([*builder.everywhere.values()], builder.regions, explain, builder.ranks)
    if takes_blocks(sources):
        from interlace.verify.scales import scales  # which few Programs need

        findings += scales(builder, sweep, explain)
    findings += mismatches(builder, explain)
    findings += deadlocks(builder, explain)
    return findings + launched


def _explainer(sources: Sequence[LoweredProgram], again: Callable[..., Report]) -> Explainer:
    """The words for findings: most checks need none."""
    from interlace.verify.explain import Explainer

    return Explainer(sources, again)


def _refuse_too_many(sources: Sequence[LoweredProgram], visited: Collection[int]) -> None:
    """Refuses what would take minutes and gigabytes: a signal between all ranks of a team is one
    for each pair of them."""
    count = 0
    for source in sources:
        num_ranks = sum(rank in visited for rank in source.ranks)
        count += (source.num_places - len(source.items)) * num_ranks
        for item in source.items:
            level = item.ordering.raises or item.ordering.expects
            to_all = level is not None and isinstance(level.peer, Others)
            others = source.program.team(level.team).size - 1 if level and to_all else 1
            count += max(1, others) * num_ranks
    if count > MAX_OPS:
        raise ProgramError(
            f"{count:,} ops, and signals between pairs of ranks, on {len(visited):,} ranks that "
            f"would be visited, where {MAX_OPS:,} are checked at most: check the schedule on fewer "
            "ranks"
        )


def _reported(sweep: Sweep) -> list[list[AccessFault]]:
    """The faults to report: no uninitialized read of a memory in which accesses race."""
    reported: list[list[AccessFault]] = []
    for same in sweep.faults.values():
        if same[0].first is None:
            bare = [one for one in same if one.second.content.memory not in sweep.raced]
            same = bare[:MAX_REPEATS]
        if same:
            reported.append(same)
    return reported


def _of_every_kind(found: list[T], kind: Callable[[T], str]) -> list[T]:
    """As many as are listed: the first of each kind, and then the others."""
    if len(found) <= MAX_FINDINGS:
        return found
    firsts = {kind(one): i for i, one in reversed(list(enumerate(found)))}
    chosen = sorted(range(len(found)), key=lambda i: (firsts[kind(found[i])] != i, i))
    return [found[i] for i in sorted(chosen[:MAX_FINDINGS])]
