"""Reading schedules for the commands, and laying them on another mesh or world.

programs = read_programs(Path("ring.ilc"))
programs = on_mesh(programs, world=8, mesh={})            # 8 / 4 copies side by side
programs = on_mesh(programs, world=None, mesh={"tp": 8})  # the same text for 8 ranks
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.errors import InterlaceError, TeamError

if TYPE_CHECKING:
    from interlace.cost import Machine
    from interlace.ir import Op, Program, View


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for `-`."""
    from interlace.ir.text.load import LONGEST, bounded, read, unreadable

    if str(path) != "-":
        return read(path)
    try:
        return bounded(sys.stdin.read(LONGEST + 1), path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def label(path: Path) -> str:
    """What errors call a file."""
    return path.name if str(path) != "-" else "<stdin>"


def read_programs(path: Path) -> list[Program]:
    """Every Program of a schedule file, validated."""
    from interlace.ir.text.load import validated_set

    return list(validated_set(read_text(path), label(path)))


def make_folder(folder: Path) -> None:
    """Makes a folder for what is written at the end of long work, and sees that it can be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InterlaceError(
            f"cannot write in {folder} ({error.strerror or error}): name another folder"
        ) from error


def read_machine(calibration: Path | None, device: str = "cpu") -> Machine:
    """The machine of a calibration file, or the built-in model of a device."""
    from interlace.cost import Machine, default_machine

    return default_machine(device) if calibration is None else Machine.load(calibration)


def parse_mesh(text: str | None) -> dict[str, int]:
    """Axis sizes from text such as `dp=2,tp=4`, in order."""
    sizes: dict[str, int] = {}
    for item in (text or "").split(","):
        if not item.strip():
            continue
        name, equals, value = (part.strip() for part in item.partition("="))
        digits = value.isascii() and value.isdecimal() and len(value) < 10
        if not equals or not name.isidentifier() or not digits or int(value) < 1:
            raise TeamError(f"--mesh {text}: write axes and their sizes, such as dp=2,tp=4")
        if name in sizes:
            raise TeamError(f"--mesh {text}: axis {name} stands there twice")
        sizes[name] = int(value)
    return sizes


def on_mesh(
    programs: list[Program], *, world: int | None, mesh: Mapping[str, int]
) -> list[Program]:
    """The Programs on a world of that many ranks, or on a mesh of those axes.

    A world that is a multiple of the Program's holds copies of it side by side. A mesh gives the
    Program's teams other sizes, and adds the axes that it has no team for.
    """
    if world is None and not mesh:
        return programs
    if len(programs) > 1:
        return _set_on_world(programs, world, mesh)
    from interlace.ir.types import check_world

    check_world(max(world or 0, math.prod(mesh.values())))
    program = programs[0]
    if mesh:
        program = _on_axes(program, mesh)
        if world is not None and world != len(program.world):
            raise TeamError(
                f"--world {world} and a mesh of {len(program.world)} ranks do not agree: "
                "give one of them"
            )
        return [_valid(program)]
    assert world is not None
    size = len(program.world)
    if program.ranks is not None or any(team.groups for team in program.teams):
        if world != size:
            raise TeamError(
                f"{program.name} names its ranks {list(program.world)} itself, so it runs on "
                f"{size} ranks and not on {world}: change its text"
            )
        return programs
    if world < 1 or world % size:
        teams = ", ".join(f"{team.name}[{team.size}]" for team in program.teams)
        raise TeamError(
            f"a world of {world} ranks does not divide into teams {teams} of {program.name}: "
            f"give a multiple of {size}, or other sizes with --mesh"
        )
    return [program] if world == size else [_valid(_on_axes(program, {"copies": world // size}))]


def _valid(program: Program) -> Program:
    from interlace.ir import validate

    validate(program)
    return program


def _set_on_world(
    programs: list[Program], world: int | None, mesh: Mapping[str, int]
) -> list[Program]:
    if mesh:
        raise TeamError("--mesh lays out one Program, and the file holds a set: use --world")
    ranks = sorted({rank for program in programs for rank in program.world})
    if len(ranks) != world:
        raise TeamError(
            f"these {len(programs)} programs run on {len(ranks)} ranks {ranks}, not on {world}"
        )
    return programs


def _on_axes(program: Program, mesh: Mapping[str, int]) -> Program:
    """The Program with its teams sized by `mesh`; unknown axes go where `mesh` has them."""
    from interlace.ir import Team

    named = {team.name: team for team in program.teams}
    for name in mesh:
        if name in named and named[name].groups is not None:
            raise TeamError(f"team {name} lists its ranks in the text: --mesh cannot size it")
    if program.ranks is not None:
        raise TeamError(f"{program.name} names its ranks itself: change its text")
    left = [team for team in program.teams if team.name not in mesh]
    if any(team.groups is not None for team in left):
        raise TeamError(f"{program.name} has teams that list their ranks: --mesh cannot lay it out")
    if mesh.keys() & named.keys() and left:
        names = ", ".join(team.name for team in left)
        raise TeamError(f"--mesh gives no size for team {names}: name every team of the Program")
    order = [Team(name, size) for name, size in mesh.items()]
    sized = program.replace(teams=(*order, *left))
    for team in program.teams:
        if mesh.get(team.name, team.size) != team.size:
            sized = _resized(sized, team.name, team.size, mesh[team.name])
    assert len(sized.world) == math.prod(team.size for team in sized.teams)
    return sized


def _resized(program: Program, team: str, old: int, new: int) -> Program:
    """Chunks that are one part for each rank of a team, for a team of another size."""
    from interlace.ir import Chunk, RankIndex, View, map_views

    def resize(view: View) -> View:
        steps = (
            dataclasses.replace(step, parts=new)
            if isinstance(step, Chunk)
            and step.parts == old
            and isinstance(step.index, RankIndex)
            and step.index.team == team
            else step
            for step in view.steps
        )
        return View(view.buffer, tuple(steps))

    def each(op: Op) -> Op:
        return map_views(op, resize)

    return program.replace(ops=tuple(map(each, program.ops)))
