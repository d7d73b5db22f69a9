"""The ways to compute a site: our strategies, and what they are compared with.

    candidate = Ours(case, ranks, "put", graph=False)
    run = candidate.open()           # every rank together: lower, prove, prepare
    y = run(x, w)
    candidate.close()

`sequential` is what a model without overlap does: NCCL, cuBLAS, one after the other on one stream.
Its graphs hand out their own results, and either x is copied in or there is a graph for each x:
what is faster here (as a rule a copy for gathers, and a graph for each x for reductions).
`async-tp` is torch's; `gemm` is the matmul alone: half of the roof. A candidate that cannot serve
the site says so by raising when it is opened.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import UnsupportedError
from interlace.float8.products import multiply_into
from interlace.options import Options
from interlace.passes import lower
from interlace.runtime import Executor
from interlace.runtime.hosts import on_hosts
from interlace.runtime.machine import machine_for
from interlace_bench.ranks import Ranks
from interlace_bench.sites import DTYPES, SiteCase
from interlace_bench.timing import burst, captured
from interlace_bench.transfers import assert_no_multicast, enable_symmetric_memory

Sets = Sequence[tuple[torch.Tensor, torch.Tensor]]
Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OURS: dict[str, dict[str, Any]] = {
    "serial": {"strategy": "serial"},
    "pipeline": {"strategy": "pipeline"},
    "get": {"strategy": "peer"},
    "put": {"strategy": "peer"},
    "fused": {"strategy": "fused"},
    "exchange": {"strategy": "exchange"},
    "ring": {"strategy": "ring"},
    "auto": {"strategy": "auto"},
}
"""Our strategies by the name that rows give them."""
EXCHANGE_BYTES = 16 << 20
"""`exchange` is for small sizes: beyond that many bytes over the link it is not tried."""
TIME_OUT_S = 60.0
WARM_UPS = 3
TRIALS = 3
"""Trials of each way to replay a graph, before the faster one is taken."""


class Candidate:
    """One way to compute a site."""

    name = ""
    mode = "eager"
    """`eager` or `graph`."""
    chosen = ""
    """The strategy that `auto` chose, or the way in which `sequential` replays."""
    predicted_s = math.nan
    text = ""
    """Text of the Program that runs, if one does: candidates with the same text are the same."""

    def __init__(self, case: SiteCase, ranks: Ranks) -> None:
        self.case = case
        self.ranks = ranks
        self.loose = ranks.size
        """Largest deviation, as a multiple of what one rounding may change: a backend's sum rounds
        at every rank."""

    def open(self) -> Launch:
        """Sets up on all ranks together; returns what launches once."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives everything back."""


class Ours(Candidate):
    """A strategy of ours: an Executor, eager or as CUDA graphs."""

    def __init__(
        self, case: SiteCase, ranks: Ranks, name: str, graph: bool, calibration: str | None = None
    ) -> None:
        super().__init__(case, ranks)
        self.name = name
        self.mode = "graph" if graph else "eager"
        if case.op == "ag_gemm" or name not in ("serial", "pipeline", "auto"):
            self.loose = 1  # our own sums round once
        self._calibration = calibration
        self._executor: Executor | None = None

    def open(self) -> Launch:
        """Lowers the site and prepares its Executor."""
        device, graph = self.ranks.device, self.mode == "graph"
        options = Options(
            **OURS[self.name],
            graph=graph,
            static_outputs=graph,
            time_out_s=TIME_OUT_S,
            calibration=self._calibration,
        )
        machine = machine_for(options, device.type)
        groups = {"tp": self.ranks.group}
        serial = on_hosts(self.case.program(self.ranks.size), groups, TIME_OUT_S)
        transport = self.name if self.name in ("get", "put") else None
        program = lower(serial, options, machine, transport=transport)
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


def matmul(case: SiteCase) -> Launch:
    """torch's matmul of all rows: in FP8 one `_scaled_mm`, as the ranks have one scale."""
    if not case.float8:
        return torch.mm

    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(len(x), len(w), dtype=case.out_dtype)
        multiply_into(y, x, w, 1, None, True)
        return y

    return scaled


class Sequential(Candidate):
    """The collective of torch.distributed and torch.mm, eager or in a CUDA graph."""

    name = "sequential"

    def __init__(self, case: SiteCase, ranks: Ranks, graph: bool, sets: Sets) -> None:
        super().__init__(case, ranks)
        self.mode = "graph" if graph else "eager"
        self._sets: Sets = sets

    def open(self) -> Launch:
        """The function, or what replays its graphs: x copied in, or a graph for each x."""
        launch = self._launch()
        if self.mode == "eager":
            return launch
        first, weight = self._sets[0]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                launch(first, weight)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        place = first.clone()
        replay_copied, copied = captured(lambda: launch(place, weight))
        each = {x.data_ptr(): captured(lambda x=x: launch(x, weight)) for x, _ in self._sets}

        def copy_in(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            place.copy_(x)
            replay_copied()
            return copied

        def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            replay, result = each[x.data_ptr()]
            replay()
            return result

        ways = {"x copied in": copy_in, "a graph for each x": in_place}
        given = [(x, weight) for x, _ in self._sets]
        took = dict.fromkeys(ways, math.inf)
        for _ in range(TRIALS):
            for name, way in ways.items():
                spent = burst(self.ranks, way, given, TRIALS * len(given), warm=len(given))[0]
                took[name] = min(took[name], *self.ranks.maximum([spent]))
        self.chosen = min(took, key=lambda name: took[name])
        return ways[self.chosen]

    def close(self) -> None:
        """Lets go of the inputs; the graphs go with what replays them."""
        self._sets = ()

    def _launch(self) -> Launch:
        size, rows, mm = self.ranks.size, self.case.m, matmul(self.case)
        each = torch.uint8 if self.case.float8 else self.case.out_dtype

        def ag_gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            full = x.new_empty(rows, x.shape[1])
            dist.all_gather_into_tensor(full.view(each), x.view(each))
            return mm(full, w)

        def gemm_rs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = mm(x, w)
            out = y.new_empty(rows // size, y.shape[1])
            dist.reduce_scatter_tensor(out, y)
            return out

        def gemm_ar(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = mm(x, w)
            dist.all_reduce(y)
            return y

        return {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs, "gemm_ar": gemm_ar}[self.case.op]


class AsyncTP(Candidate):
    """torch's async tensor parallelism: its fused operators on symmetric memory."""

    name = "async-tp"

    def open(self) -> Launch:
        """The operator for this site; there is none for GEMM+AR."""
        assert_no_multicast(self.ranks.device)
        name = enable_symmetric_memory(self.ranks.group)
        ops: Any = torch.ops.symm_mem
        match self.case.op:
            case "ag_gemm":
                gather = ops.fused_all_gather_matmul
                return lambda x, w: gather(x, [w], 0, name, return_A=False)[1][0]
            case "gemm_rs":
                scatter = ops.fused_matmul_reduce_scatter
                return lambda x, w: scatter(x, w, "sum", 0, name)
            case _:
                raise UnsupportedError("torch's async-TP has no operator for GEMM + all-reduce")


class WholeGemm(Candidate):
    """The matmul alone, all rows at once, by cuBLAS or by our Triton kernel."""

    def __init__(self, case: SiteCase, ranks: Ranks, by: str) -> None:
        super().__init__(case, ranks)
        self.name = f"gemm {by}"
        self._by = by

    def open(self) -> Launch:
        """The function."""
        if self._by == "torch":
            return matmul(self.case)
        case, device = self.case, self.ranks.device
        try:
            kernels: Any = importlib.import_module("interlace.kernels.gemm.matmul")
        except ImportError as error:
            raise UnsupportedError(f"no Triton matmul: {error}") from error
        sizes = {"rows": case.m, "inner": case.k, "columns": case.n}
        kernel = kernels.GatherMatmul(
            **sizes, size=1, rank=0, dtype=DTYPES[case.dtype], device=device
        )

        def launch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x.new_empty(case.m, case.n)
            kernel.launch(torch.cuda.current_stream().cuda_stream, x, w, None, y, None, 0, 0)
            return y

        return launch


def rivals(case: SiteCase, ranks: Ranks, names: Sequence[str], sets: Sets) -> list[Candidate]:
    """The rivals for a case."""
    found: list[Candidate] = []
    if "sequential" in names:
        found.append(Sequential(case, ranks, False, sets))
        if ranks.cuda:
            found.append(Sequential(case, ranks, True, sets))
    if "async-tp" in names and ranks.cuda and case.op != "gemm_ar" and not case.float8:
        found.append(AsyncTP(case, ranks))
    return found


def whole_gemms(case: SiteCase, ranks: Ranks) -> list[Candidate]:
    """The matmuls of which the faster is half of the roof."""
    by = ("torch", "triton") if ranks.cuda and not case.float8 else ("torch",)
    return [WholeGemm(case, ranks, name) for name in by]


def ours(
    case: SiteCase, ranks: Ranks, names: Sequence[str], calibration: str | None
) -> list[Candidate]:
    """Our candidates for a case, eager and (on GPUs) as graphs."""
    found: list[Candidate] = []
    for name in OURS:
        if name not in names:
            continue
        if name == "exchange" and case.link_bytes(ranks.size) > EXCHANGE_BYTES:
            continue
        for graph in (False, True) if ranks.cuda else (False,):
            found.append(Ours(case, ranks, name, graph, calibration))
    return found
