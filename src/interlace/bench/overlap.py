"""`interlace bench overlap`: sites computed by our strategies and by others, against the roof.

    report = work(settings, ranks, tell)       # on every rank; rank 0 gets the report

Of every case: inputs, candidates opened and checked against wide arithmetic, then all of them timed
in turn; so are whole matmuls, which with the best copy make the roof max(gemm, bytes / bandwidth).
A candidate that raises or is wrong becomes a row with its error and no time.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from interlace.bench.candidates import OURS, Candidate, Launch, ours, rivals, whole_gemms
from interlace.bench.jax_rival import jax_rows
from interlace.bench.ranks import Ranks
from interlace.bench.rows import Row, facts
from interlace.bench.sites import Inputs, SiteCase, deviation, make_inputs, whole_check
from interlace.bench.timing import Timing, describe, host_times, race
from interlace.bench.transfers import ROOF_SIZES, Roof, best_copy
from interlace.comm.teams import reset_teams
from interlace.errors import InterlaceError, OptionError
from interlace.launch import Tell

RIVALS = ("sequential", "async-tp")
HOST_RUNS = 1000
BRIEF_S = 150e-6
"""What takes longer hides its host's time, which is taken from the bursts then."""
MARGIN_S = 0.25
"""Of a case's share of the time, what setting up is taken to need at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings:
    """What is run."""

    cases: tuple[SiteCase, ...]
    only: tuple[str, ...] = (*OURS, *RIVALS)
    graphs: bool = True
    seconds: float = 90.0
    """All of it, set-up included; what does not fit is left out and said."""
    host_runs: int = HOST_RUNS
    calibration: str | None = None
    commit: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in (*OURS, *RIVALS, "jax"):
                known = ", ".join((*OURS, *RIVALS, "jax"))
                raise OptionError(f"--only {name}: choose from {known}")


@dataclass(slots=True)
class CandidateRun:
    """A candidate under way."""

    candidate: Candidate
    launch: Launch | None = None
    deviation: float = math.nan
    problem: str | None = None
    timed: Timing = field(default_factory=Timing)
    host_s: float = math.nan
    host_runs: int = 0


@torch.no_grad()
def work(settings: OverlapSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures every case; rank 0 gets the report."""
    begun = time.monotonic()
    cases = settings.cases
    for case in cases:
        case.check(ranks.size)
    tell({"event": "total", "total": len(cases), "doing": "links"})
    common = facts(ranks.device.type, settings.commit)
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
        entries, gemm_s = _case(case, settings, ranks, share, small, tell)
        found = _rows(case, entries, gemm_s, roof, ranks, common)
        measured[index] = found
        tell({"event": "rows", "rows": found})
        del entries
    rows = [row for index in sorted(measured) for row in measured[index]]
    if "jax" in settings.only:
        tell({"event": "doing", "doing": "jax"})
        found = jax_rows(cases, ranks, rows)
        rows += found
        tell({"event": "rows", "rows": found})
    if ranks.me:
        return None
    return {"rows": rows, "skipped": skipped, "roof": asdict(roof), "facts": common}


def _case(
    case: SiteCase, settings: OverlapSettings, ranks: Ranks, share: float, small: bool, tell: Tell
) -> tuple[list[CandidateRun], float]:
    begun = time.monotonic()
    inputs = make_inputs(case, ranks, settings.seed)
    gemms = [CandidateRun(item) for item in whole_gemms(case, ranks)]
    entries = [
        CandidateRun(item)
        for item in (
            *rivals(case, ranks, settings.only, inputs.sets),
            *ours(case, ranks, settings.only, settings.calibration, settings.graphs),
        )
    ]
    for entry in gemms:
        _open(entry, [whole_check(inputs)], ranks, tell, case)
    for entry in entries:
        _open(entry, 2 * inputs.checks[entry.candidate.mode], ranks, tell, case)
    running = {_key(e): e for e in (*gemms, *entries) if e.problem is None and e.launch is not None}
    twins = _twins(list(running.values()))
    for key in twins:
        running.pop(key)
    spent = max(ranks.maximum([time.monotonic() - begun]))
    sets = {
        key: inputs.whole if e in gemms else inputs.of(e.candidate.mode)
        for key, e in running.items()
    }
    runs = {key: e.launch for key, e in running.items() if e.launch is not None}
    for key, timed in race(ranks, runs, sets, max(share - spent, MARGIN_S * share)).items():
        entry = running[key]
        entry.timed, entry.problem = timed, timed.problem
        entry.host_s, entry.host_runs = timed.host_median, len(timed.host)
    fastest = min((e.timed.median for e in entries if e.timed.rounds), default=math.inf)
    if small or max(ranks.maximum([fastest])) <= BRIEF_S:
        for entry in running.values():
            if entry not in gemms:
                _host(entry, inputs, ranks, settings.host_runs)
    for entry in entries:
        twin = twins.get(_key(entry))
        if twin is not None:
            entry.timed, entry.problem = twin.timed, twin.problem
            entry.host_s, entry.host_runs = twin.host_s, twin.host_runs
    for entry in (*gemms, *entries):
        entry.launch = None
        entry.candidate.close()
    best = min((e.timed.median for e in gemms if e.timed.rounds), default=math.nan)
    del inputs, runs, sets, running
    gc.collect()
    if ranks.cuda:
        torch.cuda.empty_cache()
    return [*gemms, *entries], best


def _key(entry: CandidateRun) -> str:
    return f"{entry.candidate.name}/{entry.candidate.mode}"


def _twins(entries: Sequence[CandidateRun]) -> dict[str, CandidateRun]:
    """By key: candidates whose Program is that of another, which is timed for both: what `auto`
    chose is the same launches as the fixed strategy, and would differ by noise alone."""
    found: dict[str, CandidateRun] = {}
    for entry in entries:
        one = entry.candidate
        if one.name == "auto" and one.text:
            same = [e for e in entries if e is not entry and _runs(e) == (one.text, one.mode)]
            found |= {_key(entry): twin for twin in same[:1]}
    return found


def _runs(entry: CandidateRun) -> tuple[str, str]:
    return entry.candidate.text, entry.candidate.mode


def _open(
    entry: CandidateRun, checks: Sequence[tuple[Any, Any]], ranks: Ranks, tell: Tell, case: SiteCase
) -> None:
    """Opens a candidate on all ranks, and lets it compute what is known."""
    tell({"event": "doing", "doing": f"{case}: {_key(entry)}"})
    problem: str | None = None
    try:
        entry.launch = entry.candidate.open()
    except Exception as error:
        problem = describe(error, ranks)
    entry.problem = ranks.agree(problem)
    if entry.problem is None:
        assert entry.launch is not None
        try:
            entry.deviation = 0.0
            for (x, w), expected in checks:
                off = deviation(entry.launch(x, w), expected)
                entry.deviation = max(entry.deviation, off) if off == off else math.inf
            if entry.deviation > entry.candidate.loose:
                problem = f"wrong: off by {entry.deviation:.3g} times what rounding may change"
        except Exception as error:
            problem = describe(error, ranks)
        entry.problem = ranks.agree(problem)
    if entry.problem is not None:
        _recover(entry, ranks)


def _recover(entry: CandidateRun, ranks: Ranks) -> None:
    """Leaves a failed candidate behind, so that the next one can run."""
    entry.launch = None
    try:
        entry.candidate.close()
        reset_teams()
    except InterlaceError as error:
        entry.problem = f"{entry.problem} (and then {describe(error, ranks)})"
    ranks.agree(None)


def _host(entry: CandidateRun, inputs: Inputs, ranks: Ranks, runs: int) -> None:
    """The median time of many calls, of this rank's host."""
    if ranks.agree(entry.problem) is not None or entry.launch is None:
        return
    problem: str | None = None
    spent: list[float] = []
    try:
        spent = host_times(ranks, entry.launch, inputs.of(entry.candidate.mode), runs)
    except Exception as error:
        problem = describe(error, ranks)
    entry.problem = ranks.agree(problem)
    if entry.problem is None:
        entry.host_s, entry.host_runs = sorted(spent)[len(spent) // 2], len(spent)
    else:
        _recover(entry, ranks)


def _rows(
    case: SiteCase,
    entries: Sequence[CandidateRun],
    gemm_s: float,
    roof: Roof,
    ranks: Ranks,
    common: dict[str, str],
) -> list[Row]:
    """The rows of a case; times in microseconds. Slowest host of all ranks."""
    hosts = ranks.maximum([entry.host_s for entry in entries])
    offs = ranks.maximum([entry.deviation for entry in entries])
    link_s = case.link_bytes(ranks.size) / roof.bandwidth
    limit = max(gemm_s, link_s)
    base = {
        e.candidate.mode: e.timed.median
        for e in entries
        if e.candidate.name == "sequential" and e.timed.rounds
    }
    rows: list[Row] = []
    for entry, host_s, off in zip(entries, hosts, offs, strict=True):
        candidate, median = entry.candidate, entry.timed.median
        if entry.problem is not None:
            median = math.nan
        known = not math.isnan(median)
        rows.append(
            {
                **asdict(case),
                "world": ranks.size,
                "strategy": candidate.name,
                "mode": candidate.mode,
                "chosen": candidate.chosen if candidate.name in ("auto", "sequential") else "",
                "median_us": median * 1e6,
                "p90_us": entry.timed.p90 * 1e6 if known else math.nan,
                "least_us": entry.timed.least * 1e6 if known else math.nan,
                "host_us": host_s * 1e6,
                "host_runs": entry.host_runs,
                "speedup_eager": base.get("eager", math.nan) / median,
                "speedup_graph": base.get("graph", math.nan) / median,
                "r": median / limit,
                "gemm_us": gemm_s * 1e6,
                "link_us": link_s * 1e6,
                "bandwidth_gbs": roof.bandwidth / 1e9,
                "predicted_us": candidate.predicted_s * 1e6,
                "deviation": off,
                "rounds": len(entry.timed.rounds),
                "sm_mhz": entry.timed.clock,
                "error": entry.problem or "",
                **common,
            }
        )
    return rows
