"""find_sites: every collective of a serial Program gets a Site, and its ops the site's number.

Sites are found by meaning (`sites/`). A collective without matmuls is a site of its own kind, with
the reason. Run again, the pass numbers afresh, but for sites that are overlapped already.

    site(1, "all_gather_matmul", "layers.0.mlp.up")

A site's ops become one block, which `decompose` replaces as a whole. A block that would have to run
both before and after some op outside it cannot be; `in_blocks` then gives None.

    >>> in_blocks(before, {3: {0, 3}, 6: {5, 6}})   # before: dependencies(program)
    [(0, 3), (1,), (2,), (4,), (5, 6)]
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from interlace.ir import Program, Site
from interlace.ir.overlap import representatives
from interlace.passes.dependencies import Before, dependencies
from interlace.passes.rewrite import tagged
from interlace.passes.sites.recognise import GatherSite, MatmulSite, recognise, site_kind
from interlace.passes.sites.rows import Refused
from interlace.passes.sites.values import Dataflow


@dataclass(frozen=True)
class FindSites:
    """Gives every collective a Site."""

    name: ClassVar[str] = "find_sites"

    def run(self, program: Program) -> Program:
        """The same ops, marked with the sites they belong to."""
        analysis = Analysis.of(program)
        used, done = {op.site for op in program.ops}, analysis.done
        sites = [site for site in program.sites if site.id in done & used]
        kept = {None, *(site.id for site in sites)}
        ops = [op if op.site in kept else tagged(op, site=None) for op in program.ops]
        first = max((site.id for site in sites), default=0) + 1
        for number, found in enumerate(analysis.found, first):
            modules = [program.ops[i].loc.module for i in (found.collective, *found.ops)]
            module = next(filter(None, modules), "")
            sites.append(Site(id=number, kind=found.kind, module=module, reason=found.reason))
            for i in found.ops:
                ops[i] = tagged(ops[i], site=number)
        return program.replace(ops=tuple(ops), sites=tuple(sites))


# all collectives together


@dataclass(frozen=True, slots=True)
class Analysis:
    """The sites of a Program, and the data that they were found by."""

    program: Program
    values: Dataflow
    before: Before
    done: frozenset[int]
    """Sites that are overlapped already: their ops stay."""
    found: tuple[FoundSite, ...]

    @classmethod
    def of(cls, program: Program) -> Analysis:
        """The analysis of a Program, whether or not its sites are marked."""
        serial = {op.site for op in program.collectives().values()}
        done = {s.id for s in program.sites if s.strategy != "serial" or s.id not in serial}
        values = Dataflow(program, representatives(program)[0])
        before = dependencies(program, touched=values.touched)
        found = _analyse(values, done, before)
        # Where no box depends on the rank, the others see the same.
        for rank in representatives(program)[1:] if values.ranked else ():
            others = _analyse(Dataflow(program, rank), done, before)
            found = [
                one
                if one == other
                else FoundSite(
                    one.collective,
                    values.collectives[one.collective].kind,
                    reason="the ranks' rows differ",
                )
                for one, other in zip(found, others, strict=True)
            ]
        return cls(program, values, before, frozenset(done), tuple(found))


@dataclass(frozen=True, slots=True)
class FoundSite:
    """A collective, what it is, and the reason where it stays alone."""

    collective: int
    kind: str
    site: MatmulSite | None = None
    reason: str = ""

    @property
    def ops(self) -> tuple[int, ...]:
        """Its ops, by index."""
        return self.site.ops if self.site is not None else (self.collective,)


def without_moves(before: Before, sites: Iterable[MatmulSite]) -> Before:
    """The dependencies, without those on ops that a site's chunks do not need."""
    edges = list(before)
    for site in sites:
        for i in site.ops:
            edges[i] = tuple(j for j in edges[i] if j not in site.kept)
    return tuple(edges)


def _analyse(values: Dataflow, done: Collection[int], before: Before) -> list[FoundSite]:
    """Each collective's site, or why it has none, as one rank sees them."""
    program = values.program
    taken = {i for i, op in enumerate(program.ops) if op.site in done}
    blocks: list[tuple[int, ...]] = []
    found: list[FoundSite] = []
    for i, op in values.collectives.items():
        if op.site in done:
            continue
        try:
            if program.team(op.team).size < 2:
                raise Refused(f"team {op.team} has one rank")
            site = recognise(values, i, op, taken)
            later: set[int] = set()  # matmuls that need what others of the site make
            while not fits(without_moves(before, (site,)), blocks, site.ops):
                if not isinstance(site, GatherSite) or len(site.calls) < 2:
                    raise Refused("its ops cannot run together: others stand between them")
                later.add(site.calls[-1])
                site = recognise(values, i, op, taken | later)
        except Refused as refusal:
            found.append(FoundSite(i, op.kind, None, str(refusal)))
        else:
            blocks.append(site.ops)
            before = without_moves(before, (site,))
            taken.update(site.ops)
            found.append(FoundSite(i, site_kind(op.kind, site), site))
    return found


# groups of ops taken as one


Edges = Sequence[Iterable[int]]


def fits(before: Edges, blocks: Iterable[Sequence[int]], block: Sequence[int]) -> bool:
    """True if a block can run without a break, as `blocks` do; each lists its ops in order.

    No way leads out of it and back but over itself and the blocks that overlap it.
    """
    first, last = block[0], block[-1]
    near, count = list[Sequence[int]](), -1
    while len(near) > count:
        count = len(near)
        near = [other for other in blocks if other[0] <= last and other[-1] >= first]
        first = min(each[0] for each in (*near, block))
        last = max(each[-1] for each in (*near, block))
    edges = [[j - first for j in before[i] if j >= first] for i in range(first, last + 1)]
    listed = [[i - first for i in each] for each in (*near, block)]
    return in_blocks(edges, {each[-1]: each for each in listed}) is not None


def in_blocks(before: Edges, blocks: Mapping[int, Iterable[int]]) -> list[tuple[int, ...]] | None:
    """All ops, each block together, in an order that keeps `before` and else the list's; or None.

    A block stands where the op of it that is its key would.
    """
    node = list(range(len(before)))
    for anchor, block in blocks.items():
        for i in block:
            assert node[i] == i, "blocks share an op"
            node[i] = anchor
    members: dict[int, list[int]] = {}
    for i, anchor in enumerate(node):
        members.setdefault(anchor, []).append(i)
    missing = dict.fromkeys(members, 0)
    after: dict[int, set[int]] = {i: set() for i in members}
    for i, earlier in enumerate(before):
        for j in earlier:
            if node[i] != node[j] and node[i] not in after[node[j]]:
                after[node[j]].add(node[i])
                missing[node[i]] += 1
    ready = [i for i, count in missing.items() if count == 0]
    heapq.heapify(ready)
    found: list[tuple[int, ...]] = []
    while ready:
        i = heapq.heappop(ready)
        found.append(tuple(members[i]))
        for j in after[i]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, j)
    return found if len(found) == len(members) else None
