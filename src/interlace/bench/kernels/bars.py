"""The bars that the rows of `bench kernels` must clear, and whether they do.

    for verdict in judge(rows):
        print(verdict.bar, verdict.way, verdict.figure, verdict.passed)

What is judged is what a user gets by default; variants of ours are shown beside it, and no bar is
cleared by one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from interlace.bench.kernels.case import OURS
from interlace.bench.rows import Row, number

Group = dict[str, Row]
"""The rows of one case, by way."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar at one case."""

    bar: str
    limit: str
    case: str
    way: str
    figure: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """What must hold for one op; the figure is NaN where the rows do not tell."""

    text: str
    limit: str
    wants: Callable[[Row], bool]
    figure: Callable[[Row, Group], float]
    passes: Callable[[float], bool]


def _ratio(column: str, rival: str) -> Callable[[Row, Group], float]:
    """Ours over a rival's."""

    def figure(row: Row, group: Group) -> float:
        its = number(group[rival][column]) if rival in group else math.nan
        return number(row[column]) / its if its else math.nan

    return figure


def _extra(rival: str) -> Callable[[Row, Group], float]:
    """Memory that is needed beside what is handed out, over a rival's."""

    def extra(row: Row) -> float:
        return number(row["peak_bytes"]) - number(row["kept_bytes"])

    return lambda row, group: extra(row) / extra(group[rival]) if rival in group else math.nan


def _share(row: Row, group: Group) -> float:
    return number(row["share"])


def _main(row: Row) -> bool:
    whole = row["does"] == "forward+backward" and row["dtype"] == "bf16"
    return row["op"] == "cross-entropy" and row["shape"] == "8192x128256" and whole


def _linear(row: Row) -> bool:
    return row["op"] == "linear-cross-entropy" and row["device"] == "cuda"


def _adam(row: Row) -> bool:
    return row["op"] == "adam" and row["device"] == "cuda"


def _run(row: Row) -> bool:
    return row["op"] == "host" and row["shape"].startswith("Executor.run")


def _at_most(limit: float) -> Callable[[float], bool]:
    return lambda figure: figure <= limit


def _at_least(limit: float) -> Callable[[float], bool]:
    return lambda figure: figure >= limit


BARS = (
    Bar("share of copy bandwidth", ">= 0.85", _main, _share, _at_least(0.85)),
    Bar(
        *("peak memory over torch.compile's", "<= 1", _main),
        *(_ratio("peak_bytes", "torch.compile"), _at_most(1.0)),
    ),
    Bar("extra memory over unfused", "<= 0.1", _linear, _extra("unfused"), _at_most(0.1)),
    Bar("extra memory over torch's", "<= 0.1", _linear, _extra("torch"), _at_most(0.1)),
    Bar("time over unfused", "<= 1.1", _linear, _ratio("median_us", "unfused"), _at_most(1.1)),
    Bar("share of copy bandwidth", ">= 0.9", _adam, _share, _at_least(0.9)),
    Bar("run over plain calls", "<= 1.3", _run, _ratio("median_us", "torch"), _at_most(1.3)),
    Bar("time over torch fused", "< 1", _adam, _ratio("median_us", "torch"), lambda f: f < 1),
)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Every bar that the rows tell something of."""
    groups: dict[tuple[str, ...], Group] = {}
    for row in rows:
        if not row["error"]:
            key = tuple(row[name] for name in ("op", "shape", "dtype", "does"))
            groups.setdefault(key, {})[row["way"]] = row
    found: list[Verdict] = []
    for bar in BARS:
        for key, group in groups.items():
            row = group.get(OURS)
            if row is not None and bar.wants(row):
                figure = bar.figure(row, group)
                if not math.isnan(figure):
                    case, passed = " ".join(key), bar.passes(figure)
                    found.append(Verdict(bar.text, bar.limit, case, OURS, figure, passed))
    return [*found, *_halved(groups)]


def _halved(groups: dict[tuple[str, ...], Group]) -> list[Verdict]:
    """Bytes of states: bf16 moments over the fp32 moments of the same parameters."""
    kept = {
        key[1].split(" ", 1)[1]: (key, number(group[OURS]["state_bytes"]))
        for key, group in groups.items()
        if OURS in group and _adam(group[OURS])
    }
    if not {"all f32", "all bf16"} <= set(kept):
        return []
    (_, wide), (key, narrow) = kept["all f32"], kept["all bf16"]
    figure = narrow / wide
    bar = "bytes of states over those of fp32 moments", "<= 0.501"
    return [Verdict(*bar, " ".join(key), OURS, figure, figure <= 0.501)]


def missed(verdicts: Sequence[Verdict]) -> list[str]:
    """The bars that are not cleared, with the case."""
    return [f"{verdict.case}: {verdict.bar}" for verdict in verdicts if not verdict.passed]
