"""Structural validation: what must hold before a schedule can mean anything.

Names are unique and declared before use, views lie within their buffers on every rank, shapes and
element types agree, teams and peers exist. Whether the schedule is *sound* (races, deadlocks,
lifetimes) is for `interlace.verify`.

    >>> validate(parse(text), text)
    ProgramError: schedule.ilc:7: no buffer is named 'ful'
        6 |     full = alloc(f32[8, 4])
      > 7 |     main: copy(x, ful)
    did you mean 'full'?
"""

from __future__ import annotations

from collections.abc import Iterable

from interlace.errors import InterlaceError, ProgramError
from interlace.ir.checks.context import (
    BrokenRule,
    CheckContext,
    check_arguments,
    check_buffer,
    check_operator,
)
from interlace.ir.checks.effects import check_region_effects
from interlace.ir.checks.ops import OpChecker
from interlace.ir.ops import views_in
from interlace.ir.program import Program, Region, names_in
from interlace.ir.size_class import deciding
from interlace.ir.text.printer import print_lines
from interlace.ir.text.spelling import did_you_mean, excerpt, lines_of
from interlace.ir.types import Team


def validate(
    program: Program, text: str | None = None, ranks: Iterable[int] | None = None
) -> Program:
    """Raises ProgramError for the first rule that a Program breaks; gives the Program back.

    The error shows the line of the printed Program, or of `text`, which is what it was parsed from.
    `ranks` are those to look at: what they do, the others do; by default all.
    """
    try:
        with deciding(program.sizes):
            _check(CheckContext(program, ranks))
    except BrokenRule as fault:
        raise ProgramError(_message(program, fault, text)) from None
    return program


def _check(context: CheckContext) -> None:
    _check_header(context)
    ops = OpChecker(context)
    for place, op in enumerate(context.program.ops):
        context.tag = ("op", place)
        ops.check(op)
    _check_results(context)


def _message(program: Program, fault: BrokenRule, text: str | None) -> str:
    family, place = fault.tag
    loc = program.ops[place].loc if family == "op" else None
    if text is not None and loc is not None and loc.text is not None:
        file, line = loc.text
        origin = f" (from {loc})" if loc.module else ""
        shown = excerpt(lines_of(text), line)
        return f"{file}:{line}: {fault.what}{origin}\n{shown}\n{fault.fix}"
    try:
        lines = print_lines(program)
    except (InterlaceError, TypeError, ValueError):  # it holds what no text can say
        return f"{program.name}: {fault.what}\n{fault.fix}"
    line = next((i for i, found in enumerate(lines) if found.tag == fault.tag), 0) + 1
    head = f"{program.name}, line {line}"
    if loc is not None and str(loc):
        head = f"{head}, from {loc}"
    shown = excerpt([found.text for found in lines], line)
    return f"{head}: {fault.what}\n{shown}\n{fault.fix}"


def _check_header(context: CheckContext) -> None:
    """Everything but the ops and the results."""
    program = context.program
    _unique(context, [team.name for team in program.teams], "team")
    for team in program.teams:
        _check_team(context, team)
        context.teams[team.name] = team
    context.tag = ("ranks", 0)
    ranks = program.ranks
    if ranks is not None and (not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0):
        raise context.fault(
            f"ranks{ranks} are no set of ranks", "name each global rank once, from 0"
        )
    context.place_ranks()
    _unique(context, [table.name for table in program.tables], "table")
    for place, table in enumerate(program.tables):
        context.tag = ("table", place)
        if table.team not in context.teams:
            raise context.unknown("team", table.team, context.teams)
        size = context.teams[table.team].size
        if len(table.values) != size or any(size < 0 for size in table.values):
            what = f"table {table.name!r} holds {list(table.values)} for {size} ranks"
            raise context.fault(what, f"give one number >= 0 for each rank of {table.team!r}")
        context.tables[table.name] = table
    context.tag = ("header", 0)
    for buffer in program.params:
        check_buffer(context, buffer, ("input", "output"))
        context.declare(buffer)
    _check_sites(context)
    for place, region in enumerate(program.regions):
        context.tag = ("region", place)
        _check_region(context, region)
    _unique(context, [region.name for region in program.regions], "region")


def _check_results(context: CheckContext) -> None:
    """Checks the results of a run: views of memory that outlives it, numbers and None."""
    context.tag = ("results", 0)
    for result in context.program.returned():
        if names_in(result):
            raise context.fault(
                "a result is no value of a region", "return views of buffers, numbers or None"
            )
        for view in views_in(result):
            kind = context.buffer(view).kind
            context.boxes(view)
            if kind in ("local", "symmetric"):
                raise context.fault(
                    f"{view.buffer!r} is {kind}: its memory is used again after the run",
                    f"copy it to an output, or declare it fresh: {view.buffer} = empty(...)",
                )


def _check_team(context: CheckContext, team: Team) -> None:
    if team.size < 1:
        raise context.fault(f"team {team.name!r} has {team.size} ranks", "give it 1 or more")
    if team.hosts is not None:
        placed = sorted(rank for host in team.hosts for rank in host)
        if placed != [*range(team.size)] or len(team.hosts) < 2 or not all(team.hosts):
            raise context.fault(
                f"the hosts of team {team.name!r} do not have each of its {team.size} ranks once",
                "write Team[4].on([0, 1], [2, 3]), or leave .on() out where it has one host",
            )
    if team.groups is None:
        return
    listed = [rank for group in team.groups for rank in group]
    if not listed or any(len(group) != team.size for group in team.groups):
        raise context.fault(
            f"team {team.name!r} of {team.size} ranks has groups of another size",
            "give each group as many ranks as the team has",
        )
    if len(set(listed)) != len(listed) or min(listed) < 0:
        raise context.fault(
            f"the groups of team {team.name!r} name a rank twice, or one below 0",
            "each global rank stands in one group at most",
        )


def _check_sites(context: CheckContext) -> None:
    ids: set[int] = set()
    for place, site in enumerate(context.program.sites):
        if site.id in ids:
            context.tag = ("site", place)
            raise context.fault(f"site {site.id} is declared twice", "number each site differently")
        ids.add(site.id)
    for place, remark in enumerate(context.program.remarks):
        if remark.site is not None and remark.site not in ids:
            context.tag = ("remark", place)
            raise context.fault(f"no site {remark.site}", f"sites are {sorted(ids)[:12]}")


def _check_region(context: CheckContext, region: Region) -> None:
    known = set(region.inputs)
    if len(known) != len(region.inputs):
        raise context.fault(
            f"region {region.name!r} has an input twice", "name each input differently"
        )
    for node in region.body:
        check_operator(context, node.fn)
        check_arguments(context, node.args, node.kwargs)
        for arg in (*node.args, *(value for _, value in node.kwargs)):
            for name in names_in(arg):
                _known_value(context, region, name, known)
            if any(True for _ in views_in(arg)):
                raise context.fault(
                    f"region {region.name!r} uses a buffer of the program",
                    "make it an input of the region",
                )
        for out in node.outs:
            if out in known:
                what = f"region {region.name!r} gives {out!r} twice"
                raise context.fault(what, "name each value differently")
            known.add(out)
    for name in region.outputs:
        _known_value(context, region, name, known)
    check_region_effects(context, region)


def _known_value(context: CheckContext, region: Region, name: str, known: set[str]) -> None:
    if name not in known:
        what = f"region {region.name!r} has no value {name!r} here"
        raise context.fault(what, did_you_mean(name, known, "values are"))


def _unique(context: CheckContext, names: Iterable[str], family: str) -> None:
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            if family != "team":
                context.tag = (family, place)
            raise context.fault(
                f"{family} {name!r} is declared twice", "give the second another name"
            )
        seen.add(name)
