"""The candidates that compute a site: our strategies, and what they are compared with.

    (candidate,) = ours(case, ranks, ["put"], calibration=None)
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

import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from interlace_bench.links import assert_no_multicast, enable_symmetric_memory
from interlace_bench.race import burst, captured
from interlace_bench.ranks import Ranks
from interlace_bench.settings import STRATEGIES
from interlace_bench.sites import DTYPES, SiteCase

Sets = Sequence[tuple[torch.Tensor, torch.Tensor]]
Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

EXCHANGE_BYTES = 16 << 20
"""`exchange` is for small sizes: beyond that many bytes over the link it is not tried."""
TIMEOUT_S = 60.0
WARM_UPS = 3
TRIALS = 3
"""Trials of each way to replay a graph, before the faster one is taken."""


@dataclass(slots=True, eq=False)
class Candidate:
    """One way to compute a site."""

    name: str
    start: Callable[[Candidate], Launch]
    """Sets up on all ranks together; returns what launches once."""
    mode: str = "eager"
    """`eager` or `graph`."""
    loose: int = 1
    """Largest deviation, as a multiple of what one rounding may change: a backend's sum rounds at
    every rank."""
    whole: bool = False
    """True for the matmul alone, all rows at once."""
    chosen: str = ""
    """The strategy that `auto` chose, or the way in which `sequential` replays."""
    predicted_s: float = math.nan
    text: str = ""
    """Text of the Program that runs, if one does: candidates with the same text are the same."""
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def open(self) -> Launch:
        """Sets up on all ranks together; returns what launches once."""
        return self.start(self)

    def close(self) -> None:
        """Gives everything back."""
        self.held.close()


def ours(
    case: SiteCase, ranks: Ranks, names: Sequence[str], calibration: str | None
) -> list[Candidate]:
    """Our candidates for a case, eager and (on GPUs) as graphs."""
    start = functools.partial(_executor, case, ranks, calibration)
    large = case.link_bytes(ranks.size) > EXCHANGE_BYTES
    by_backend = case.op != "ag_gemm"  # our own sums round once
    return [
        Candidate(
            name,
            start,
            mode,
            ranks.size if by_backend and name in ("serial", "pipeline", "auto") else 1,
        )
        for name in STRATEGIES
        if name in names and not (name == "exchange" and large)
        for mode in (("eager", "graph") if ranks.cuda else ("eager",))
    ]


def rivals(case: SiteCase, ranks: Ranks, names: Sequence[str], sets: Sets) -> list[Candidate]:
    """The rivals for a case."""
    found: list[Candidate] = []
    launch = sequential(case, ranks)
    if "sequential" in names:
        found.append(Candidate("sequential", lambda _: launch, loose=ranks.size))
        if ranks.cuda:
            start = functools.partial(_replayed, ranks, launch, sets)
            found.append(Candidate("sequential", start, "graph", ranks.size))
    if "async-tp" in names and ranks.cuda and case.op != "gemm_ar" and not case.float8:
        start = functools.partial(_async_tp, case, ranks)
        found.append(Candidate("async-tp", start, loose=ranks.size))
    return found


def whole_gemms(case: SiteCase, ranks: Ranks) -> list[Candidate]:
    """The matmuls alone, by cuBLAS and our Triton kernel, of which the faster is half the roof."""
    found = [Candidate("gemm torch", lambda _: matmul(case), loose=ranks.size, whole=True)]
    if ranks.cuda and not case.float8:
        start = functools.partial(_triton_matmul, case, ranks)
        found.append(Candidate("gemm triton", start, loose=ranks.size, whole=True))
    return found


def _executor(case: SiteCase, ranks: Ranks, calibration: str | None, one: Candidate) -> Launch:
    """An Executor of the site by a strategy of ours, lowered, proved and prepared."""
    device, graph = ranks.device, one.mode == "graph"
    protocol: Any = one.name if one.name in ("get", "put") else None
    strategy: Any = "peer" if protocol else one.name
    options = Options(
        strategy=strategy,
        graph=graph,
        static_outputs=graph,
        timeout_s=TIMEOUT_S,
        calibration=calibration,
    )
    groups = {"tp": ranks.group}
    serial = on_hosts(case.program(ranks.size), groups, TIMEOUT_S)
    program = lower(serial, options, machine_for(options, device.type), protocol=protocol)
    for site in program.sites:
        one.chosen = (
            f"{site.strategy} {site.protocol}" if site.strategy == "peer" else site.strategy
        )
        if site.predicted_ms is not None:
            one.predicted_s = site.predicted_ms / 1e3
        if options.strategy not in ("auto", site.strategy):
            said = [r.text for r in program.remarks if r.pass_name == "decompose"]
            raise UnsupportedError("; ".join(said) or f"{one.name} does not serve this site")
    plain = {"reason": "", "serial_ms": None, "predicted_ms": None}
    sites = tuple(dataclasses.replace(site, **plain) for site in program.sites)
    one.text = str(program.replace(sites=sites, remarks=()))
    executor = Executor(program, groups=groups, device=device, options=options)
    one.held.callback(executor.close)
    executor.prepare()
    run = executor.run
    return lambda x, w: run((x, w))[0]


def matmul(case: SiteCase) -> Launch:
    """torch's matmul of all rows: in FP8 one `_scaled_mm`, as the ranks have one scale."""
    if not case.float8:
        return torch.mm

    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(len(x), len(w), dtype=case.out_dtype)
        multiply_into(y, x, w, 1, None, True)
        return y

    return scaled


def sequential(case: SiteCase, ranks: Ranks) -> Launch:
    """The collective of torch.distributed and torch.mm."""
    rows, mm = case.m, matmul(case)
    each = torch.uint8 if case.float8 else case.out_dtype

    def ag_gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = x.new_empty(rows, x.shape[1])
        dist.all_gather_into_tensor(full.view(each), x.view(each))
        return mm(full, w)

    def gemm_rs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = mm(x, w)
        out = y.new_empty(rows // ranks.size, y.shape[1])
        dist.reduce_scatter_tensor(out, y)
        return out

    def gemm_ar(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = mm(x, w)
        dist.all_reduce(y)
        return y

    return {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs, "gemm_ar": gemm_ar}[case.op]


def _replayed(ranks: Ranks, launch: Launch, sets: Sets, one: Candidate) -> Launch:
    """Replays graphs of a launch: with x copied in, or a graph for each x, as is faster."""
    first, weight = sets[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            launch(first, weight)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    place = first.clone()
    replay_copied, copied = captured(lambda: launch(place, weight))
    each = {x.data_ptr(): captured(lambda x=x: launch(x, weight)) for x, _ in sets}

    def copy_in(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        place.copy_(x)
        replay_copied()
        return copied

    def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        replay, result = each[x.data_ptr()]
        replay()
        return result

    runs = {"x copied in": copy_in, "a graph for each x": in_place}
    given = [(x, weight) for x, _ in sets]
    took = dict.fromkeys(runs, math.inf)
    for _ in range(TRIALS):
        for name, run in runs.items():
            spent = burst(ranks, run, given, TRIALS * len(given), warm=len(given))[0]
            took[name] = min(took[name], *ranks.maximum([spent]))
    one.chosen = min(took, key=lambda name: took[name])
    return runs[one.chosen]


def _async_tp(case: SiteCase, ranks: Ranks, one: Candidate) -> Launch:
    """torch's async tensor parallelism: its fused operators on symmetric memory."""
    assert_no_multicast(ranks.device)
    name = enable_symmetric_memory(ranks.group)
    ops: Any = torch.ops.symm_mem
    if case.op == "ag_gemm":
        gather = ops.fused_all_gather_matmul
        return lambda x, w: gather(x, [w], 0, name, return_A=False)[1][0]
    scatter = ops.fused_matmul_reduce_scatter
    return lambda x, w: scatter(x, w, "sum", 0, name)


def _triton_matmul(case: SiteCase, ranks: Ranks, one: Candidate) -> Launch:
    try:
        kernels: Any = importlib.import_module("interlace.kernels.gemm.matmul")
    except ImportError as error:
        raise UnsupportedError(f"no Triton matmul: {error}") from error
    sizes = {"rows": case.m, "inner": case.k, "columns": case.n}
    how: dict[str, Any] = {"size": 1, "rank": 0, "dtype": DTYPES[case.dtype]}
    kernel = kernels.GatherMatmul(**sizes, **how, device=ranks.device)

    def launch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(case.m, case.n)
        kernel.launch(torch.cuda.current_stream().cuda_stream, x, w, None, y, None, 0, 0)
        return y

    return launch
