"""`interlace bench optimizer`: settings, the race, and what its rows tell.

    report = work(OptimizerSettings(model="tiny"), ranks, tell)     # on every rank; rank 0 reports

All ways train in turn, in one process group (ways.py). On a CPU what is exposed of the gathers is
the time for which modules waited for them; on GPUs, where nobody waits, what a step takes beyond
one without any gather. The synchronous way hides nothing, so its figure is that of all gathers.
"""

from __future__ import annotations

import ctypes
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from interlace.errors import OptionError
from interlace.launch import Tell
from interlace_bench.optimizer.model import SIZES, ModelSize
from interlace_bench.optimizer.ways import NO_GATHER, SYNCHRONOUS, WAYS, OptimizerWays
from interlace_bench.race.ways import (
    Opened,
    Racer,
    RaceSettings,
    Sets,
    also,
    close,
    free,
    prepare,
    run_race,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row, facts
from interlace_bench.timing import Run, Timing, race

LAUNCHES = (2, 4)
"""Steps of a burst."""
ROUNDS = (3, 25)
M_MMAP_THRESHOLD, SMALL, LARGE = -3, 1 << 16, 1 << 25
"""`mallopt`'s parameter for the bytes from which memory has pages of its own, which go when it is
freed; two values. Unless it is set, glibc raises it as it likes, and freed memory may stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings(RaceSettings):
    """A model, and the link that moves its buckets."""

    known = WAYS
    model: str = "llama3-8b"
    bandwidth: float = 0.0
    """Bytes a second of the link that CPU ranks shall have; 0: the link as it is."""
    seed: int = 0

    def __post_init__(self) -> None:
        RaceSettings.__post_init__(self)
        if self.bandwidth < 0:
            raise OptionError("--link must be >= 0")

    @property
    def size(self) -> ModelSize:
        """The model's dimensions."""
        return SIZES[self.model]


def work(settings: OptimizerSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Races the ways; rank 0 gets the report."""
    if settings.bandwidth and ranks.cuda:
        raise OptionError("--link is for ranks on CPUs: GPUs have the link that they have")
    tell({"event": "total", "total": len(settings.only) + 1, "doing": "weights"})
    trained = OptimizerWays(settings, ranks)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALL)
    close([_prepared(trained, settings.only[0])])  # what stays from a first one is nobody's

    def timer(runs: Mapping[str, Run], sets: Mapping[str, Sets]) -> dict[str, Timing]:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)
        return race(ranks, runs, sets, settings.seconds, ROUNDS, LAUNCHES)

    racers = run_race(settings.only, lambda name: _prepared(trained, name), timer, tell)
    rows = _rows(trained, racers)
    tell({"event": "rows", "rows": rows})
    close(racers.values())
    free(ranks)
    return None if ranks.me else {"rows": rows, "facts": facts(ranks.device.type, settings.commit)}


def _prepared(trained: OptimizerWays, name: str) -> Racer:
    """A way, opened, with the most bytes that it holds in a step."""
    ranks = trained.ranks
    before = _held(ranks)
    racer = prepare(ranks, trained.way(name), trained.sets)

    def measure(opened: Opened) -> None:
        _held(ranks)
        _forget_peak(ranks)
        for given in trained.sets:
            opened.run(*given)
        racer.peak_bytes = _peak(ranks) - before
        trained.settle(name)

    also(ranks, racer, measure)
    trained.waits.get(name, []).clear()
    return racer


def _held(ranks: Ranks) -> float:
    """Bytes that are in use: of torch's allocator on GPUs, on CPUs of the whole process."""
    free(ranks)
    if ranks.cuda:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _forget_peak(ranks: Ranks) -> None:
    if ranks.cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak(ranks: Ranks) -> float:
    ranks.synchronize()
    return torch.cuda.max_memory_allocated() if ranks.cuda else _status("VmHWM")


def _status(name: str) -> float:
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return float(found[1]) * 1024 if found else math.nan


def _rows(trained: OptimizerWays, racers: dict[str, Racer]) -> list[Row]:
    """The rows; of waits and memory the greatest of all ranks'."""
    settings, ranks, size = trained.settings, trained.ranks, trained.size
    medians = [statistics.median(trained.waits.get(name) or [math.nan]) for name in racers]
    waits = dict(zip(racers, ranks.maximum(medians), strict=True))
    peaks = ranks.maximum([racer.peak_bytes for racer in racers.values()])
    memory = dict(zip(racers, peaks, strict=True))
    steps = {name: racer.median for name, racer in racers.items()}
    none = steps.get(NO_GATHER, math.nan)

    def exposed(name: str) -> float:
        return steps.get(name, math.nan) - none if ranks.cuda else waits.get(name, math.nan)

    gather = exposed(SYNCHRONOUS)
    return [
        {
            "model": settings.model,
            **{each: getattr(size, each) for each in ("layers", "batch", "sequence", "dtype")},
            "bucket_bytes": size.bucket_bytes,
            "link_gbs": settings.bandwidth / 1e9 or math.nan,
            "world": ranks.size,
            "device": ranks.device.type,
            "way": name,
            "step_ms": racer.median * 1e3,
            "p90_ms": racer.columns("p90_us")["p90_us"] / 1e3,
            "exposed_ms": exposed(name) * 1e3,
            "gather_ms": gather * 1e3,
            "exposed_share": exposed(name) / gather,
            "over_no_gather": steps[name] / none,
            "peak_bytes": memory[name],
            "off": racer.off,
            **racer.columns("rounds", "sm_mhz", "error"),
            **facts(ranks.device.type, settings.commit),
        }
        for name, racer in racers.items()
    ]
