"""The bars that rows of sites and of optimizers must clear, as one table.

    for verdict in judge("overlap", rows):
        print(verdict.bar, verdict.figure, verdict.passed)

A bar is for one variant of ours, which is what a user gets by default (`auto`, `overlap`): it takes
a figure of that row and of the other variants of its case. Other variants of ours are shown beside
it, and no bar is cleared by one of them. Sites are judged eager against eager and graph against
graph.
"""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from interlace_bench.rows import Row, number
from interlace_bench.settings import STRATEGIES
from interlace_bench.shapes import FLOAT8, SMALL_ROWS

HOLDS = {"<=": operator.le, ">=": operator.ge}
Variants = dict[str, Row]
"""The rows of one case, by variant."""
Figure = Callable[[Row, Variants], float]
"""A figure of a row, from it and its rivals; NaN where the rows lack it."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar for the rows that `wants` accepts."""

    text: str
    limit: str
    """Such as `<= 1.05`."""
    wants: Callable[[Row], bool]
    figure: Figure
    joined: Callable[[Sequence[float]], float] = max
    """Joins the figures of all cases of a mode."""


@dataclass(frozen=True, slots=True)
class BarVerdict:
    """A bar, judged, of all cases of a mode."""

    bar: str
    limit: str
    figure: float
    mode: str
    worst: str
    """The case that is furthest from keeping to the limit, and its figure."""

    @property
    def passed(self) -> bool:
        """True if the figure keeps to the limit."""
        sign, bound = self.limit.split()
        return HOLDS[sign](self.figure, float(bound))

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "passed": self.passed}


def judge(benchmark: str, rows: Sequence[Row]) -> list[BarVerdict]:
    """Every bar of a benchmark that the rows of a run tell something of."""
    variant, *columns = CASES[benchmark]
    cases: dict[str, Variants] = {}
    for row in rows:
        if not row["error"]:
            case = " ".join(str(row.get(name, "")) for name in columns)
            cases.setdefault(case, {})[row[variant]] = row
    found: list[BarVerdict] = []
    for bar in BARS[benchmark]:
        figures: dict[str, dict[str, float]] = {}
        for case, variants in cases.items():
            for row in filter(bar.wants, variants.values()):
                figure = bar.figure(row, variants)
                if not math.isnan(figure):
                    figures.setdefault(row.get("mode", ""), {})[case] = figure
        for mode, known in sorted(figures.items()):
            furthest = (min if bar.limit.startswith(">") else max)(known, key=lambda of: known[of])
            worst, figure = f"{furthest}: {known[furthest]:.3f}", bar.joined([*known.values()])
            found.append(BarVerdict(bar.text, bar.limit, figure, mode, worst))
    return found


def missed(verdicts: Sequence[BarVerdict]) -> list[str]:
    """The bars that are cleared in no mode."""
    cleared = {verdict.bar for verdict in verdicts if verdict.passed}
    return list(dict.fromkeys(v.bar for v in verdicts if v.bar not in cleared))


# -- figures -------------------------------------------------------------------------------------


def geomean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    found = [value for value in values if value > 0]
    return statistics.geometric_mean(found) if found else math.nan


def _of(variants: Variants, way: str, column: str = "median_us") -> float:
    """A column of a variant; NaN where it is not there."""
    return number(variants[way].get(column)) if way in variants else math.nan


def _column(name: str) -> Figure:
    return lambda row, variants: number(row[name])


def _gain(rival: str) -> Figure:
    """The time of a rival over ours."""
    return lambda row, variants: _of(variants, rival) / number(row["median_us"])


def _columns(**patterns: str) -> Callable[[Row], bool]:
    """Accepts rows whose columns match."""
    return lambda row: all(re.fullmatch(of, str(row[name])) for name, of in patterns.items())


# -- overlap -------------------------------------------------------------------------------------


def _site(op: str, small: bool | None = False, **patterns: str) -> Callable[[Row], bool]:
    """Accepts rows of `auto`, by default not in FP8: `small` ones, the others, or all."""

    def wants(row: Row) -> bool:
        m, k, n = (int(row[name]) for name in ("m", "k", "n"))
        tiny = m in SMALL_ROWS and (k, n) == (4096, 4096) and row["op"] != "gemm_ar"
        return small in (None, tiny) and accepts(row)

    accepts = _columns(op=op, strategy="auto", **{"dtype": f"(?!{FLOAT8}).*", **patterns})
    return wants


def _roof(row: Row, variants: Variants) -> float:
    """The time over the roof, which has no mode."""
    return number(row["median_us"]) / max(number(row["gemm_us"]), number(row["link_us"]))


def _excess(row: Row, variants: Variants) -> float:
    """Microseconds by which a small case is slower than allowed."""
    sequential = _of(variants, "sequential")
    return number(row["median_us"]) - sequential - max(0.02 * sequential, 1.0)


def _over_best(row: Row, variants: Variants) -> float:
    """The time over that of the best fixed strategy."""
    fixed = [_of(variants, name) for name in STRATEGIES if name != "auto" and name in variants]
    return number(row["median_us"]) / min(fixed, default=math.nan)


AG, RS, AR, ANY = _site("ag_gemm"), _site("gemm_rs"), _site("gemm_ar"), _site(".*", small=None)
HOST, SEQUENTIAL = "host time of an AG+GEMM call, us", _gain("sequential")
EAGER, GRAPH = (_site("ag_gemm", small=None, mode=mode) for mode in ("eager", "graph"))
FP8 = _site("ag_gemm", small=None, dtype=FLOAT8)


# -- optimizer -----------------------------------------------------------------------------------

OVERLAP = _columns(way="overlap", device="cuda")


def _memory(row: Row, variants: Variants) -> float:
    """Peak memory over the synchronous twin's."""
    return number(row.get("peak_bytes")) / (_of(variants, "synchronous", "peak_bytes") or math.nan)


# -- all -----------------------------------------------------------------------------------------

CASES = {
    "overlap": ("strategy", "op", "m", "k", "n", "dtype", "mode"),
    "optimizer": ("way", "model", "dtype", "world"),
}
"""The column that names a variant, and those that make a case, by benchmark."""
BARS: dict[str, Sequence[Bar]] = {
    "overlap": (
        Bar("AG+GEMM R, geomean", "<= 1.05", AG, _roof, geomean),
        Bar("AG+GEMM R, worst", "<= 1.1", AG, _roof, max),
        Bar("AG+GEMM over sequential, geomean", ">= 1.25", AG, SEQUENTIAL, geomean),
        Bar("GEMM+RS R, geomean", "<= 1.08", RS, _roof, geomean),
        Bar("GEMM+RS R, worst", "<= 1.15", RS, _roof, max),
        Bar("GEMM+RS over sequential, geomean", ">= 1.3", RS, SEQUENTIAL, geomean),
        Bar("AG+GEMM over async-TP, geomean", ">= 1.4", AG, _gain("async-tp"), geomean),
        Bar("GEMM+AR over sequential, geomean", ">= 1.2", AR, SEQUENTIAL, geomean),
        Bar("GEMM+AR over sequential, worst", ">= 1", AR, SEQUENTIAL, min),
        Bar(
            "small: us slower than max(2 %, 1 us) allows, worst",
            "<= 0",
            _site("ag_gemm|gemm_rs", small=True),
            _excess,
            max,
        ),
        Bar("over the best fixed strategy, worst", "<= 1.03", ANY, _over_best, max),
        Bar(HOST, "<= 40", EAGER, _column("host_us"), statistics.median),
        Bar(HOST, "<= 10", GRAPH, _column("host_us"), statistics.median),
        Bar("FP8 AG+GEMM R, geomean", "<= 1.08", FP8, _roof, geomean),
    ),
    "optimizer": (
        Bar("exposed of all gathers", "<= 0.05", OVERLAP, _column("exposed_share")),
        Bar("peak memory over the synchronous", "<= 1.01", OVERLAP, _memory),
        Bar("step over one without a gather", "<= 1.03", OVERLAP, _column("over_no_gather")),
    ),
}
