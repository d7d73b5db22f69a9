"""The ways to compute a site: our strategies, each an Executor, eager or as CUDA graphs.

    ours = Ours(case, ranks, "put", graph=False)
    run = ours.open()                # every rank together: lower, prove, prepare
    y = run(x, w)
    ours.close()

A candidate that cannot serve the site says so by raising when it is opened.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from interlace.bench.ranks import Ranks
from interlace.bench.sites import Case
from interlace.errors import UnsupportedError
from interlace.options import Options
from interlace.passes import lower
from interlace.runtime import Executor
from interlace.runtime.machine import machine_for

Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OURS: dict[str, dict[str, Any]] = {
    "serial": {"strategy": "serial"},
    "pipeline": {"strategy": "pipeline"},
    "get": {"strategy": "peer", "protocol": "get"},
    "put": {"strategy": "peer", "protocol": "put"},
    "fused": {"strategy": "fused"},
    "exchange": {"strategy": "exchange"},
    "auto": {"strategy": "auto"},
}
"""Our strategies by the name that rows give them."""
EXCHANGE_BYTES = 16 << 20
"""`exchange` is for small sizes: beyond that many bytes over the link it is not tried."""
TIME_OUT_S = 60.0


class Candidate(Protocol):
    """One way to compute a site."""

    name: str
    mode: str
    """`eager` or `graph`."""
    loose: int
    """How many times what rounding once may change this one may be off by."""
    chosen: str
    """What `auto` chose."""
    predicted_s: float
    text: str
    """What runs, where that is a Program: candidates with the same text are the same."""

    def open(self) -> Launch:
        """Sets up on all ranks together; returns what launches once."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


class Ours:
    """A strategy of ours."""

    def __init__(
        self, case: Case, ranks: Ranks, name: str, graph: bool, calibration: str | None = None
    ) -> None:
        self.name = name
        self.mode = "graph" if graph else "eager"
        # Our own sums round once; collectives of a backend round at every rank.
        backends = name in ("serial", "pipeline", "auto")
        self.loose = ranks.size if backends and case.op != "ag_gemm" else 1
        self.chosen = ""
        self.predicted_s = math.nan
        self.text = ""
        self._case = case
        self._ranks = ranks
        self._calibration = calibration
        self._executor: Executor | None = None

    def open(self) -> Launch:
        """Lowers the site and prepares its Executor."""
        given, device = self._calibration, self._ranks.device
        options = Options(
            **OURS[self.name],
            graph=self.mode == "graph",
            static_outputs=self.mode == "graph",
            time_out_s=TIME_OUT_S,
            calibration=given,
        )
        machine = machine_for(options, device.type)
        program = lower(self._case.program(self._ranks.size), options, machine)
        for site in program.sites:
            protocol = f" {site.protocol}" if site.strategy == "peer" else ""
            self.chosen = f"{site.strategy}{protocol}"
            if site.predicted_ms is not None:
                self.predicted_s = site.predicted_ms / 1e3
            if options.strategy not in ("auto", site.strategy):
                said = [r.text for r in program.remarks if r.pass_name == "decompose"]
                raise UnsupportedError("; ".join(said) or f"{self.name} does not serve this site")
        plain = {"reason": "", "serial_ms": None, "predicted_ms": None}
        sites = tuple(dataclasses.replace(site, **plain) for site in program.sites)
        self.text = str(program.replace(sites=sites, remarks=()))
        groups = {"tp": self._ranks.group}
        executor = Executor(program, groups=groups, device=device, options=options)
        self._executor = executor
        executor.prepare()
        run = executor.run
        return lambda x, w: run((x, w))[0]

    def close(self) -> None:
        """Ends the Executor."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None


def ours(
    case: Case, ranks: Ranks, names: Sequence[str], calibration: str | None, graphs: bool
) -> list[Candidate]:
    """Our candidates for a case, eager and (on GPUs) as graphs."""
    found: list[Candidate] = []
    for name in OURS:
        if name not in names:
            continue
        if name == "exchange" and case.link_bytes(ranks.size) > EXCHANGE_BYTES:
            continue
        for graph in (False, True) if graphs and ranks.cuda else (False,):
            found.append(Ours(case, ranks, name, graph, calibration))
    return found
