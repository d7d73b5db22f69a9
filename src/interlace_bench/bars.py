"""The bars that rows must clear, and whether they do.

    for verdict in judge_overlap(rows):
        print(verdict.bar, verdict.figure, verdict.passed)

Of `bench overlap` `auto` is judged, eager against eager and graph against graph. R compares with
the roof, which has no mode. Of `bench kernels` what is judged is what a user gets by default;
variants of ours are shown beside it, and no bar is cleared by one of them. Of `bench transformer`
each of our variants has to clear every bar.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from interlace_bench.kernels.case import BOTH
from interlace_bench.kernels.case import OURS as OUR_VARIANT
from interlace_bench.kernels.float8 import CAST
from interlace_bench.kernels.host import LAYERS as HOST_LAYERS
from interlace_bench.kernels.muon import LAYERS, SMALL_ONES
from interlace_bench.rows import Row, number
from interlace_bench.settings import STRATEGIES
from interlace_bench.sites import FLOAT8, SMALL_ROWS

HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}
Variants = dict[str, Row]
"""The rows of one case, by variant."""


@dataclass(frozen=True, slots=True)
class BarVerdict:
    """A bar, judged."""

    bar: str
    limit: str
    """Such as `<= 1.05`."""
    figure: float
    of: dict[str, Any] = field(default_factory=dict)
    """Facts about the figure (mode, case and so on), by column of a table."""

    @property
    def passed(self) -> bool:
        """True if the figure keeps to the limit."""
        sign, bound = self.limit.split()
        return HOLDS[sign](self.figure, float(bound))

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        told = {"bar": self.bar, "limit": self.limit, **self.of}
        return {**told, "figure": self.figure, "passed": self.passed}


def missed(verdicts: Sequence[BarVerdict]) -> list[str]:
    """The bars that are cleared in no mode, each with its case."""
    passed: dict[str, bool] = {}
    for verdict in verdicts:
        bar = ": ".join(filter(None, (verdict.of.get("case"), verdict.bar)))
        passed[bar] = passed.get(bar, False) or verdict.passed
    return [bar for bar, good in passed.items() if not good]


def _told(verdicts: Iterable[BarVerdict]) -> list[BarVerdict]:
    """The verdicts that rows tell something of."""
    return [verdict for verdict in verdicts if not math.isnan(verdict.figure)]


# -- overlap -------------------------------------------------------------------------------------

MANY = 1000
"""Calls, one after another, whose median is judged: a burst's, which begins after a rest, tell
less, and stand in only where there are no others."""
MODES = {"eager": "<= 40", "graph": "<= 10"}
"""With the microseconds that the host may take for an AG+GEMM call."""
Shape = tuple[str, int, int, int]
Times = dict[str, float]
"""One shape's times in microseconds: by strategy and rival, the `best` of our fixed strategies, and
the `roof`."""


@dataclass(frozen=True, slots=True)
class OverlapBar:
    """A bar for the shapes that `wants` accepts: their figures, joined, must keep to the limit."""

    text: str
    limit: str
    wants: Callable[[Shape], bool]
    figure: Callable[[Times], float]
    joined: Callable[[Sequence[float]], float]


def geomean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    found = [value for value in values if value > 0]
    return statistics.geometric_mean(found) if found else math.nan


def _small(shape: Shape) -> bool:
    op, m, k, n = shape
    return op in ("ag_gemm", "gemm_rs") and m in SMALL_ROWS and (k, n) == (4096, 4096)


def _big(op: str) -> Callable[[Shape], bool]:
    return lambda shape: shape[0] == op and not _small(shape)


def _over(name: str, other: str) -> Callable[[Times], float]:
    """One time over another; NaN where one is not there."""
    return lambda times: times.get(name, math.nan) / times.get(other, math.nan)


def _excess(times: Times) -> float:
    """Microseconds by which a small case is slower than allowed."""
    ours, sequential = (times.get(name, math.nan) for name in ("auto", "sequential"))
    return ours - sequential - max(0.02 * sequential, 1.0)


AG, RS, AR = _big("ag_gemm"), _big("gemm_rs"), _big("gemm_ar")
R, GAIN = _over("auto", "roof"), _over("sequential", "auto")
OVERLAP_BARS = (
    OverlapBar("AG+GEMM R, geomean", "<= 1.05", AG, R, geomean),
    OverlapBar("AG+GEMM R, worst", "<= 1.1", AG, R, max),
    OverlapBar("AG+GEMM over sequential, geomean", ">= 1.25", AG, GAIN, geomean),
    OverlapBar("GEMM+RS R, geomean", "<= 1.08", RS, R, geomean),
    OverlapBar("GEMM+RS R, worst", "<= 1.15", RS, R, max),
    OverlapBar("GEMM+RS over sequential, geomean", ">= 1.3", RS, GAIN, geomean),
    OverlapBar("AG+GEMM over async-TP, geomean", ">= 1.4", AG, _over("async-tp", "auto"), geomean),
    OverlapBar("GEMM+AR over sequential, geomean", ">= 1.2", AR, GAIN, geomean),
    OverlapBar("GEMM+AR over sequential, worst", ">= 1", AR, GAIN, min),
    OverlapBar("small: us slower than max(2 %, 1 us) allows, worst", "<= 0", _small, _excess, max),
    OverlapBar(
        "over the best fixed strategy, worst",
        "<= 1.03",
        lambda shape: True,
        _over("auto", "best"),
        max,
    ),
)
FLOAT8_BARS = (OverlapBar("FP8 AG+GEMM R, geomean", "<= 1.08", AG, R, geomean),)


def judge_overlap(rows: Sequence[Row]) -> list[BarVerdict]:
    """Every bar that the rows tell something of; most are for bf16, where there are others."""
    float8 = [row for row in rows if row.get("dtype") == FLOAT8]
    plain = [row for row in rows if row.get("dtype") != FLOAT8]
    plain = [row for row in plain if row.get("dtype") == "bf16"] or plain
    hosts = [verdict for mode in MODES for verdict in _host(plain, mode)]
    return [*_judge_sites(plain, OVERLAP_BARS), *hosts, *_judge_sites(float8, FLOAT8_BARS)]


def _judge_sites(rows: Sequence[Row], bars: Sequence[OverlapBar]) -> list[BarVerdict]:
    times = {mode: _times(rows, mode) for mode in MODES}
    found: list[BarVerdict] = []
    for bar in bars:
        for mode in MODES:
            shapes = {s: bar.figure(t) for s, t in times[mode].items() if bar.wants(s)}
            known = {shape: figure for shape, figure in shapes.items() if not math.isnan(figure)}
            if not known:
                continue
            extreme = (min if bar.limit.startswith(">") else max)(known, key=lambda s: known[s])
            worst = f"{extreme[0]} {','.join(map(str, extreme[1:]))}: {known[extreme]:.3f}"
            of = {"mode": mode, "count": len(known), "worst": worst}
            found.append(BarVerdict(bar.text, bar.limit, bar.joined(list(known.values())), of))
    return found


def _times(rows: Sequence[Row], mode: str) -> dict[Shape, Times]:
    """Times by shape, of the rows without an error."""
    found: dict[Shape, Times] = {}
    for row in rows:
        if row["error"]:
            continue
        times = found.setdefault((row["op"], int(row["m"]), int(row["k"]), int(row["n"])), {})
        times["roof"] = max(number(row["gemm_us"]), number(row["link_us"]))
        if row["mode"] == mode:
            times[row["strategy"]] = number(row["median_us"])
    for times in found.values():
        fixed = [times[name] for name in STRATEGIES if name != "auto" and name in times]
        times["best"] = min(fixed, default=math.nan)
    return found


def _host(rows: Sequence[Row], mode: str) -> list[BarVerdict]:
    """The host time of an AG+GEMM call by `auto`: the median over the shapes at which many calls
    were timed."""
    known = [
        number(row["host_us"])
        for row in [row for row in rows if number(row["host_runs"]) >= MANY] or rows
        if (row["op"], row["strategy"], row["mode"]) == ("ag_gemm", "auto", mode)
        if not row["error"]
    ]
    if not known:
        return []
    of = {"mode": mode, "count": len(known), "worst": f"{max(known):.1f}"}
    figure = statistics.median(known)
    return [BarVerdict("host time of an AG+GEMM call, us", MODES[mode], figure, of)]


# -- kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelBar:
    """A bar for the cases whose columns match; the figure is NaN where the rows lack it."""

    text: str
    limit: str
    op: str
    figure: Callable[[Row, Variants], float]
    does: str = ".*"
    shape: str = ".*"
    dtype: str = ".*"
    device: str = "cuda"

    def wants(self, row: Row) -> bool:
        """True if the bar is for this row."""
        columns = ("op", "does", "shape", "dtype", "device")
        return all(re.fullmatch(getattr(self, name), row[name]) for name in columns)


def _ratio(column: str, rival: str) -> Callable[[Row, Variants], float]:
    """Ours over a rival's."""

    def figure(row: Row, variants: Variants) -> float:
        its = number(variants[rival][column]) if rival in variants else math.nan
        return number(row[column]) / its if its else math.nan

    return figure


def _extra(rival: str) -> Callable[[Row, Variants], float]:
    """Memory that is needed beside what is handed out, over a rival's."""

    def extra(row: Row) -> float:
        return number(row["peak_bytes"]) - number(row["kept_bytes"])

    return lambda row, others: extra(row) / extra(others[rival]) if rival in others else math.nan


def _share(row: Row, variants: Variants) -> float:
    return number(row["share"])


def _speedup(row: Row, variants: Variants) -> float:
    return number(row["speedup_torch"])


SHARE, LINEAR, OVER_TORCH = "share of copy bandwidth", "linear-cross-entropy", "over torch"
OVER_COMPILED = "peak memory over torch.compile's"
LOSS: dict[str, str] = {"does": re.escape(BOTH), "shape": "8192x128256", "dtype": "bf16"}
PEAK_OVER, TIME_OVER = (functools.partial(_ratio, name) for name in ("peak_bytes", "median_us"))
CALLS = {"shape": f"({'|'.join(HOST_LAYERS)}) .*"}
RUNS = {"shape": r"Executor\.run.*", "device": ".*"}
KERNEL_BARS = (
    KernelBar(SHARE, ">= 0.85", "cross-entropy", _share, **LOSS),
    KernelBar(OVER_COMPILED, "<= 1", "cross-entropy", PEAK_OVER("torch.compile"), **LOSS),
    KernelBar("extra memory over unfused", "<= 0.1", LINEAR, _extra("unfused")),
    KernelBar("extra memory over torch's", "<= 0.1", LINEAR, _extra("torch")),
    KernelBar("time over unfused", "<= 1.1", LINEAR, TIME_OVER("unfused")),
    KernelBar(SHARE, ">= 0.9", "adam", _share),
    KernelBar("run over plain calls", "<= 1.3", "host", TIME_OVER("torch"), **RUNS),
    KernelBar("call over F.linear and NCCL", "<= 1.3", "host", TIME_OVER("torch"), **CALLS),
    KernelBar("time over torch fused", "< 1", "adam", TIME_OVER("torch")),
    KernelBar(OVER_TORCH, ">= 1.5", "muon", _speedup, shape=LAYERS),
    KernelBar(OVER_TORCH, ">= 6", "muon", _speedup, shape=SMALL_ONES),
    KernelBar(SHARE, ">= 0.88", "float8", _share, re.escape(CAST)),
    KernelBar("time over torchao's", "<= 0.926", "float8", TIME_OVER("torchao"), re.escape(BOTH)),
)


def judge_kernels(rows: Sequence[Row]) -> list[BarVerdict]:
    """Every bar that the rows tell something of."""
    cases: dict[tuple[str, ...], Variants] = {}
    for row in rows:
        if not row["error"]:
            key = tuple(row[name] for name in ("op", "shape", "dtype", "does"))
            cases.setdefault(key, {})[row["way"]] = row
    ours = {key: known[OUR_VARIANT] for key, known in cases.items() if OUR_VARIANT in known}
    return _told(
        BarVerdict(
            bar.text,
            bar.limit,
            bar.figure(row, cases[key]),
            {"case": " ".join(key), "way": OUR_VARIANT},
        )
        for bar in KERNEL_BARS
        for key, row in ours.items()
        if bar.wants(row)
    )


# -- transformer ---------------------------------------------------------------------------------

LAYER_BARS = {"llama3-70b": (">= 1.12", "<= 1.05"), "llama3-8b": (">= 1.2", "<= 1.08")}
"""Limits by model: the speedup over the faster of Inductor's ways with NCCL, and the time over the
ideal; forward and backward of one layer in bf16, 8192 tokens over four ranks."""


def judge_transformer(rows: Sequence[Row]) -> list[BarVerdict]:
    """Every bar that rows of one run, measured or predicted, tell something of."""
    ways = {row["way"]: row for row in rows if not row["error"] and row["dtype"] == "bf16"}
    plain = ways.get("inductor", {})
    found: list[BarVerdict] = []
    for way in ("compile", "compile-graph", "layers"):
        row = ways.get(way, {})
        sizes = [row.get(name) for name in ("world", "sequence", "batch", "layers")]
        if row.get("model") not in LAYER_BARS or sizes != [4, 8192, 1, 1]:
            continue
        faster, near = LAYER_BARS[row["model"]]
        of = {"case": f"{row['model']} {way}", "how": row["how"]}
        share = 1 / (1 - number(row["exposed_share"]))
        peak = number(row["peak_bytes"]) / (number(plain.get("peak_bytes")) or math.nan)
        found += [
            BarVerdict("over compiled with NCCL", faster, number(row["speedup"]), of),
            BarVerdict("time over the ideal", near, share, of),
            BarVerdict("peak memory over compiled with NCCL", "<= 1", peak, of),
        ]
    return _told([*found, *_float8_layers(ways)])


def _float8_layers(ways: Variants) -> list[BarVerdict]:
    """The fastest of our ways in FP8 beside the fastest in bf16, for a layer of 70B."""
    times = {
        way: number(row["forward_ms"]) + number(row["backward_ms"])
        for way, row in ways.items()
        if row["model"] == "llama3-70b" and way.startswith(("compile", "layers"))
    }
    both = [{w: ms for w, ms in times.items() if ("fp8" in w) == f8} for f8 in (False, True)]
    if not all(both):
        return []
    plain, float8 = (min(found, key=lambda way: found[way]) for found in both)
    of = {"case": f"llama3-70b {float8} beside {plain}", "how": ways[plain]["how"]}
    return [BarVerdict("FP8 over ours in bf16", ">= 1.25", times[plain] / times[float8], of)]


# -- optimizer -----------------------------------------------------------------------------------

PEAK = 1.01
"""Peak memory over the synchronous version's: on CPUs it is of the process, in pages."""


def judge_optimizer(rows: Sequence[Row]) -> list[BarVerdict]:
    """Every bar that rows of one run tell something of: of LayerWise as it is by default."""
    ways = {row["way"]: row for row in rows if not row["error"]}
    row, twin = ways.get("overlap"), ways.get("synchronous", {})
    if row is None:
        return []
    of = {"case": f"{row['model']} {row['dtype']}, {row['world']} ranks"}
    peak = number(row["peak_bytes"]) / (number(twin.get("peak_bytes")) or math.nan)
    found = [
        BarVerdict("exposed of all gathers", "<= 0.05", number(row["exposed_share"]), of),
        BarVerdict("peak memory over the synchronous", f"<= {PEAK}", peak, of),
    ]
    if row["device"] == "cuda":
        ratio = number(row["over_no_gather"])
        found.append(BarVerdict("step over one without a gather", "<= 1.03", ratio, of))
    return _told(found)
