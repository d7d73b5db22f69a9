"""`bench kernels` and the hot path of a run, on a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from tests.gpu.cases import on_a_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.runtime import Executor
from interlace_bench.kernels.case import COPY, OURS, peak_and_kept
from interlace_bench.kernels.host import WIDTH, chain, program
from interlace_bench.kernels.work import measure
from interlace_bench.ranks import Alone
from interlace_bench.settings import KERNELS, KernelSettings

pytestmark = on_a_gpu(300)
DEVICE = torch.device("cuda")


def test_every_case_runs_in_our_way_at_small_sizes() -> None:
    report = measure(KernelSettings(small=True, seconds=200, device="cuda"), lambda event: None)
    assert report["skipped"] == []
    rows = report["rows"]
    assert {row["op"] for row in rows} == set(KERNELS)
    ours = [row for row in rows if row["way"].startswith(OURS) or row["way"] == COPY]
    assert [row["error"] for row in ours] == [""] * len(ours)
    assert all(row["median_us"] > 0 for row in ours)
    losses = [row for row in ours if row["op"] == "cross-entropy" and row["way"] == OURS]
    assert all(row["peak_bytes"] > 0 for row in losses)


def test_peak_and_kept_bytes() -> None:
    def run() -> torch.Tensor:
        scratch = torch.empty(3 << 20, dtype=torch.uint8, device=DEVICE)
        del scratch
        return torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)

    assert peak_and_kept(run, (), Alone(DEVICE)) == (3 << 20, 1 << 20)


class Count(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_run_dispatches_the_programs_calls_and_nothing_else() -> None:
    executor = Executor(program(9), device=DEVICE).prepare()
    x, w = torch.randn(2, WIDTH, WIDTH, device=DEVICE).unbind()
    executor.run([x, w])
    with Count() as count:
        (y,) = executor.run([x, w])
    assert count.seen == {"aten.mm.out": 5, "aten.add.out": 4}
    assert torch.equal(y, chain(9, DEVICE)(x, w))
