"""The commands on a schedule's text: `opt` runs passes, `show` draws, `simulate` predicts.

$ interlace opt mlp.ilc -p "find_sites,decompose{strategy=peer},schedule" --diff
$ interlace opt serial.ilc -o lowered.ilc
$ interlace show mlp.ilc --rank 0        # as rank 0 runs it
$ interlace show mlp.ilc --html mlp.html # with the predicted timeline
$ interlace simulate mlp.ilc --calibration mine.json --html mlp.html
$ interlace simulate step.ilc --scale-to 1024 --per-host 8 --machine mine.json     # by symmetry
"""

from __future__ import annotations

import difflib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.commands.files import (
    label,
    on_mesh,
    parse_mesh,
    read_machine,
    read_programs,
    read_text,
    scaled,
)
from interlace.commands.options import Calibration, Json, Mesh, Model, Schedule
from interlace.commands.output import UNSOUND, code, command, print_json, say, table
from interlace.commands.pages import tell_written, write_files

if TYPE_CHECKING:
    from interlace.ir import Program
    from interlace.passes import Pass


@command
def opt(
    file: Schedule,
    passes: Annotated[
        str | None,
        typer.Option(
            "-p", "--passes", help="Passes with their options; without it, those that lower."
        ),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print what each pass changed, not the whole text.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the last text to this file, and print no text."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Validate after each pass; the last must be sound.")
    ] = False,
    calibration: Calibration = None,
    json: Json = False,
) -> None:
    """Run passes on a schedule and print its text after each of them."""
    from interlace.ir import print_set
    from interlace.options import Options
    from interlace.passes import lowering, parse_pipeline, run_pipeline, spell

    programs = read_programs(file)
    machine = read_machine(calibration)
    chosen = parse_pipeline(passes, machine) if passes else lowering(Options(), machine)
    texts: list[tuple[str, str, str]] = []  # program, pass, text after it
    results: list[Program] = []

    def note(item: Pass, made: Program) -> None:
        texts.append((made.name, spell(item), print_set([made])))

    alone = check and len(programs) == 1
    for program in programs:
        texts.append((program.name, "", print_set([program])))
        results.append(run_pipeline(program, chosen, check=alone, on_pass=note))
    if check and len(programs) > 1:
        from interlace.verify import check as verify

        verify(results).raise_if_unsound()
    if out is not None:
        from interlace.trace.tracks import write_whole

        write_whole(out, print_set(results))
    if json:
        steps = [{"program": name, "pass": step, "text": text} for name, step, text in texts]
        print_json({"schema": 1, "steps": steps})
        return
    before = ""
    for name, step, text in texts if diff or out is None else ():
        if step and diff:
            code(_diff(before, text, name, step))
        elif step and text == before:
            code(f"# {name}: {step} changes nothing\n")
        elif step:
            code(f"# {name} after {step}\n{text}")
        before = text


def _diff(before: str, after: str, name: str, step: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), name, f"{name} after {step}", lineterm="", n=1
    )
    text = "\n".join(lines)
    return text + "\n" if text else f"# {name}: {step} changes nothing\n"


@command
def show(
    file: Schedule,
    rank: Annotated[
        int | None, typer.Option(help="Show the schedule as this rank runs it.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page here.")] = None,
    json: Json = False,
) -> None:
    """Show a schedule, as text or as an HTML page with its predicted timeline."""
    from interlace.ir import parse_set, print_set

    programs = list(parse_set(read_text(file), file=label(file)))
    if rank is not None:
        programs = [p.instantiate(rank) for p in programs if rank in p.world] or [
            programs[0].instantiate(rank)  # raises the error that says which ranks there are
        ]
    if html is not None:
        from interlace.cost import simulate as simulated
        from interlace.ir import validate
        from interlace.trace import Run

        for item in programs:
            validate(item)
        predicted = None if rank is not None else simulated(programs, read_machine(None))
        tell_written(write_files([Run(tuple(programs), predicted)], html=html), json)
    if json:
        print_json({"schema": 1, "programs": [_facts(item) for item in programs]})
    elif html is None:
        code(print_set(programs).rstrip("\n"))


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


@command
def simulate(
    file: Schedule,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            "--machine",
            help="Calibration file, of any host. Default: this host's, or the built-in model.",
        ),
    ] = None,
    device: Model = "cpu",
    mesh: Mesh = None,
    scale_to: Annotated[
        int | None,
        typer.Option(help="Ranks: the outermost team grows to that many. Predicts by symmetry."),
    ] = None,
    per_host: Annotated[
        int | None,
        typer.Option(help="Ranks of a host, counted from rank 0. Predicts by symmetry."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the timeline as a page.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write it as a trace for ui.perfetto.dev.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the timeline as JSON.")
    ] = None,
    json: Json = False,
) -> None:
    """Predict when each op runs, and how much communication is hidden.

    Ends with code 1 if the schedule is unsound: then it may run otherwise, or not to its end.

    With --scale-to or --per-host, ranks that do the same are simulated once. Assumed are ranks and
    hosts of equal speed, numbered host by host; links that nothing else uses; and a network between
    hosts that passes on all that their interfaces send. Soundness is not checked then: `interlace
    check` does that. docs/explanation/prediction.md says how far to trust it.
    """
    from interlace.cost import predict
    from interlace.cost import simulate as simulated
    from interlace.trace import Run, figures_json
    from interlace.trace.figures import (
        HEADINGS,
        PREDICTED,
        figures_rows,
        link_rows,
        prediction_json,
        prediction_rows,
    )
    from interlace.verify import check

    begun = time.perf_counter()
    programs = on_mesh(read_programs(file), world=None, mesh=parse_mesh(mesh))
    machine = read_machine(calibration, device, any_host=True)
    report = prediction = None
    if scale_to is not None or per_host is not None:
        programs = scaled(programs, scale_to, per_host)
        prediction = predict(programs, machine)
    else:
        report = check(programs)
    timeline = prediction.timeline if prediction else simulated(programs, machine)
    took_s = time.perf_counter() - begun
    runs, facts = [Run(tuple(programs), timeline)], [("machine", machine.name)]
    written = write_files(runs, html=html, perfetto=perfetto, out=out, facts=facts)
    verdict = "unchecked" if report is None else "sound" if report.sound else "unsound"
    title = f"predicted for machine {machine.name!r}"
    if json:
        rows = figures_json([timeline])
        told: dict[str, object] = {"schema": 1, "machine": machine.name, "verdict": verdict}
        if prediction is not None:
            told["prediction"] = prediction_json(prediction) | {"took_s": took_s}
        print_json({**told, "figures": rows})
    else:
        if prediction is None:
            table(HEADINGS, figures_rows([timeline]), title=title)
        else:
            title += f", {prediction.world} ranks by {len(prediction.ranks)} in {took_s:.2f} s"
            table(PREDICTED, prediction_rows(prediction), title=title)
            table(("link", "busy", "of the run"), link_rows(prediction), title="\nthe busiest")
        tell_written(written, json)
        if report is not None and not report.sound:
            say(f"\nthe prediction is of a schedule that can go wrong\n{report}")
    if verdict == "unsound":
        raise typer.Exit(UNSOUND)
