"""The bars that rows must clear, and whether they do.

    for verdict in judge_overlap(rows):
        print(verdict.bar, verdict.figure, verdict.passed)

Of `bench overlap` every bar is judged four times: for `auto` and for the best of our strategies,
eager against eager and graph against graph. R compares with the roof, which has no mode. Of `bench
kernels` what is judged is what a user gets by default; variants of ours are shown beside it, and no
bar is cleared by one of them. Of `bench transformer` each of our ways has to clear every bar.
"""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from interlace_bench.kernels.case import OURS as OUR_WAY
from interlace_bench.kernels.float8 import CAST, WGRAD
from interlace_bench.kernels.host import LAYERS as HOST_LAYERS
from interlace_bench.kernels.losses import BOTH
from interlace_bench.kernels.muon import GRAM, LAYERS, SMALL_ONES, STEP
from interlace_bench.race.candidates import OURS
from interlace_bench.rows import Row, number
from interlace_bench.sites import FLOAT8, SMALL_ROWS

HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True, slots=True)
class BarVerdict:
    """A bar, judged."""

    bar: str
    limit: str
    """Such as `<= 1.05`."""
    figure: float
    of: dict[str, Any] = field(default_factory=dict)
    """Facts about the figure (who, mode, case and so on), by column of a table."""

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
    """The bars that are cleared in no mode, each with its case; of `overlap` those of `auto`."""
    passed: dict[str, bool] = {}
    for verdict in verdicts:
        if verdict.of.get("who", "auto") == "auto":
            bar = ": ".join(filter(None, (verdict.of.get("case"), verdict.bar)))
            passed[bar] = passed.get(bar, False) or verdict.passed
    return [bar for bar, good in passed.items() if not good]


# -- overlap -------------------------------------------------------------------------------------

MANY = 1000
"""Calls, one after another, whose median is judged: a burst's, which begins after a rest, tell
less, and stand in only where there are no others."""
MODES = {"eager": "<= 40", "graph": "<= 10"}
"""With the microseconds that the host may take for an AG+GEMM call."""
READINGS = [(mode, who) for mode in MODES for who in ("auto", "best")]
Shape = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """One shape's times in microseconds: ours, and what it is compared with."""

    ours: float
    sequential: float
    async_tp: float
    limit: float
    best: float
    """The best of our fixed strategies."""


@dataclass(frozen=True, slots=True)
class OverlapBar:
    """A bar for the shapes that `wants` accepts: their figures, joined, must keep to the limit."""

    text: str
    limit: str
    wants: Callable[[Shape], bool]
    figure: Callable[[ShapeTimes], float]
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


def _over_roof(point: ShapeTimes) -> float:
    return point.ours / point.limit


def _over_sequential(point: ShapeTimes) -> float:
    return point.sequential / point.ours


def _excess(point: ShapeTimes) -> float:
    """Microseconds by which a small case is slower than allowed."""
    return point.ours - point.sequential - max(0.02 * point.sequential, 1.0)


AG, RS, AR = _big("ag_gemm"), _big("gemm_rs"), _big("gemm_ar")
BEST_FIXED = "over the best fixed strategy, worst"
OVERLAP_BARS = (
    OverlapBar("AG+GEMM R, geomean", "<= 1.05", AG, _over_roof, geomean),
    OverlapBar("AG+GEMM R, worst", "<= 1.1", AG, _over_roof, max),
    OverlapBar("AG+GEMM over sequential, geomean", ">= 1.25", AG, _over_sequential, geomean),
    OverlapBar("GEMM+RS R, geomean", "<= 1.08", RS, _over_roof, geomean),
    OverlapBar("GEMM+RS R, worst", "<= 1.15", RS, _over_roof, max),
    OverlapBar("GEMM+RS over sequential, geomean", ">= 1.3", RS, _over_sequential, geomean),
    OverlapBar(
        "AG+GEMM over async-TP, geomean", ">= 1.4", AG, lambda p: p.async_tp / p.ours, geomean
    ),
    OverlapBar("GEMM+AR over sequential, geomean", ">= 1.2", AR, _over_sequential, geomean),
    OverlapBar("GEMM+AR over sequential, worst", ">= 1", AR, _over_sequential, min),
    OverlapBar("small: us slower than max(2 %, 1 us) allows, worst", "<= 0", _small, _excess, max),
    OverlapBar(BEST_FIXED, "<= 1.03", lambda shape: True, lambda p: p.ours / p.best, max),
)


FLOAT8_BARS = (OverlapBar("FP8 AG+GEMM R, geomean", "<= 1.08", AG, _over_roof, geomean),)


def judge_overlap(rows: Sequence[Row]) -> list[BarVerdict]:
    """Every bar that the rows tell something of; most are for bf16, where there are others."""
    float8 = [row for row in rows if row.get("dtype") == FLOAT8]
    plain = [row for row in rows if row.get("dtype") != FLOAT8]
    plain = [row for row in plain if row.get("dtype") == "bf16"] or plain
    hosts = [verdict for mode, who in READINGS for verdict in _host(plain, who, mode)]
    return [*_judge_sites(plain, OVERLAP_BARS), *hosts, *_judge_sites(float8, FLOAT8_BARS)]


def _judge_sites(rows: Sequence[Row], bars: Sequence[OverlapBar]) -> list[BarVerdict]:
    points = {(mode, who): _points(rows, who, mode) for mode, who in READINGS}
    return [
        _verdict(bar, who, mode, known)
        for bar in bars
        for mode, who in READINGS
        if not (who == "best" and bar.text == BEST_FIXED)
        and (known := _figures(bar, points[mode, who]))
    ]


def _shape(row: Row) -> Shape:
    return row["op"], int(row["m"]), int(row["k"]), int(row["n"])


def _points(rows: Sequence[Row], who: str, mode: str) -> dict[Shape, ShapeTimes]:
    """Times by shape, where `auto` or any fixed strategy of ours was timed."""
    times: dict[Shape, dict[str, float]] = {}
    limits: dict[Shape, float] = {}
    for row in rows:
        mine = times.setdefault(_shape(row), {})
        if not row["error"]:
            limits[_shape(row)] = max(number(row["gemm_us"]), number(row["link_us"]))
            if row["mode"] == mode:
                mine[row["strategy"]] = number(row["median_us"])
    found: dict[Shape, ShapeTimes] = {}
    for shape, known in times.items():
        best = min((known[name] for name in OURS if name != "auto" and name in known), default=None)
        ours = known.get("auto") if who == "auto" else best
        if ours is not None:
            found[shape] = ShapeTimes(
                ours=ours,
                sequential=known.get("sequential", math.nan),
                async_tp=known.get("async-tp", math.nan),
                limit=limits[shape],
                best=math.nan if best is None else best,
            )
    return found


def _figures(bar: OverlapBar, points: dict[Shape, ShapeTimes]) -> dict[Shape, float]:
    figures = {shape: bar.figure(point) for shape, point in points.items() if bar.wants(shape)}
    return {shape: figure for shape, figure in figures.items() if not math.isnan(figure)}


def _verdict(bar: OverlapBar, who: str, mode: str, known: dict[Shape, float]) -> BarVerdict:
    pick = min if bar.limit.startswith(">") else max
    extreme = pick(known, key=lambda shape: known[shape])
    worst = f"{extreme[0]} {','.join(map(str, extreme[1:]))}: {known[extreme]:.3f}"
    of = {"who": who, "mode": mode, "count": len(known), "worst": worst}
    return BarVerdict(bar.text, bar.limit, bar.joined(list(known.values())), of)


def _host(rows: Sequence[Row], who: str, mode: str) -> list[BarVerdict]:
    """The host time of an AG+GEMM call: of `auto`, and of the slowest fixed strategy.

    Of each strategy the median over the shapes at which many calls were timed.
    """
    hosts: dict[str, list[float]] = {}
    for row in [row for row in rows if number(row["host_runs"]) >= MANY] or rows:
        if row["op"] == "ag_gemm" and row["mode"] == mode and not row["error"]:
            hosts.setdefault(row["strategy"], []).append(number(row["host_us"]))
    names = ("auto",) if who == "auto" else [n for n in OURS if n not in ("auto", "pipeline")]
    known = {name: statistics.median(hosts[name]) for name in names if name in hosts}
    if not known:
        return []
    slowest = max(known, key=lambda name: known[name])
    of = {"who": "auto" if who == "auto" else "all", "mode": mode, "count": len(hosts[slowest])}
    of["worst"] = f"{slowest}: {known[slowest]:.1f}"
    return [BarVerdict("host time of an AG+GEMM call, us", MODES[mode], known[slowest], of)]


# -- kernels -------------------------------------------------------------------------------------

Ways = dict[str, Row]
"""The rows of one case, by way."""


@dataclass(frozen=True, slots=True)
class KernelBar:
    """A bar for the cases that `wants` accepts; the figure is NaN where the rows lack it."""

    text: str
    limit: str
    wants: Callable[[Row], bool]
    figure: Callable[[Row, Ways], float]


def _ratio(column: str, rival: str) -> Callable[[Row, Ways], float]:
    """Ours over a rival's."""

    def figure(row: Row, ways: Ways) -> float:
        its = number(ways[rival][column]) if rival in ways else math.nan
        return number(row[column]) / its if its else math.nan

    return figure


def _extra(rival: str) -> Callable[[Row, Ways], float]:
    """Memory that is needed beside what is handed out, over a rival's."""

    def extra(row: Row) -> float:
        return number(row["peak_bytes"]) - number(row["kept_bytes"])

    return lambda row, ways: extra(row) / extra(ways[rival]) if rival in ways else math.nan


def _share(row: Row, ways: Ways) -> float:
    return number(row["share"])


def _main_loss(row: Row) -> bool:
    whole = row["does"] == "forward+backward" and row["dtype"] == "bf16"
    return row["op"] == "cross-entropy" and row["shape"] == "8192x128256" and whole


def _on_gpu(op: str, row: Row) -> bool:
    return row["op"] == op and row["device"] == "cuda"


def _layer(row: Row) -> bool:
    return _on_gpu("host", row) and row["shape"].split(" ")[0] in HOST_LAYERS


def _executor(row: Row) -> bool:
    return row["op"] == "host" and row["shape"].startswith("Executor.run")


def _float8(does: str, row: Row) -> bool:
    return _on_gpu("float8", row) and row["does"] == does


def _speedup(row: Row, ways: Ways) -> float:
    return number(row["speedup_torch"])


def _muon(does: str, shape: str, row: Row) -> bool:
    return _on_gpu("muon", row) and row["does"] == does and row["shape"] == shape


LINEAR = functools.partial(_on_gpu, "linear-cross-entropy")
ADAM = functools.partial(_on_gpu, "adam")
COMPILED = _ratio("peak_bytes", "torch.compile")
KERNEL_BARS = (
    KernelBar("share of copy bandwidth", ">= 0.85", _main_loss, _share),
    KernelBar("peak memory over torch.compile's", "<= 1", _main_loss, COMPILED),
    KernelBar("extra memory over unfused", "<= 0.1", LINEAR, _extra("unfused")),
    KernelBar("extra memory over torch's", "<= 0.1", LINEAR, _extra("torch")),
    KernelBar("time over unfused", "<= 1.1", LINEAR, _ratio("median_us", "unfused")),
    KernelBar("share of copy bandwidth", ">= 0.9", ADAM, _share),
    KernelBar("run over plain calls", "<= 1.3", _executor, _ratio("median_us", "torch")),
    KernelBar("call over F.linear and NCCL", "<= 1.3", _layer, _ratio("median_us", "torch")),
    KernelBar("time over torch fused", "< 1", ADAM, _ratio("median_us", "torch")),
    KernelBar("over torch", ">= 1.7", functools.partial(_muon, GRAM, "4096x4096"), _speedup),
    KernelBar("over torch", ">= 1.5", functools.partial(_muon, STEP, LAYERS), _speedup),
    KernelBar("over torch", ">= 6", functools.partial(_muon, STEP, SMALL_ONES), _speedup),
    KernelBar("share of copy bandwidth", ">= 0.88", functools.partial(_float8, CAST), _share),
    KernelBar(
        "time over torchao's",
        "<= 0.926",
        functools.partial(_float8, BOTH),
        _ratio("median_us", "torchao"),
    ),
    KernelBar(
        "time over one _scaled_mm",
        "<= 1.053",
        functools.partial(_float8, WGRAD),
        _ratio("median_us", "_scaled_mm"),
    ),
)


def judge_kernels(rows: Sequence[Row]) -> list[BarVerdict]:
    """Every bar that the rows tell something of."""
    cases: dict[tuple[str, ...], Ways] = {}
    for row in rows:
        if not row["error"]:
            key = tuple(row[name] for name in ("op", "shape", "dtype", "does"))
            cases.setdefault(key, {})[row["way"]] = row
    ours = {key: ways[OUR_WAY] for key, ways in cases.items() if OUR_WAY in ways}
    found = [
        BarVerdict(bar.text, bar.limit, bar.figure(row, cases[key]), _kernel(key))
        for bar in KERNEL_BARS
        for key, row in ours.items()
        if bar.wants(row)
    ]
    return [verdict for verdict in (*found, *_halved(ours)) if not math.isnan(verdict.figure)]


def _kernel(key: tuple[str, ...]) -> dict[str, Any]:
    return {"case": " ".join(key), "way": OUR_WAY}


def _halved(ours: dict[tuple[str, ...], Row]) -> list[BarVerdict]:
    """Bytes of states: bf16 moments over the fp32 moments of the same parameters."""
    kept = {key[1].split(" ", 1)[1]: key for key, row in ours.items() if ADAM(row)}
    if not {"all f32", "all bf16"} <= set(kept):
        return []
    wide, narrow = kept["all f32"], kept["all bf16"]
    figure = number(ours[narrow]["state_bytes"]) / number(ours[wide]["state_bytes"])
    bar = "bytes of states over those of fp32 moments"
    return [BarVerdict(bar, "<= 0.501", figure, _kernel(narrow))]


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
    found += _float8_layers(ways)
    return [verdict for verdict in found if not math.isnan(verdict.figure)]


def _float8_layers(ways: Ways) -> list[BarVerdict]:
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
    return [verdict for verdict in found if not math.isnan(verdict.figure)]
