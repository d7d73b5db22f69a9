"""The pictures of the page on pretraining: losses of each variant, and how far they are off.

Above, the loss of all variants, each point the mean of `MEAN_OF` steps; below, the largest
difference from eager torch among as many steps, relative, on a logarithmic scale. The rows are
those of benchmarks/results/pretrain/DEVICE.csv, which benchmarks/pretrain.py writes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence

from layers import THEMES
from measurements import RESULTS

REFERENCE, OURS = "eager", "interlace"
LABELS = {
    REFERENCE: "eager torch",
    OURS: "Interlace",
    "inductor": "Inductor",
    "torch": "torch's loss and AdamW too",
    "inductor-torch": "Inductor, torch's loss and AdamW too",
    "fp8": "Interlace, FP8",
}
LOOKS = {
    REFERENCE: ("Inductor + NCCL", 5.0),
    OURS: ("Interlace", 1.8),
    "inductor": ("over", 1.2),
    "torch": ("ink", 1.2),
    "inductor-torch": ("over", 1.2),
    "fp8": ("ink", 1.2),
}
"""The name of the colour in THEMES, and the width of the line."""
WIDTH, LEFT, RIGHT, UPPER, LOWER, GAP = 640, 52, 20, 220, 110, 34
MEAN_OF = 10
DECADES = (-7, -1)
"""Powers of ten at the lower and the upper edge of the differences. Lower ones, which no loss in
float32 has, stand at the lower edge as zero does."""


def curves() -> dict[str, str]:
    """The light and the dark SVG of each device that has losses, by name."""
    pictures: dict[str, str] = {}
    for path in sorted((RESULTS / "pretrain").glob("*.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        losses = {name: [float(row[name]) for row in rows] for name in LABELS if name in rows[0]}
        for suffix, colours in THEMES.items():
            pictures[f"pretrain-{path.stem}{suffix}.svg"] = _picture(losses, colours)
    return pictures


def _picture(losses: dict[str, list[float]], colours: dict[str, str]) -> str:
    steps = len(losses[REFERENCE])
    means = {name: [sum(c) / len(c) for c in _chunks(each)] for name, each in losses.items()}
    top = math.ceil(max(max(each) for each in means.values()))
    bottom = math.floor(min(min(each) for each in means.values()))
    parts: list[str] = []
    for value in range(bottom, top + 1):
        y = _y(value, bottom, top, 10, UPPER)
        parts += [_rule(y, colours), _label(LEFT - 8, y + 4, str(value), "end")]
    for name, each in means.items():
        parts.append(_line([_y(v, bottom, top, 10, UPPER) for v in each], name, colours))
    start = 10 + UPPER + GAP
    for power in range(DECADES[0], DECADES[1] + 1, 2):
        y = _y(power, *DECADES, start, LOWER)
        named = f"1e{power}" if power > DECADES[0] else "equal"
        parts += [_rule(y, colours), _label(LEFT - 8, y + 4, named, "end")]
    for name, each in losses.items():
        if name != REFERENCE:
            off = [abs(a / b - 1) for a, b in zip(each, losses[REFERENCE], strict=True)]
            logs = [math.log10(max(max(c), 10 ** DECADES[0])) for c in _chunks(off)]
            parts.append(_line([_y(v, *DECADES, start, LOWER) for v in logs], name, colours))
    parts.append(_label(LEFT, 8 + 10 + UPPER + GAP - 14, "off eager torch, relative", "start"))
    end = start + LOWER
    for step in range(0, steps + 1, max(1, steps // 5)):
        parts.append(_label(_x(step, steps), end + 16, str(step), "middle"))
    for place, name in enumerate(losses):
        x, y = LEFT + 12 + 230 * (place % 2), end + 38 + 18 * (place // 2)
        colour, wide = colours[LOOKS[name][0]], LOOKS[name][1]
        parts.append(f'<path d="M{x} {y - 4}h22" stroke="{colour}" stroke-width="{wide}"/>')
        same = sum(a == b for a, b in zip(losses[name], losses[REFERENCE], strict=True))
        equal = f": {same} of {steps} losses equal" if name == OURS else ""
        parts.append(_label(x + 28, y, f"{LABELS[name]}{equal}", "start"))
    height = end + 50 + 18 * ((len(losses) - 1) // 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{colours["ink"]}">'
        "<title>Loss by step</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _chunks(values: Sequence[float]) -> list[Sequence[float]]:
    return [values[i : i + MEAN_OF] for i in range(0, len(values), MEAN_OF)]


def _x(step: float, steps: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / steps


def _y(value: float, bottom: float, top: float, start: int, height: int) -> float:
    return start + height * (top - value) / (top - bottom)


def _line(ys: Sequence[float], name: str, colours: dict[str, str]) -> str:
    points = " ".join(f"{_x(i + 0.5, len(ys)):.1f},{y:.1f}" for i, y in enumerate(ys))
    colour, wide = colours[LOOKS[name][0]], LOOKS[name][1]
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{wide}"/>'


def _rule(y: float, colours: dict[str, str]) -> str:
    return f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{colours["ink"]}" opacity="0.15"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
