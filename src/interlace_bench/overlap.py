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
from interlace_bench.candidates import ours, rivals, whole_gemms
from interlace_bench.links import ROOF_SIZES, best_copy
from interlace_bench.race import (
    RacePlan,
    Racer,
    Variant,
    benchmark,
    race,
    race_hosts,
    run_race,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row
from interlace_bench.settings import OverlapSettings, whole, words
from interlace_bench.sites import SiteCase, cases_of, make_inputs

BRIEF_S = 150e-6
"""A longer launch hides its host's time, which is then taken from the bursts."""
HOST_S = 2.0
"""Seconds in which hosts are timed where launches are brief."""
MARGIN_S = 0.25
"""Part of a case's share of the time that timing gets at least, however long set-up took."""


@benchmark
def work(settings: OverlapSettings, ranks: Ranks, tell: Tell) -> RacePlan:
    """All cases."""
    # The largest last: what small ones leave of their time is theirs, whose noise is the greatest.
    cases = sorted(cases_of(settings.preset, settings.shapes, words(settings.dtype)), key=_work)
    for case in cases:
        case.check(ranks.size)
    machine = machine_for(Options(calibration=whole(settings.calibration)), ranks.device.type)
    roof = best_copy(ranks, ROOF_SIZES if ranks.cuda else (1 << 20,))
    bandwidth = math.nan if roof is None else roof.nbytes / roof.seconds

    @torch.no_grad()
    def measure(case: SiteCase, share: float) -> list[Row]:
        return _rows(case, _case(case, settings, ranks, share, tell), bandwidth, ranks)

    said = f", roof of a copy {bandwidth / 1e9:.1f} GB/s"
    if roof is not None:
        said += f" ({roof.kind} {roof.protocol} {roof.pattern} {roof.nbytes >> 20}M)"
    return RacePlan(
        cases={str(case): functools.partial(measure, case) for case in cases},
        seconds=settings.seconds,
        facts={"calibrated": "yes" if machine.host or settings.calibration else "no"},
        headline=said,
    )


def _work(case: SiteCase) -> int:
    return case.m * case.k * case.n


def _case(
    case: SiteCase, settings: OverlapSettings, ranks: Ranks, share: float, tell: Tell
) -> list[Racer]:
    """Every candidate, timed and closed; whole matmuls come first."""
    begun = time.monotonic()
    inputs = make_inputs(case, ranks)
    variants = [
        *whole_gemms(case, ranks, inputs),
        *rivals(case, ranks, inputs, settings.names),
        *ours(case, ranks, inputs, settings.names, whole(settings.calibration)),
    ]

    def timer(ready: list[Racer]) -> None:
        twins = _twins([racer.variant for racer in ready])
        spent = max(ranks.maximum([time.monotonic() - begun]))
        running = {r.variant.name: r for r in ready if r.variant.name not in twins}
        race(ranks, [*running.values()], max(share - spent, MARGIN_S * share), ahead=1)
        timed = [racer for racer in running.values() if not racer.variant.facts["whole"]]
        fastest = min((racer.median for racer in timed if racer.timed), default=math.inf)
        if max(ranks.maximum([fastest])) <= BRIEF_S:
            race_hosts(ranks, [racer for racer in timed if racer.ready], HOST_S)
        for racer in ready:
            if (twin := running.get(twins.get(racer.variant.name, ""))) is not None:
                racer.rounds, racer.host, racer.clocks = twin.rounds, twin.host, twin.clocks
                racer.problem = twin.problem

    return [*run_race(ranks, variants, timer, tell, f"{case}: ").values()]


def _twins(variants: Sequence[Variant]) -> dict[str, str]:
    """Candidates whose Program is that of another, which is timed for both: what `auto` chose is
    the same launches as the fixed strategy, and would differ by noise alone."""
    runs = {(v.facts["text"], v.facts["mode"]): v.name for v in reversed(variants)}
    return {
        v.name: other
        for v in variants
        if v.facts["strategy"] == "auto" and v.facts["text"]
        if (other := runs[v.facts["text"], v.facts["mode"]]) != v.name
    }


def _rows(case: SiteCase, racers: Sequence[Racer], bandwidth: float, ranks: Ranks) -> list[Row]:
    """The rows of a case."""
    known = [(racer.variant.facts, racer) for racer in racers]
    base = {of["mode"]: racer.median for of, racer in known if of["strategy"] == "sequential"}
    gemms = [racer.median for of, racer in known if of["whole"] and racer.timed]
    gemm_s = min(gemms, default=math.nan)
    link_s = case.link_bytes(ranks.size) / bandwidth
    return [
        {
            **asdict(case),
            "world": ranks.size,
            **{name: of[name] for name in ("strategy", "mode", "chosen")},
            "speedup_eager": base.get("eager", math.nan) / racer.median,
            "speedup_graph": base.get("graph", math.nan) / racer.median,
            "r": racer.median / max(gemm_s, link_s),
            "gemm_us": gemm_s * 1e6,
            "link_us": link_s * 1e6,
            "bandwidth_gbs": bandwidth / 1e9,
            "predicted_us": of.get("predicted_us", math.nan),
            **racer.row,
        }
        for of, racer in known
    ]
