"""`interlace bench overlap`: sites computed by our strategies and by others, against the roof.

    report = work(OverlapSettings(preset="tiny"), ranks, tell)     # on every rank; rank 0 reports

Of every case: inputs, candidates opened and checked against wide arithmetic, then all of them timed
in turn; so are whole matmuls, which with the best copy make the roof max(gemm, bytes / bandwidth).
A candidate that raises or is wrong becomes a row with its error and no time.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from interlace.launch import Tell
from interlace.options import Options
from interlace.runtime.machine import machine_for
from interlace_bench.candidates import Candidate, ours, rivals, whole_gemms
from interlace_bench.links import ROOF_SIZES, best_copy
from interlace_bench.race import (
    Opened,
    Racer,
    Variant,
    also,
    close,
    host_times,
    race,
    run_cases,
    run_race,
    worst,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row, facts
from interlace_bench.settings import OverlapSettings, whole, words
from interlace_bench.sites import Inputs, SiteCase, cases_of, deviation, make_inputs, whole_check

BRIEF_S = 150e-6
"""A longer launch hides its host's time, which is then taken from the bursts."""
MARGIN_S = 0.25
"""Part of a case's share of the time that timing gets at least, however long set-up took."""


@torch.no_grad()
def work(settings: OverlapSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures every case, within the time, set-up included; rank 0 gets the report."""
    begun = time.monotonic()
    # The largest last: what small ones leave of their time is theirs, whose noise is the greatest.
    cases = sorted(cases_of(settings.preset, settings.shapes, words(settings.dtype)), key=_work)
    for case in cases:
        case.check(ranks.size)
    common = facts(ranks.device.type, settings.commit)
    machine = machine_for(Options(calibration=whole(settings.calibration)), ranks.device.type)
    common["calibrated"] = "yes" if machine.host or settings.calibration else "no"
    roof = best_copy(ranks, ROOF_SIZES if ranks.cuda else (1 << 20,))
    bandwidth = math.nan if roof is None else roof.nbytes / roof.seconds
    smallest = {case.op: min(_work(c) for c in cases if c.op == case.op) for case in cases}

    def measure(case: SiteCase, share: float) -> list[Row]:
        timed = _case(case, settings, ranks, share, _work(case) == smallest[case.op], tell)
        return [row | common for row in _rows(case, timed, bandwidth, ranks)]

    named = {str(case): functools.partial(measure, case) for case in cases}
    (spent,) = ranks.maximum([time.monotonic() - begun])
    rows, skipped = run_cases(ranks, named, settings.seconds - spent, tell)
    if ranks.me:
        return None
    said = f", roof of a copy {bandwidth / 1e9:.1f} GB/s"
    if roof is not None:
        said += f" ({roof.kind} {roof.protocol} {roof.pattern} {roof.nbytes >> 20}M)"
    return {"rows": rows, "skipped": skipped, "facts": common, "headline": said}


def _work(case: SiteCase) -> int:
    return case.m * case.k * case.n


Timed = dict[Candidate, Racer]


def _case(
    case: SiteCase, settings: OverlapSettings, ranks: Ranks, share: float, small: bool, tell: Tell
) -> Timed:
    """Every candidate, timed and closed; whole matmuls come first."""
    begun = time.monotonic()
    inputs = make_inputs(case, ranks)
    candidates = [
        *whole_gemms(case, ranks),
        *rivals(case, ranks, settings.names, inputs.sets),
        *ours(case, ranks, settings.names, whole(settings.calibration)),
    ]
    variants = {one: _variant(one, case, inputs) for one in candidates}
    sites = [item.name for one, item in variants.items() if not one.whole]

    def timer(ready: list[Racer]) -> None:
        known = {racer.variant.name: racer for racer in ready}
        twins = _twins([one for one, item in variants.items() if item.name in known])
        spent = max(ranks.maximum([time.monotonic() - begun]))
        running = {n: known[n] for n in known if n not in {variants[one].name for one in twins}}
        race(ranks, [*running.values()], max(share - spent, MARGIN_S * share), ahead=1)
        timed = [running[name] for name in sites if name in running]
        fastest = min((racer.median for racer in timed if racer.timed), default=math.inf)
        if small or max(ranks.maximum([fastest])) <= BRIEF_S:
            for racer in timed:
                also(ranks, racer, many_calls)
        for one, twin in twins.items():
            here, there = (known[variants[each].name] for each in (one, twin))
            here.rounds, here.host, here.clocks = there.rounds, there.host, there.clocks
            here.problem = there.problem

    def many_calls(racer: Racer) -> None:
        """Times calls of this rank's host, in place of the bursts' calls."""
        racer.host = host_times(ranks, racer.run, racer.variant.sets, settings.host_runs)

    racers = run_race(ranks, variants.values(), timer, tell, f"{case}: ")
    close(racers.values())
    return {one: racers[item.name] for one, item in variants.items()}


def _variant(one: Candidate, case: SiteCase, inputs: Inputs) -> Variant:
    """A candidate as a variant, which is right where all checks come out."""
    checks = [whole_check(case, inputs)] if one.whole else 2 * inputs.checks[one.mode]

    def make() -> Opened:
        launch = one.open()
        return Opened(launch, lambda: worst(deviation(launch(*at), want) for at, want in checks))

    sets = inputs.whole if one.whole else inputs.of(one.mode)
    return Variant(f"{one.name}/{one.mode}", make, one.close, sets, one.loose)


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


def _rows(case: SiteCase, timed: Timed, bandwidth: float, ranks: Ranks) -> list[Row]:
    """The rows of a case."""

    base = {one.mode: racer.median for one, racer in timed.items() if one.name == "sequential"}
    gemms = [racer for one, racer in timed.items() if one.whole]
    gemm_s = min((racer.median for racer in gemms if racer.timed), default=math.nan)
    link_s = case.link_bytes(ranks.size) / bandwidth
    return [
        {
            **asdict(case),
            "world": ranks.size,
            "strategy": one.name,
            "mode": one.mode,
            "chosen": one.chosen if one.name in ("auto", "sequential") else "",
            **racer.columns("median_us", "p90_us", "least_us", "host_us", "host_runs"),
            "speedup_eager": base.get("eager", math.nan) / racer.median,
            "speedup_graph": base.get("graph", math.nan) / racer.median,
            "r": racer.median / max(gemm_s, link_s),
            "gemm_us": gemm_s * 1e6,
            "link_us": link_s * 1e6,
            "bandwidth_gbs": bandwidth / 1e9,
            "predicted_us": one.predicted_s * 1e6,
            **racer.columns("deviation", "rounds", "sm_mhz", "error"),
        }
        for one, racer in timed.items()
    ]
