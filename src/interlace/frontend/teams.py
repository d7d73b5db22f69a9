"""Which teams a graph communicates in: from process groups to the Teams of a Program.

A graph names process groups by strings that mean something in this process alone. A Program names
teams by mesh axis and lists the groups of all the ranks that it connects, so that one text serves
every rank and the verifier can put the ranks together:

    def forward(dp: Team[2], tp: Team[2], x: f32[4, 8]): ...

A DeviceMesh says how all ranks are grouped. For process groups made by hand each rank knows only
its own, so the ranks that they connect tell each other, in one meeting (`learn_groups`).

Ranks decide alike on what each would decide by its own sizes. With uneven shards the ranks' matmuls
take different times, so near a threshold one rank would gather again in backward and another not.
They tell each other through the store, in bounded time, and do what all want:

    wanted = consent_of_ranks(["layers.0.mlp", "layers.1.mlp"], [(group, True), (group, False)])
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from interlace.comm import limit_s, team_of
from interlace.comm.rendezvous.board import Note
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
    """A team as this rank knows it: its name, and the groups of global ranks."""

    name: str
    groups: Groups
    complete: bool
    """True if `groups` lists every rank's group; else it has only this rank's."""

    @property
    def size(self) -> int:
        """Number of ranks in a group."""
        return len(self.groups[0])


class Teams:
    """Names the process groups of one graph; collects those it uses."""

    def __init__(
        self,
        rank: int,
        find: Callable[[str], KnownTeam],
        given: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """`given` outright, teams need not be learnt, and have no process groups."""
        self.rank, self._find = rank, find
        self._given, self._timeout_s = given, timeout_s
        self._used: dict[str, KnownTeam] = {}

    @classmethod
    def of_torch(cls, meshes: Iterable[DeviceMesh] = (), timeout_s: float | None = None) -> Teams:
        """The teams of torch.distributed in this process; `meshes` name them."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, _no_groups, given=True)
        axes = mesh_axes(meshes)
        return cls(
            dist.get_rank(),
            lambda group: axes.get(group) or _plain_group(group),
            timeout_s=timeout_s,
        )

    @classmethod
    def of(cls, groups: Mapping[str, tuple[str, Groups]], rank: int = 0) -> Teams:
        """Teams given outright: group name to (team name, groups of global ranks)."""
        return cls(rank, lambda group: KnownTeam(*groups[group], complete=True), given=True)

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
        known = [team for team in self._used.values() if team.size > 1]
        if not self._given and len(known) > 1 and not all(k.complete for k in known):
            learnt = learn_groups(known, self.process_groups(), self._timeout_s)
            known = [replace(k, groups=g) for k, g in zip(known, learnt, strict=True)]
        ranks = connected(self.rank, [team.groups for team in known])
        teams = tuple(
            Team(team.name, team.size, tuple(g for g in team.groups if set(g) <= ranks))
            for team in known
        )
        return as_axes(teams, tuple(sorted(ranks)))


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
                found.setdefault(*_axis(whole, dim))
    return found


def _axis(mesh: DeviceMesh, dim: int) -> tuple[str, KnownTeam]:
    names = mesh.mesh_dim_names
    name = names[dim] if names else ("world" if mesh.ndim == 1 else f"axis_{dim}")
    size = mesh.size(dim)
    rows = mesh.mesh.movedim(dim, -1).reshape(-1, size).tolist()
    groups = tuple(tuple(row) for row in rows)
    complete = len({rank for row in groups for rank in row}) == dist.get_world_size()
    return group_of_mesh(mesh, dim).group_name, KnownTeam(name, groups, complete)


def _plain_group(name: str) -> KnownTeam:
    group = _process_group(name)
    ranks = tuple(dist.get_process_group_ranks(group))
    whole = len(ranks) == dist.get_world_size()
    described = str(getattr(group, "group_desc", "")).removeprefix("mesh_")
    plain = described.isidentifier() and described not in ("undefined", "default_pg")
    return KnownTeam(described if plain else "world" if whole else "team", (ranks,), whole)


def _no_groups(name: str) -> KnownTeam:
    raise TeamError(
        f"the graph communicates in process group {name!r}, but torch.distributed is not "
        "initialised: call torch.distributed.init_process_group first"
    )


def learn_groups(
    teams: Sequence[KnownTeam], groups: Mapping[str, ProcessGroup], timeout_s: float | None = None
) -> list[Groups]:
    """Returns every group of each team that is connected to this rank: all of these ranks tell
    theirs. One that does not come costs a bounded wait and an error that names it, not a hang."""
    limit, me = limit_s(timeout_s, groups.values()), dist.get_rank()
    joined = {team_of(groups[team.name], team.name, limit) for team in teams}
    note: Note = {
        "step": "learn which process groups there are for",
        "name": ", ".join(team.name for team in teams),
        "groups": [next(group for group in team.groups if me in group) for team in teams],
    }
    entries = gather(note, sorted(joined, key=lambda team: team.key), limit)
    first = min(entries)
    for rank, entry in sorted(entries.items()):
        if len(entry["groups"]) != len(entries[first]["groups"]):
            counts = [len(entries[each]["groups"]) for each in (first, rank)]
            raise AgreementError(
                f"a graph uses {counts[0]} process groups on rank {first} and {counts[1]} on rank "
                f"{rank}: every rank must compile the same model. {SAME_ORDER}"
            )
    told = [entry["groups"] for entry in entries.values()]
    found = [tuple(sorted({tuple(each[i]) for each in told})) for i in range(len(told[0]))]
    for number, listed in enumerate(found):
        ranks = [rank for group in listed for rank in group]
        twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
        if twice is not None:
            both = " and ".join(str(list(group)) for group in listed if twice in group)
            raise AgreementError(
                f"process group number {number + 1} of a graph is {both} on different ranks, which "
                f"share rank {twice}. {SAME_ORDER}"
            )
    return found


SAME_ORDER = "fix: use the process groups in the same order on all ranks, or a DeviceMesh"


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
