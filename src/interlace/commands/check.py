"""`interlace check FILE`: whether a schedule can go wrong, and how.

$ interlace check ring.ilc --world 8
sound (8 ranks, 168 ops, 12 ms)
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from interlace.commands.files import on_mesh, parse_mesh, read_programs
from interlace.commands.operators import look_up
from interlace.commands.output import UNSOUND, command, print_json, say


@command
def check(
    file: Annotated[Path, typer.Argument(help="A schedule, or - for standard input.")],
    world: Annotated[
        int | None, typer.Option(help="Ranks in all: a multiple of the Program's own.")
    ] = None,
    mesh: Annotated[str | None, typer.Option(help="Sizes of the teams, such as dp=2,tp=4.")] = None,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Check the twin that runs one op after another.")
    ] = False,
    operators: Annotated[
        list[str] | None,
        typer.Option(help="An operator of your own that may be called, or a namespace; repeat it."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a report for scripts.")] = False,
) -> None:
    """Prove that a schedule has no race and no deadlock, or show how it goes wrong.

    Ends with code 0 if the schedule is sound, with 1 and the counterexample if it is not, with 2 if
    it cannot be read, and with 70 for a fault of Interlace.
    """
    from interlace.verify import check as verify

    programs = on_mesh(read_programs(file), world=world, mesh=parse_mesh(mesh))
    remarks = look_up(programs, operators or ())
    report = verify(programs, in_order=in_order)
    report = dataclasses.replace(report, findings=(*report.findings, *remarks))
    if json:
        print_json(report.to_json())
    else:
        say(str(report))
    if not report.sound:
        raise typer.Exit(UNSOUND)
