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
from interlace.passes.dependencies import Before, dependencies, followers
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
    blocks = Blocks(before)
    found: list[FoundSite] = []
    for i, op in values.collectives.items():
        if op.site in done:
            continue
        try:
            if program.team(op.team).size < 2:
                raise Refused(f"team {op.team} has one rank")
            site = recognise(values, i, op, taken)
            later: set[int] = set()  # matmuls that need what others of the site make
            while (
                isinstance(site, GatherSite)
                and len(site.calls) > 1
                and not blocks.accepts(site.ops, site.kept)
            ):
                later.add(site.calls[-1])
                site = recognise(values, i, op, taken | later)
            ops = site.ops
            if not blocks.accepts(ops, site.kept):
                raise Refused("its ops cannot run together: others stand between them")
        except Refused as refusal:
            found.append(FoundSite(i, op.kind, None, str(refusal)))
        else:
            blocks.add(ops, site.kept)
            taken.update(ops)
            found.append(FoundSite(i, site_kind(op.kind, site), site))
    return found


# groups of ops taken as one


Edges = Sequence[Iterable[int]]


class Blocks:
    """Blocks that can all run without a break, grown one by one.

    `before[i]` names ops that are listed before i alone, and a block has an op at least.

    blocks = Blocks(dependencies(program))
    if blocks.accepts({0, 3}):
        blocks.add({0, 3})
    """

    def __init__(self, before: Edges) -> None:
        self.members: list[Collection[int]] = [(i,) for i in range(len(before))]
        self.after = list(followers(before))
        self.least = list(range(len(before)))
        """For each op the first op of the stretch of overlapping blocks that it stands in (itself,
        where it stands in none): nothing that follows the op is listed before that."""

    def accepts(self, block: Iterable[int], unneeded: Iterable[int] = ()) -> bool:
        """True if no path leaves the block and comes back; `unneeded` ops do not lead into it."""
        mine, ignored = frozenset(block), frozenset(unneeded)
        seen: set[int] = set()
        last = max(mine)
        stack = [i for j in mine for i in self.after[j] if i not in mine]
        while stack:
            op = stack.pop()
            if op in seen or self.least[op] > last:  # from there no way leads back
                continue
            seen.update(self.members[op])
            for i in self.members[op]:
                if not mine.isdisjoint(self.after[i]) and i not in ignored:
                    return False
                stack += [k for k in self.after[i] if k not in seen and k not in mine]
        return True

    def add(self, block: Iterable[int], unneeded: Iterable[int] = ()) -> None:
        """Takes these ops as one from now on."""
        mine = frozenset(block)
        for i in mine:
            self.members[i] = mine
        first, last = self.least[min(mine)], max(mine)
        for i in range(min(mine), len(self.least)):
            if i > last and self.least[i] > last:
                break
            self.least[i] = first
        for i in unneeded:
            self.after[i] = tuple([j for j in self.after[i] if j not in mine])


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
