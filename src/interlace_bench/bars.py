"""The bars that rows must clear, as one table for all benchmarks.

    for verdict in judge("overlap", rows):
        print(verdict.bar, verdict.figure, verdict.passed)

A bar is for some variant of ours: it takes a figure of that row and of the other variants of its
case. Of `bench overlap` and `kernels` that is what a user gets by default (`auto`, `interlace`):
other variants of ours are shown beside it, and no bar is cleared by one of them. Sites are judged
eager against eager and graph against graph; all of `bench transformer` have to clear every bar.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from interlace_bench.kernels.case import BOTH, OURS
from interlace_bench.kernels.float8 import CAST
from interlace_bench.kernels.host import LAYERS as HOST_LAYERS
from interlace_bench.kernels.muon import LAYERS, SMALL_ONES
from interlace_bench.rows import Row, number
from interlace_bench.settings import STRATEGIES
from interlace_bench.shapes import FLOAT8, SMALL_ROWS

HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}
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
    joined: Callable[[Sequence[float]], float] | None = None
    """Joins the figures of all cases of a mode; None: each case must keep to the limit."""


@dataclass(frozen=True, slots=True)
class BarVerdict:
    """A bar, judged: of one case and variant, or of all cases of a mode."""

    bar: str
    limit: str
    figure: float
    case: str = ""
    way: str = ""
    mode: str = ""
    worst: str = ""
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
        figures: dict[str, dict[tuple[str, str], float]] = {}
        for case, variants in cases.items():
            for way, row in variants.items():
                figure = bar.figure(row, variants) if bar.wants(row) else math.nan
                if not math.isnan(figure):
                    figures.setdefault(row.get("mode", ""), {})[case, way] = figure
        for mode, known in sorted(figures.items()):
            if bar.joined is None:
                found += [BarVerdict(bar.text, bar.limit, f, *of) for of, f in known.items()]
                continue
            furthest = (min if bar.limit.startswith(">") else max)(known, key=lambda of: known[of])
            worst, figure = f"{furthest[0]}: {known[furthest]:.3f}", bar.joined([*known.values()])
            found.append(BarVerdict(bar.text, bar.limit, figure, mode=mode, worst=worst))
    return found


def missed(verdicts: Sequence[BarVerdict]) -> list[str]:
    """The bars that are cleared in no mode, each with its case."""
    passed: dict[str, bool] = {}
    for verdict in verdicts:
        of = " ".join(filter(None, (verdict.case, verdict.way)))
        bar = f"{of}: {verdict.bar}" if of else verdict.bar
        passed[bar] = passed.get(bar, False) or verdict.passed
    return [bar for bar, good in passed.items() if not good]


# -- figures -------------------------------------------------------------------------------------


def geomean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    found = [value for value in values if value > 0]
    return statistics.geometric_mean(found) if found else math.nan


def _of(variants: Variants, way: str, column: str = "median_us") -> float:
    """A column of a variant; NaN where it is not there."""
    return number(variants[way][column]) if way in variants else math.nan


def _column(name: str) -> Figure:
    return lambda row, variants: number(row[name])


def _over(rival: str, column: str = "median_us") -> Figure:
    """Ours over a rival's."""
    return lambda row, variants: number(row[column]) / (_of(variants, rival, column) or math.nan)


def _gain(rival: str) -> Figure:
    """The time of a rival over ours."""
    return lambda row, variants: _of(variants, rival) / number(row["median_us"])


def _extra(rival: str) -> Figure:
    """Memory that is needed beside what is handed out, over a rival's."""

    def extra(row: Row) -> float:
        return number(row["peak_bytes"]) - number(row["kept_bytes"])

    return lambda row, others: extra(row) / extra(others[rival]) if rival in others else math.nan


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


def _host(row: Row, variants: Variants) -> float:
    return number(row["host_us"])


AG, RS, AR, ANY = _site("ag_gemm"), _site("gemm_rs"), _site("gemm_ar"), _site(".*", small=None)
HOST, SEQUENTIAL = "host time of an AG+GEMM call, us", _gain("sequential")
EAGER, GRAPH = (_site("ag_gemm", small=None, mode=mode) for mode in ("eager", "graph"))
FP8 = _site("ag_gemm", small=None, dtype=FLOAT8)


# -- kernels -------------------------------------------------------------------------------------

SHARE, LINEAR, OVER_TORCH = "share of copy bandwidth", "linear-cross-entropy", "over torch"


def _kernel(op: str, **patterns: str) -> Callable[[Row], bool]:
    """Accepts rows of ours, measured on a GPU unless a pattern says otherwise."""
    return _columns(op=op, way=OURS, **{"device": "cuda", **patterns})


LOSS = _kernel("cross-entropy", does=re.escape(BOTH), shape="8192x128256", dtype="bf16")
RUNS = _kernel("host", shape=r"Executor\.run.*", device=".*")
CALLS = _kernel("host", shape=f"({'|'.join(HOST_LAYERS)}) .*")

# -- transformer ---------------------------------------------------------------------------------

LAYER_BARS = {"llama3-70b": (">= 1.12", "<= 1.05"), "llama3-8b": (">= 1.2", "<= 1.08")}
"""Limits by model: the speedup over the faster of Inductor's ways with NCCL, and the time over the
ideal; forward and backward of one layer in bf16, 8192 tokens over four ranks."""
_layer = functools.partial(
    _columns, way="compile|compile-graph|layers", dtype="bf16", world="4", sequence="8192",
    batch="1", layers="1", form="whole",
)  # fmt: skip


def _over_ideal(row: Row, variants: Variants) -> float:
    return 1 / (1 - number(row["exposed_share"]))


def _float8_gain(row: Row, variants: Variants) -> float:
    """The time of the fastest of our ways in bf16 over this one's."""

    def both(row: Row) -> float:
        return number(row["forward_ms"]) + number(row["backward_ms"])

    ours = [r for way, r in variants.items() if way.startswith(("compile", "layers"))]
    plain = [both(row) for row in ours if "fp8" not in row["way"]]
    return min(plain, default=math.nan) / both(row)


# -- optimizer -----------------------------------------------------------------------------------

OVERLAP = _columns(way="overlap", device="cuda")

# -- all -----------------------------------------------------------------------------------------

CASES = {
    "overlap": ("strategy", "op", "m", "k", "n", "dtype", "mode"),
    "kernels": ("way", "op", "shape", "dtype", "does"),
    "transformer": ("way", "model", "layers", "form", "batch", "sequence", "dtype", "world", "how"),
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
        Bar(HOST, "<= 40", EAGER, _host, statistics.median),
        Bar(HOST, "<= 10", GRAPH, _host, statistics.median),
        Bar("FP8 AG+GEMM R, geomean", "<= 1.08", FP8, _roof, geomean),
    ),
    "kernels": (
        Bar(SHARE, ">= 0.85", LOSS, _column("share")),
        Bar("peak memory over torch.compile's", "<= 1", LOSS, _over("torch.compile", "peak_bytes")),
        Bar("extra memory over unfused", "<= 0.1", _kernel(LINEAR), _extra("unfused")),
        Bar("extra memory over torch's", "<= 0.1", _kernel(LINEAR), _extra("torch")),
        Bar("time over unfused", "<= 1.1", _kernel(LINEAR), _over("unfused")),
        Bar(SHARE, ">= 0.9", _kernel("adam"), _column("share")),
        Bar("run over plain calls", "<= 1.3", RUNS, _over("torch")),
        Bar("call over F.linear and NCCL", "<= 1.3", CALLS, _over("torch")),
        Bar("time over torch fused", "< 1", _kernel("adam"), _over("torch")),
        Bar(OVER_TORCH, ">= 1.5", _kernel("muon", shape=LAYERS), _column("speedup_torch")),
        Bar(OVER_TORCH, ">= 6", _kernel("muon", shape=SMALL_ONES), _column("speedup_torch")),
        Bar(SHARE, ">= 0.88", _kernel("float8", does=re.escape(CAST)), _column("share")),
        Bar(
            "time over torchao's",
            "<= 0.926",
            _kernel("float8", does=re.escape(BOTH)),
            _over("torchao"),
        ),
    ),
    "transformer": (
        *(
            Bar(text, limit, _layer(model=model), figure)
            for model, (faster, near) in LAYER_BARS.items()
            for text, limit, figure in (
                ("over compiled with NCCL", faster, _column("speedup")),
                ("time over the ideal", near, _over_ideal),
                ("peak memory over compiled with NCCL", "<= 1", _over("inductor", "peak_bytes")),
            )
        ),
        Bar(
            "FP8 over ours in bf16",
            ">= 1.25",
            _columns(way="(compile|layers)-fp8.*", model="llama3-70b", dtype="bf16"),
            _float8_gain,
            max,
        ),
    ),
    "optimizer": (
        Bar("exposed of all gathers", "<= 0.05", OVERLAP, _column("exposed_share")),
        Bar(
            "peak memory over the synchronous",
            "<= 1.01",
            OVERLAP,
            _over("synchronous", "peak_bytes"),
        ),
        Bar("step over one without a gather", "<= 1.03", OVERLAP, _column("over_no_gather")),
    ),
}
