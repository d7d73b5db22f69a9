"""`bench kernels` on a GPU."""

from __future__ import annotations

import torch
from tests.gpu.cases import on_a_gpu
from tests.support.alone import Alone

from interlace_bench.kernels.case import COPY, OURS, peak_and_kept
from interlace_bench.kernels.work import work
from interlace_bench.settings import KERNELS, KernelSettings

pytestmark = on_a_gpu(300)
DEVICE = torch.device("cuda")


def test_every_case_runs_in_our_way_at_small_sizes() -> None:
    settings = KernelSettings(small=True, seconds=200, device="cuda")
    report = work(settings, Alone(DEVICE), lambda event: None)
    assert report is not None
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
