"""What our strategies are compared with: a collective and a matmul, and torch's async-TP.

    launch = Sequential(case, ranks, graph=True, sets=inputs.sets).open()

`sequential` is what a model without overlap does: NCCL, cuBLAS, one after the other on one stream.
Its graphs hand out their own results, and either x is copied in or there is a graph for each x:
what is faster here (as a rule a copy for gathers, and a graph for each x for reductions).
`gemm` is the matmul alone: half of the roof.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.candidates import Candidate, Launch
from interlace.bench.peer_memory import assert_no_multicast, enable_symmetric_memory
from interlace.bench.ranks import Ranks
from interlace.bench.sites import DTYPES, Case
from interlace.bench.timing import burst
from interlace.errors import UnsupportedError

Sets = Sequence[tuple[torch.Tensor, torch.Tensor]]
WARM_UPS = 3
TRIALS = 3
"""How often each way to replay a graph is timed, before the better one is taken."""


class _Rival:
    """What candidates have in common that are not ours."""

    chosen = text = ""
    predicted_s = math.nan
    mode = "eager"

    def __init__(self, case: Case, ranks: Ranks) -> None:
        self.case = case
        self.ranks = ranks
        self.loose = ranks.size  # a backend's sum rounds at every rank

    def close(self) -> None:
        """Gives everything back."""


class Sequential(_Rival):
    """The collective of torch.distributed and torch.mm, eager or in a CUDA graph."""

    name = "sequential"

    def __init__(self, case: Case, ranks: Ranks, graph: bool, sets: Sets) -> None:
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
        replay_copied, copied = self._captured(launch, place, weight)
        each = {x.data_ptr(): self._captured(launch, x, weight) for x, _ in self._sets}

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

    def _captured(
        self, launch: Launch, x: torch.Tensor, w: torch.Tensor
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """What replays it, and where the result lies."""
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks about events meanwhile, which only this mode allows it.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = launch(x, w)
        return graph.replay, result

    def close(self) -> None:
        """Lets go of the inputs; the graphs go with what replays them."""
        self._sets = ()

    def _launch(self) -> Launch:
        size, rows = self.ranks.size, self.case.m

        def ag_gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            full = x.new_empty(rows, x.shape[1])
            dist.all_gather_into_tensor(full, x)
            return torch.mm(full, w)

        def gemm_rs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = torch.mm(x, w)
            out = y.new_empty(rows // size, y.shape[1])
            dist.reduce_scatter_tensor(out, y)
            return out

        def gemm_ar(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = torch.mm(x, w)
            dist.all_reduce(y)
            return y

        return {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs, "gemm_ar": gemm_ar}[self.case.op]


class AsyncTP(_Rival):
    """torch's async tensor parallelism: its fused operators on symmetric memory."""

    name = "async-tp"

    def open(self) -> Launch:
        """The operator for this site; there is none for GEMM+AR."""
        assert_no_multicast(self.ranks.device)
        name = enable_symmetric_memory(self.ranks)
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


class WholeGemm(_Rival):
    """The matmul alone, all rows at once, by cuBLAS or by our Triton kernel."""

    def __init__(self, case: Case, ranks: Ranks, by: str) -> None:
        super().__init__(case, ranks)
        self.name = f"gemm {by}"
        self._by = by

    def open(self) -> Launch:
        """The function."""
        if self._by == "torch":
            return torch.mm
        case, device = self.case, self.ranks.device
        try:
            kernels: Any = importlib.import_module("interlace.kernels.gemm.gather_matmul")
        except ImportError as error:
            raise UnsupportedError(f"no Triton matmul: {error}") from error
        sizes = {"rows": case.m, "inner": case.k, "columns": case.n}
        kernel = kernels.GatherMatmul(
            **sizes, size=1, rank=0, dtype=DTYPES[case.dtype], device=device, gated=False
        )

        def launch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x.new_empty(case.m, case.n)
            kernel.launch(torch.cuda.current_stream().cuda_stream, x, w, None, y, None, 0, 0)
            return y

        return launch


def rivals(case: Case, ranks: Ranks, names: Sequence[str], sets: Sets) -> list[Candidate]:
    """The rivals for a case."""
    found: list[Candidate] = []
    if "sequential" in names:
        found.append(Sequential(case, ranks, False, sets))
        if ranks.cuda:
            found.append(Sequential(case, ranks, True, sets))
    if "async-tp" in names and ranks.cuda and case.op != "gemm_ar":
        found.append(AsyncTP(case, ranks))
    return found


def whole_gemms(case: Case, ranks: Ranks) -> list[Candidate]:
    """The matmuls of which the faster is half of the roof."""
    by = ("torch", "triton") if ranks.cuda else ("torch",)
    return [WholeGemm(case, ranks, name) for name in by]
