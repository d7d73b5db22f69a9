"""Which teams a graph communicates in: from process groups to the Teams of a Program.

A graph names process groups by strings that mean something in this process alone. A Program names
teams by mesh axis and lists the groups of all the ranks that it connects, so that one text serves
every rank and the verifier can put the ranks together:

    def forward(dp: Team[2], tp: Team[2], x: f32[4, 8]): ...

A DeviceMesh says how all ranks are grouped. Of a process group made by hand each rank knows only
its own, which is enough where no other team joins its ranks to further ones.

Ranks decide alike on what each would decide by its own sizes. With uneven shards the ranks' matmuls
take different times, so near a threshold one rank would gather again in backward and another not.
They tell each other through the store, in bounded time, and do what all want:

    wanted = consent_of_ranks(["layers.0.mlp", "layers.1.mlp"], [(group, True), (group, False)])
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from interlace.comm import limit_s, team_of
from interlace.comm.teams import group_of_mesh
from interlace.errors import AgreementError, TeamError
from interlace.ir import Program, Team
from interlace.runtime.prepare.agreement import gather
from interlace.torch_private import resolve_process_group

Groups = tuple[tuple[int, ...], ...]
Wish = tuple[ProcessGroup | str, bool]
"""A process group (or its name), and whether this rank wants something that it all must do."""


@dataclass(frozen=True, slots=True)
class KnownTeam:
    """A team as this rank knows it: its name, and the groups of global ranks that it knows of."""

    name: str
    groups: Groups

    @property
    def size(self) -> int:
        """Number of ranks in a group."""
        return len(self.groups[0])


class Teams:
    """Names the process groups of one graph; collects those it uses."""

    def __init__(self, rank: int, find: Callable[[str], KnownTeam]) -> None:
        self.rank, self._find = rank, find
        self._used: dict[str, KnownTeam] = {}

    @classmethod
    def of_torch(cls, meshes: Iterable[DeviceMesh] = ()) -> Teams:
        """The teams of torch.distributed in this process; `meshes` name them."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, _no_groups)
        axes = mesh_axes(meshes)
        return cls(dist.get_rank(), lambda group: axes.get(group) or _plain_group(group))

    @classmethod
    def of(cls, groups: Mapping[str, tuple[str, Groups]], rank: int = 0) -> Teams:
        """Teams given outright: group name to (team name, groups of global ranks)."""
        return cls(rank, lambda group: KnownTeam(*groups[group]))

    def team(self, group: str | ProcessGroup) -> Team:
        """The team of a process group, or of its name."""
        name = group if isinstance(group, str) else group.group_name
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

    def process_groups(self) -> dict[str, ProcessGroup]:
        """The process group of each team of the Program, by the team's name."""
        return {
            known.name: _process_group(group)
            for group, known in self._used.items()
            if known.size > 1
        }

    def used(self) -> tuple[tuple[Team, ...], tuple[int, ...] | None]:
        """The Teams of the Program, and its ranks: all that its collectives connect to this one."""
        ranks = self._connected()
        if any(team.size > 1 and ranks.difference(*team.groups) for team in self._used.values()):
            axes = mesh_axes(_live_meshes())  # code may hold a mesh that no argument has
            for group in self._used.keys() & axes.keys():
                if _reach(axes[group]) > _reach(self._used[group]):
                    self._used[group] = replace(self._used[group], groups=axes[group].groups)
            ranks = self._connected()
        known = [team for team in self._used.values() if team.size > 1]
        for team in known:
            if unknown := ranks.difference(*team.groups):
                raise TeamError(
                    f"a graph communicates in {', '.join(other.name for other in known)}, which "
                    f"join ranks {sorted(ranks)}, and {team.name} is a process group made by hand: "
                    f"this rank does not know that of rank {min(unknown)}. fix: take all of them "
                    "from one DeviceMesh"
                )
        teams = tuple(
            Team(team.name, team.size, tuple(g for g in team.groups if set(g) <= ranks))
            for team in known
        )
        return as_axes(teams, tuple(sorted(ranks)))

    def _connected(self) -> set[int]:
        return connected(self.rank, [team.groups for team in self._used.values() if team.size > 1])


def connected(rank: int, groupings: Iterable[Groups]) -> set[int]:
    """The ranks that any chain of groups connects to `rank`."""
    groups = [group for groups in groupings for group in groups]
    found, before = {rank}, 0
    while len(found) > before:
        before = len(found)
        found |= {other for group in groups if not found.isdisjoint(group) for other in group}
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
        for implied in Program(teams=axes, ranks=ranks).wheres(ranks):
            for team in teams:
                if implied.member(team.name).ranks not in (team.groups or ()):
                    return teams, shown
    except TeamError:
        return teams, shown
    return axes, shown


def mesh_axes(meshes: Iterable[DeviceMesh]) -> dict[str, KnownTeam]:
    """The axes of the meshes, by the name of this rank's process group."""
    found: dict[str, KnownTeam] = {}
    for mesh in meshes:
        root: DeviceMesh = getattr(mesh, "_get_root_mesh", lambda mesh=mesh: mesh)()
        for whole in (root, mesh):
            for dim in range(whole.ndim):
                group, known = _axis(whole, dim)
                if group not in found or _reach(known) > _reach(found[group]):
                    found[group] = known  # whatever the order of the meshes
    return found


def _reach(known: KnownTeam) -> int:
    """Number of ranks whose groups are known."""
    return sum(map(len, known.groups))


def _live_meshes() -> Iterator[DeviceMesh]:
    """The meshes of this process whose process groups are there."""
    for each in gc.get_objects():
        if issubclass(type(each), DeviceMesh):
            with contextlib.suppress(TeamError):
                mesh_axes([each])
                yield each


def _axis(mesh: DeviceMesh, dim: int) -> tuple[str, KnownTeam]:
    names = mesh.mesh_dim_names
    name = names[dim] if names else ("world" if mesh.ndim == 1 else f"axis_{dim}")
    size = mesh.size(dim)
    rows = _all_ranks(mesh).movedim(dim + 1, -1).reshape(-1, size).tolist()
    return group_of_mesh(mesh, dim).group_name, KnownTeam(name, tuple(map(tuple, rows)))


def _all_ranks(mesh: DeviceMesh) -> torch.Tensor:
    """The ranks of a mesh and, of a part of a mesh or of flattened dimensions, of those beside it;
    `mesh.mesh` has those alone that this rank is among."""
    layout, ranks = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    return mesh.mesh[None] if layout is None or ranks is None else layout.remap_to_tensor(ranks)


def _plain_group(name: str) -> KnownTeam:
    group = _process_group(name)
    ranks = tuple(dist.get_process_group_ranks(group))
    whole = len(ranks) == dist.get_world_size()
    described = str(getattr(group, "group_desc", "")).removeprefix("mesh_")
    plain = described.isidentifier() and described not in ("undefined", "default_pg")
    return KnownTeam(described if plain else "world" if whole else "team", (ranks,))


def _no_groups(name: str) -> KnownTeam:
    raise TeamError(
        f"the graph communicates in process group {name!r}, but torch.distributed is not "
        "initialised: call torch.distributed.init_process_group first"
    )


def consent_of_ranks(
    places: Sequence[str],
    wishes: Sequence[Wish],
    timeout_s: float | None = None,
    what: str = "what backward gathers again",
) -> list[bool]:
    """Returns each wish, True only if all ranks of its process group share it.

    A rank that compiles alone raises an error that names the absent ranks. `places` identifies the
    graph by facts that are the same on all ranks, unlike sizes and padding. `what` names the
    subject of the agreement, for messages.
    """
    agreed = [wish for _, wish in wishes]
    if not (wishes and dist.is_available() and dist.is_initialized()):
        return agreed
    groups = [_process_group(group) if isinstance(group, str) else group for group, _ in wishes]
    limit = limit_s(timeout_s, groups)
    teams = [team_of(group, "", limit) for group in groups]
    digest = hashlib.sha256(" ".join(places).encode()).hexdigest()[:16]
    own = {team.key: [i for i, of in enumerate(teams) if of is team] for team in {*teams}}
    told = {key: [digest, [agreed[i] for i in places_of]] for key, places_of in own.items()}
    met = sorted({*teams}, key=lambda team: team.key)
    entries = gather({"step": "agree on", "name": what, "wishes": told}, met, limit)
    for rank, entry in sorted(entries.items()):
        for key in entry["wishes"].keys() & own.keys():
            graph, theirs = entry["wishes"][key]
            if (graph, len(theirs)) != (digest, len(own[key])):
                raise AgreementError(
                    f"rank {rank} compiles another graph than rank {dist.get_rank()}, where ranks "
                    f"decide {what}: compile the same model on every rank of a process group"
                )
            for i, wish in zip(own[key], theirs, strict=True):
                agreed[i] = agreed[i] and wish
    return agreed


def _process_group(name: str) -> ProcessGroup:
    try:
        return resolve_process_group(name)
    except RuntimeError as error:
        raise TeamError(
            f"there is no process group {name!r} ({error}): it was destroyed, or the graph was "
            "traced with another. Fix: make the group, its mesh and what is compiled with it anew"
        ) from error
