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
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from interlace.cost import Machine
from interlace.errors import PassError, choose_from
from interlace.ir import Program, Remark
from interlace.passes.dependencies import is_frozen
from interlace.passes.find_sites import Analysis, FoundSite
from interlace.passes.strategies.choose import Choice, Chooser, timed
from interlace.passes.strategies.reconsider import reconsidered
from interlace.passes.strategies.whole import unmovable
from interlace.passes.strategies.write import COPIES, refusal, written
from interlace.strategies import REPLACED, STRATEGIES, names, rows_of


class LaterPass(Protocol):
    """A pass behind `decompose`."""

    def run(self, program: Program) -> Program: ...


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
    amid: tuple[str, ...] = field(default=(), metadata={"text": False})
    """Strategies (`copies`, `serial`) that sites get where the whole schedule ends sooner so."""
    later: tuple[LaterPass, ...] = field(default=(), metadata={"text": False})
    """The passes behind this one and before `fuse`, which make the whole schedule."""

    def __post_init__(self) -> None:
        if self.strategy in REPLACED:
            fix = f"fix: use strategy={REPLACED[self.strategy]}"
            raise PassError(f"decompose: the strategy {self.strategy} went. {fix}")
        if self.strategy not in names():
            known = choose_from(self.strategy, names())
            raise PassError(f"decompose: no strategy {self.strategy!r}: {known}")
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
        machine = self.machine
        gpu = machine is not None and machine.device == "cuda"
        # Of named sizes, and of ranks of other Programs, too little is known.
        if self.amid and machine is not None and not (program.sizes.sizes or is_frozen(program)):
            known = reconsidered(analysis, known, machine, self.amid, self._scheduled)
        return written(analysis, known, gpu).remarked(remarks)

    def _scheduled(self, program: Program) -> tuple[Program, float]:
        """A decomposed Program as it is scheduled, and the seconds that it takes."""
        assert self.machine is not None
        for item in self.later:
            program = item.run(program)
        return timed(program, self.machine)

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
