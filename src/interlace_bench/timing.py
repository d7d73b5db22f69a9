"""Timing by bursts of back-to-back launches, interleaved round robin.

    found = race(ranks, {"ours": run, "theirs": other}, inputs, seconds=2.0)
    found["ours"].median, found["ours"].p90          # seconds: of each round the slowest rank

A burst is a few launches one after another, with inputs in turn so that none lies in the cache,
between two events of the current stream; before it ranks meet, and the device waits a moment so
that launches stand back to back from the first on. A round gives every candidate a
burst, each round in another order and after a short rest: drift (clocks, heat) and traces of
the burst before affect all alike.
The slowest rank of a burst counts, and over the rounds the median and the 90th percentile.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.errors import ExecutorError
from interlace_bench.ranks import Ranks

Run = Callable[..., Any]
"""Launches once, with the inputs of one set."""

BURST_S = 6e-3
"""A burst holds launches for about that long,"""
LAUNCHES = (8, 60)
"""but at least and at most so many."""
LEAD_CYCLES = 400_000
"""Cycles that the device waits before a burst, so that the host is ahead of it: some 0.2 ms."""
AHEAD_LAUNCHES, AHEAD_ROUNDS = 8, 7
AHEAD_CYCLES = 4e9
"""Cycles that the device waits for each second of the host's: twice as long as that takes."""
MOST_CYCLES = 40_000_000
"""Most cycles that it waits where the host shall be a launch ahead."""
REST_S = 5e-3
"""Seconds that the device rests before a burst."""
HOST_BATCH = 20
"""Calls between which the host waits for the device, so that it never waits in a call."""
HOST_CALLS, HOST_BLOCK = 1000, 100
"""Calls of a way that `time_in_turn` times, and how many before it is another's turn."""
ROUNDS = (3, 15)
"""At least and at most so many rounds."""


@dataclass(slots=True)
class Timing:
    """Measurements of one candidate, in seconds."""

    rounds: list[float] = field(default_factory=list)
    """Time of a launch in each round: the mean of its burst; the slowest rank's, once gathered."""
    host: list[float] = field(default_factory=list)
    """Time that this rank's host spent in each call."""
    clocks: list[float] = field(default_factory=list)
    """SM clock in MHz, read while the device was at it."""
    problem: str | None = None

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds) if self.rounds else math.nan

    @property
    def least(self) -> float:
        """The least over the rounds: what a busy host or a hot GPU did not disturb."""
        return min(self.rounds, default=math.nan)

    @property
    def p90(self) -> float:
        """The 90th percentile over the rounds."""
        return percentile(self.rounds, 0.9)

    @property
    def host_median(self) -> float:
        """The median time that the host takes for a call."""
        return statistics.median(self.host) if self.host else math.nan

    @property
    def clock(self) -> float:
        """The median SM clock; NaN where nobody could read it."""
        return statistics.median(self.clocks) if self.clocks else math.nan


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` of all do not exceed."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def burst(
    ranks: Ranks,
    run: Run | None,
    inputs: Sequence[Sequence[Any]],
    launches: int,
    first: int = 0,
    clock: SMClock | None = None,
    warm: int = 1,
    lead: int = LEAD_CYCLES,
    ahead: bool = False,
) -> tuple[float, list[float], float]:
    """Seconds for each launch, host seconds of each call, and the SM clock meanwhile, after `warm`
    launches and while the device waits `lead` cycles, or `ahead`, for a launch of the host.

    All ranks call it; one without `run` meets the others and does nothing (none goes `ahead` then).
    """
    if run is None:
        ranks.align()
        return 0.0, [], math.nan
    try:
        for number in range(first, first + warm):  # the candidate before left its own traces
            begun = time.perf_counter()
            run(*inputs[number % len(inputs)])
            if ahead:
                cycles = int(AHEAD_CYCLES * (time.perf_counter() - begun))
                lead = max(lead, min(MOST_CYCLES, cycles))
    finally:
        ranks.synchronize()
        if ahead:  # by the slowest host: a device that waited less would count the others' wait
            (slowest,) = ranks.maximum([lead])
            lead = int(slowest)
        time.sleep(REST_S)
        ranks.align()
    host: list[float] = []
    sets = [inputs[(first + 1 + i) % len(inputs)] for i in range(launches)]
    start, end = _marks(ranks)
    if ranks.cuda:
        torch.cuda._sleep(lead)
    begun = time.perf_counter()
    start.record()
    before = time.perf_counter()
    for given in sets:
        run(*given)
        now = time.perf_counter()
        host.append(now - before)
        before = now
    end.record()
    mhz = clock.read() if clock is not None else math.nan
    if ranks.cuda:
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / launches, host, mhz
    return (before - begun) / launches, host, mhz


def _marks(ranks: Ranks) -> tuple[Any, Any]:
    if ranks.cuda:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    return _NoEvent(), _NoEvent()


class _NoEvent:
    """The CPU needs no events: a call that returns is done."""

    def record(self) -> None:
        """Nothing."""


def captured(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A CUDA graph of what `run` launches: what replays it, and the result, which lies in it."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks about events meanwhile, which only this mode allows it.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result


def race(
    ranks: Ranks,
    runs: Mapping[str, Run],
    inputs: Mapping[str, Sequence[Sequence[Any]]],
    seconds: float,
    rounds: tuple[int, int] = ROUNDS,
    launches: tuple[int, int] = LAUNCHES,
    ahead: bool = False,
) -> dict[str, Timing]:
    """Times the candidates against one another for about `seconds`.

    `inputs` has sets of inputs for each, `launches` bounds a burst, before which the device may
    wait until the host is `ahead`: what stands amid other work is timed so. A candidate that raises
    is out on all ranks, with the reason; a fault of the device ends it all.
    """
    found = {name: Timing() for name in runs}
    clock = SMClock(ranks.device)
    bursts, failed = _launches(ranks, runs, inputs, launches)
    names = _without(ranks, failed, found, list(runs))
    number, least, most = 0, *rounds
    begun = time.perf_counter()
    while names and number < most:
        failed: dict[str, str] = {}
        for name in random.Random(number).sample(names, len(names)):  # the same on all ranks
            first = number * (bursts[name] + 1)
            try:
                count = bursts[name]
                given = runs[name], inputs[name], count, first, clock
                each, host, mhz = burst(ranks, *given, ahead=ahead)
            except Exception as error:
                failed[name] = describe(error, ranks)
                continue
            found[name].rounds.append(each)
            found[name].host += host
            if not math.isnan(mhz):
                found[name].clocks.append(mhz)
        number += 1
        spent = time.perf_counter() - begun
        names = _without(ranks, failed, found, names)
        if number >= least and max(ranks.maximum([spent])) * (1 + 1 / number) > seconds:
            break
    return _slowest(ranks, found, names)


def ahead(
    ranks: Ranks,
    runs: Mapping[str, Run],
    inputs: Mapping[str, Sequence[Sequence[Any]]],
    host_s: Mapping[str, float],
) -> dict[str, float]:
    """Seconds of a launch where the host is ahead: the device waits for as long as the host takes
    to issue a burst, so that only the device's own time counts. NaN without a GPU.
    """
    if not ranks.cuda:
        return dict.fromkeys(runs, math.nan)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(AHEAD_ROUNDS):
        for name in random.Random(number).sample(list(runs), len(runs)):
            lead = LEAD_CYCLES + int(AHEAD_CYCLES * AHEAD_LAUNCHES * host_s[name])
            launch = runs[name], inputs[name], AHEAD_LAUNCHES, number * (AHEAD_LAUNCHES + 1)
            found[name].append(burst(ranks, *launch, lead=lead)[0])
    flat = ranks.maximum([each for name in runs for each in found[name]])
    rounds = [flat[at : at + AHEAD_ROUNDS] for at in range(0, len(flat), AHEAD_ROUNDS)]
    return {name: statistics.median(each) for name, each in zip(runs, rounds, strict=True)}


def host_times(ranks: Ranks, run: Run, inputs: Sequence[Sequence[Any]], calls: int) -> list[float]:
    """Seconds that this rank's host takes for each of many calls, one after another."""
    spent: list[float] = []
    ranks.align()
    for number in range(calls):
        given = inputs[number % len(inputs)]
        before = time.perf_counter()
        run(*given)
        spent.append(time.perf_counter() - before)
        if number % HOST_BATCH == HOST_BATCH - 1:
            ranks.synchronize()
    ranks.synchronize()
    return spent


def time_in_turn(
    ranks: Ranks, runs: Mapping[str, Run], sets: Sequence[Sequence[Any]], seconds: float
) -> dict[str, Timing]:
    """The time of each of 1,000 calls, by way, or of fewer that take so long.

    A way that raises has the reason instead. torch computes with one thread meanwhile: others would
    have to be woken for each call.
    """
    found = {name: Timing() for name in runs}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        until = time.monotonic() + seconds
        number, blocks = 0, dict.fromkeys(runs, HOST_BATCH)
        while number < HOST_CALLS // HOST_BLOCK + 1 and (number < 2 or time.monotonic() < until):
            for name in random.Random(number).sample(list(runs), len(runs)):
                _turn(ranks, runs[name], sets, blocks[name], found[name])
            if not number:  # the first turn warms up, and tells how many calls a block may have
                for name, timed in found.items():
                    if timed.problem is not None:
                        continue
                    share = seconds / len(runs) / 2 / (HOST_CALLS / HOST_BLOCK)
                    blocks[name] = int(max(4, min(HOST_BLOCK, share / max(timed.least, 1e-6))))
                    timed.rounds.clear()
            number += 1
    finally:
        torch.set_num_threads(threads)
    for timed in found.values():
        timed.host = timed.rounds
    return found


def _turn(ranks: Ranks, run: Run, sets: Sequence[Sequence[Any]], calls: int, timed: Timing) -> None:
    """So many calls of a way, one after another."""
    if timed.problem is not None:
        return
    clock, spent = time.perf_counter, timed.rounds
    try:
        for number in range(calls):
            if number % HOST_BATCH == 0:
                ranks.align()
            given = sets[number % len(sets)]
            before = clock()
            run(*given)
            spent.append(clock() - before)
        ranks.align()
    except Exception as error:
        timed.problem = describe(error, ranks)


def _launches(
    ranks: Ranks,
    runs: Mapping[str, Run],
    inputs: Mapping[str, Sequence[Sequence[Any]]],
    bounds: tuple[int, int],
) -> tuple[dict[str, int], dict[str, str]]:
    """Launches of a burst, by candidate, from a first short one that is not counted; and what
    failed in it here."""
    quick: list[float] = []
    failed: dict[str, str] = {}
    for name, run in runs.items():
        try:
            # What graphs are captured for, they are captured for here.
            quick.append(burst(ranks, run, inputs[name], 2, warm=len(inputs[name]))[0])
        except Exception as error:
            failed[name] = describe(error, ranks)
            quick.append(1.0)
    low, high = bounds
    counts = [round(BURST_S / max(seconds, 1e-9)) for seconds in ranks.maximum(quick)]
    return {n: min(high, max(low, count)) for n, count in zip(runs, counts, strict=True)}, failed


def _without(
    ranks: Ranks, failed: Mapping[str, str], found: Mapping[str, Timing], names: Sequence[str]
) -> list[str]:
    """The names without those that failed on some rank, whose problem is noted."""
    for rank, note in enumerate(ranks.exchange({"failed": failed})):
        for name, problem in note["failed"].items():
            found[name].problem = found[name].problem or f"rank {rank}: {problem}"
    return [name for name in names if found[name].problem is None]


def _slowest(ranks: Ranks, found: dict[str, Timing], names: Sequence[str]) -> dict[str, Timing]:
    """Keeps the slowest rank's time of each round and candidate; host times stay this rank's."""
    flat = ranks.maximum([each for name in names for each in found[name].rounds])
    for name in names:
        count = len(found[name].rounds)
        found[name].rounds, flat = flat[:count], flat[count:]
    return found


def describe(error: BaseException, ranks: Ranks) -> str:
    """One line of an error; raises where the device itself is broken, since nothing works then."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    try:
        ranks.synchronize()
    except RuntimeError as fault:
        raise ExecutorError(f"the GPU of rank {ranks.me} is in error, after {text}") from fault
    return text


class SMClock:
    """Reads the clock of a GPU's multiprocessors by NVML (`nvidia-ml-py`), where that is there."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        with contextlib.suppress(Exception):  # NVML is an extra, and raises what it likes
            pynvml: Any = importlib.import_module("pynvml")
            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml

    def read(self) -> float:
        """The clock now, in MHz; NaN where it cannot be read."""
        if self._nvml is None:
            return math.nan
        try:
            return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        except self._nvml.NVMLError:
            return math.nan
