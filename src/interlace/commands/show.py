"""`interlace show FILE`: a schedule as its canonical text, or a timeline as figures; or as a page.

$ interlace show mlp.ilc --rank 0        # as rank 0 runs it
$ interlace show mlp.ilc --html mlp.html # with the predicted timeline
$ interlace show run.json --program mlp.ilc --html run.html
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.commands.files import label, read_machine, read_programs, read_text, write_text
from interlace.commands.output import code, command, print_json, say, table
from interlace.errors import InputError

if TYPE_CHECKING:
    from interlace.cost import Timeline
    from interlace.ir import Program


@command
def show(
    file: Annotated[Path, typer.Argument(help="A schedule, a timeline in JSON, or - for stdin.")],
    rank: Annotated[
        int | None, typer.Option(help="Show the schedule as this rank runs it.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page here.")] = None,
    program: Annotated[
        Path | None, typer.Option(help="The schedule that a timeline in JSON belongs to.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the facts for scripts.")] = False,
) -> None:
    """Show a schedule or a timeline, as text or as an HTML page."""
    from interlace.cost import Timeline
    from interlace.ir import parse_set, print_set

    text = read_text(file)
    if text.lstrip().startswith("{"):
        _timeline(Timeline.from_json(text), program, html, json)
        return
    programs = list(parse_set(text, file=label(file)))
    if rank is not None:
        programs = [p.instantiate(rank) for p in programs if rank in p.world] or [
            programs[0].instantiate(rank)  # raises the error that says which ranks there are
        ]
    if html is not None:
        from interlace.ir import validate

        for item in programs:
            validate(item)
        predicted = None if rank is not None else _predict(programs)
        _page(html, predicted, None, programs)
    if json:
        print_json({"schema": 1, "programs": [_facts(item) for item in programs]})
    elif html is None:
        code(print_set(programs).rstrip("\n"))


def _timeline(timeline: Timeline, program: Path | None, html: Path | None, json: bool) -> None:
    from interlace.trace.figures import HEADINGS, figures_json, figures_rows

    programs = read_programs(program) if program is not None else []
    lengths = {item.name: len(item.ops) for item in programs}
    last = max((span.op_index for span in timeline.spans), default=0)
    if programs and last >= lengths.get(timeline.name, 0):
        raise InputError(
            f"the timeline is of {timeline.name!r} and goes to op {last}, and {program} holds "
            f"{', '.join(f'{name!r} of {count} ops' for name, count in lengths.items())}: give the "
            "schedule that ran"
        )
    if html is not None:
        measured = timeline.source == "measured"
        _page(html, None if measured else timeline, timeline if measured else None, programs)
    if json:
        print_json({"schema": 1, "figures": figures_json([timeline])})
    elif html is None:
        table(HEADINGS, figures_rows([timeline]))


def _predict(programs: list[Program]) -> Timeline:
    from interlace.cost import simulate

    return simulate(programs, read_machine(None))


def _page(
    path: Path, predicted: Timeline | None, measured: Timeline | None, programs: list[Program]
) -> None:
    from interlace.trace import Run, html_page

    write_text(path, html_page([Run(tuple(programs), predicted, measured)]))
    say(f"wrote {path}")


def _facts(program: Program) -> dict[str, object]:
    return {
        "name": program.name,
        "ranks": list(program.world),
        "teams": {team.name: team.size for team in program.teams},
        "streams": list(program.streams()),
        "ops": len(program.ops),
        "sites": len(program.sites),
        "text": str(program),
    }
