"""The bars that the rows of `bench overlap` must clear, and whether they do.

    for verdict in judge(rows):
        print(verdict.bar, verdict.figure, verdict.passed)

Every bar is judged four times: for `auto` and for the best of our strategies, eager against eager
and graph against graph. R compares with the roof, which has no mode.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from interlace.bench.candidates import OURS
from interlace.bench.rows import Row, number
from interlace.bench.sites import SMALL_ROWS

MANY = 1000
"""Calls, one after another, whose median is judged: a burst's, which begins after a rest, tell
less, and stand in only where there are no others."""
MODES = ("eager", "graph")
Shape = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar in one reading of the rows."""

    bar: str
    limit: str
    who: str
    """`auto`, or the `best` of our fixed strategies; of host times `all` of them."""
    mode: str
    figure: float
    passed: bool
    worst: str
    """The shape that is furthest from it."""
    count: int
    """How many shapes it was judged by."""


@dataclass(frozen=True, slots=True)
class _Bar:
    text: str
    limit: str
    wants: Callable[[Shape], bool]
    figure: Callable[[_Point], float]
    """Of one shape."""
    joined: Callable[[Sequence[float]], float]
    passes: Callable[[float], bool]
    high_is_bad: bool = True


@dataclass(frozen=True, slots=True)
class _Point:
    """One shape's times in microseconds: ours, and what it is compared with."""

    ours: float
    sequential: float
    async_tp: float
    limit: float
    best: float
    """The best of our fixed strategies."""


def geomean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    found = [value for value in values if value > 0]
    return statistics.geometric_mean(found) if found else math.nan


def _big(op: str) -> Callable[[Shape], bool]:
    return lambda shape: shape[0] == op and not _small(shape)


def _small(shape: Shape) -> bool:
    op, m, k, n = shape
    return op in ("ag_gemm", "gemm_rs") and m in SMALL_ROWS and (k, n) == (4096, 4096)


def _excess(point: _Point) -> float:
    """Microseconds by which a small case is slower than allowed."""
    return point.ours - point.sequential - max(0.02 * point.sequential, 1.0)


BARS = (
    *(
        bar
        for op, title, mean, worst, gain in (
            ("ag_gemm", "AG+GEMM", 1.05, 1.10, 1.25),
            ("gemm_rs", "GEMM+RS", 1.08, 1.15, 1.3),
        )
        for bar in (
            _Bar(
                *(f"{title} R, geomean", f"<= {mean}", _big(op)),
                *(lambda p: p.ours / p.limit, geomean, lambda f, mean=mean: f <= mean),
            ),
            _Bar(
                *(f"{title} R, worst", f"<= {worst}", _big(op)),
                *(lambda p: p.ours / p.limit, max, lambda f, worst=worst: f <= worst),
            ),
            _Bar(
                *(f"{title} over sequential, geomean", f">= {gain}", _big(op)),
                *(lambda p: p.sequential / p.ours, geomean, lambda f, gain=gain: f >= gain),
                high_is_bad=False,
            ),
        )
    ),
    _Bar(
        *("AG+GEMM over async-TP, geomean", ">= 1.4", _big("ag_gemm")),
        *(lambda p: p.async_tp / p.ours, geomean, lambda f: f >= 1.4),
        high_is_bad=False,
    ),
    _Bar(
        *("GEMM+AR over sequential, geomean", ">= 1.2", _big("gemm_ar")),
        *(lambda p: p.sequential / p.ours, geomean, lambda f: f >= 1.2),
        high_is_bad=False,
    ),
    _Bar(
        *("GEMM+AR over sequential, worst", ">= 1", _big("gemm_ar")),
        *(lambda p: p.sequential / p.ours, min, lambda f: f >= 1),
        high_is_bad=False,
    ),
    _Bar(
        *("small: us slower than max(2 %, 1 us) allows, worst", "<= 0", _small),
        *(_excess, max, lambda f: f <= 0),
    ),
    _Bar(
        *("over the best fixed strategy, worst", "<= 1.03", lambda shape: True),
        *(lambda p: p.ours / p.best, max, lambda f: f <= 1.03),
    ),
)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Every bar that the rows tell something of; the bars are for bf16, where there are others."""
    rows = [row for row in rows if row.get("dtype") == "bf16"] or list(rows)
    found: list[Verdict] = []
    for mode in MODES:
        for who in ("auto", "best"):
            points = {shape: _point(rows, shape, who, mode) for shape in _shapes(rows)}
            for bar in BARS:
                figures = {
                    shape: bar.figure(point)
                    for shape, point in points.items()
                    if point is not None and bar.wants(shape)
                }
                known = {shape: f for shape, f in figures.items() if not math.isnan(f)}
                if known and not (who == "best" and "best fixed" in bar.text):
                    found.append(_verdict(bar, who, mode, known))
            found += _host(rows, who, mode)
    order = [bar.text for bar in BARS]
    return sorted(found, key=lambda v: order.index(v.bar) if v.bar in order else len(order))


def _verdict(bar: _Bar, who: str, mode: str, known: dict[Shape, float]) -> Verdict:
    figure = bar.joined(list(known.values()))
    extreme = (max if bar.high_is_bad else min)(known, key=lambda shape: known[shape])
    worst = f"{extreme[0]} {','.join(map(str, extreme[1:]))}: {known[extreme]:.3f}"
    return Verdict(*(bar.text, bar.limit, who, mode, figure, bar.passes(figure), worst, len(known)))


def _host(rows: Sequence[Row], who: str, mode: str) -> list[Verdict]:
    """The host time of an AG+GEMM call: of `auto`, and of the slowest fixed strategy.

    Of each strategy the median over the shapes at which many calls were timed.
    """
    hosts: dict[str, list[float]] = {}
    counted = [row for row in rows if number(row["host_runs"]) >= MANY] or rows
    for row in counted:
        if row["op"] == "ag_gemm" and row["mode"] == mode and not row["error"]:
            hosts.setdefault(row["strategy"], []).append(number(row["host_us"]))
    names = ("auto",) if who == "auto" else [n for n in OURS if n not in ("auto", "pipeline")]
    known = {name: statistics.median(hosts[name]) for name in names if name in hosts}
    if not known:
        return []
    most = 40.0 if mode == "eager" else 10.0
    slowest = max(known, key=lambda name: known[name])
    fixed = "host time of an AG+GEMM call, us", f"<= {most:g}", "auto" if who == "auto" else "all"
    worst, passed = f"{slowest}: {known[slowest]:.1f}", known[slowest] <= most
    return [Verdict(*fixed, mode, known[slowest], passed, worst, len(hosts[slowest]))]


def _shapes(rows: Sequence[Row]) -> list[Shape]:
    return list(
        dict.fromkeys((row["op"], int(row["m"]), int(row["k"]), int(row["n"])) for row in rows)
    )


def _point(rows: Sequence[Row], shape: Shape, who: str, mode: str) -> _Point | None:
    times: dict[tuple[str, str], float] = {}
    limit = math.nan
    for row in rows:
        if (row["op"], int(row["m"]), int(row["k"]), int(row["n"])) == shape and not row["error"]:
            times[row["strategy"], row["mode"]] = number(row["median_us"])
            limit = max(number(row["gemm_us"]), number(row["link_us"]))
    fixed = [times[name, mode] for name in OURS if name != "auto" and (name, mode) in times]
    ours = times.get(("auto", mode)) if who == "auto" else min(fixed, default=None)
    if ours is None:
        return None
    return _Point(
        ours,
        times.get(("sequential", mode), math.nan),
        times.get(("async-tp", mode), math.nan),
        limit,
        min(fixed, default=math.nan),
    )
