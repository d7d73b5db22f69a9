"""Overlap figures as rows: how busy each rank was, and how much communication compute hid.

>>> print(figures_text([simulated, measured]))
run        ranks      makespan   compute   communication   hidden   exposed
predicted  0          2.41 ms    2.30 ms   1.10 ms         95 %     0.06 ms
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from interlace.cost.timeline import Figures, Timeline

HEADINGS = ("run", "rank", "makespan", "compute", "communication", "hidden", "exposed")


def milliseconds(seconds: float) -> str:
    """A time as people read it."""
    ms = seconds * 1e3
    if ms == 0:
        return "0 ms"
    return f"{ms:.3f} ms" if ms < 1 else f"{ms:.2f} ms" if ms < 100 else f"{ms:.0f} ms"


def figures_rows(timelines: Iterable[Timeline]) -> list[tuple[str, ...]]:
    """A row for each rank of each timeline, and one for all of its ranks if there are several."""
    rows: list[tuple[str, ...]] = []
    for timeline in timelines:
        for rank in timeline.ranks:
            rows.append((timeline.source, str(rank), *_cells(timeline.figures(rank))))
        if len(timeline.ranks) > 1:
            rows.append((timeline.source, "all", *_cells(timeline.figures())))
    return rows


def _cells(figures: Figures) -> tuple[str, ...]:
    hidden = f"{figures.hidden:.0%}" if figures.comm_s > 0 else "-"
    return (
        milliseconds(figures.makespan_s),
        milliseconds(figures.compute_s),
        milliseconds(figures.comm_s),
        hidden,
        milliseconds(figures.exposed_s),
    )


def figures_json(timelines: Iterable[Timeline]) -> list[dict[str, object]]:
    """The same rows as data; times in seconds, `rank` None for all ranks together."""
    rows: list[dict[str, object]] = []
    for timeline in timelines:
        ranks: list[int | None] = list(timeline.ranks)
        for rank in [*ranks, None] if len(ranks) > 1 else ranks:
            figures = timeline.figures(rank)
            rows.append(
                {
                    "run": timeline.source,
                    "rank": rank,
                    "makespan_s": figures.makespan_s,
                    "compute_s": figures.compute_s,
                    "comm_s": figures.comm_s,
                    "overlap_s": figures.overlap_s,
                    "exposed_s": figures.exposed_s,
                    "hidden": figures.hidden,
                }
            )
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
