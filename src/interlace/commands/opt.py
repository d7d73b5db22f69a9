"""`interlace opt FILE -p PASSES`: the text of a schedule after each pass.

$ interlace opt mlp.ilc -p "find_sites,decompose{strategy=peer},schedule" --diff
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.commands.files import read_machine, read_programs, write_text
from interlace.commands.output import code, command, print_json

if TYPE_CHECKING:
    from interlace.ir import Program
    from interlace.passes import Pass


@command
def opt(
    file: Annotated[Path, typer.Argument(help="A schedule, or - for standard input.")],
    passes: Annotated[
        str | None,
        typer.Option(
            "-p", "--passes", help="Passes with their options; without it, those that lower."
        ),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print what each pass changed, not the whole text.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the last text to this file.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Validate after each pass; the last must be sound.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file for passes that ask the cost model.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the texts for scripts.")] = False,
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
    if output is not None:
        write_text(output, print_set(results))
    if json:
        steps = [{"program": name, "pass": step, "text": text} for name, step, text in texts]
        print_json({"schema": 1, "steps": steps})
        return
    before = ""
    for name, step, text in texts:
        if step and diff:
            code(_diff(before, text, name, step))
        elif step:
            code(f"# {name} after {step}\n{text}")
        before = text


def _diff(before: str, after: str, name: str, step: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), name, f"{name} after {step}", lineterm="", n=1
    )
    text = "\n".join(lines)
    return text + "\n" if text else f"# {name}: {step} changes nothing\n"
