"""`interlace simulate FILE`: the predicted timeline of a schedule, and how much it hides.

$ interlace simulate mlp.ilc --calibration mine.json --html mlp.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from interlace.commands.files import (
    on_mesh,
    parse_mesh,
    read_machine,
    read_programs,
    write_text,
)
from interlace.commands.output import UNSOUND, command, print_json, say, table


@command
def simulate(
    file: Annotated[Path, typer.Argument(help="A schedule, or - for standard input.")],
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file; without it, the built-in model.")
    ] = None,
    device: Annotated[str, typer.Option(help="Built-in model: cpu or cuda.")] = "cpu",
    mesh: Annotated[str | None, typer.Option(help="Sizes of the teams, such as dp=2,tp=4.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the timeline as a page.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write it as a trace for ui.perfetto.dev.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the timeline as JSON.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures for scripts.")] = False,
) -> None:
    """Predict when each op runs, and how much communication is hidden.

    Ends with code 1 if the schedule is unsound: then it may run otherwise, or not to its end.
    """
    from interlace import cost
    from interlace.trace import Run, figures_json, html_page, write_perfetto
    from interlace.trace.figures import HEADINGS, figures_rows
    from interlace.verify import check

    programs = on_mesh(read_programs(file), world=None, mesh=parse_mesh(mesh))
    report = check(programs)
    machine = read_machine(calibration, device)
    timeline = cost.simulate(programs, machine)
    written: list[Path] = []
    if output is not None:
        write_text(output, timeline.to_json() + "\n")
        written.append(output)
    if html is not None:
        facts = [("machine", machine.name)]
        write_text(html, html_page([Run(tuple(programs), timeline)], facts=facts))
        written.append(html)
    if perfetto is not None:
        written.append(write_perfetto(timeline, perfetto, program=programs))
    if json:
        rows = figures_json([timeline])
        verdict = "sound" if report.sound else "unsound"
        print_json({"schema": 1, "machine": machine.name, "verdict": verdict, "figures": rows})
    else:
        table(HEADINGS, figures_rows([timeline]), title=f"predicted for machine {machine.name!r}")
        for path in written:
            say(f"wrote {path}")
        if not report.sound:
            say(f"\nthe prediction is of a schedule that can go wrong\n{report}")
    if not report.sound:
        raise typer.Exit(UNSOUND)
