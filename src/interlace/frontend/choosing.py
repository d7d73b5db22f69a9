"""Ranks lower a graph from facts that all of them have, and choose once.

    agreed = facts_of_all(serial, groups, options, machine)    # or one AgreementError on all ranks
    program, remarks = chosen(serial, agreed, options, agreed.machine)

Before anything is chosen each rank tells the graph, its options and the calibration that it would
choose by. Options and calibrations must be the same, and so must the inputs that the graph is given
(a bias, say). Where the graphs differ for all that, by uneven shards, each rank lowers those of all
ranks, sees as the others do whether they are sound as a set, and else runs serially.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch.distributed import ProcessGroup

from interlace.comm import TeamComm, limit_s, team_of
from interlace.comm.rendezvous.board import Note, as_told, failure
from interlace.cost import Machine
from interlace.errors import AgreementError, InterlaceError, SoundnessError
from interlace.ir import (
    Expect,
    Get,
    Group,
    Notify,
    Program,
    Put,
    Recv,
    Remark,
    Send,
    parse,
    print_program,
)
from interlace.options import Options
from interlace.passes import lower
from interlace.runtime.prepare.agreement import (
    digest,
    essence,
    for_ranks,
    gather,
    program_rank,
    ranks_of,
    skeleton,
    texts_of,
)
from interlace.verify import check

STEP = "choose how to overlap"
OWN = frozenset(("time_out_s", "trace", "static_outputs", "calibration"))
"""Options that concern one rank, or (the calibration) are compared by what they stand for."""
DIFFER = "the ranks' graphs differ, and overlapped they do not fit together: all run serially"


@dataclass(frozen=True, slots=True)
class AgreedFacts:
    """Facts that all ranks of a graph's teams share before they lower it."""

    machine: Machine
    texts: Mapping[str, str]
    """The graphs of all ranks by digest, where they differ;"""
    ranks: Mapping[str, tuple[int, ...]]
    """and the ranks of the Program that have each."""


def facts_of_all(
    graph: Program,
    groups: Mapping[str, ProcessGroup],
    options: Options,
    machine: Machine | InterlaceError,
    layer: Mapping[str, Any] | None = None,
) -> AgreedFacts:
    """Gathers the ranks' facts of this graph; an error of one (as in `machine`) is raised on all.
    `layer` has the arguments of a layer that must be the same on all ranks."""
    limit = limit_s(options.time_out_s, groups.values())
    teams = {team_of(group, name, limit) for name, group in groups.items()}
    if not teams:
        if isinstance(machine, InterlaceError):
            raise machine
        return AgreedFacts(machine, {}, {})
    rank, plain = program_rank(graph, groups), essence(graph)
    text = print_program(plain)
    mine: Note = {
        "step": STEP,
        "rank": rank,
        "name": graph.name,
        "hash": digest(text),
        "skeleton": digest(print_program(skeleton(plain))),
        "layer": dict(layer or {}),
        "options": _told(options),
        "inputs": [] if graph.name == "backward" else _inputs(graph),
    }
    if isinstance(machine, InterlaceError):
        mine |= failure(machine)
    else:
        mine["calibration"] = _calibration(machine, options)
        mine["kernels"] = [machine.kernels, machine.packed_kernels]
    ordered: Sequence[TeamComm] = sorted(teams, key=lambda team: team.key)
    entries = gather(mine, ordered, limit)
    if isinstance(machine, InterlaceError):
        raise machine
    for other, entry in sorted(entries.items()):
        if "error" in entry:
            raise as_told(other, entry["error"])
    _compare(graph.name, entries)
    kernels, packed = (all(entry["kernels"][i] for entry in entries.values()) for i in (0, 1))
    machine = machine.replace(kernels=kernels, packed_kernels=packed)
    if len({entry["skeleton"] for entry in entries.values()}) == 1:
        return AgreedFacts(machine, {}, {})
    board, me = ordered[0].board, ordered[0].rank
    texts = texts_of(board, entries, me, text, limit)
    return AgreedFacts(machine, texts, {key: ranks_of(entries, key) for key in sorted(texts)})


def tell(
    name: str, groups: Mapping[str, ProcessGroup], error: InterlaceError, time_out_s: float | None
) -> None:
    """Tells an error to the ranks that gather the facts of the graph of this name."""
    limit = limit_s(time_out_s, groups.values())
    teams = {team_of(group, team, limit) for team, group in groups.items()}
    if teams:
        ordered = sorted(teams, key=lambda team: team.key)
        gather({"step": STEP, "name": name, **failure(error)}, ordered, limit)


def chosen(graph: Program, agreed: AgreedFacts, options: Options) -> tuple[Program, list[Remark]]:
    """The overlapped Program of a graph, and what is to be remarked on."""
    if agreed.texts and options.overlap:
        made = {key: lower(parse(t), options, agreed.machine) for key, t in agreed.texts.items()}
        parts = [part for key, of in agreed.ranks.items() for part in for_ranks(made[key], of)]
        try:
            check(parts).raise_if_unsound()
        except SoundnessError:
            options = dataclasses.replace(options, overlap=False)
            return lower(graph, options, agreed.machine), [Remark("frontend", DIFFER)]
    return lower(graph, options, agreed.machine), []


def _told(options: Options) -> dict[str, Any]:
    named = [field.name for field in fields(options) if field.name not in OWN]
    told = {name: getattr(options, name) for name in named}
    return {**told, "schedules": told["schedules"] and "a folder"}


def _calibration(machine: Machine, options: Options) -> dict[str, str]:
    plain = machine.replace(kernels=True, packed_kernels=True)
    where = f" of {options.calibration}" if options.calibration else ""
    return {"digest": digest(repr(plain)), "name": f"{machine.name!r}{where}"}


def _inputs(graph: Program) -> list[tuple[str, str]]:
    """The name and the kind of each input, of a graph whose ranks all do the same."""
    if any(isinstance(op, Send | Recv | Group | Notify | Expect | Put | Get) for op in graph.ops):
        return []
    inputs = [buffer for buffer in graph.params if buffer.kind == "input"]
    return [(b.name, f"{b.dtype} of {len(b.shape)} dimensions") for b in inputs]


def _compare(name: str, entries: Mapping[int, Note]) -> None:
    """Raises the first difference between the ranks; on all of them the same."""
    first = min(entries)
    for rank, entry in sorted(entries.items()):
        one = entries[first]
        for what, noun in (("layer", "arguments"), ("options", "options")):
            for key in one[what]:
                ours, theirs = one[what][key], entry[what].get(key)
                if ours != theirs:
                    raise AgreementError(
                        f"ranks give {name!r} different {noun}: rank {first} has {key}={ours!r}, "
                        f"and rank {rank} {key}={theirs!r}: give all ranks the same (pad what is "
                        "short)"
                    )
        ours, theirs = one["calibration"], entry["calibration"]
        if ours["digest"] != theirs["digest"]:
            mark = [side["digest"][:8] for side in (ours, theirs)]
            raise AgreementError(
                f"ranks would choose how {name!r} is overlapped by different calibrations: rank "
                f"{first} by {ours['name']} ({mark[0]}), and rank {rank} by {theirs['name']} "
                f"({mark[1]}): give all ranks one file with the option `calibration`, or copy what "
                "`interlace calibrate` wrote on one host to the others"
            )
        _compare_inputs(name, (first, one["inputs"]), (rank, entry["inputs"]))


def _compare_inputs(name: str, one: tuple[int, Any], other: tuple[int, Any]) -> None:
    """Raises for an input that one rank alone has, or that is of another kind there."""
    sides = [(rank, {each: kind for each, kind in inputs}) for rank, inputs in (one, other)]
    (rank_1, inputs_1), (rank_2, inputs_2) = sides
    if not inputs_1 or not inputs_2:
        return
    if len(inputs_1) != len(inputs_2):
        alone = [(rank_1, rank_2, n) for n in inputs_1 if n not in inputs_2]
        alone += [(rank_2, rank_1, n) for n in inputs_2 if n not in inputs_1]
        where, not_there, which = alone[0]
        raise AgreementError(
            f"{name!r} is given {which} on rank {where}, and not on rank {not_there}: give it on "
            "all ranks (a bias, a mask), or on none"
        )
    for (n_1, kind_1), (_, kind_2) in zip(inputs_1.items(), inputs_2.items(), strict=True):
        if kind_1 != kind_2:
            raise AgreementError(
                f"the input {n_1} of {name!r} is {kind_1} on rank {rank_1}, and {kind_2} on rank "
                f"{rank_2}: give all ranks inputs of the same element types and dimensions"
            )
