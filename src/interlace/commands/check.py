"""`interlace check FILE...`: whether schedules can go wrong, and how.

$ interlace check ring.ilc --world 8
sound (8 ranks by symmetry of tp: 1 visited, 168 ops, 2 ms)
memory: peak 8,192 bytes at op 3: 4,096 of temporaries, 4,096 of symmetric slots (1, of 2 copies)
$ interlace check generated/*.ilc pipeline.csv
$ interlace check --recorded dumps
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace.commands.files import on_mesh, parse_mesh, read_programs
from interlace.commands.options import Json, Mesh
from interlace.commands.output import (
    FAILED,
    UNSOUND,
    command,
    error_json,
    print_json,
    say,
    tell_error,
)
from interlace.errors import InputError, InterlaceError, ProgramError

if TYPE_CHECKING:
    from interlace.cost.memory import RunMemory
    from interlace.ir import Program
    from interlace.verify import Finding, Report


@command
def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...",
            help="Schedules, or - for standard input; NAME.csv is one of torch's pipelines.",
        ),
    ] = None,
    world: Annotated[
        int | None, typer.Option(help="Ranks in all: a multiple of the Program's own.")
    ] = None,
    mesh: Mesh = None,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Check the twin that runs one op after another.")
    ] = False,
    operators: Annotated[
        list[str] | None,
        typer.Option(help="An operator of your own that may be called, or a namespace; repeat it."),
    ] = None,
    pipelining: Annotated[
        Path | None,
        typer.Option(help="Instead of FILE: CSV that torch's pipeline schedules dump, or -."),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(help="Instead of FILE: a folder of what the ranks of a run had recorded."),
    ] = None,
    json: Json = False,
) -> None:
    """Prove that schedules have no race and no deadlock, or show how they go wrong.

    Ranks that are proved to do the same at their places are visited once; the first line says so.
    Of a sound schedule the last line says how much memory a run takes.

    With --pipelining, or of a FILE.csv, check a schedule of torch.distributed.pipelining. With
    --recorded, say instead why a run hung: a JSON dump of torch's flight recorder a rank.

    Ends with code 0 if all schedules are sound, with 1 and the counterexample if one is not, with 2
    if one cannot be read, and with 70 for a fault of Interlace.
    """
    import interlace
    from interlace.cost.memory import run_memory

    options = bool(world is not None or mesh or in_order or operators)
    if (instead := pipelining if recorded is None else recorded) is not None:
        if options or files or (recorded and pipelining):
            name = "--pipelining" if recorded is None else "--recorded"
            raise InputError(f"{name} takes --json and no other option, and no FILE")
        files = [instead]
    if not files:
        told = "name a schedule, or give --pipelining FILE.csv or --recorded DIR"
        raise InputError(f"FILE is missing: {told}")

    def judge(file: Path) -> tuple[Report, RunMemory | None]:
        if recorded is not None:
            return interlace.check_recorded(file), None
        if pipelining is not None or file.suffix == ".csv":
            if options:
                raise InputError(f"{file}: a schedule of torch's pipelines takes --json alone")
            return interlace.check_pipelining(file), None
        programs = on_mesh(read_programs(file), world=world, mesh=parse_mesh(mesh))
        remarks = look_up(programs, operators or ())
        report = interlace.check(programs, in_order=in_order)
        report = dataclasses.replace(report, findings=(*report.findings, *remarks))
        return report, run_memory(programs, report.sizes) if report.sound else None

    code, documents, single = 0, list[dict[str, Any]](), len(files) == 1
    for file in files:
        try:
            report, memory = judge(file)
        except InterlaceError as error:
            if single:
                raise
            code = FAILED
            documents.append({"file": str(file), **error_json(error)})
            if not json:
                tell_error(error)
            continue
        code = code if report.sound else max(code, UNSOUND)
        taken = {} if memory is None else {"memory": memory.to_json()}
        documents.append(({} if single else {"file": str(file)}) | report.to_json() | taken)
        if not json:
            say(f"{report}" if single else f"{file}: {report}")
            if memory is not None:
                say(f"memory: {memory.line()}")
    if json:
        print_json(documents[0] if single else documents)
    if code:
        raise typer.Exit(code)


def look_up(programs: Sequence[Program], allowed: Collection[str] = ()) -> tuple[Finding, ...]:
    """Remarks on the operators that the Programs call, as far as the PyTorch that is here can say.

    Raises ProgramError for an operator that PyTorch does not have, for one of another library that
    `allowed` does not name, and for one that does more than its call declares. PyTorch is imported
    for names that are not in the table of operators.
    """
    from interlace.ir.validate import refuse_others
    from interlace.verify import Finding

    for program in programs:
        refuse_others(program, allowed)
    return tuple(
        Finding("unknown-operator", message, level="remark") for message in _remarks(programs)
    )


def _remarks(programs: Sequence[Program]) -> list[str]:
    from interlace.ir.operators import FUNCTIONS, facts_of, is_known
    from interlace.ir.validate import called

    calls: dict[str, str] = {}  # the first place of each name
    for program in programs:
        for fn, place in called(program):
            if fn not in FUNCTIONS and facts_of(fn) is None:
                calls.setdefault(fn, place)
    own = {fn: at for fn, at in calls.items() if is_known(fn)}
    if own:
        _confirm(programs, own)
    return [
        f"{at}: {fn!r} is not known to Interlace, which takes it for granted that this operator "
        "touches its arguments and results alone"
        for fn, at in calls.items()
        if fn not in own
    ]


def _confirm(programs: Sequence[Program], places: Mapping[str, str]) -> None:
    """Asks PyTorch of the operators of its own that are not in the table."""
    from interlace.ir.program import calls_in

    try:
        from interlace.runtime.calling.effects import confirm
    except ImportError:
        fn, place = next(iter(places.items()))
        raise ProgramError(
            f"{place}: {fn!r} is not in the table of operators, and PyTorch, which could say what "
            "it writes and draws, is not installed here: install it, or call another operator"
        ) from None
    for program in programs:
        regions = {region.name: region for region in program.regions}
        for op in calls_in(program.ops):
            if op.fn in places or op.fn in regions:
                try:
                    confirm(op, regions.get(op.fn))
                except ProgramError as error:
                    place = places.get(op.fn) or f"region {op.fn!r} of {program.name}"
                    raise ProgramError(f"{place}: {error}") from None
