"""Overlap figures as rows: how busy each rank was, and how much communication compute hid.

>>> print(figures_text([simulated, measured]))
run        ranks      makespan   compute   communication   hidden   exposed
predicted  0          2.41 ms    2.30 ms   1.10 ms         95 %     0.06 ms
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from interlace.cost.simulate import Prediction
from interlace.cost.timeline import Figures, Interval, Span, Timeline, intersection, length, union

HEADINGS = ("run", "rank", "makespan", "compute", "communication", "hidden", "exposed")
PREDICTED = ("rank", "ranks alike", *HEADINGS[2:])
MOST_ROWS = 16


def milliseconds(seconds: float) -> str:
    """A time as people read it."""
    ms = seconds * 1e3
    if ms == 0:
        return "0 ms"
    return f"{ms:.3f} ms" if ms < 1 else f"{ms:.2f} ms" if ms < 100 else f"{ms:.0f} ms"


def percent(share: float) -> str:
    """A share in whole percent. Only all of it is 100%; just below, a digit more is shown."""
    if 0.995 <= share < 1:
        return f"{math.floor(1000 * share) / 10:.1f}%"
    return f"{share:.0%}"


def figures_rows(timelines: Iterable[Timeline]) -> list[tuple[str, ...]]:
    """A row for each rank of each timeline, and their mean if there are several."""
    return [
        (
            timeline.source,
            "mean" if rank is None else str(rank),
            *figure_cells(timeline.figures(rank)),
        )
        for timeline in timelines
        for rank in parts_of(timeline)
    ]


def parts_of(timeline: Timeline) -> list[int | None]:
    """The ranks, and None for their mean where there are several."""
    ranks = timeline.ranks
    return [*ranks, None] if len(ranks) > 1 else [*ranks]


def figure_cells(figures: Figures) -> tuple[str, ...]:
    """The cells that `HEADINGS` names from the makespan on."""
    hidden = percent(figures.hidden) if figures.comm_s > 0 else "-"
    times = figures.makespan_s, figures.compute_s, figures.comm_s
    return *map(milliseconds, times), hidden, milliseconds(figures.exposed_s)


@dataclass(frozen=True, slots=True)
class SiteFigures:
    """Times of a site on a rank."""

    took_s: float
    """From the first start of its computation and communication to the last end; waits before it
    do not count, and ops of other sites may run between."""
    comm_s: float
    """Time in which it communicated."""
    exposed_s: float
    """Time of that in which the rank computed nothing."""


def site_figures(timeline: Timeline) -> dict[tuple[int, int], SiteFigures]:
    """Figures by rank and site, of sites that compute or communicate."""
    compute: dict[int, list[Interval]] = {}
    sites: dict[tuple[int, int], list[Span]] = {}
    for span in timeline.spans:
        if span.kind == "compute":
            compute.setdefault(span.rank, []).append((span.start_s, span.end_s))
        if span.site is not None and span.kind in ("compute", "comm"):
            sites.setdefault((span.rank, span.site), []).append(span)
    busy = {rank: union(intervals) for rank, intervals in compute.items()}
    found: dict[tuple[int, int], SiteFigures] = {}
    for (rank, site), spans in sites.items():
        took = max(span.end_s for span in spans) - min(span.start_s for span in spans)
        comm = union((span.start_s, span.end_s) for span in spans if span.kind == "comm")
        exposed = length(comm) - length(intersection(comm, busy.get(rank, [])))
        found[rank, site] = SiteFigures(took, length(comm), exposed)
    return found


def prediction_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    """A row for each rank that was simulated, up to `MOST_ROWS`: the slowest ones."""
    timeline = prediction.timeline
    found = [(rank, timeline.figures(rank)) for rank in prediction.ranks]
    slowest = sorted(found, key=lambda item: -item[1].makespan_s)[:MOST_ROWS]
    return [
        (str(rank), str(prediction.ranks[rank]), *figure_cells(figures))
        for rank, figures in sorted(slowest, key=lambda item: item[0])
    ]


def link_rows(prediction: Prediction) -> list[tuple[str, ...]]:
    """A row for each link: how long the busiest one worked, and which part of the run that is."""
    whole = prediction.timeline.makespan_s
    return [(name, milliseconds(s), f"{s / whole:.0%}") for name, s in prediction.busy.items()]


def prediction_json(prediction: Prediction) -> dict[str, object]:
    """The same as data, times in seconds."""
    return {
        "world": prediction.world,
        "ranks": {str(rank): count for rank, count in prediction.ranks.items()},
        "makespan_s": prediction.timeline.makespan_s,
        "busy_s": dict(prediction.busy),
    }


def figures_json(timelines: Iterable[Timeline]) -> list[dict[str, object]]:
    """The same rows as data; times in seconds, `rank` None for the mean over ranks."""
    rows: list[dict[str, object]] = []
    for timeline in timelines:
        for rank in parts_of(timeline):
            figures = timeline.figures(rank)
            known = {**asdict(figures), "exposed_s": figures.exposed_s, "hidden": figures.hidden}
            rows.append({"run": timeline.source, "rank": rank, **known})
    return rows


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns, as plain text."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    padded = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in lines)
    return "\n".join(line.rstrip() for line in padded)


def figures_text(timelines: Iterable[Timeline]) -> str:
    """The overlap figures as a plain text table."""
    return text_table(HEADINGS, figures_rows(timelines))
