"""Measurements of one device alone, for calibration: matmuls, copies, launches, the host.

    samples = device_samples(ranks, ["bf16"], tell)

All ranks measure at once, as they compute at once, and the slowest counts.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.launch import Tell
from interlace_bench.calibration.fit import Sample
from interlace_bench.links import BenchMemory, sample
from interlace_bench.race import host_times, step
from interlace_bench.ranks import Ranks
from interlace_bench.shapes import PRESETS
from interlace_bench.sites import CACHE, DTYPES

COPIES = tuple(1 << power for power in (16, 20, 28, 29))
"""Bytes. The larger half, which tells a GPU's bandwidth, is beyond any cache of today's."""
HOST_CALLS = 200
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COLUMNS = ((4096, 4096), (4096, 7168), (8192, 2560), (3584, 4096), (8192, 8192), (2048, 8192))
"""K and N of the matmuls, each with all rows: chunks of sites are among them."""


def gemm_shapes(ranks: Ranks) -> list[tuple[int, int, int]]:
    """The matmuls that are measured."""
    if not ranks.cuda:
        return [(rows, 256, 512) for rows in (16, 64, 256, 1024)]
    named = [(m, k, n) for _, m, k, n in PRESETS["bars"]]
    chunks = [(m // ranks.size, k, n) for m, k, n in named if m >= 1024]
    grid = [(rows, k, n) for k, n in COLUMNS for rows in ROWS]
    return list(dict.fromkeys((*grid, *named, *chunks)))


def device_samples(ranks: Ranks, dtypes: Sequence[str], tell: Tell) -> list[Sample]:
    """The samples, alike on all ranks."""
    found: list[Sample] = []
    for dtype in dtypes:
        step(tell, f"matmuls {dtype}")
        found += [_gemm(ranks, dtype, shape) for shape in gemm_shapes(ranks)]
    step(tell, "copies and launches")
    for nbytes in COPIES if ranks.cuda else COPIES[:2]:
        found.append(_copy(ranks, nbytes))
    empty = torch.zeros(1, device=ranks.device)
    found.append(sample(ranks, empty.zero_, kind="launch"))
    if ranks.cuda:
        found += _host(ranks)
    return found


def _gemm(ranks: Ranks, dtype: str, shape: tuple[int, int, int]) -> Sample:
    m, k, n = shape
    kind = DTYPES[dtype]
    sets = 1 + min(16, 2 * CACHE // ((m * k + k * n) * kind.itemsize)) if ranks.cuda else 2
    pairs = [
        (
            torch.randn(m, k, dtype=kind, device=ranks.device),
            torch.randn(k, n, dtype=kind, device=ranks.device),
        )
        for _ in range(sets)
    ]
    out = torch.empty(m, n, dtype=kind, device=ranks.device)
    turn = iter(range(1 << 60))

    def run() -> None:
        x, w = pairs[next(turn) % sets]
        torch.mm(x, w, out=out)

    return sample(ranks, run, kind="gemm", dtype=dtype, shape=shape)


def _copy(ranks: Ranks, nbytes: int) -> Sample:
    src = torch.randint(256, (nbytes,), dtype=torch.uint8, device=ranks.device)
    dst = torch.zeros_like(src)
    return sample(ranks, lambda: dst.copy_(src), kind="copy", nbytes=nbytes)


def _host(ranks: Ranks) -> list[Sample]:
    """Measures the host's time to issue a call, a copy, a collective or a signal."""
    x, w = (torch.zeros(64, 64, dtype=torch.bfloat16, device=ranks.device) for _ in range(2))
    out = torch.empty_like(x)
    memory = BenchMemory(ranks, 1 << 12)
    peer = memory.theirs[(ranks.me + 1) % ranks.size]
    whole = x.new_empty(64 * ranks.size, 64)
    calls: dict[str, Callable[[], Any]] = {
        "call": lambda: torch.mm(x, w, out=out),
        "copy": lambda: memory.copy(memory.private, memory.mine, 1 << 10),
        "peer": lambda: memory.copy(memory.private, peer, 1 << 10),
        "collective": lambda: dist.all_gather_into_tensor(whole, x),
        **_signal(x),
    }
    return [
        Sample(kind="issue", protocol=name, seconds=_issue(ranks, call))
        for name, call in calls.items()
    ]


def _signal(word: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """A write of a word by the stream, where cuda-bindings are there."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return {}
    stream, place = torch.cuda.current_stream().cuda_stream, word.data_ptr()
    return {"signal": lambda: driver.cuStreamWriteValue32(stream, place, 0, 0)}


def _issue(ranks: Ranks, call: Callable[[], Any]) -> float:
    call()
    return max(ranks.maximum([statistics.median(host_times(ranks, call, [()], HOST_CALLS))]))
