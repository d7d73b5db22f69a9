"""The pictures of strategies: rank 0 of four, as the simulator predicts it, all on one time scale.

Colours are chosen to be legible on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from interlace.cost import Timeline, default_machine, simulate
from interlace.ir import Program, parse
from interlace.options import Options
from interlace.passes import lower
from interlace.strategies import STRATEGIES

GATHER = """
def gather(tp: Team[4], x: bf16[2048, 8192], w: bf16[8192, 2560]):
    full = empty(bf16[8192, 8192])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := bf16[8192, 2560]))
    return y
"""
SCATTER = """
def scatter(tp: Team[4], x: bf16[8192, 2048], w: bf16[2048, 8192]):
    main: call("aten.mm.default", x, w, out=(y := bf16[8192, 8192]))
    mine = empty(bf16[2048, 8192])
    main: reduce_scatter(y, mine, reduce="sum", team=tp)
    return mine
"""
WIDTH, LEFT, RIGHT, ROW, GAP = 760, 110, 70, 14, 12
COLOURS = {"compute": "#4c8bf5", "comm": "#e8710a", "sync": "#9aa0a6"}
GREY = "#80868b"


def pictures() -> dict[str, str]:
    """The SVG files by name."""
    return {
        "strategies-gather.svg": _stacked("An all-gather before a matmul", GATHER),
        "strategies-scatter.svg": _stacked("A matmul before a reduce-scatter", SCATTER),
    }


def timelines(text: str) -> Iterator[tuple[str, Timeline]]:
    """What each strategy that serves a team in one host is predicted to take, serial first."""
    serial, machine = parse(text.strip()), default_machine("cuda")
    yield "serial", simulate(_lowered(serial, "serial", None), machine)
    for name, protocol in STRATEGIES:
        program = _lowered(serial, name, protocol)
        if program.sites[0].strategy == name:
            label = f"{name} ({protocol})" if protocol else name
            yield label, simulate(program, machine)


def _lowered(serial: Program, name: str, protocol: str | None) -> Program:
    options = Options(strategy=name, protocol=protocol or "get")
    return lower(serial, options, default_machine("cuda"))


def _stacked(title: str, text: str) -> str:
    """All strategies below one another, with the end of each in microseconds."""
    shown = list(timelines(text))
    longest = max(timeline.makespan_s for _, timeline in shown)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts: list[str] = []
    y = 8
    for label, timeline in shown:
        streams = _drawn_streams(timeline)
        begin = min(span.start_s for span in timeline.spans)
        middle = y + ROW * len(streams) / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{middle:.1f}" text-anchor="end">{label}</text>')
        for row, stream in enumerate(streams):
            for span in timeline.spans:
                if span.rank == 0 and span.stream == stream and span.kind in COLOURS:
                    x = LEFT + (span.start_s - begin) * scale
                    parts.append(
                        f'<rect x="{x:.1f}" y="{y + row * ROW + 1}" '
                        f'width="{max(span.seconds * scale - 0.6, 0.4):.1f}" height="{ROW - 2}" '
                        f'fill="{COLOURS[span.kind]}"><title>{escape(span.name)}</title></rect>'
                    )
        end = LEFT + timeline.makespan_s * scale
        took = f"{timeline.makespan_s * 1e6:.0f} µs"
        parts.append(f'<text x="{end + 6:.1f}" y="{middle:.1f}">{took}</text>')
        y += ROW * len(streams) + GAP
    for number, (kind, word) in enumerate(
        (("compute", "computes"), ("comm", "communicates"), ("sync", "waits"))
    ):
        x = LEFT + 130 * number
        parts.append(f'<rect x="{x}" y="{y + 2}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 12}">{word}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 22}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{GREY}"><title>{title}</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _drawn_streams(timeline: Timeline) -> list[str]:
    """The streams of rank 0 on which something happens."""
    drawn = {span.stream for span in timeline.spans if span.rank == 0 and span.kind in COLOURS}
    return sorted(drawn, key=lambda stream: (stream != "main", stream))
