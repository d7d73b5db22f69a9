"""What each collective of a serial Program is, all of them together.

`recognise.py` looks at one; here stands which ops belong to which site, that every site can run
without a break, and that all ranks see the same.

    >>> analyse(program)[0]
    Found(collective=2, kind='all_gather_matmul', site=GatherSite(...), reason='')
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from interlace.ir import Collective, Program
from interlace.passes.order.dependencies import Before, dependencies
from interlace.passes.order.overlaps import representatives
from interlace.passes.sites.blocks import Blocks
from interlace.passes.sites.recognise import GatherSite, ScatterSite, recognise, site_kind
from interlace.passes.sites.rows import Refused
from interlace.passes.sites.values import Values


@dataclass(frozen=True, slots=True)
class Found:
    """A collective, what it is, and the reason where it stays alone."""

    collective: int
    kind: str
    site: GatherSite | ScatterSite | None = None
    reason: str = ""


def without_moves(before: Before, sites: Iterable[GatherSite | ScatterSite]) -> Before:
    """The dependencies, without those on ops that a site's chunks do not need."""
    edges = list(before)
    for site in sites:
        for i in site.ops:
            edges[i] = tuple(j for j in edges[i] if j not in site.kept)
    return tuple(edges)


def analyse(
    program: Program, done: Iterable[int] = (), before: Before | None = None
) -> tuple[Found, ...]:
    """What every collective is; those of the sites `done` are left out, and their ops untouched.

    `before` has the Program's dependencies, where they are known.
    """
    ranks = representatives(program)
    before, done = before or dependencies(program), frozenset(done)
    values = Values(program, ranks[0])
    found = _analyse(values, done, before)
    for rank in ranks[1:] if values.ranked else ():  # else no other rank sees anything else
        other = _analyse(Values(program, rank), done, before)
        found = tuple(
            mine
            if mine == theirs
            else Found(mine.collective, _kind(program, mine), None, "the ranks' rows differ")
            for mine, theirs in zip(found, other, strict=True)
        )
    return found


def _kind(program: Program, found: Found) -> str:
    op = program.ops[found.collective]
    assert isinstance(op, Collective)
    return op.kind


def _analyse(values: Values, done: frozenset[int], before: Before) -> tuple[Found, ...]:
    program = values.program
    taken = {i for i, op in enumerate(program.ops) if op.site in done}
    blocks = Blocks(before)
    found: list[Found] = []
    for i, op in enumerate(program.ops):
        if not isinstance(op, Collective) or op.site in done:
            continue
        try:
            if program.team(op.team).size < 2:
                raise Refused(f"team {op.team} has one rank")
            site = recognise(values, i, op, taken)
            later: set[int] = set()  # matmuls that need what others of the site make
            while (
                isinstance(site, GatherSite)
                and len(site.matmuls) > 1
                and not blocks.accepts(site.ops, site.kept)
            ):
                later.add(site.matmuls[-1])
                site = recognise(values, i, op, taken | later)
            if not blocks.accepts(site.ops, site.kept):
                raise Refused("its ops cannot run together: others stand between them")
        except Refused as refusal:
            found.append(Found(i, op.kind, None, str(refusal)))
        else:
            blocks.add(site.ops, site.kept)
            taken.update(site.ops)
            found.append(Found(i, site_kind(op.kind, site), site))
    return tuple(found)
