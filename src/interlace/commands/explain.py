"""`interlace explain FILE`: every site with its strategy, the reason and the predicted gain.

$ interlace explain mlp.ilc
$ interlace explain serial.ilc --device cuda --calibration h200.json     # and all candidates
$ interlace explain serial.ilc --why                # what stays serial
$ interlace explain mlp.ilc --memory                # what is alive at the peak, by module
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.commands.files import read_machine, read_programs
from interlace.commands.options import Calibration, Json, Model, Schedule, Strategy
from interlace.commands.output import UNSOUND, command, print_json, say, table
from interlace.errors import OptionError

if TYPE_CHECKING:
    from interlace.cost import Machine
    from interlace.cost.choose import Estimate
    from interlace.ir import Program, Site

HEADINGS = ("site", "module", "kind", "strategy", "serial", "predicted", "gain", "reason")
CANDIDATES = ("site", "strategy", "predicted", "measured")


@command
def explain(
    file: Schedule,
    calibration: Calibration = None,
    device: Model = "cpu",
    strategy: Strategy = "auto",
    graph: Annotated[bool, typer.Option("--graph", help="As a replayed CUDA graph.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Only what stays serial, and why.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="What is alive at the peak of memory, by module.")
    ] = False,
    json: Json = False,
) -> None:
    """Say how each communication is overlapped, why, and what that is predicted to gain.

    A serial program (communication on its one stream, and no sites yet) is lowered first, and all
    strategies that could serve its sites are listed with predicted and, if calibrated, measured
    times.
    """
    from interlace.cost.memory import run_memory
    from interlace.options import Options
    from interlace.passes import candidates, lower
    from interlace.verify import check

    machine = read_machine(calibration, device)
    machine = machine.replayed if graph else machine
    options = Options(strategy=strategy)
    given = read_programs(file)
    if not any(map(_serial, given)):
        _refuse(file, strategy, graph)
    programs = [
        lower(program, options, machine) if _serial(program) else program for program in given
    ]
    shown = list(map(_serial_sites, programs)) if why else programs
    found = [
        {site.id: known[site.id] for site in part.sites if site.id in known}
        for program, part in zip(given, shown, strict=True)
        for known in [candidates(program, options, machine) if _serial(program) else {}]
    ]
    report = check(programs)
    verdict = "sound" if report.sound else "unsound"
    if json:
        listed = [
            {
                "name": before.name,
                "lowered": _serial(before),
                **explanation(program),
                "memory": run_memory(program).to_json(),
                "candidates": {str(site): list(map(_plain, known)) for site, known in all_.items()},
            }
            for before, program, all_ in zip(given, shown, found, strict=True)
        ]
        print_json({"schema": 1, "programs": listed, "verdict": verdict})
    else:
        _show(given, shown, found, machine, why, memory)
        say(str(report))
    if not report.sound:
        raise typer.Exit(UNSOUND)


def _refuse(file: Path, strategy: str, graph: bool) -> None:
    """Raises OptionError for options by which a schedule would be lowered, if it is already."""
    name = "--strategy" if strategy != "auto" else "--graph"
    if strategy != "auto" or graph:
        raise OptionError(
            f"{name}: {file} is lowered already, or has no collective to overlap: give the serial "
            "schedule, such as NAME.serial.ilc beside NAME.ilc"
        )


def _serial_sites(program: Program) -> Program:
    """The Program with the sites that stay serial, and the remarks on them and on all of it."""
    sites = tuple(site for site in program.sites if site.strategy == "serial")
    kept = {None, *(site.id for site in sites)}
    remarks = tuple(remark for remark in program.remarks if remark.site in kept)
    return program.replace(sites=sites, remarks=remarks)


def _show(
    given: Sequence[Program],
    programs: Sequence[Program],
    found: Sequence[Mapping[int, Sequence[Estimate]]],
    machine: Machine,
    why: bool,
    memory: bool,
) -> None:
    from interlace.cost.memory import HEADINGS as MODULES
    from interlace.cost.memory import run_memory

    for before, program, all_ in zip(given, programs, found, strict=True):
        if _serial(before):
            say(f"{program.name} is serial; this is what lowering makes of it\n")
        if program.sites:
            table(HEADINGS, site_rows(program.sites), title=program.name)
        else:
            say(f"{program.name}: {without_sites(program, why)}")
        if all_:
            say("")
            table(CANDIDATES, candidate_rows(all_), title=f"candidates, by {machine.name}")
        for remark in program.remarks:
            place = "" if remark.site is None else f" (site {remark.site})"
            say(f"{remark.pass_name}{place}: {remark.text}")
        taken = run_memory(program)
        say(f"memory: {taken.line()}")
        if memory:
            say("")
            table(MODULES, taken.rows(), title="alive at the peak")
        say("")


def without_sites(program: Program, why: bool = False) -> str:
    """Message for a Program that has no sites, or (`why`) none that stays serial."""
    from interlace.ir.program import communication_in_words

    if why and program.streams() != ("main",):
        return "no site stays serial"
    return (
        f"the text states no sites; it has {communication_in_words(program) or 'no communication'}"
    )


def _serial(program: Program) -> bool:
    communicates = bool(program.collectives())
    return not program.sites and communicates and program.streams() == ("main",)


def candidate_rows(found: Mapping[int, Sequence[Estimate]]) -> list[tuple[str, ...]]:
    """A row for each candidate of each site: what `CANDIDATES` names."""
    return [
        (
            str(site),
            estimate.label,
            _ms(estimate.predicted_ms),
            _ms(estimate.measured_ms),
        )
        for site, estimates in found.items()
        for estimate in estimates
    ]


def _plain(estimate: Estimate) -> dict[str, object]:
    return {
        "strategy": estimate.label,
        "predicted_ms": estimate.predicted_ms,
        "measured_ms": estimate.measured_ms,
    }


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
            gain_of(site.serial_ms, site.predicted_ms),
            site.reason,
        )
        for site in sites
    ]


def strategy_of(site: Site) -> str:
    """A site's strategy with its protocol and chunks, such as `peer/get x4`."""
    text = f"{site.strategy}/{site.protocol}" if site.protocol else site.strategy
    return f"{text} x{site.chunks}" if site.chunks else text


def gain_of(serial_ms: float | None, predicted_ms: float | None) -> str:
    """Predicted speedup of a site over serial, such as `1.25x`; `-` if there is none."""
    return f"{serial_ms / predicted_ms:.2f}x" if serial_ms and predicted_ms else "-"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ms"


def explanation(program: Program) -> dict[str, object]:
    """Sites and remarks as plain data."""
    return {
        "sites": [asdict(site) for site in program.sites],
        "remarks": [
            {"pass": remark.pass_name, "text": remark.text, "site": remark.site}
            for remark in program.remarks
        ],
    }
