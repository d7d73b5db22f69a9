"""`interlace explain FILE`: every site with its strategy, the reason and the predicted gain.

$ interlace explain mlp.ilc
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.commands.files import read_machine, read_programs
from interlace.commands.output import command, print_json, say, table

if TYPE_CHECKING:
    from interlace.ir import Program, Site

HEADINGS = ("site", "module", "kind", "strategy", "serial", "predicted", "gain", "reason")


@command
def explain(
    file: Annotated[Path, typer.Argument(help="A schedule, or - for standard input.")],
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file; without it, the built-in model.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the facts for scripts.")] = False,
) -> None:
    """Say how each communication is overlapped, why, and what that is predicted to gain.

    A serial program (communication on its one stream, and no sites yet) is lowered first.
    """
    from interlace.options import Options
    from interlace.passes import lower
    from interlace.verify import check

    machine = read_machine(calibration)
    given = read_programs(file)
    programs = [
        lower(program, Options(), machine) if _serial(program) else program for program in given
    ]
    report = check(programs)
    verdict = "sound" if report.sound else "unsound"
    if json:
        listed = [
            {"name": program.name, "lowered": program is not before, **explanation(program)}
            for before, program in zip(given, programs, strict=True)
        ]
        print_json({"schema": 1, "programs": listed, "verdict": verdict})
        return
    for before, program in zip(given, programs, strict=True):
        if program is not before:
            say(f"{program.name} is serial; this is what lowering makes of it\n")
        if program.sites:
            table(HEADINGS, site_rows(program.sites), title=program.name)
        else:
            say(f"{program.name}: the text states no sites")
        for remark in program.remarks:
            place = "" if remark.site is None else f" (site {remark.site})"
            say(f"{remark.pass_name}{place}: {remark.text}")
        say("")
    say(str(report))


def _serial(program: Program) -> bool:
    from interlace.ir import Collective

    communicates = any(isinstance(op, Collective) for op in program.ops)
    return not program.sites and communicates and program.streams() == ("main",)


def site_rows(sites: Sequence[Site]) -> list[tuple[str, ...]]:
    """A row for each site: what `HEADINGS` names."""
    return [
        (
            str(site.id),
            site.module or "-",
            site.kind,
            strategy_of(site),
            _ms(site.serial_ms),
            _ms(site.predicted_ms),
            gain_of(site),
            site.reason,
        )
        for site in sites
    ]


def strategy_of(site: Site) -> str:
    """A site's strategy with its protocol and chunks, such as `peer/get x4`."""
    text = f"{site.strategy}/{site.protocol}" if site.protocol else site.strategy
    return f"{text} x{site.chunks}" if site.chunks else text


def gain_of(site: Site) -> str:
    """How much faster a site is predicted to be than serial."""
    if not site.serial_ms or not site.predicted_ms:
        return "-"
    return f"{site.serial_ms / site.predicted_ms:.2f}x"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ms"


def explanation(program: Program) -> dict[str, object]:
    """Sites and remarks as plain data."""
    return {
        "sites": [
            {
                "id": site.id,
                "kind": site.kind,
                "module": site.module,
                "strategy": site.strategy,
                "protocol": site.protocol,
                "chunks": site.chunks,
                "serial_ms": site.serial_ms,
                "predicted_ms": site.predicted_ms,
                "reason": site.reason,
            }
            for site in program.sites
        ],
        "remarks": [
            {"pass": remark.pass_name, "text": remark.text, "site": remark.site}
            for remark in program.remarks
        ],
    }
