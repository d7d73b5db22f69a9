"""Ways to compute one thing, raced: opened, checked, timed in turn, closed.

    racers = [prepare(ranks, way, inputs) for way in ways]          # every rank together
    time_ways(racers, lambda runs, sets: race(ranks, runs, sets, seconds=2.0))     # or: run_race
    racers[0].median, racers[0].problem
    close(racers)
    free(ranks)

A way that cannot be opened, computes something wrong or raises is out on all ranks, with the
reason; the others go on.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from interlace.comm.resets import reset_teams
from interlace.errors import InterlaceError, OptionError
from interlace.launch import Tell
from interlace_bench.ranks import Ranks
from interlace_bench.timing import Run, Timing, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings:
    """Settings that every race has."""

    known: ClassVar[tuple[str, ...]] = ()
    """Names of all that may be raced."""
    only: tuple[str, ...] = ()
    """Names of what is raced; none: all."""
    seconds: float = 60.0
    commit: str = ""
    """Commit for the rows, where git cannot tell."""

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in self.known:
                raise OptionError(f"--only {name}: choose from {', '.join(self.known)}")
        if not self.only:
            object.__setattr__(self, "only", self.known)


Sets = Sequence[Sequence[Any]]
"""Inputs, which take turns."""
Timer = Callable[[Mapping[str, Run], Mapping[str, Sets]], Mapping[str, Timing]]


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
    """A way to compute something; `open` raises where that is impossible."""

    name: str
    open: Callable[[], Opened]
    close: Callable[[], None] = lambda: None
    """Gives everything back, after a failure too."""


@dataclass(slots=True)
class Racer:
    """A way under way."""

    way: Way
    sets: Sets
    opened: Opened | None = None
    """None before, after, and where there is a `problem`."""
    off: float = math.nan
    problem: str | None = None
    timed: Timing = field(default_factory=Timing)
    peak_bytes: float = math.nan
    """Most bytes that it holds in a launch, where that is measured."""

    @property
    def median(self) -> float:
        """The median time in seconds; NaN where it has none."""
        return self.timed.median if self.problem is None else math.nan

    def columns(self, *names: str) -> dict[str, Any]:
        """The named columns of its row; times are in microseconds, NaN where it has none."""
        timed = self.timed if self.problem is None else Timing()
        known = {
            "median_us": timed.median * 1e6,
            "p90_us": timed.p90 * 1e6,
            "least_us": timed.least * 1e6,
            "host_us": timed.host_median * 1e6,
            "host_runs": len(timed.host),
            "rounds": len(timed.rounds),
            "sm_mhz": timed.clock,
            "error": self.problem or "",
        }
        return {name: known[name] for name in names}


def prepare(ranks: Ranks, way: Way, sets: Sets, limit: float = 1.0) -> Racer:
    """Opens a way on all ranks, and lets it compute what is known, which may be `limit` off."""
    racer = Racer(way, sets)

    def make() -> None:
        racer.opened = way.open()

    def check(opened: Opened) -> str | None:
        racer.off = opened.off()
        right = racer.off <= limit
        return None if right else f"wrong: off by {racer.off:.3g} times what rounding may change"

    _attempt(ranks, racer, make)
    also(ranks, racer, check)
    return racer


def also(ranks: Ranks, racer: Racer, step: Callable[[Opened], str | None]) -> None:
    """Does one more thing with a way that is open, on all ranks; it may return a problem."""
    opened = racer.opened
    if opened is not None and racer.problem is None:
        _attempt(ranks, racer, lambda: step(opened))


def _attempt(ranks: Ranks, racer: Racer, step: Callable[[], str | None]) -> None:
    """Does a step; where a rank has a problem in it, the way is closed on all of them."""
    try:
        problem = step()
    except Exception as error:
        problem = describe(error, ranks)
    racer.problem = ranks.agree(problem)
    if racer.problem is not None:
        _give_up(ranks, racer)


def _give_up(ranks: Ranks, racer: Racer) -> None:
    """Leaves a failed way behind, so that the next one can run."""
    racer.opened = None
    try:
        racer.way.close()
        if ranks.size > 1:
            reset_teams()
    except InterlaceError as error:
        racer.problem = f"{racer.problem} (and then {describe(error, ranks)})"
    free(ranks)
    ranks.agree(None)


def run_race(
    names: Iterable[str],
    prepared: Callable[[str], Racer],
    timer: Timer,
    tell: Tell,
    title: str = "",
) -> dict[str, Racer]:
    """Prepares ways by name, one after another, and times in turn those that have no problem."""
    racers: dict[str, Racer] = {}
    for name in names:
        tell({"event": "step", "doing": f"{title}{name}"})
        racers[name] = prepared(name)
    tell({"event": "step", "doing": f"{title}timing"})
    time_ways(racers.values(), timer)
    return racers


def running(racers: Iterable[Racer]) -> tuple[dict[str, Run], dict[str, Sets]]:
    """The launch of each way that has no problem, and its inputs, both by name."""
    ready = [racer for racer in racers if racer.opened is not None and racer.problem is None]
    runs = {racer.way.name: racer.opened.run for racer in ready if racer.opened is not None}
    return runs, {racer.way.name: racer.sets for racer in ready}


def time_ways(racers: Iterable[Racer], timer: Timer) -> None:
    """Times the ways that have no problem, by `timer`, which gets what `running` returns."""
    known = {racer.way.name: racer for racer in racers}
    for name, timed in timer(*running(known.values())).items():
        known[name].timed, known[name].problem = timed, timed.problem


def close(racers: Iterable[Racer]) -> None:
    """Closes the ways."""
    for racer in racers:
        racer.opened = None
        racer.way.close()


def free(ranks: Ranks) -> None:
    """Gives back the memory of ways that are closed."""
    gc.collect()
    if ranks.cuda:
        torch.cuda.empty_cache()


def worst(offs: Iterable[float]) -> float:
    """The largest; infinite where one is not finite."""
    known = list(offs)
    return max(known) if all(map(math.isfinite, known)) else math.inf
