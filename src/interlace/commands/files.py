"""Reading schedules for the commands, and laying them on another mesh or world.

programs = read_programs(Path("ring.ilc"))
programs = on_mesh(programs, world=8, mesh={})            # 8 / 4 copies side by side
programs = on_mesh(programs, world=None, mesh={"tp": 8})  # the same text for 8 ranks
programs = scaled(programs, 1024, per_host=8)             # its outermost axis for 1024 ranks
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.errors import InterlaceError, ProgramError, TeamError

if TYPE_CHECKING:
    from interlace.cost import Machine
    from interlace.ir import Op, Program, Team, View


ALONG = 32
"""Ranks at each end of a team for which a Program that was scaled is validated."""


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
    """The name of a file in errors."""
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


def read_machine(calibration: Path | None, device: str = "cpu", any_host: bool = False) -> Machine:
    """The machine of a calibration file: the one named, or else this host's; without either, the
    built-in model of a device."""
    from interlace.cost import Machine, default_machine, default_path

    if calibration is not None:
        return Machine.load(calibration, any_host=any_host)
    gpus = ""
    if device == "cuda":
        if not count_gpus():
            return default_machine(device)
        from interlace.runtime.machine import gpus_of

        gpus = gpus_of(device)
    path = default_path(gpus)
    return Machine.load(path, any_host=True) if path.exists() else default_machine(device)


def count_gpus() -> int:
    """GPUs that torch sees; torch, slow to import, is asked only where there may be one."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count()


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
    Program's teams other sizes; each of its axes is one of them.
    """
    if world is None and not mesh:
        return programs
    if len(programs) > 1:
        return _set_on_world(programs, world, mesh)
    from interlace.ir.types import check_world

    check_world(max(world or 0, math.prod(mesh.values())))
    program = programs[0]
    if mesh:
        own = [team.name for team in program.teams]
        if unknown := [name for name in mesh if name not in own]:
            raise TeamError(
                f"--mesh sizes {', '.join(unknown)}, and the teams of {program.name} are "
                f"{', '.join(own) or 'none'}: name those alone; --world holds copies side by side"
            )
        program = _on_axes(program, mesh)
        if world is not None and world != len(program.world):
            raise TeamError(
                f"--world {world} and a mesh of {len(program.world)} ranks do not agree: "
                "give one of them"
            )
        return [_valid(program, programs[0])]
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
    if world == size:
        return [program]
    return [_valid(_on_axes(program, {"copies": world // size}), program)]


def _valid(program: Program, before: Program, ranks: Sequence[int] | None = None) -> Program:
    """The Program, which was `before` for teams of other sizes; see `validate` for `ranks`."""
    from interlace.ir import validate

    try:
        validate(program, ranks=ranks)
    except ProgramError as error:
        sizes = {team.name: team.size for team in before.teams}
        new = [t for t in program.teams if sizes.get(t.name, t.size) != t.size]
        if not new:
            raise
        old = ", ".join(f"{team.name} of {sizes[team.name]}" for team in new)
        now = ", ".join(f"{team.name} of {team.size}" for team in new)
        raise TeamError(
            f"the buffers and views of {before.name} are for {old} and do not fit {now}: keep that "
            f"size, or write the text for the other one. {error}"
        ) from error
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
    order = [
        team if (team := named.get(name)) and team.size == size else Team(name, size)
        for name, size in mesh.items()
    ]
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


def scaled(programs: list[Program], world: int | None, per_host: int | None) -> list[Program]:
    """The Programs on a world of that many ranks, with so many on each host, counted from rank 0.

    The outermost axis of a mesh grows to the world. Programs are validated for the first and last
    ranks along each team: there views differ.
    """
    given = programs
    if world is not None:
        if per_host is None and any(team.hosts for program in programs for team in program.teams):
            raise TeamError(
                "--scale-to: the text names hosts, so say how many ranks each has: --per-host"
            )
        programs = _grown(programs, world)
    if per_host is not None:
        if per_host < 1:
            raise TeamError(f"--per-host {per_host}: a host has 1 rank or more")
        programs = [_placed(program, per_host) for program in programs]
    for before, program in zip(given, programs, strict=True):
        lines = [m.ranks for m in program.where(program.world[0]).members.values()]
        ends = {rank for line in lines for rank in (*line[:ALONG], *line[-ALONG:])}
        _valid(program, before, sorted(ends & {*program.world}))
    return programs


def _grown(programs: list[Program], world: int) -> list[Program]:
    from interlace.ir.types import check_world

    check_world(world)
    program, *others = programs
    listed = [team for team in program.teams if team.groups is not None]
    if others or listed or program.ranks is not None or not program.teams:
        raise TeamError(
            "--scale-to enlarges the outermost team of one Program that names no ranks: write this "
            f"text for {world} ranks"
        )
    outermost = program.teams[0]
    step = len(program.world) // outermost.size
    if world < step or world % step:
        raise TeamError(
            f"--scale-to {world}: the teams within {outermost.name} have {step} ranks, so it is a "
            f"multiple of {step}"
        )
    sizes = {team.name: team.size for team in program.teams}
    return [_on_axes(program, sizes | {outermost.name: world // step})]


def _placed(program: Program, per_host: int) -> Program:
    found: dict[str, set[tuple[tuple[int, ...], ...]]] = {}
    for where in program.wheres(program.world):
        for name, member in where.members.items():
            if member.index == 0:
                hosts: dict[int, list[int]] = {}
                for index, rank in enumerate(member.ranks):
                    hosts.setdefault(rank // per_host, []).append(index)
                found.setdefault(name, set()).add(tuple(map(tuple, hosts.values())))
    teams: list[Team] = []
    for team in program.teams:
        ways = found.get(team.name, {()})
        if len(ways) > 1:
            raise TeamError(
                f"--per-host {per_host}: the instances of team {team.name} do not lie on hosts "
                "alike: give a number that divides the ranks of a team, or that they divide"
            )
        (way,) = ways
        teams.append(dataclasses.replace(team, hosts=way if len(way) > 1 else None))
    return program.replace(teams=tuple(teams))
