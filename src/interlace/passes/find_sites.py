"""find_sites: every collective of a serial Program gets a Site, and its ops the site's number.

Sites are found by meaning (`analysis.py`): an all-gather whose rows one or several matmuls take,
or matmuls whose rows, pointwise operators between, a reduce-scatter or an all-reduce sums; and an
all-to-all on either side of the matmuls of a rank's experts. A collective that is neither is a site
of its own kind, with the reason, and runs as it is.

    site(1, "all_gather_matmul", "layers.0.mlp.up")
    site(2, "all_gather", "layers.0.mlp.up", reason="aten.mm.default takes the gathered tensor as
        its right-hand side or its bias: it travels as a whole, under other computation")

Run again, it numbers afresh; sites that are overlapped already keep their numbers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from interlace.ir import Collective, Group, Op, Program, Site
from interlace.passes.sites.analysis import Found, analyse


@dataclass(frozen=True)
class FindSites:
    """Gives every collective a Site."""

    name: ClassVar[str] = "find_sites"

    def run(self, program: Program) -> Program:
        """The same ops, marked with the sites they belong to."""
        used = {op.site for op in program.ops}
        serial = {op.site for op in program.ops if isinstance(op, Collective)}
        done = {
            site.id: site
            for site in program.sites
            if site.id in used and (site.strategy != "serial" or site.id not in serial)
        }
        ops: list[Op] = [
            op if op.site is None or op.site in done else marked(op, None) for op in program.ops
        ]
        sites = list(done.values())
        number = max(done, default=0)
        for found in analyse(program, done):
            number += 1
            sites.append(_site(program, found, number))
            for i in members(program, found):
                ops[i] = marked(ops[i], number)
        return program.replace(ops=tuple(ops), sites=tuple(sites))


def marked(op: Op, site: int | None) -> Op:
    """The op, and what it groups, as a part of a site."""
    if isinstance(op, Group):
        op = dataclasses.replace(op, ops=tuple(dataclasses.replace(m, site=site) for m in op.ops))
    return dataclasses.replace(op, site=site)


def members(program: Program, found: Found) -> tuple[int, ...]:
    """The ops of a site, by index."""
    return found.site.ops if found.site is not None else (found.collective,)


def _site(program: Program, found: Found, number: int) -> Site:
    modules = [program.ops[i].loc.module for i in members(program, found)]
    own = program.ops[found.collective].loc.module
    module = own or next((module for module in modules if module), "")
    return Site(id=number, kind=found.kind, module=module, reason=found.reason)
