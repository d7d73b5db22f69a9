"""The candidates that compute a site: our strategies, and what they are compared with, as variants.

    (variant,) = ours(case, ranks, inputs, ["put"], calibration=None)
    run = variant.open().run         # every rank together: lower, prove, prepare
    y = run(x, w)
    variant.close()

`sequential` is what a model without overlap does: NCCL, cuBLAS, one after the other on one stream.
Its graphs hand out their own results, and either x is copied in or there is a graph for each x:
what is faster here (as a rule a copy for gathers, and a graph for each x for reductions).
`async-tp` is torch's; `gemm` is the matmul alone: half of the roof. A candidate that cannot serve
the site says so by raising when it is opened.

Facts of a candidate: `strategy` and `mode` (`eager` or `graph`); `whole`, for the matmul alone;
`chosen`, the strategy that `auto` chose, or the way in which `sequential` replays; `predicted_us`;
and the `text` of the Program that runs, if one does: candidates with the same text are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
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
from interlace_bench.links import assert_no_multicast, enable_symmetric_memory
from interlace_bench.race import Opened, Variant, captured, open_racer, race, worst
from interlace_bench.ranks import Ranks
from interlace_bench.settings import STRATEGIES
from interlace_bench.sites import DTYPES, Inputs, SiteCase, deviation, whole_check

Sets = Sequence[tuple[torch.Tensor, torch.Tensor]]
Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

EXCHANGE_BYTES = 16 << 20
"""`exchange` is for small sizes: beyond that many bytes over the link it is not tried."""
TIMEOUT_S = 60.0
WARM_UPS = 3
TRIALS = 3
"""Trials of each way to replay a graph, before the faster one is taken."""


Facts = dict[str, Any]
Start = Callable[[Facts, contextlib.ExitStack], Launch]
"""Sets up on all ranks together, notes facts and what to give back; returns what launches once."""


def candidate(
    case: SiteCase,
    inputs: Inputs,
    name: str,
    start: Start,
    mode: str = "eager",
    loose: int = 1,
    whole: bool = False,
) -> Variant:
    """A variant that is right where all checks come out, as often as one rounding may change its
    result (`loose`: a backend's sum rounds at every rank)."""
    held = contextlib.ExitStack()
    facts: Facts = {"strategy": name, "mode": mode, "whole": whole, "chosen": "", "text": ""}
    checks = [whole_check(case, inputs)] if whole else 2 * inputs.checks[mode]

    def make() -> Opened:
        launch = start(facts, held)
        return Opened(launch, lambda: worst(deviation(launch(*at), want) for at, want in checks))

    sets = inputs.whole if whole else inputs.of(mode)
    return Variant(f"{name}/{mode}", make, held.close, sets, loose, facts)


def ours(
    case: SiteCase, ranks: Ranks, inputs: Inputs, names: Sequence[str], calibration: str | None
) -> list[Variant]:
    """Our candidates for a case, eager and (on GPUs) as graphs."""
    large = case.link_bytes(ranks.size) > EXCHANGE_BYTES
    by_backend = case.op != "ag_gemm"  # our own sums round once
    return [
        candidate(
            case,
            inputs,
            name,
            functools.partial(_executor, case, ranks, calibration),
            mode,
            ranks.size if by_backend and name in ("serial", "pipeline", "auto") else 1,
        )
        for name in STRATEGIES
        if name in names and not (name == "exchange" and large)
        for mode in (("eager", "graph") if ranks.cuda else ("eager",))
    ]


def rivals(case: SiteCase, ranks: Ranks, inputs: Inputs, names: Sequence[str]) -> list[Variant]:
    """The rivals for a case."""
    found: list[Variant] = []
    launch = sequential(case, ranks)
    of = functools.partial(candidate, case, inputs, loose=ranks.size)
    if "sequential" in names:
        found.append(of("sequential", lambda *_: launch))
        if ranks.cuda:
            start = functools.partial(_replayed, ranks, launch, inputs.sets)
            found.append(of("sequential", start, "graph"))
    if "async-tp" in names and ranks.cuda and case.op != "gemm_ar" and not case.float8:
        found.append(of("async-tp", functools.partial(_async_tp, case, ranks)))
    return found


def whole_gemms(case: SiteCase, ranks: Ranks, inputs: Inputs) -> list[Variant]:
    """The matmuls alone, by cuBLAS and our Triton kernel, of which the faster is half the roof."""
    of = functools.partial(candidate, case, inputs, loose=ranks.size, whole=True)
    found = [of("gemm torch", lambda *_: matmul(case))]
    if ranks.cuda and not case.float8:
        found.append(of("gemm triton", functools.partial(_triton_matmul, case, ranks)))
    return found


def _executor(
    case: SiteCase,
    ranks: Ranks,
    calibration: str | None,
    facts: Facts,
    held: contextlib.ExitStack,
) -> Launch:
    """An Executor of the site by a strategy of ours, lowered, proved and prepared."""
    device, name, graph = ranks.device, facts["strategy"], facts["mode"] == "graph"
    protocol: Any = name if name in ("get", "put") else None
    strategy: Any = "peer" if protocol else name
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
        if name == "auto":
            of_peer = f" {site.protocol}" if site.strategy == "peer" else ""
            facts["chosen"] = site.strategy + of_peer
        if site.predicted_ms is not None:
            facts["predicted_us"] = site.predicted_ms * 1e3
        if options.strategy not in ("auto", site.strategy):
            said = [r.text for r in program.remarks if r.pass_name == "decompose"]
            raise UnsupportedError("; ".join(said) or f"{name} does not serve this site")
    plain = {"reason": "", "serial_ms": None, "predicted_ms": None}
    sites = tuple(dataclasses.replace(site, **plain) for site in program.sites)
    facts["text"] = str(program.replace(sites=sites, remarks=()))
    executor = Executor(program, groups=groups, device=device, options=options)
    held.callback(executor.close)
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


def _replayed(
    ranks: Ranks, launch: Launch, sets: Sets, facts: Facts, held: contextlib.ExitStack
) -> Launch:
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
    racers = [open_racer(name, run, given) for name, run in runs.items()]
    race(ranks, racers, 0.0, rounds=(TRIALS, TRIALS))
    facts["chosen"] = min(racers, key=lambda racer: racer.median).variant.name
    return runs[facts["chosen"]]


def _async_tp(case: SiteCase, ranks: Ranks, *_: Any) -> Launch:
    """torch's async tensor parallelism: its fused operators on symmetric memory."""
    assert_no_multicast(ranks.device)
    name = enable_symmetric_memory(ranks.group)
    ops: Any = torch.ops.symm_mem
    if case.op == "ag_gemm":
        gather = ops.fused_all_gather_matmul
        return lambda x, w: gather(x, [w], 0, name, return_A=False)[1][0]
    scatter = ops.fused_matmul_reduce_scatter
    return lambda x, w: scatter(x, w, "sum", 0, name)


def _triton_matmul(case: SiteCase, ranks: Ranks, *_: Any) -> Launch:
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
