"""`interlace bench overlap`: sites computed by our strategies and by others, against the roof.

    report = work(settings, ranks, tell)       # on every rank; rank 0 gets the report

Of every case: inputs, candidates opened and checked against wide arithmetic, then all of them timed
in turn; so are whole matmuls, which with the best copy make the roof max(gemm, bytes / bandwidth).
A candidate that raises or is wrong becomes a row with its error and no time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from interlace.launch import Tell
from interlace.options import Options
from interlace.runtime.machine import machine_for
from interlace_bench.race.candidates import (
    OURS,
    Candidate,
    WholeGemm,
    ours,
    rivals,
    whole_gemms,
)
from interlace_bench.race.ways import (
    Opened,
    Racer,
    RaceSettings,
    Way,
    also,
    close,
    free,
    prepare,
    time_ways,
    worst,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row, facts
from interlace_bench.sites import SiteCase, deviation, make_inputs, whole_check
from interlace_bench.timing import host_times, race
from interlace_bench.transfers import ROOF_SIZES, Roof, best_copy

RIVALS = ("sequential", "async-tp")
HOST_RUNS = 1000
BRIEF_S = 150e-6
"""A longer launch hides its host's time, which is then taken from the bursts."""
MARGIN_S = 0.25
"""Part of a case's share of the time that timing gets at least, however long set-up took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings(RaceSettings):
    """Sites, and their share of the time."""

    known = (*OURS, *RIVALS)
    cases: tuple[SiteCase, ...]
    only: tuple[str, ...] = (*(name for name in OURS if name != "ring"), *RIVALS)
    """Beside `ring`, which gains only between hosts."""
    seconds: float = 90.0
    """All of it, set-up included; what does not fit is left out and said."""
    host_runs: int = HOST_RUNS
    calibration: str | None = None
    seed: int = 0


@torch.no_grad()
def work(settings: OverlapSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures every case; rank 0 gets the report."""
    begun = time.monotonic()
    cases = settings.cases
    for case in cases:
        case.check(ranks.size)
    tell({"event": "total", "total": len(cases), "doing": "links"})
    common = facts(ranks.device.type, settings.commit)
    machine = machine_for(Options(calibration=settings.calibration), ranks.device.type)
    common["calibrated"] = "yes" if machine.host or settings.calibration else "no"
    roof = best_copy(ranks, ROOF_SIZES if ranks.cuda else (1 << 20,))
    smallest = {case.op: min(c.m * c.k * c.n for c in cases if c.op == case.op) for case in cases}
    measured: dict[int, list[Row]] = {}
    skipped: list[str] = []
    # The largest last: what small ones leave of their time is theirs, whose noise is the greatest.
    ordered = sorted(enumerate(cases), key=lambda item: item[1].m * item[1].k * item[1].n)
    for number, (index, case) in enumerate(ordered):
        tell({"event": "step", "doing": str(case)})
        left = settings.seconds - max(ranks.maximum([time.monotonic() - begun]))
        share = left / (len(cases) - number)
        if left <= 0:
            skipped.append(str(case))
            continue
        small = case.m * case.k * case.n == smallest[case.op]
        racers = _case(case, settings, ranks, share, small, tell)
        measured[index] = [row | common for row in _rows(case, racers, roof, ranks)]
        del racers
        free(ranks)
        tell({"event": "rows", "rows": measured[index]})
    rows = [row for index in sorted(measured) for row in measured[index]]
    if ranks.me:
        return None
    return {"rows": rows, "skipped": skipped, "roof": asdict(roof), "facts": common}


Racers = dict[Candidate, Racer]


def _case(
    case: SiteCase, settings: OverlapSettings, ranks: Ranks, share: float, small: bool, tell: Tell
) -> Racers:
    """Every candidate, timed and closed; whole matmuls come first."""
    begun = time.monotonic()
    inputs = make_inputs(case, ranks, settings.seed)
    sites = (
        *rivals(case, ranks, settings.only, inputs.sets),
        *ours(case, ranks, settings.only, settings.calibration),
    )
    racers: Racers = {}
    for candidate in (*whole_gemms(case, ranks), *sites):
        whole = isinstance(candidate, WholeGemm)
        sets = inputs.whole if whole else inputs.of(candidate.mode)
        checks = [whole_check(case, inputs)] if whole else 2 * inputs.checks[candidate.mode]
        way = _way(candidate, checks)
        tell({"event": "doing", "doing": f"{case}: {way.name}"})
        racers[candidate] = prepare(ranks, way, sets, candidate.loose)
    twins = _twins([one for one, racer in racers.items() if racer.opened is not None])
    spent = max(ranks.maximum([time.monotonic() - begun]))
    left = max(share - spent, MARGIN_S * share)
    running = {one: racer for one, racer in racers.items() if one not in twins}
    time_ways(running.values(), lambda runs, sets: race(ranks, runs, sets, left, ahead=True))
    found = [running[one].timed for one in sites if one in running]
    fastest = min((timed.median for timed in found if timed.rounds), default=math.inf)
    if small or max(ranks.maximum([fastest])) <= BRIEF_S:
        for one in sites:
            if one in running:
                also(ranks, running[one], _hosts(ranks, running[one], settings.host_runs))
    for one, twin in twins.items():
        racers[one].timed, racers[one].problem = racers[twin].timed, racers[twin].problem
    close(racers.values())
    return racers


def _way(candidate: Candidate, checks: Sequence[tuple[Any, Any]]) -> Way:
    """A candidate as a way, which is right where all `checks` come out."""

    def make() -> Opened:
        launch = candidate.open()
        return Opened(launch, lambda: worst(deviation(launch(*at), want) for at, want in checks))

    return Way(f"{candidate.name}/{candidate.mode}", make, candidate.close)


def _twins(candidates: Sequence[Candidate]) -> dict[Candidate, Candidate]:
    """Candidates whose Program is that of another, which is timed for both: what `auto` chose is
    the same launches as the fixed strategy, and would differ by noise alone."""
    found: dict[Candidate, Candidate] = {}
    for one in candidates:
        if one.name == "auto" and one.text:
            runs = one.text, one.mode
            same = [c for c in candidates if c is not one and (c.text, c.mode) == runs]
            if same:
                found[one] = same[0]
    return found


def _hosts(ranks: Ranks, racer: Racer, calls: int) -> Callable[[Opened], None]:
    """Returns a step that times many calls of this rank's host, in place of the bursts' calls."""

    def measure(opened: Opened) -> None:
        racer.timed.host = host_times(ranks, opened.run, racer.sets, calls)

    return measure


def _rows(case: SiteCase, racers: Racers, roof: Roof, ranks: Ranks) -> list[Row]:
    """The rows of a case; of host times and deviations the greatest of all ranks'."""
    hosts = ranks.maximum([racer.timed.host_median for racer in racers.values()])
    offs = ranks.maximum([racer.off for racer in racers.values()])
    base = {
        one.mode: racer.timed.median
        for one, racer in racers.items()
        if one.name == "sequential" and racer.timed.rounds
    }
    gemms = [racer.timed for one, racer in racers.items() if isinstance(one, WholeGemm)]
    gemm_s = min((timed.median for timed in gemms if timed.rounds), default=math.nan)
    link_s = case.link_bytes(ranks.size) / roof.bandwidth
    rows: list[Row] = []
    for (one, racer), host_s, off in zip(racers.items(), hosts, offs, strict=True):
        median = racer.median
        rows.append(
            {
                **asdict(case),
                "world": ranks.size,
                "strategy": one.name,
                "mode": one.mode,
                "chosen": one.chosen if one.name in ("auto", "sequential") else "",
                **racer.columns("median_us", "p90_us", "least_us"),
                "host_us": host_s * 1e6,
                **racer.columns("host_runs"),
                "speedup_eager": base.get("eager", math.nan) / median,
                "speedup_graph": base.get("graph", math.nan) / median,
                "r": median / max(gemm_s, link_s),
                "gemm_us": gemm_s * 1e6,
                "link_us": link_s * 1e6,
                "bandwidth_gbs": roof.bandwidth / 1e9,
                "predicted_us": one.predicted_s * 1e6,
                "deviation": off,
                **racer.columns("rounds", "sm_mhz", "error"),
            }
        )
    return rows
