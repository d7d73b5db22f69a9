"""Variants that compute one thing, raced: opened, checked, timed in turn, closed.

    racers = run_race(ranks, variants, lambda racers: race(ranks, racers, seconds=2.0), tell)
    racers["ours"].median, racers["ours"].problem    # seconds: of each round the slowest rank's

A variant that cannot be opened, computes something wrong or raises is out on all ranks, with the
reason; the others go on.

A burst is a few launches one after another, with inputs in turn so that none lies in the cache,
between two events of the current stream; before it ranks meet, and the device waits a moment so
that launches stand back to back from the first on. A round gives every variant a burst, each round
in another order and after a short rest: drift (clocks, heat) and traces of the burst before affect
all alike. The slowest rank of a burst counts, and over the rounds the median and the 90th
percentile.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from interlace.comm.resets import reset_teams
from interlace.errors import ExecutorError, InterlaceError
from interlace.launch import Report, Tell
from interlace.torch_private import cuda_sleep
from interlace_bench.ranks import Ranks, Work
from interlace_bench.rows import Row, facts
from interlace_bench.settings import BenchSettings

Run = Callable[..., Any]
"""Launches once, with the inputs of one set."""
Sets = Sequence[Sequence[Any]]
"""Inputs, which take turns."""

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
"""Most cycles that it waits for each launch by which the host shall be ahead."""
REST_S = 5e-3
"""Seconds that the device rests before a burst."""
HOST_BATCH = 20
"""Calls between which the host waits for the device, so that it never waits in a call."""
HOST_LAUNCHES, HOST_ROUNDS = (4, 100), (2, 10)
"""Calls of a variant in a turn, and turns, where the host is timed: at most 1,000 calls in all."""
ROUNDS = (3, 15)
"""At least and at most so many rounds."""


# -- variants ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A variant, ready to run."""

    run: Run
    off: Callable[[], float] = lambda: 0.0
    """Lets it compute something known: how far it is off, in units of what rounding may do."""
    state: Callable[[], int] = lambda: 0
    """Bytes that it keeps from call to call."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compute something; `open` raises where that is impossible."""

    name: str
    open: Callable[[], Opened]
    close: Callable[[], None] = lambda: None
    """Gives everything back, after a failure too."""
    sets: Sets = ((),)
    limit: float = 1.0
    """Largest deviation that it may have."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further columns of its row; those that are known once it is open come then."""


@dataclass(slots=True)
class Racer:
    """A variant under way, and its measurements in seconds."""

    variant: Variant
    opened: Opened | None = None
    """None before, after, and where there is a `problem`."""
    problem: str | None = None
    off: float = math.nan
    """Deviation; of all ranks the largest, once raced."""
    host_s: float = math.nan
    """Median time that the host takes for a call, on the slowest rank, once raced."""
    figures: dict[str, float] = field(default_factory=dict)
    """Others, by column: bytes, for instance. Of all ranks the largest, once raced."""
    rounds: list[float] = field(default_factory=list)
    """Time of a launch in each round: the mean of its burst; the slowest rank's, once gathered."""
    host: list[float] = field(default_factory=list)
    """Time that this rank's host spent in each call."""
    clocks: list[float] = field(default_factory=list)
    """SM clock in MHz, read while the device was at it."""

    @property
    def ready(self) -> bool:
        """True if it is open and has no problem."""
        return self.opened is not None and self.problem is None

    @property
    def run(self) -> Run:
        """Its launch."""
        assert self.opened is not None
        return self.opened.run

    @property
    def timed(self) -> Sequence[float]:
        """The rounds that count: none where it has a problem."""
        return () if self.problem else self.rounds

    @property
    def median(self) -> float:
        """The median time in seconds; NaN where it has none."""
        return median(self.timed)

    @property
    def row(self) -> Row:
        """Its columns of a row; times are in microseconds, NaN where it has none."""
        timed = self.timed
        return {
            "median_us": self.median * 1e6,
            "p90_us": percentile(timed, 0.9) * 1e6,
            "least_us": min(timed, default=math.nan) * 1e6,
            "host_us": math.nan if self.problem else self.host_s * 1e6,
            "host_runs": 0 if self.problem else len(self.host),
            "rounds": len(timed),
            "sm_mhz": math.nan if self.problem else median(self.clocks),
            "off": self.off,
            "error": self.problem or "",
            **self.figures,
        }


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def worst(offs: Iterable[float]) -> float:
    """The largest; infinite where one is not finite."""
    known = list(offs)
    return max(known) if all(map(math.isfinite, known)) else math.inf


def step(tell: Tell, doing: str) -> None:
    """Tells what is under way."""
    tell({"event": "step", "doing": doing})


def run_race(
    ranks: Ranks,
    variants: Iterable[Variant],
    timer: Callable[[list[Racer]], None],
    tell: Tell,
    title: str = "",
    measure: Callable[[Racer], None] | None = None,
) -> dict[str, Racer]:
    """Opens variants, one after another, times in turn those that have no problem, and closes all;
    the racers by name. Each that is open does the step `measure` alone before the next is opened.
    """
    racers: dict[str, Racer] = {}
    for variant in variants:
        step(tell, f"{title}{variant.name}")
        racer = racers[variant.name] = prepare(ranks, variant)
        if measure is not None:
            also(ranks, racer, measure)
    step(tell, f"{title}timing")
    timer([racer for racer in racers.values() if racer.ready])
    gather(ranks, racers.values())
    close(racers.values())
    return racers


@dataclass(frozen=True, slots=True, kw_only=True)
class RacePlan:
    """The cases of a benchmark on these ranks, and what their report says."""

    cases: Mapping[str, Callable[[float], list[Row]]]
    """Each measures its rows within so many seconds."""
    seconds: float = math.inf
    """Time for all of them, set-up included; those for which none is left are skipped."""
    most_s: float = math.inf
    """Most seconds for a case."""
    facts: Row = field(default_factory=dict[str, Any])
    """Columns of all rows, beside what they say of the machine."""
    headline: str = ""
    shown: Callable[[list[Row]], list[Row]] = lambda rows: rows
    """Picks the rows that people see."""
    more: Report = field(default_factory=dict[str, Any])
    """Further entries of the report, filled as the cases are measured."""


def benchmark(plan_of: Callable[[Any, Ranks, Tell], RacePlan]) -> Work:
    """Measures the cases of a plan, one after another, and tells their rows as they come; rank 0
    gets the report."""

    @functools.wraps(plan_of)
    def work(settings: BenchSettings, ranks: Ranks, tell: Tell) -> Report | None:
        begun = time.monotonic()
        plan = plan_of(settings, ranks, tell)
        common = plan.facts | facts(ranks.device.type, settings.commit)
        rows: list[Row] = []
        skipped: list[str] = []
        for number, (name, measure) in enumerate(plan.cases.items()):
            step(tell, name)
            (spent,) = ranks.maximum([time.monotonic() - begun])
            left = plan.seconds - spent
            if left <= 0:
                skipped.append(name)
                continue
            share = min(plan.most_s, left / (len(plan.cases) - number))
            found = [row | common for row in measure(share)]
            free(ranks)
            tell({"event": "rows", "rows": found})
            rows += found
        if ranks.me:
            return None
        report = {"rows": rows, "skipped": skipped, "facts": common}
        return {**report, "headline": plan.headline, "shown": plan.shown(rows), **plan.more}

    return work


def open_racer(name: str, run: Run, sets: Sets = ((),)) -> Racer:
    """A racer of what is ready to run, and right."""
    opened = Opened(run)
    return Racer(Variant(name, lambda: opened, sets=sets), opened)


def prepare(ranks: Ranks, variant: Variant) -> Racer:
    """Opens a variant on all ranks, and lets it compute what is known."""
    racer = Racer(variant)

    def make() -> None:
        racer.opened = variant.open()

    def check(racer: Racer) -> str | None:
        assert racer.opened is not None
        racer.off = racer.opened.off()
        right = racer.off <= variant.limit
        return None if right else f"wrong: off by {racer.off:.3g} times what rounding may change"

    _attempt(ranks, racer, make)
    also(ranks, racer, check)
    return racer


def also(ranks: Ranks, racer: Racer, step: Callable[[Racer], str | None]) -> None:
    """Does one more thing with a variant that is open, on all ranks; it may return a problem."""
    if racer.ready:
        _attempt(ranks, racer, lambda: step(racer))


def _attempt(ranks: Ranks, racer: Racer, step: Callable[[], str | None]) -> None:
    """Does a step; where a rank has a problem in it, the variant is closed on all of them."""
    try:
        problem = step()
    except Exception as error:
        problem = describe(error, ranks)
    racer.problem = ranks.agree(problem)
    give_up(ranks, racer)


def give_up(ranks: Ranks, racer: Racer) -> None:
    """Closes a variant that has a problem, on all ranks; others stay."""
    if racer.problem is None:
        return
    racer.opened = None
    try:
        racer.variant.close()
        if ranks.size > 1:
            reset_teams()
    except InterlaceError as error:
        racer.problem = f"{racer.problem} (and then {describe(error, ranks)})"
    free(ranks)
    ranks.agree(None)


def gather(ranks: Ranks, racers: Iterable[Racer]) -> None:
    """Takes host times, deviations and other figures of the rank that has the most."""
    for racer in racers:
        racer.host_s = median(racer.host)
        mine = [racer.host_s, racer.off, *racer.figures.values()]
        racer.host_s, racer.off, *others = ranks.maximum(mine)
        racer.figures = dict(zip(racer.figures, others, strict=True))


def close(racers: Iterable[Racer]) -> None:
    """Closes the variants."""
    for racer in racers:
        racer.opened = None
        racer.variant.close()


def free(ranks: Ranks) -> None:
    """Gives back the memory of variants that are closed."""
    gc.collect()
    if ranks.cuda:
        torch.cuda.empty_cache()


def describe(error: BaseException, ranks: Ranks) -> str:
    """One line of an error; raises where the device itself is broken, since nothing works then."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    try:
        ranks.synchronize()
    except RuntimeError as fault:
        raise ExecutorError(f"the GPU of rank {ranks.me} is in error, after {text}") from fault
    return text


# -- bursts --------------------------------------------------------------------------------------


def burst(
    ranks: Ranks,
    run: Run,
    inputs: Sets,
    launches: int,
    first: int = 0,
    warm: int = 1,
    ahead: int = 0,
) -> tuple[float, list[float], float]:
    """Seconds for each launch, host seconds of each call, and the SM clock meanwhile, after `warm`
    launches and while the device waits, where asked until the slowest host is `ahead` by so many
    launches. All ranks call it."""
    lead = LEAD_CYCLES
    try:
        for number in range(first, first + warm):  # the variant before left its own traces
            begun = time.perf_counter()
            run(*inputs[number % len(inputs)])
            cycles = int(ahead * AHEAD_CYCLES * (time.perf_counter() - begun))
            lead = max(lead, min(ahead * MOST_CYCLES, cycles))
    finally:
        ranks.synchronize()
        if ahead:  # by the slowest host: a device that waited less would count the others' wait
            (slowest,) = ranks.maximum([lead])
            lead = int(slowest)
        time.sleep(REST_S)
        ranks.align()
    host: list[float] = []
    sets = [inputs[(first + 1 + i) % len(inputs)] for i in range(launches)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if ranks.cuda else []
    if ranks.cuda:
        cuda_sleep(lead)
    begun = time.perf_counter()
    if marks:
        marks[0].record()
    before = time.perf_counter()
    for given in sets:
        run(*given)
        now = time.perf_counter()
        host.append(now - before)
        before = now
    if not marks:  # a CPU needs no events: a call that returns is done
        return (before - begun) / launches, host, math.nan
    start, end = marks
    end.record()
    mhz = sm_clock(ranks.device)
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / launches, host, mhz


def sm_clock(device: torch.device) -> float:
    """The clock of a GPU's multiprocessors in MHz; NaN where NVML (`nvidia-ml-py`) is not there."""
    try:
        return float(torch.cuda.clock_rate(device))
    except Exception:  # NVML is an extra, and raises what it likes
        return math.nan


def captured(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A CUDA graph of what `run` launches: what replays it, and the result, which lies in it."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks about events meanwhile, which only this mode allows it.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result


def race(
    ranks: Ranks,
    racers: Sequence[Racer],
    seconds: float,
    rounds: tuple[int, int] = ROUNDS,
    launches: tuple[int, int] = LAUNCHES,
    ahead: int = 0,
    host: bool = False,
) -> None:
    """Times the variants against one another for about `seconds`: bursts, or the calls of the
    `host`.

    `launches` bounds a burst, before which the device may wait until the host is `ahead`: what
    stands amid other work is timed so. A variant that raises is out on all ranks, with the reason;
    a fault of the device ends it all.
    """
    bursts, failed = _launches(ranks, racers, launches)
    running = _without(ranks, failed, racers)
    number, least, most = 0, *rounds
    begun = time.perf_counter()
    while running and number < most:
        failed: dict[str, str] = {}
        for racer in random.Random(number).sample(running, len(running)):  # the same on all ranks
            name, count = racer.variant.name, bursts[racer.variant.name]
            given = racer.run, racer.variant.sets, count
            try:
                if host:
                    racer.host += host_times(ranks, *given)
                    continue
                each, calls, mhz = burst(ranks, *given, number * (count + 1), ahead=ahead)
            except Exception as error:
                failed[name] = describe(error, ranks)
                continue
            racer.rounds.append(each)
            racer.host += calls
            racer.clocks += [] if math.isnan(mhz) else [mhz]
        number += 1
        spent = time.perf_counter() - begun
        running = _without(ranks, failed, running)
        if number >= least and max(ranks.maximum([spent])) * (1 + 1 / number) > seconds:
            break
    for racer in running if not host else ():  # host times stay this rank's
        racer.rounds = ranks.maximum(racer.rounds)


def _launches(
    ranks: Ranks, racers: Sequence[Racer], bounds: tuple[int, int]
) -> tuple[dict[str, int], dict[str, str]]:
    """Launches of a burst, by variant, from a first short one that is not counted; and what failed
    in it here."""
    quick: list[float] = []
    failed: dict[str, str] = {}
    for racer in racers:
        sets = racer.variant.sets
        try:
            # What graphs are captured for, they are captured for here.
            quick.append(burst(ranks, racer.run, sets, 2, warm=len(sets))[0])
        except Exception as error:
            failed[racer.variant.name] = describe(error, ranks)
            quick.append(1.0)
    low, high = bounds
    counts = [round(BURST_S / max(seconds, 1e-9)) for seconds in ranks.maximum(quick)]
    bursts = [min(high, max(low, count)) for count in counts]
    names = [racer.variant.name for racer in racers]
    return dict(zip(names, bursts, strict=True)), failed


def _without(ranks: Ranks, failed: Mapping[str, str], racers: Sequence[Racer]) -> list[Racer]:
    """The racers without those that failed on some rank, whose problem is noted."""
    known = {racer.variant.name: racer for racer in racers}
    for rank, note in enumerate(ranks.exchange({"failed": failed})):
        for name, problem in note["failed"].items():
            known[name].problem = known[name].problem or f"rank {rank}: {problem}"
    return [racer for racer in racers if racer.problem is None]


def time_device(ranks: Ranks, racers: Sequence[Racer]) -> None:
    """Times launches where the host is ahead: the device waits for as long as the slowest host
    takes to issue a burst, so that only the device's own time counts. NaN without a GPU."""
    again = [Racer(racer.variant, racer.opened) for racer in racers if racer.ready and ranks.cuda]
    launches, rounds = (AHEAD_LAUNCHES, AHEAD_LAUNCHES), (AHEAD_ROUNDS, AHEAD_ROUNDS)
    race(ranks, again, math.inf, rounds, launches, ahead=AHEAD_LAUNCHES)
    timed = {racer.variant.name: racer.median * 1e6 for racer in again}
    for racer in racers:
        racer.figures["device_us"] = timed.get(racer.variant.name, math.nan)


# -- the host ------------------------------------------------------------------------------------


def host_times(ranks: Ranks, run: Run, inputs: Sets, calls: int) -> list[float]:
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


def race_hosts(ranks: Ranks, racers: Sequence[Racer], seconds: float) -> None:
    """Times calls of this rank's host, by variant, in place of those that bursts had.

    torch computes with one thread meanwhile: others would have to be woken for each call.
    """
    for racer in racers:
        racer.host = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        race(ranks, racers, seconds, HOST_ROUNDS, HOST_LAUNCHES, host=True)
    finally:
        torch.set_num_threads(threads)


# -- memory --------------------------------------------------------------------------------------


def held(ranks: Ranks) -> float:
    """Bytes in use at rest, on the GPU or (CPU) by this process."""
    free(ranks)
    return in_use(ranks)


def busy(ranks: Ranks, launch: Callable[[], Any]) -> float:
    """Seconds in which a kernel or copy runs while something is launched; NaN without a GPU."""
    if not ranks.cuda:
        return math.nan
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launch()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    total, end = 0.0, -math.inf
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total / 1e6


def peak(ranks: Ranks, launch: Callable[[], Any]) -> float:
    """Most bytes that are in use while something is launched: what a user's device shows, with all
    that stays reserved for graphs, slots, memory of peers and NCCL's buffers."""
    free(ranks)
    if ranks.cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    launch()
    return in_use(ranks, "VmHWM")


def in_use(ranks: Ranks, line: str = "VmRSS") -> float:
    """Bytes of the GPU that are in use, in equal parts where ranks share it; on a CPU those of this
    process, by a line of its status; NaN where the system has none."""
    if ranks.cuda:
        torch.cuda.synchronize()
        unused, total = torch.cuda.mem_get_info()
        hosts = ranks.hosts if ranks.size > 1 else ()
        local = next((len(host) for host in hosts if ranks.me in host), ranks.size)
        return (total - unused) / -(-local // torch.cuda.device_count())
    with contextlib.suppress(OSError):
        known = dict(each.split(":") for each in Path("/proc/self/status").read_text().splitlines())
        return 1024.0 * int(known[line].split()[0])
    return math.nan
