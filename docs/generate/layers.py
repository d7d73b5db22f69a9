"""The picture of the home page: measured steps of one layer, as bars.

It shows the newest run of benchmarks/results/transformer.csv that timed all of `GROUPS`, variants
taking turns. The part of a bar beyond the same layer without communication has a colour of its own.
"""

from __future__ import annotations

import csv

from measurements import RESULTS, Row

INDUCTOR, OURS, IDEAL = "Inductor + NCCL", "Interlace", "no communication"
GROUPS = {
    "8B layer, in CUDA graphs": (
        "llama3-8b",
        {INDUCTOR: "inductor-graph", OURS: "compile-graph", IDEAL: "ideal"},
    ),
    "70B layer": (
        "llama3-70b",
        {
            INDUCTOR: "inductor",
            OURS: "compile",
            IDEAL: "ideal",
            f"{OURS}, FP8 in graphs": "compile-fp8-graph",
        },
    ),
}
"""The model and the variants of each group of bars. No FP8 without Interlace was timed."""
WIDTH, LEFT, RIGHT, ROW, BAR = 520, 168, 104, 25, 17
NAMES = ("ink", INDUCTOR, OURS, IDEAL, "over")
THEMES = {
    "": dict(zip(NAMES, ("#1b2330", "#8793a5", "#2459c9", "#c3cad5", "#d9480f"), strict=True)),
    "-dark": dict(zip(NAMES, ("#e4e9f0", "#8b98ab", "#7aa7ff", "#4b5768", "#ff9a6b"), strict=True)),
}
"""Colours by the suffix of the file, as benchmarks/plot.py has them."""
LEGEND = "beyond the time without communication"


def newest_run() -> tuple[str, dict[tuple[str, str], Row]]:
    """The commit of the run, and its rows by model and variant."""
    wanted = {(model, way) for model, ways in GROUPS.values() for way in ways.values()}
    runs: dict[str, dict[tuple[str, str], Row]] = {}
    with (RESULTS / "transformer.csv").open() as file:
        for row in csv.DictReader(file):
            key = row["model"], row["way"]
            if key in wanted and row["how"] == "measured" and not row["error"]:
                runs.setdefault(row["commit"], {})[key] = row
    complete = {commit: run for commit, run in runs.items() if {*run} == wanted}
    return max(complete.items(), key=lambda run: max(row["date"] for row in run[1].values()))


def layer_bars() -> dict[str, str]:
    """The light and the dark SVG file by name."""
    return {f"layers{suffix}.svg": _bars(colours) for suffix, colours in THEMES.items()}


def _bars(colours: dict[str, str]) -> str:
    _, run = newest_run()
    parts: list[str] = []
    y = 14
    for title, (model, ways) in GROUPS.items():
        times = {label: float(run[model, way]["median_us"]) / 1e3 for label, way in ways.items()}
        scale = (WIDTH - LEFT - RIGHT) / times[INDUCTOR]
        parts.append(f'<text x="{LEFT}" y="{y}" font-weight="bold">{title}</text>')
        y += 8
        for label, ms in times.items():
            wide, whole = ms * scale, min(ms, times[IDEAL]) * scale
            middle = y + BAR / 2 + 5
            colour = colours[label.split(",")[0]]
            parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{label}</text>')
            parts.append(_rect(LEFT, y, whole, colour))
            if wide > whole:
                parts.append(_rect(LEFT + whole, y, wide - whole, colours["over"]))
            gain = f", {times[INDUCTOR] / ms:.2f}x" if label.startswith(OURS) else ""
            text = f'<text x="{LEFT + wide + 6:.1f}" y="{middle}">{ms:.1f} ms{gain}</text>'
            parts.append(text)
            y += ROW
        y += 20
    parts.append(_rect(LEFT, y - 12, 14, colours["over"]))
    parts.append(f'<text x="{LEFT + 20}" y="{y + 1}">{LEGEND}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 12}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="{colours["ink"]}">'
        "<title>Time of a training step of one layer</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _rect(x: float, y: float, width: float, colour: str) -> str:
    size = f'width="{width:.1f}" height="{BAR}"'
    return f'<rect x="{x:.1f}" y="{y}" {size} fill="{colour}"/>'
