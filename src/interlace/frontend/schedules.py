"""The schedules of a compiled model as files, and files run in place of generated schedules.

Note [The name of a schedule]
    The digits in a file's name are a digest of the graph's serial Program: what it computes, of
    which sizes, in which teams. Neither strategies nor the placement of ranks count, so replicas
    of a model and later processes have the same names, and a model that has changed finds no file.
    Ranks whose graphs differ (by the first row of a vocabulary's shard, say) have files of their
    own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch.distributed import ProcessGroup

from interlace.errors import ExecutorError, ScheduleError, SoundnessError
from interlace.ir import Program, Team, View, contiguous_strides
from interlace.ir.roles import write_type
from interlace.ir.sizes import deciding
from interlace.ir.text.load import load, read
from interlace.ir.text.printer import Printer, print_program
from interlace.options import Options
from interlace.runtime.prepare.agreement import digest, essence, program_rank
from interlace.trace.tracks import write_whole
from interlace.verify import check

DIGITS = 8
NAME = re.compile(rf"(forward|backward|inference)-[0-9a-f]{{{DIGITS}}}\.ilc")


def export(
    compiled: Callable[..., object], folder: str | os.PathLike[str], *, overwrite: bool = False
) -> list[Path]:
    """Writes the schedules of a compiled model as text, to be read, edited and run again.

    Each graph of the arguments met last gives `KIND-DIGEST.ilc`, the Program that runs, and
    `KIND-DIGEST.serial.ilc`, the Program that was imported. `Options(schedules=folder)` runs the
    former, which may be edited. Ranks that run one text write one file.

    Args:
        compiled: what `torch.compile` made, or what `interlace.compile` returned.
        folder: the folder, which is made where need be.
        overwrite: replaces files that have another text, edited ones perhaps.

    Returns:
        The paths of the files.

    Raises:
        ExecutorError: nothing is compiled yet.
        ScheduleError: a file has another text; nothing was written.

    Examples:
        >>> paths = interlace.export(compiled, "generated")
        >>> {path.name.split("-")[0] for path in paths} == {"forward", "backward"}
        True
    """
    from interlace.frontend.explain import graphs_of, none_of

    place, texts = Path(folder), dict[Path, str]()
    for bound in (bound for graph in graphs_of(compiled) for bound in graph.bound):
        stem = f"{bound.kind}-{key_of(bound.serial)}"
        for program, ending in ((bound.program, ".ilc"), (bound.serial, ".serial.ilc")):
            texts[place / f"{stem}{ending}"] = f"{print_program(_anywhere(program))}\n"
    if not texts:
        raise ExecutorError(
            "there is no schedule to export: call the compiled model first. " + none_of(compiled)
        )
    if edited := [path for path, text in texts.items() if not overwrite and _other(path, text)]:
        raise ScheduleError(
            f"{', '.join(map(str, edited))}: the text is not what export would write, so it may be "
            "edited. Nothing was written. Export to another folder, or give overwrite=True"
        )
    return [write_whole(path, text) for path, text in texts.items()]


def _other(path: Path, text: str) -> bool:
    return path.exists() and read(path) != text


def path_of(kind: str, graph: Program, options: Options) -> Path:
    """The file of `options.schedules` for a graph."""
    assert options.schedules is not None
    return Path(options.schedules) / f"{kind}-{key_of(graph)}.ilc"


def unsound(
    path: Path, program: Program, error: SoundnessError, options: Options
) -> SoundnessError:
    """The error of a Program that was read from a file, with the lines of the file: what ranks
    agree on has lost them."""
    report = check(program, in_order=options.in_order)
    text = str(error) if report.sound else str(report)
    return SoundnessError(f"{path} is unsound:\n{text}", report.errors or error.findings)


def scheduled(
    kind: str, graph: Program, groups: Mapping[str, ProcessGroup], options: Options
) -> Program | None:
    """The Program that `options.schedules` has for a graph, placed on its ranks; None: it is to be
    generated."""
    if options.schedules is None or not options.overlap:
        return None
    return _find(kind, graph, program_rank(graph, groups), Path(options.schedules))


def texts_by_graph(graph: Program, written: Program | None) -> dict[str, str]:
    """Digest of the Program that a file has for a graph, by that of the graph."""
    return (
        {f"{graph.name}-{key_of(graph)}.ilc": digest(print_program(essence(written)))[:DIGITS]}
        if written
        else {}
    )


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
    path = folder / f"{kind}-{key_of(graph)}.ilc"
    if other := next((file for file in files if not NAME.fullmatch(file.name)), None):
        raise ScheduleError(
            f"{other} would never run: no graph's schedule has that name. Keep the names that "
            f"interlace.export gave; the schedule of this {kind} graph is {path.name}"
        )
    if path not in files:
        if others := [file.name for file in files if file.name.startswith(f"{kind}-")]:
            raise ScheduleError(
                f"no schedule in {folder} is for this {kind} graph: {path.name} is missing, beside "
                f"{', '.join(others)}. A file was renamed; or the model, its sizes or torch have "
                "changed since they were exported; or they are of the other way to compile: graphs "
                "of torch.compile and of interlace.compile name and order their inputs "
                f"differently. Export it anew, or remove the files {kind}-*.ilc to have all {kind} "
                "schedules generated"
            )
        return None
    program = _on_ranks_of(graph, load(path))
    if lines := differences(program, graph, rank):
        listed = "\n".join(f"  {line}" for line in lines)
        raise ScheduleError(
            f"{path} does not fit the {kind} graph that it is for:\n{listed}\n"
            "Keep the signature and the results as they were exported"
        )
    return program


def _on_ranks_of(graph: Program, found: Program) -> Program:
    """A Program with the teams of a graph where the graph has them; it may have parts of these."""
    own = {team.name: team for team in graph.teams}
    teams = tuple(own.get(team.name, team) for team in found.teams)
    sizes = found.sizes & graph.sizes if found.sizes.values == graph.sizes.values else found.sizes
    return found.replace(teams=teams, ranks=graph.ranks, sizes=sizes)


def differences(found: Program, graph: Program, rank: int) -> list[str]:
    """Differences of a Program's signature and results from those of a graph; none: it fits."""
    known = {team.name for team in graph.teams}
    theirs, ours = (_facts(program, known, rank) for program in (found, graph))
    return [
        f"{what}: {theirs.get(what, 'none')} in the file, {ours.get(what, 'none')} in the graph"
        for what in {**theirs, **ours}
        if theirs.get(what) != ours.get(what)
    ]


def _facts(program: Program, known: set[str], rank: int) -> dict[str, str]:
    """Facts that must be the same in a file and in its graph, by what they are about."""
    printer, inputs = Printer(program.teams), [b for b in program.params if b.kind == "input"]
    written = {access.view.buffer for op in program.ops for access in op.writes()}
    names = [buffer.name for buffer in inputs]
    facts = {f"team {t.name}": f"{t.size} ranks" for t in program.teams if t.name in known}
    facts |= {f"size {name}": str(value) for name, value in program.sizes.values.items()}
    facts |= {f"input {b.name}": write_type(printer, b) for b in inputs}
    facts["order of inputs"] = ", ".join(names)
    facts["inputs written in place"] = ", ".join(n for n in names if n in written) or "none"
    return facts | {f"result {i}": text for i, text in enumerate(_results(program, rank), 1)}


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
