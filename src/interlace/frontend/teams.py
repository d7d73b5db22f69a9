"""Which teams a graph communicates in: from process groups to the Teams of a Program.

A graph names process groups by strings that mean something in this process alone. A Program names
teams by mesh axis and lists the groups of all the ranks that it connects, so that one text serves
every rank and the verifier can put the ranks together:

    def forward(dp: Team[2], tp: Team[2], x: f32[4, 8]): ...

A DeviceMesh says how all ranks are grouped. For process groups made by hand each rank knows only
its own; the ranks tell each other through the store (`interlace.frontend.membership`), in bounded
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import TeamError
from interlace.frontend.membership import learn_groups
from interlace.ir import Team, Where

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Known:
    """What this rank knows of a team: its name, its size, and the groups of global ranks."""

    name: str
    size: int
    groups: Groups
    complete: bool
    """Whether `groups` lists every rank's group; else only this rank's."""


class Teams:
    """Names the process groups of one graph; collects those it uses."""

    def __init__(
        self,
        rank: int,
        find: Callable[[str], Known],
        learn: Callable[[Sequence[Known], int], list[Groups]] | None = None,
    ) -> None:
        self.rank = rank
        self._find = find
        self._learn = learn
        self._used: dict[str, Known] = {}

    @classmethod
    def of_torch(cls, meshes: Iterable[DeviceMesh] = (), time_out_s: float | None = None) -> Teams:
        """The teams of torch.distributed in this process; `meshes` name them."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, _no_groups)
        axes = mesh_axes(meshes)

        def find(group: str) -> Known:
            return axes.get(group) or _plain_group(group)

        def learn(used: Sequence[Known], rank: int) -> list[Groups]:
            return learn_groups([(k.size, k.groups, k.complete) for k in used], rank, time_out_s)

        return cls(dist.get_rank(), find, learn)

    @classmethod
    def of(cls, groups: Mapping[str, tuple[str, Groups]], rank: int = 0) -> Teams:
        """Teams given outright: group name to (team name, groups of global ranks)."""

        def find(group: str) -> Known:
            name, all_groups = groups[group]
            return Known(name, len(all_groups[0]), all_groups, True)

        return cls(rank, find)

    def team(self, group: str | ProcessGroup) -> Team:
        """The team of a process group, or of its name."""
        name = group if isinstance(group, str) else _group_name(group)
        known = self._used.get(name)
        if known is None:
            known = self._find(name)
            taken = {other.name for other in self._used.values()}
            unique, count = known.name, 1
            while unique in taken:
                count += 1
                unique = f"{known.name}_{count}"
            self._used[name] = known = replace(known, name=unique)
        return Team(known.name, known.size)

    def index(self, team: str) -> int:
        """This rank's index in a team of that name."""
        known = next(known for known in self._used.values() if known.name == team)
        group = next(group for group in known.groups if self.rank in group)
        return group.index(self.rank)

    def process_groups(self) -> dict[str, ProcessGroup]:
        """The process group of each team of the Program, by the team's name."""
        return {
            known.name: dist.distributed_c10d._resolve_process_group(group)  # pyright: ignore
            for group, known in self._used.items()
            if known.size > 1
        }

    def used(self) -> tuple[tuple[Team, ...], tuple[int, ...] | None]:
        """The Teams of the Program, and its ranks: all that its collectives connect to this one."""
        known = [team for team in self._used.values() if team.size > 1]
        if self._learn is not None and len(known) > 1 and not all(k.complete for k in known):
            learnt = self._learn(known, self.rank)
            known = [replace(k, groups=g) for k, g in zip(known, learnt, strict=True)]
        ranks = connected(self.rank, [team.groups for team in known])
        teams = tuple(
            Team(team.name, team.size, tuple(g for g in team.groups if set(g) <= ranks))
            for team in known
        )
        return as_axes(teams, tuple(sorted(ranks)))


def connected(rank: int, groupings: Iterable[Groups]) -> set[int]:
    """The ranks that any chain of groups connects to `rank`."""
    groups = [set(group) for groups in groupings for group in groups]
    found, grew = {rank}, True
    while grew:
        grew = False
        for group in groups:
            if group & found and not group <= found:
                found |= group
                grew = True
    return found


def as_axes(
    teams: tuple[Team, ...], ranks: tuple[int, ...]
) -> tuple[tuple[Team, ...], tuple[int, ...] | None]:
    """Teams as mesh axes (no explicit groups) where they are that; the ranks where they matter."""
    shown = None if ranks == tuple(range(len(ranks))) else ranks
    if not teams:
        return (), shown
    assert all(team.groups for team in teams)
    step = {team.name: team.groups[0][1] - team.groups[0][0] for team in teams if team.groups}
    ordered = sorted(teams, key=lambda team: -step[team.name])
    axes = tuple(Team(team.name, team.size) for team in ordered)
    try:
        for rank in ranks:
            implied = Where.of(rank, axes, ranks=ranks)
            for team in teams:
                if implied.member(team.name).ranks not in (team.groups or ()):
                    return teams, shown
    except TeamError:
        return teams, shown
    return axes, shown


def mesh_axes(meshes: Iterable[DeviceMesh]) -> dict[str, Known]:
    """The axes of the meshes, by the name of this rank's process group."""
    found: dict[str, Known] = {}
    for mesh in meshes:
        root: DeviceMesh = getattr(mesh, "_get_root_mesh", lambda mesh=mesh: mesh)()
        for whole in (root, mesh):
            for dim in range(whole.ndim):
                found.setdefault(*_axis(whole, dim))
    return found


def _axis(mesh: DeviceMesh, dim: int) -> tuple[str, Known]:
    names = mesh.mesh_dim_names
    name = names[dim] if names else ("world" if mesh.ndim == 1 else f"axis_{dim}")
    size = mesh.size(dim)
    rows = mesh.mesh.movedim(dim, -1).reshape(-1, size).tolist()
    groups = tuple(tuple(row) for row in rows)
    complete = len({rank for row in groups for rank in row}) == dist.get_world_size()
    return _group_name(mesh.get_group(dim)), Known(name, size, groups, complete)


def _group_name(group: ProcessGroup) -> str:
    return group.group_name


def _plain_group(name: str) -> Known:
    group = dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore
    ranks = tuple(dist.get_process_group_ranks(group))
    whole = len(ranks) == dist.get_world_size()
    described = str(getattr(group, "group_desc", "")).removeprefix("mesh_")
    plain = described.isidentifier() and described not in ("undefined", "default_pg")
    return Known(
        described if plain else ("world" if whole else "team"), len(ranks), (ranks,), whole
    )


def _no_groups(name: str) -> Known:
    raise TeamError(
        f"the graph communicates in process group {name!r}, but torch.distributed is not "
        "initialised: call torch.distributed.init_process_group first"
    )
