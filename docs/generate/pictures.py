"""The pictures of strategies, from their rows and from the simulator.

Timelines show rank 0 of four, as predicted, all on one time scale. Steps show whose rows each rank
handles at each step. Colours are chosen to be legible on light and on dark pages.
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
RANKS = 4
OWNERS = ("#4c8bf5", "#e8710a", "#34a853", "#a142f4")
"""By the rank whose rows they are."""


def pictures() -> dict[str, str]:
    """The SVG files by name."""
    return {
        "strategies-gather.svg": _stacked("An all-gather before a matmul", GATHER),
        "strategies-scatter.svg": _stacked("A matmul before a reduce-scatter", SCATTER),
        "strategies-steps.svg": _steps(),
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
    options = Options.from_dict({"strategy": name})
    return lower(serial, options, default_machine("cuda"), protocol=protocol)


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
    return _svg(title, y + 22, parts)


def _steps() -> str:
    """Whose rows a rank multiplies at each step, for the two ways in which steps go."""
    parts: list[str] = []
    for number, (name, protocol) in enumerate((("peer", "get"), ("ring", None))):
        row = STRATEGIES[name, protocol]
        assert row.gather
        assert row.scatter
        gather = [0, *(row.gather.chunk.at(k) for k in range(1, RANKS))]
        scatter = [*(row.scatter.chunk.at(k) for k in range(1, RANKS)), 0]
        label = "ring" if name == "ring" else "peer, fused"
        for place, (kind, offsets) in enumerate((("gather", gather), ("scatter", scatter))):
            x, y = 60 + 370 * place, 34 + 170 * number
            parts.append(f'<text x="{x}" y="{y - 18}">{kind}: {label}</text>')
            for step in range(RANKS):
                parts.append(f'<text x="{x + 62 * step + 10}" y="{y}">step {step}</text>')
            for rank in range(RANKS):
                top = y + 8 + 28 * rank
                parts.append(f'<text x="{x - 50}" y="{top + 16}">rank {rank}</text>')
                for step, offset in enumerate(offsets):
                    parts.append(_cell(x + 62 * step, top, (rank + offset) % RANKS))
    return _svg("Whose rows a rank multiplies at each step", 340, parts)


def _cell(x: int, y: int, owner: int) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="58" height="24" rx="3" fill="{OWNERS[owner]}"/>'
        f'<text x="{x + 29}" y="{y + 16}" text-anchor="middle" fill="#fff">rows {owner}</text>'
    )


def _svg(title: str, height: int, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{GREY}"><title>{title}</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _drawn_streams(timeline: Timeline) -> list[str]:
    """The streams of rank 0 on which something happens."""
    drawn = {span.stream for span in timeline.spans if span.rank == 0 and span.kind in COLOURS}
    return sorted(drawn, key=lambda stream: (stream != "main", stream))
