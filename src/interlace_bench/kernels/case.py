"""One op at one size, computed in several ways that are timed in turn.

    case = KernelCase(op="adam", shape="1.40e9 all f32", dtype="f32", does="step", build=build)
    rows = time_case(case, ranks, seconds=3.0)

A way that is not installed, cannot serve or computes something wrong becomes a row with the reason
and no time. Where bytes bound the op, a copy from device to device takes turns with the ways: its
rate, in the same minute on the same warm device, is what theirs is a share of.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.errors import UnsupportedError
from interlace.launch import Tell
from interlace_bench.race.ways import Opened, Racer, Sets, Way, also, close, prepare, run_race
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row
from interlace_bench.timing import LAUNCHES, Run, Timing, race, time_in_turn

OURS = "interlace"
"""The name of our way; variants of it begin with it."""
COPY = "copy"
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
"""Size of what is copied: twice as many bytes move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltCase:
    """A case with its tensors."""

    ways: Sequence[Way]
    sets: Sets = ((),)
    nbytes: int = 0
    """Bytes that must move, where they bound the op."""
    flops: int = 0
    limit: float = 1.0
    """Largest deviation that a way may have."""
    launches: tuple[int, int] = (3, LAUNCHES[1])
    ahead: bool = False
    """The device waits until the host is a launch ahead."""
    host: bool = False
    """The host's time is measured, not the device's."""
    calls: int = 0
    """Number of calls in the Program of an Executor; 0 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A computation described in words, and the function that builds it."""

    op: str
    shape: str
    dtype: str
    does: str
    build: Callable[[torch.device], BuiltCase]

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype} {self.does}"


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
    memory: dict[str, Row] = {}
    ways = {way.name: way for way in (*work.ways, *([_copy(ranks.device)] if work.nbytes else []))}

    def prepared(name: str) -> Racer:
        sets = [()] if name == COPY else work.sets
        racer = prepare(ranks, ways[name], sets, work.limit)
        memory[name] = _memory(ranks, racer)
        return racer

    def timer(runs: Mapping[str, Run], sets: Mapping[str, Sets]) -> dict[str, Timing]:
        if work.host:
            return time_in_turn(ranks, runs, work.sets, seconds)
        return race(ranks, runs, sets, seconds, launches=work.launches, ahead=work.ahead)

    def told(event: Row) -> None:
        tell(event | {"event": "doing"})  # a case is a step

    racers = [*run_race(ways, prepared, timer, told, f"{case}: ").values()]
    rows = _rows(case, work, racers, memory, ranks)
    close(racers)
    return rows


def _memory(ranks: Ranks, racer: Racer) -> Row:
    """Memory that a call takes, as columns."""
    found: Row = {"peak_bytes": math.nan, "kept_bytes": math.nan, "state_bytes": 0}

    def measure(opened: Opened) -> None:
        opened.run(*racer.sets[0])
        most, kept = peak(opened.run, racer.sets[0], ranks)
        found.update(peak_bytes=most, kept_bytes=kept, state_bytes=opened.state())

    also(ranks, racer, measure)
    return found


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
    case: KernelCase,
    work: BuiltCase,
    racers: Sequence[Racer],
    memory: Mapping[str, Row],
    ranks: Ranks,
) -> list[Row]:
    copied = 2 * COPY_BYTES[ranks.device.type]
    times = {racer.way.name: racer.median for racer in racers}
    copy_rate = copied / times.get(COPY, math.nan)
    rows: list[Row] = []
    for racer in racers:
        name, median = racer.way.name, racer.median
        nbytes = copied if name == COPY else work.nbytes or math.nan
        rows.append(
            {
                "op": case.op,
                "shape": case.shape,
                "dtype": case.dtype,
                "does": case.does,
                "device": ranks.device.type,
                "way": name,
                **racer.columns("median_us", "p90_us", "least_us", "host_us"),
                "bytes": nbytes,
                "gbs": nbytes / median / 1e9,
                "copy_gbs": copy_rate / 1e9,
                "share": nbytes / median / copy_rate,
                "tflops": (work.flops or math.nan) / median / 1e12,
                "speedup_torch": times.get("torch", math.nan) / median,
                **memory[name],
                "calls": work.calls or math.nan,
                "deviation": racer.off,
                **racer.columns("rounds", "sm_mhz", "error"),
            }
        )
    return rows
