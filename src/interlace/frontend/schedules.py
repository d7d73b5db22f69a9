"""The schedules of a compiled model as files, and files run in place of generated schedules.

    compiled = interlace.compile(model, x, mesh=mesh)
    interlace.export(compiled, "schedules")     # forward-3f2a91c0.ilc, backward-77d0c1e2.ilc, ...
    edited = interlace.compile(model, x, mesh=mesh, options=Options(schedules="schedules"))

Note [The name of a schedule]
    The digits in a file's name are a digest of the graph's serial Program: what it computes, of
    which sizes, in which teams. Neither strategies nor the placement of ranks count, so replicas
    of a model and later processes have the same names, and a model that has changed finds no file.
    Ranks whose graphs differ (by the first row of a vocabulary's shard, say) have files of their
    own.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch.distributed import ProcessGroup

from interlace.comm import limit_s, team_of
from interlace.errors import AgreementError, ExecutorError, InterlaceError, ScheduleError
from interlace.ir import Program, Team, View, contiguous_strides
from interlace.ir.size_class import deciding
from interlace.ir.text.load import load
from interlace.ir.text.printer import Printer, print_program
from interlace.options import Options
from interlace.runtime.prepare.agreement import digest, essence, program_rank
from interlace.trace.tracks import write_whole

if TYPE_CHECKING:
    from interlace.frontend.compiled_graph import CompiledGraph

DIGITS = 8
NAME = re.compile(rf"(forward|backward|inference)-[0-9a-f]{{{DIGITS}}}\.ilc")
MOST_TOLD = 12
"""Differences that an error lists."""


class HasGraphs(Protocol):
    """What `interlace.compile` gives, and `interlace.frontend.capture`."""

    @property
    def graphs(self) -> Sequence[CompiledGraph]:
        """The compiled graphs."""
        ...


def export(compiled: HasGraphs, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes the schedules of a compiled model into `folder` and returns their paths.

    `compiled` is what `interlace.compile` returned, of which the graphs of the arguments met last
    are written, or what `interlace.frontend.capture` collected of `torch.compile`. Each bound graph
    gives `KIND-DIGEST.ilc`, the Program that runs, and beside it `KIND-DIGEST.serial.ilc`, the
    Program that was imported. `Options(schedules=folder)` runs the former, which may be edited.
    Ranks that run one text write one file, so one of them is enough. Raises ExecutorError where
    nothing is compiled yet.
    """
    place, written = Path(folder), dict[Path, None]()
    for bound in (bound for graph in compiled.graphs for bound in graph.bound):
        stem = f"{bound.kind}-{key_of(bound.serial)}"
        for program, ending in ((bound.program, ".ilc"), (bound.serial, ".serial.ilc")):
            text = print_program(_anywhere(program))
            written[write_whole(place / f"{stem}{ending}", f"{text}\n")] = None
    if not written:
        raise ExecutorError("there is no schedule to export: call the compiled model first")
    return list(written)


def scheduled(
    kind: str, graph: Program, groups: Mapping[str, ProcessGroup], options: Options
) -> Program | None:
    """The Program that `options.schedules` has for a graph, placed on its ranks; None: it is to be
    generated. Collective: where a rank has another text, or none that fits, all ranks raise."""
    if options.schedules is None or not options.overlap:
        return None
    found: Program | None = None
    problem: InterlaceError | None = None
    try:
        found = _find(kind, graph, program_rank(graph, groups), Path(options.schedules))
    except InterlaceError as error:
        problem = error
    text = digest(print_program(essence(found))) if found is not None else ""
    note = {"graph": key_of(graph), "text": text, "problem": str(problem or "")}
    limit = limit_s(options.time_out_s, groups.values())
    teams = {team_of(group, name, limit) for name, group in groups.items()}
    for team in sorted(teams, key=lambda team: team.key):
        told = team.consult("take schedules from files", note, limit)
        for rank, other in zip(team.ranks, told, strict=True):
            same = other["graph"] != note["graph"] or other["text"] == text
            why = f": {other['problem']}" if other["problem"] else ""
            if not why and not same:
                why = f" has another text of {kind}-{note['graph']}.ilc than rank {team.rank}"
                why += f": give all ranks the same files in {options.schedules}"
            if why and problem is None:
                problem = AgreementError(f"rank {rank}{why}")
                note = {**note, "problem": str(problem)}  # for the next team
    if problem is not None:
        raise problem
    return found


def key_of(graph: Program) -> str:
    """The digits of a serial Program: see Note [The name of a schedule]."""
    return digest(_bare(graph))[:DIGITS]


def _bare(graph: Program) -> str:
    teams = tuple(Team(team.name, team.size) for team in graph.teams)
    return print_program(essence(graph).replace(teams=teams, ranks=None))


def _anywhere(program: Program) -> Program:
    """The Program without its ranks, where its teams are axes of any mesh."""
    fixed = any(team.groups is not None or team.hosts is not None for team in program.teams)
    return program if fixed else program.replace(ranks=None)


def _find(kind: str, graph: Program, rank: int, folder: Path) -> Program | None:
    files = [path for path in sorted(folder.glob("*.ilc")) if ".serial" not in path.suffixes]
    if not files:
        raise ScheduleError(
            f"Options(schedules={str(folder)!r}): there is no schedule in that folder. Write them "
            "with interlace.export(compiled, folder), compiled without this option"
        )
    wanted = f"{kind}-{key_of(graph)}.ilc"
    if other := next((path for path in files if not NAME.fullmatch(path.name)), None):
        raise ScheduleError(
            f"{other} would never run: no graph's schedule has that name. Keep the names that "
            f"interlace.export gave; the schedule of this {kind} graph is {wanted}"
        )
    alike = [path for path in files if path.name.startswith(f"{kind}-")]
    for path in alike:
        if path.name == wanted:
            program = _on_ranks_of(graph, load(path))
            if told := differences(program, graph, rank):
                raise ScheduleError(
                    f"{path} does not fit the {kind} graph that it is for:\n{_listed(told)}\n"
                    "Keep the signature and the results as they were exported"
                )
            return program
    if not alike:
        return None
    near = {path: differences(_on_ranks_of(graph, load(path)), graph, rank) for path in alike}
    path = min(near, key=lambda path: len(near[path]))
    told = near[path] or _changed(path.with_suffix(".serial.ilc"), graph)
    raise ScheduleError(
        f"no schedule in {folder} is for this {kind} graph, which has changed since they were "
        f"exported ({wanted} is missing). From {path.name} it differs by:\n{_listed(told)}\n"
        f"Export it anew, or remove the files {kind}-*.ilc to have all {kind} schedules generated"
    )


def _on_ranks_of(graph: Program, found: Program) -> Program:
    """A Program with the teams of a graph where the graph has them; it may have parts of these."""
    own = {team.name: team for team in graph.teams}
    teams = tuple(own.get(team.name, team) for team in found.teams)
    sizes = found.sizes & graph.sizes if found.sizes.values == graph.sizes.values else found.sizes
    return found.replace(teams=teams, ranks=graph.ranks, sizes=sizes)


def differences(found: Program, graph: Program, rank: int) -> list[str]:
    """How the signature and the results of a Program differ from those of a graph; none: it fits.

    Compared are teams, named sizes, inputs (name, element type, sizes, strides, whether they are
    written) and results (element type, sizes, strides; numbers by value).
    """
    known = {team.name for team in graph.teams}
    sides = [_facts(program, known, rank) for program in (found, graph)]
    return [
        f"{what}: {theirs} in the file, {ours} in the graph"
        for what in sides[1]
        for theirs, ours in zip_longest(sides[0][what], sides[1][what], fillvalue="none")
        if theirs != ours
    ]


def _facts(program: Program, known: set[str], rank: int) -> dict[str, list[str]]:
    """The facts of one side that must be the same on the other, by what they are about."""
    printer = Printer(program.teams)
    inputs = [buffer for buffer in program.params if buffer.kind == "input"]
    written = {access.view.buffer for op in program.ops for access in op.writes()}
    return {
        "team": sorted(f"{t.name} of {t.size} ranks" for t in program.teams if t.name in known),
        "named size": [f"{name} of {value}" for name, value in program.sizes.values.items()],
        "input": [f"{b.name}: {printer.buffer_type(b, 'input', None)}" for b in inputs],
        "input written in place": sorted(b.name for b in inputs if b.name in written),
        "result": list(_results(program, rank)),
    }


def _results(program: Program, rank: int) -> Iterator[str]:
    with deciding(program.sizes):
        box = program.boxes(rank)
        for result in program.returned():
            if not isinstance(result, View):
                yield repr(result)
                continue
            place = box(result)
            text = f"{place.dtype}[{', '.join(map(str, place.sizes))}]"
            plain = place.strides == contiguous_strides(place.sizes)
            yield text if plain else f"{text}.strides({', '.join(map(str, place.strides))})"


def _changed(serial: Path, graph: Program) -> list[str]:
    """The lines by which the serial text beside a schedule differs from a graph's."""
    if not serial.exists():
        return ["what it computes, with the same signature"]
    theirs, ours = (_bare(program).splitlines() for program in (load(serial), graph))
    lines = difflib.unified_diff(theirs, ours, "the file", "the graph", lineterm="", n=0)
    return [line for line in lines if not line.startswith("@@")]


def _listed(told: Iterable[str]) -> str:
    lines = list(told)
    more = [f"and {len(lines) - MOST_TOLD} more"] if len(lines) > MOST_TOLD else []
    return "\n".join(f"  {line}" for line in [*lines[:MOST_TOLD], *more])
