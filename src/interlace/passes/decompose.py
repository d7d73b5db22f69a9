"""decompose: sites become chunks, so that communication can run under computation.

One decomposer reads every strategy as a row of data (`interlace/strategies.py`). A site whose
strategy cannot serve it stays serial, with a remark; `auto` takes the strategy with the shortest
predicted time of the site in isolation, `serial` among them.

    decompose{strategy=peer,protocol=put}
    decompose{strategy=pipeline,chunks=4,sites=[1,3]}

Everything is emitted on the stream `main`, in an order in which no rank waits for what a peer lists
later; `schedule` then gives the transfers a stream of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from interlace.cost import Machine
from interlace.errors import PassError
from interlace.ir import Op, Program, Remark, Site
from interlace.passes.find_sites import Analysis, FoundSite, in_blocks, without_moves
from interlace.passes.sites.recognise import MatmulSite
from interlace.passes.strategies.choose import Choice, Chooser
from interlace.passes.strategies.whole import lifted, unmovable
from interlace.passes.strategies.write import refusal, write, write_whole
from interlace.strategies import REPLACED, STRATEGIES, names, row_of, rows_of

COPIES = STRATEGIES["copies", None]


@dataclass(frozen=True)
class Decompose:
    """Replaces sites by their chunks."""

    name: ClassVar[str] = "decompose"
    strategy: str = "auto"
    protocol: str | None = None
    """Protocol of `peer`: `get` or `put`; None takes the faster one for each site."""
    chunks: int = 0
    """Slices of `pipeline`, pieces of `fused`; 0 lets the strategy choose."""
    sites: tuple[int, ...] | None = None
    """The sites to work on; None: all."""
    machine: Machine | None = field(default=None, metadata={"text": False})

    def __post_init__(self) -> None:
        if self.strategy in REPLACED:
            fix = f"fix: use strategy={REPLACED[self.strategy]}"
            raise PassError(f"decompose: the strategy {self.strategy} went. {fix}")
        if self.strategy not in names():
            known = ", ".join(names())
            raise PassError(f"decompose: no strategy {self.strategy!r}: one of {known}")
        known = [row.protocol for row in rows_of(self.strategy) if row.protocol is not None]
        if self.protocol is not None and self.protocol not in known:
            ways = " or ".join(known) or "no protocol to choose"
            raise PassError(
                f"decompose: {self.strategy} has {ways}, and not protocol={self.protocol}"
            )
        if self.chunks < 0:
            raise PassError(f"decompose: {self.chunks} chunks; give 0 or more")

    def run(self, program: Program) -> Program:
        """The Program with its sites decomposed."""
        known = {site.id: site for site in program.sites}
        if self.sites is not None and not known.keys() >= set(self.sites):
            missing = sorted(set(self.sites) - known.keys())
            raise PassError(f"decompose: no sites {missing}; known are {sorted(known)}")
        analysis = Analysis.of(program)
        choose = Chooser(self.machine, self.chunks)
        remarks: list[Remark] = []
        for found in analysis.found:
            number = program.ops[found.collective].site
            if number is None or (self.sites is not None and number not in self.sites):
                continue
            site = known.get(number) or program.site(number)
            if found.site is None and rows_of(self.strategy) != (COPIES,):
                known[number] = dataclasses.replace(site, reason=found.reason or site.reason)
                continue
            choice = self._choose(choose, analysis, found)
            known[number] = choice.on(site)
            if choice.remark:
                remarks.append(Remark(self.name, choice.remark, number))
        gpu = self.machine is not None and self.machine.device == "cuda"
        return written(analysis, known, gpu).remarked(remarks)

    def _choose(self, choose: Chooser, analysis: Analysis, found: FoundSite) -> Choice:
        values, site = analysis.values, found.site
        if site is None:  # copies serve a collective without matmuls as well
            why = unmovable(values, values.collectives[found.collective])
            text = f"copies cannot serve it: {why}"
            return Choice(reason=text, remark=text) if why else Choice(COPIES, reason="requested")
        if self.strategy == "auto":
            return choose.choose(values, site)
        if self.strategy == "serial":
            return Choice(reason="requested")
        rows = rows_of(self.strategy, self.protocol)
        row = rows[0]
        why = refusal(values, site, row, self.machine)
        if not why:
            return choose.choose(values, site, rows)
        text = f"{self.strategy} cannot serve this site: {why}"
        other = STRATEGIES[row.instead] if row.instead else None
        if other is None or refusal(values, site, other):
            return Choice(reason=text, remark=text)
        text = f"{text}; {other.name} copies instead"
        choice = choose.choose(values, site, (other,))
        return dataclasses.replace(choice, reason=text, remark=text)


def written(analysis: Analysis, sites: Mapping[int, Site], gpu: bool) -> Program:
    """The Program whose sites are overlapped as the Sites of these numbers say."""
    program, values = analysis.program, analysis.values
    names = values.names.copy()
    blocks: dict[int, tuple[int, ...]] = {}
    made: dict[int, list[Op]] = {}
    overlapped: list[MatmulSite] = []
    slots: dict[str, str] = {}
    for found in analysis.found:
        at = found.collective
        number = program.ops[at].site
        site = sites.get(number) if number is not None else None
        row = row_of(site.strategy, site.protocol) if site is not None else None
        if site is None or row is None:
            continue
        if row.whole:
            made[at], raised = write_whole(values, names, values.collectives[at], row, number)
        else:
            assert found.site is not None, "a collective alone is never cut"
            blocks[at] = found.site.ops
            overlapped.append(found.site)
            count = site.chunks or 0
            made[at], raised = write(values, names, found.site, row, count, number, gpu)
        slots |= raised
    placed = in_blocks(without_moves(analysis.before, overlapped), blocks)
    assert placed is not None, "find_sites lets no sites pass that depend on one another"
    ops: list[Op] = []
    for block in placed:
        new = next((made[i] for i in block if i in made), None)
        ops += new if new is not None else [program.ops[i] for i in block]
    listed = tuple(sites[site.id] for site in program.sites)
    return program.replace(ops=lifted(ops, slots), sites=listed, tables=tuple(names.tables))
