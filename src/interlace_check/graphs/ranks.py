"""Graphs of several ranks: which ranks a group has, and whether they begin alike there.

groups = groups_of(traces, None)               # {"tp": (0, 1)}
mismatches(traces, groups)                     # findings
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from interlace.errors import TeamError
from interlace.ir.types import Team
from interlace.verify.report import Finding
from interlace_check.graphs.findings import reference
from interlace_check.graphs.steps import Issue, Step, Trace

Groups = dict[str, tuple[int, ...]]


def groups_of(traces: Sequence[Trace], given: Mapping[str, Iterable[int]] | None) -> Groups:
    """The ranks of each process group, by its name.

    What `given` does not say follows from the graphs: as many ranks as its operators say; else
    those that name it, if the others have groups of as many; else all.
    """
    users: defaultdict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for rank, trace in enumerate(traces):
        for issue in (step.issue for step in trace.steps if step.issue is not None):
            users[issue.group].add(rank)
            if issue.size is not None:
                sizes[issue.group] = max(issue.size, sizes.get(issue.group, 0))
    world, found = len(traces), Groups()
    for group, ranks in users.items():
        if given is not None and group in given:
            found[group] = tuple(given[group])
            _check(group, found[group], ranks, world)
        elif group in sizes:
            if sizes[group] not in (len(ranks), world):
                raise TeamError(
                    f"group {group!r} has {sizes[group]} ranks, and {len(ranks)} of {world} graphs "
                    f"use it; fix: give the graph of each of its ranks, and groups={{{group!r}: "
                    f"(...)}} where that does not say which they are"
                )
            found[group] = tuple(sorted(ranks) if sizes[group] == len(ranks) else range(world))
        else:
            found[group] = tuple(sorted(ranks) if _tiles(ranks, users, world) else range(world))
    return found


def _check(group: str, members: tuple[int, ...], users: set[int], world: int) -> None:
    odd = [rank for rank in members if type(rank) is not int or not 0 <= rank < world]
    if odd or len(set(members)) != len(members) or not users <= set(members):
        raise TeamError(
            f"group {group!r} is given as ranks {list(members)}, and graphs {sorted(users)} of "
            f"{world} use it; fix: list each of its ranks once, by the place of its graph"
        )


def _tiles(ranks: set[int], users: Mapping[str, set[int]], world: int) -> bool:
    """Returns True if groups of the same size cover all other ranks: this one is its ranks' own."""
    others = set(range(world)) - ranks
    alike = [held for held in users.values() if len(held) == len(ranks) and not held & ranks]
    return len(ranks) > 1 and others <= {rank for held in alike for rank in held}


def teams_of(groups: Groups) -> dict[str, Team]:
    """A team of a Program for each group. The names of groups need be no names of teams."""
    return {
        group: Team(f"g{number}", len(ranks), (ranks,))
        for number, (group, ranks) in enumerate(groups.items())
    }


def mismatches(traces: Sequence[Trace], groups: Groups) -> Iterator[Finding]:
    """The first collective of each group at which its ranks do something else."""
    for group, ranks in groups.items():
        begun = [_begun(traces[rank], group) for rank in ranks]
        for number in range(max(map(len, begun), default=0)):
            come = {
                rank: steps[number]
                for rank, steps in zip(ranks, begun, strict=True)
                if number < len(steps)
            }
            finding = _disagreement(group, number, ranks, come)
            if finding is not None:
                yield finding
                break


def _disagreement(
    group: str, number: int, ranks: Sequence[int], come: Mapping[int, Step]
) -> Finding | None:
    which = f"collective {number + 1} of group {group!r}"
    fix = "let every rank of the group issue the same collectives in the same order"
    first = min(come)
    missing = [rank for rank in ranks if rank not in come]
    if missing:
        message = (
            f"rank {missing[0]} issues only {number} collectives of group {group!r}, and rank "
            f"{first} waits for it in {come[first].place.name}"
        )
        ops = (reference(come[first], first, f"is {which} on rank {first}"),)
        return Finding("mismatch", message, ops, fix, ranks=tuple(come))
    for rank, step in come.items():
        what = _difference(come[first].issue, step.issue, ranks.index(first), ranks.index(rank))
        if what:
            message = f"ranks {first} and {rank} meet in {which} with {what}"
            ops = [reference(come[each], each, f"is {which}") for each in (first, rank)]
            return Finding("mismatch", message, tuple(ops), fix, ranks=(first, rank))
    return None


def _difference(one: Issue | None, other: Issue | None, place: int, other_place: int) -> str:
    """The first property in which two members of a collective differ."""
    assert one is not None
    assert other is not None
    mine, theirs = dict(one.signature), dict(other.signature)
    for name in mine:
        if name in theirs and mine[name] != theirs[name]:
            return f"another {name}: {mine[name]} and {theirs[name]}"
    if one.splits is None or other.splits is None:
        return ""
    for given, taken, a, b in (
        (one.splits[0], other.splits[1], place, other_place),
        (other.splits[0], one.splits[1], other_place, place),
    ):
        if b < len(given) and a < len(taken) and given[b] != taken[a]:
            return f"other sizes: {given[b]} rows are given where {taken[a]} are taken"
    return ""


def _begun(trace: Trace, group: str) -> list[Step]:
    return [
        step
        for step in trace.steps
        if step.issue is not None and step.issue.group == group and step.issue.peer is None
    ]
