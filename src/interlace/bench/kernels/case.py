"""One op at one size, computed in several ways that are timed in turn.

    case = KernelCase(op="adam", shape="1.40e9 all f32", dtype="f32", does="step", build=build)
    rows = time_case(case, ranks, seconds=3.0)

A way that is not installed, cannot serve or computes something wrong becomes a row with the reason
and no time. Where bytes bound the op, a copy from device to device takes turns with the ways: its
rate, in the same minute on the same warm device, is what theirs is a share of.
"""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.bench.ranks import Ranks
from interlace.bench.rows import Row
from interlace.bench.timing import LAUNCHES, Run, Timing, describe, race, time_in_turn
from interlace.errors import UnsupportedError
from interlace.launch import Tell

OURS = "interlace"
"""The name of our way; variants of it begin with it."""
COPY = "copy"
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
"""Size of what is copied: twice as many bytes move."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A way, ready to run."""

    run: Run
    off: Callable[[], float]
    """Lets it compute something known: how far it is off, in units of what rounding may do."""
    state: Callable[[], int] = lambda: 0
    """Bytes that it keeps from call to call."""


@dataclass(frozen=True, slots=True)
class Way:
    """How an op may be computed; `open` raises where that cannot be."""

    name: str
    open: Callable[[], Opened]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltCase:
    """A case with its tensors."""

    ways: Sequence[Way]
    sets: Sequence[tuple[Any, ...]] = ((),)
    """Inputs, which take turns."""
    nbytes: int = 0
    """Bytes that must move, where they bound the op."""
    flops: int = 0
    limit: float = 1.0
    """How far off a way may be."""
    launches: tuple[int, int] = (3, LAUNCHES[1])
    host: bool = False
    """Whether it is the host's time that counts."""
    calls: int = 0
    """Of an Executor, how many calls its Program has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """What is computed, in words, and how to make it."""

    op: str
    shape: str
    dtype: str
    does: str
    build: Callable[[torch.device], BuiltCase]

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype} {self.does}"


@dataclass(slots=True)
class Measured:
    """A way under way."""

    name: str
    opened: Opened | None = None
    off: float = math.nan
    peak: float = math.nan
    kept: float = math.nan
    state: int = 0
    problem: str = ""
    timed: Timing = field(default_factory=Timing)


def needed(module: str, package: str, device: torch.device) -> Any:
    """A rival's module; raises `UnsupportedError` where it is not installed or there is no GPU."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        told = str(error).splitlines()[0]
        raise UnsupportedError(f"{package} is not installed ({told})") from error
    if device.type != "cuda":
        raise UnsupportedError(f"{package} runs on GPUs")
    return found


def time_case(
    case: KernelCase, ranks: Ranks, seconds: float, tell: Tell = lambda event: None
) -> list[Row]:
    """Builds, checks and times all ways of a case; a row for each."""
    work = case.build(ranks.device)
    ways = [*work.ways, *([_copy(ranks.device)] if work.nbytes else [])]
    entries = [_open(way, work, case, ranks, tell) for way in ways]
    running = {e.name: e for e in entries if e.opened is not None and not e.problem}
    runs = {name: e.opened.run for name, e in running.items() if e.opened is not None}
    sets = {name: ((),) if name == COPY else work.sets for name in running}
    tell({"event": "doing", "doing": f"{case}: timing"})
    if work.host:
        found = time_in_turn(ranks, runs, work.sets, seconds)
    else:
        found = race(ranks, runs, sets, seconds, launches=work.launches)
    for name, timed in found.items():
        running[name].timed, running[name].problem = timed, timed.problem or ""
    rows = _rows(case, work, entries, ranks)
    del work, ways, entries, running, runs, sets
    free(ranks)
    return rows


def free(ranks: Ranks) -> None:
    """Gives back what a case held."""
    torch._dynamo.reset()
    gc.collect()
    if ranks.cuda:
        torch.cuda.empty_cache()


def _open(way: Way, work: BuiltCase, case: KernelCase, ranks: Ranks, tell: Tell) -> Measured:
    tell({"event": "doing", "doing": f"{case}: {way.name}"})
    entry = Measured(way.name)
    try:
        opened = way.open()
        entry.off = opened.off()
        if not entry.off <= work.limit:
            entry.problem = f"wrong: off by {entry.off:.3g} times what rounding may change"
            return entry
        inputs = () if way.name == COPY else work.sets[0]
        opened.run(*inputs)
        entry.peak, entry.kept = peak(opened.run, inputs, ranks)
        entry.state = opened.state()
        entry.opened = opened
    except Exception as error:
        entry.problem = describe(error, ranks)
    if entry.problem:
        free(ranks)
    return entry


def peak(run: Run, inputs: Sequence[Any], ranks: Ranks) -> tuple[float, float]:
    """Bytes of one call beyond those allocated before: at most, and in what it returns."""
    if not ranks.cuda:
        return math.nan, math.nan
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run(*inputs)
    torch.cuda.synchronize()
    most, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del result
    return most - before, after - before


def _copy(device: torch.device) -> Way:
    def make() -> Opened:
        source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)

        def off() -> float:
            target.copy_(source)
            return 0.0 if torch.equal(source, target) else math.inf

        return Opened(lambda: target.copy_(source), off)

    return Way(COPY, make)


def _rows(
    case: KernelCase, work: BuiltCase, entries: Sequence[Measured], ranks: Ranks
) -> list[Row]:
    copied = 2 * COPY_BYTES[ranks.device.type]
    times = {e.name: e.timed.median for e in entries if not e.problem}
    copy_rate = copied / times.get(COPY, math.nan)
    rows: list[Row] = []
    for entry in entries:
        median = times.get(entry.name, math.nan)
        known = not math.isnan(median)
        nbytes = copied if entry.name == COPY else work.nbytes or math.nan
        rows.append(
            {
                "op": case.op,
                "shape": case.shape,
                "dtype": case.dtype,
                "does": case.does,
                "device": ranks.device.type,
                "way": entry.name,
                "median_us": median * 1e6,
                "p90_us": entry.timed.p90 * 1e6 if known else math.nan,
                "least_us": entry.timed.least * 1e6 if known else math.nan,
                "host_us": entry.timed.host_median * 1e6 if known else math.nan,
                "bytes": nbytes,
                "gbs": nbytes / median / 1e9,
                "copy_gbs": copy_rate / 1e9,
                "share": nbytes / median / copy_rate,
                "tflops": (work.flops or math.nan) / median / 1e12,
                "speedup_torch": times.get("torch", math.nan) / median,
                "peak_bytes": entry.peak,
                "kept_bytes": entry.kept,
                "state_bytes": entry.state,
                "calls": work.calls or math.nan,
                "deviation": entry.off,
                "rounds": len(entry.timed.rounds),
                "sm_mhz": entry.timed.clock if known else math.nan,
                "error": entry.problem,
            }
        )
    return rows
