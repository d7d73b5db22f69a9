"""From a serial Program to one that runs: agree on facts, choose, lower, bind to storage.

    bound = bind("forward", imported, groups={"tp": group}, options=options)
    outputs = bound.run(args)

With the option `schedules` the overlapped Program is a file's text (schedules.py), and what an
earlier process kept is used again (store.py). Else ranks lower
a graph from facts that all of them have, and choose once: before anything is chosen each rank tells
the graph, its options and the calibration that it would choose by. Options and calibrations must be
the same, and so must the inputs that the graph is given (a bias, say). Where the graphs differ for
all that, by uneven shards, each rank lowers those of all ranks, sees as the others do whether they
are sound as a set, and else runs serially; the Executor proves the set.

Note [Meetings of a compile]
    Each answers what the next one needs. partition.py, `consent_of_ranks`: which gathers backward
    repeats, before there are two graphs. Here, `on_hosts`: which ranks share a host, as a team that
    spans hosts is lowered otherwise; `agree_on_facts`: what ranks choose by. In the Executor,
    `agree_and_prove`: the Program that came out.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ProcessGroup

from interlace.comm import TeamComm, limit_s, team_of
from interlace.comm.rendezvous.board import Note, as_told, failure
from interlace.cost import Machine, Timeline
from interlace.errors import AgreementError, InterlaceError, SoundnessError
from interlace.frontend.calling.arguments import Imported, Opaque
from interlace.frontend.schedules import path_of, scheduled, texts_by_graph, unsound
from interlace.frontend.store import KeptSchedule, Key, Store, shared
from interlace.ir import Program, Remark, parse, print_program
from interlace.ir.validate import others
from interlace.options import Options
from interlace.passes import lower
from interlace.passes.decompose import Decompose
from interlace.passes.find_sites import FindSites
from interlace.passes.pipeline import Pass
from interlace.passes.place_resharding import PlaceResharding
from interlace.runtime import Executor
from interlace.runtime.hosts import on_hosts
from interlace.runtime.machine import machine_for
from interlace.runtime.prepare.agreement import (
    Agreement,
    Digests,
    digest,
    essence,
    for_ranks,
    gather,
    program_rank,
    ranks_of,
    texts_of,
)
from interlace.verify import Report, check


@dataclass(frozen=True, slots=True)
class Bound:
    """One graph for one signature: its Programs, and what runs them."""

    kind: str
    """`forward`, `backward` or `inference`."""
    imported: Imported
    executor: Executor
    machine: Machine
    """The model that its strategies were chosen by."""
    why_single: str = ""
    """Why it is for one size alone, though its sizes may change."""
    symbols: Mapping[str, int] = field(default_factory=dict[str, int])
    """The values of TorchDynamo's symbols as it was bound, where the graph has some."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float], compare=False)
    """Seconds that each stage took here."""
    is_kept: bool = field(default=False, compare=False)
    """True if an earlier process kept its schedule."""

    @property
    def serial(self) -> Program:
        """The Program as it was imported."""
        return self.imported.program

    @property
    def program(self) -> Program:
        """The overlapped Program."""
        return self.executor.program

    @property
    def measured(self) -> Timeline | None:
        """The last run that was recorded, with the option `trace`."""
        if self.executor.options.trace and self.executor.engine is not None:
            timeline = self.executor.timeline()
            return timeline if timeline.spans else None
        return None

    @property
    def report(self) -> Report:
        """The verifier's report of the overlapped Program, with those of the other ranks."""
        return self._agreement.report

    @property
    def programs(self) -> tuple[Program, ...]:
        """The overlapped Program that all ranks run, or each rank's own where these differ."""
        return self._agreement.programs(self.program, self.executor.rank)

    @property
    def _agreement(self) -> Agreement:
        assert self.executor.agreement is not None
        return self.executor.agreement

    def fits(self, symbols: Mapping[str, int]) -> bool:
        """Returns True if these values of TorchDynamo's symbols are in its class of sizes.

        A Program for one size alone fits where all symbols are unchanged: its peers' Programs may
        name others of them, such as a global size, and all ranks must find theirs, or none.
        """
        sizes = self.executor.sizes
        if sizes == sizes.alone():
            return dict(symbols) == self.symbols
        return sizes.holds(self._sizes(symbols))

    def _sizes(self, symbols: Mapping[str, int]) -> dict[str, int]:
        return {name: symbols[symbol] for name, symbol in self.imported.symbols.items()}

    def at(self, symbols: Mapping[str, int] | None) -> tuple[int, ...] | None:
        """The values of the named sizes for these of TorchDynamo's symbols, if there are any."""
        return None if symbols is None else self.executor.wanted(self._sizes(symbols))

    def run(
        self,
        args: Sequence[Any],
        at: tuple[int, ...] | None = None,
        origin: str | None = None,
        boxed: bool = False,
        as_before: bool = False,
    ) -> list[Any] | None:
        """The graph's outputs for its arguments; `at` has the values of the named sizes, where
        inputs may not tell them; `origin` is as in `Executor.run`, None for no backward. With
        `boxed`, `args` is a list that the run empties, so that each tensor may die after its last
        use. With `as_before`, None, and nothing is done, where the Executor has to look at
        something first, since it was run."""
        imported, executor = self.imported, self.executor
        inputs = [args[position] for position in imported.inputs]
        if imported.completes:
            inputs = imported.completed(inputs)
        others = [args[o.position] if isinstance(o, Opaque) else o.value for o in imported.others]
        boxes = (inputs, cast("list[Any]", args)) if boxed else ()
        results = executor.run_as_before(inputs, None, at, origin, boxes)
        if results is None:
            if as_before:
                return None
            results = executor.run_anew(inputs, None, at, origin, boxes)
        return [*map([*results, *others].__getitem__, imported.places)]


def bind(
    kind: str,
    imported: Imported,
    groups: Mapping[str, ProcessGroup],
    options: Options,
    device: str = "cpu",
    layer: Mapping[str, object] | None = None,
) -> Bound:
    """Lowers and prepares; all ranks of the Program do it together. `layer` has what else must be
    the same on all of them."""
    kind_of_device = torch.device(device).type
    stages = StageClock()
    options, noted = with_regions(options, kind_of_device)
    plain = imported.program
    imported = dataclasses.replace(imported, program=on_hosts(plain, groups, options.timeout_s))
    graph = imported.program
    machine = _attempted(machine_for, options, kind_of_device)
    written = _attempted(scheduled, kind, graph, groups, options)
    digests = Digests.of(graph)
    stages.end("agreement")
    store, key, own = Store.of(options), None, None
    if store and not written and not isinstance(machine, InterlaceError):
        key = Key.of(graph, digests, options, machine, kind_of_device, groups)
        own = store.find(key)
    stages.end("cache")
    agreed = agree_on_facts(graph, digests, groups, options, machine, written, layer, key, own)
    stages.end("agreement")
    spread = [team.name for team in imported.program.teams if team.hosts is not None]
    apart = [team_of(groups[name], name).apart for name in spread]
    noted += [Remark("frontend", f"{text}: {UNSERVED}") for text in apart]
    if options.graph and (why := _uncaptured(imported)):
        options = dataclasses.replace(options, graph=False, static_outputs=False)
        noted.append(Remark("frontend", f"not captured in CUDA graphs: {why}"))
    kept, program = agreed.kept, agreed.written
    if program is not None:
        noted.append(Remark("frontend", "its text is a file of the option schedules"))
    elif kept is not None:
        program = kept.program
    else:
        serial = graph if options.overlap else plain
        program, why = overlapped(serial, agreed, options, stages.end_of_pass)
        noted += why
    stages.end("lowering")
    executor = Executor(
        program.remarked(noted),
        groups=groups,
        device=device,
        options=options,
        host=imported.host,
        operators=others(graph),  # of this process's own graph
        graph_use=imported.graph_use,
    )
    executor.known_proof = None if kept is None else kept.proof
    try:
        executor.prepare()
    except SoundnessError as error:
        if agreed.written is None:
            raise
        raise unsound(path_of(kind, graph, options), agreed.written, error, options) from None
    stages.end("binding")
    agreement = executor.agreement
    assert agreement is not None
    stages.part("binding", "proof", agreement.proof_s)
    # An entry is what the key's own machine chose, not what the kernels of other ranks left of it.
    fits = agreed.machine == machine and not agreed.texts
    if store and key and fits and (kept is not own or kept is None):
        entry = KeptSchedule.of(key, program, agreement) if kept is None else kept
        store.keep(key, entry)
        stages.end("cache")
    seconds, is_kept = stages.seconds, kept is not None
    return Bound(kind, imported, executor, agreed.machine, seconds=seconds, is_kept=is_kept)


class StageClock:
    """Clock of a compilation: the seconds of each stage, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, stage: str) -> None:
        """Counts the time since the last end as this stage's."""
        last, self._last = self._last, time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + self._last - last

    def end_of_pass(self, item: Pass, _: Program) -> None:
        """Counts a pass: those up to `decompose` choose, the others lower what is chosen."""
        self.end("choice" if isinstance(item, CHOOSING) else "lowering")

    def part(self, whole: str, stage: str, seconds: float) -> None:
        """Counts a part of one stage as another."""
        self.seconds[whole] -= seconds
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


CHOOSING = FindSites, PlaceResharding, Decompose
"""Passes that find the sites and choose how each is overlapped."""


def _attempted(facts: Callable[..., Fact], *args: object) -> Fact | InterlaceError:
    """Returns what this rank chooses by; or the error, for the other ranks to hear."""
    try:
        return facts(*args)
    except InterlaceError as error:
        return error


Fact = TypeVar("Fact")
UNSERVED = "peer, fused and exchange, which reach into memory of peers, do not serve it"


def _uncaptured(imported: Imported) -> str:
    """Why a graph of it would be wrong, or one of too many; empty: there may be one."""
    if imported.host:
        held = min(imported.host)
        return f"{held} is on the CPU, and a graph would keep the value that it has now"
    if not imported.program.sizes.sizes:
        return ""
    return "its sizes change, and as many of them have graphs as may have"


def with_regions(options: Options, device: str) -> tuple[Options, list[Remark]]:
    """The options with `regions` chosen for a kind of device: Inductor on a GPU, where its compiler
    is there."""
    if options.regions != "auto":
        return options, []
    if device == "cpu":
        return dataclasses.replace(options, regions="eager"), []
    if importlib.util.find_spec("triton") is None:
        why = "regions run eager: Inductor needs the package triton on a GPU, and there is none"
        return dataclasses.replace(options, regions="eager"), [Remark("frontend", why)]
    return dataclasses.replace(options, regions="inductor"), []


# -- facts that all ranks choose by ----------------------------------------------------------------

STEP = "choose how to overlap"
OWN = frozenset(("timeout_s", "trace", "static_outputs", "calibration", "cache"))
"""Options that concern one rank, or (the calibration) are compared by what they stand for."""
DIFFER = "the ranks' graphs differ, and overlapped they do not fit together: all run serially"

FIXES = {
    "arguments": "give all ranks the same (pad what is short)",
    "options": "give all ranks the same",
    "calibrations": "give all ranks one file with the option `calibration`, or copy what "
    "`interlace calibrate` wrote on one host to the others",
    "texts": "give all ranks the same files in the option `schedules`",
    "inputs": "give all ranks the same ones (a bias, a mask), of one element type and as many "
    "dimensions",
}
"""Facts that must be the same on all ranks, with the fix where they are not."""


@dataclass(frozen=True, slots=True)
class AgreedFacts:
    """Facts that all ranks of a graph's teams share before they lower it."""

    machine: Machine
    texts: Mapping[str, str]
    """The graphs of all ranks by digest, where they differ;"""
    ranks: Mapping[str, tuple[int, ...]]
    """and the ranks of the Program that have each."""
    written: Program | None = None
    """The Program of this rank's file, with the option `schedules`."""
    kept: KeptSchedule | None = None
    """The schedule that an earlier process kept, where all ranks have it."""


def agree_on_facts(
    graph: Program,
    digests: Digests,
    groups: Mapping[str, ProcessGroup],
    options: Options,
    machine: Machine | InterlaceError,
    written: Program | InterlaceError | None = None,
    layer: Mapping[str, object] | None = None,
    key: Key | None = None,
    own: KeptSchedule | None = None,
) -> AgreedFacts:
    """Shares the ranks' facts of this graph; an error of one (as in `machine`) is raised on all.
    `layer` has the arguments of a layer that must be the same on all ranks; `own` is this rank's
    entry of a `key`, if there are such."""
    limit = limit_s(options.timeout_s, groups.values())
    teams = {team_of(group, name, limit) for name, group in groups.items()}
    if not teams:
        return AgreedFacts(_checked(machine), {}, {}, _checked(written), own)
    rank = program_rank(graph, groups)
    note: Note = {
        "step": STEP,
        "rank": rank,
        "name": graph.name,
        "hash": digests.text,
        "skeleton": digests.skeleton,
        "arguments": dict(layer or {}),
        "options": _compared(options),
        "inputs": {} if graph.name == "backward" else _inputs(graph),
        "kept": [key.name if key else "", digest(own.text) if own else ""],
        "kernels": [],
    }
    if isinstance(machine, InterlaceError):
        note["problem"] = failure(machine)["error"]
    elif isinstance(written, InterlaceError):
        note["problem"] = failure(AgreementError(str(written)))["error"]
    else:
        whole = machine.replace(kernels=True, packed_kernels=True)
        note["calibrations"] = {"calibration": f"{machine.name} ({digest(repr(whole))[:8]})"}
        note["kernels"] = [machine.kernels, machine.packed_kernels]
        note["texts"] = texts_by_graph(graph, written)
    ordered: Sequence[TeamComm] = sorted(teams, key=lambda team: team.key)
    entries = gather(note, ordered, limit)
    # A file that only one rank is to read is a difference, before it is a problem.
    _compare(graph.name, entries, "arguments", "options")
    machine, written = _checked(machine), _checked(written)
    for other, entry in sorted(entries.items()):
        if "problem" in entry:
            raise as_told(other, entry["problem"])
    _compare(graph.name, entries, "calibrations", "texts", "inputs")
    kernels, packed = (all(entry["kernels"][i] for entry in entries.values()) for i in (0, 1))
    machine = machine.replace(kernels=kernels, packed_kernels=packed)
    board, me = ordered[0].board, ordered[0].rank
    if len({entry["skeleton"] for entry in entries.values()}) == 1:
        kept = shared(entries, own, board, me, limit)
        return AgreedFacts(machine, {}, {}, written, kept)
    texts = texts_of(board, entries, me, print_program(essence(graph)), limit)
    ranks = {key: ranks_of(entries, key) for key in sorted(texts)}
    return AgreedFacts(machine, texts, ranks, written)


def _checked(fact: Fact | InterlaceError) -> Fact:
    if isinstance(fact, InterlaceError):
        raise fact
    return fact


def overlapped(
    graph: Program,
    agreed: AgreedFacts,
    options: Options,
    on_pass: Callable[[Pass, Program], object] | None = None,
) -> tuple[Program, list[Remark]]:
    """The overlapped Program of a graph, and what is to be remarked on; `on_pass` is as in
    `run_pipeline`."""
    if agreed.texts and options.overlap:
        made = {key: lower(parse(t), options, agreed.machine) for key, t in agreed.texts.items()}
        parts = [part for key, of in agreed.ranks.items() for part in for_ranks(made[key], of)]
        try:
            check(parts).raise_if_unsound()
        except SoundnessError:
            options = dataclasses.replace(options, overlap=False)
            return lower(graph, options, agreed.machine), [Remark("frontend", DIFFER)]
    return lower(graph, options, agreed.machine, on_pass=on_pass), []


def _compared(options: Options) -> dict[str, object]:
    """The options that all ranks have alike; of a folder, that there is one."""
    named = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in OWN}
    return {**named, "schedules": options.schedules and "a folder"}


def _inputs(graph: Program) -> dict[str, str]:
    """The kind of each input by its name."""
    inputs = [buffer for buffer in graph.params if buffer.kind == "input"]
    return {b.name: f"{b.dtype} of {len(b.shape)} dimensions" for b in inputs}


def _compare(name: str, entries: Mapping[int, Note], *nouns: str) -> None:
    """Raises the first difference between ranks in these facts; on all of them the same."""
    for rank, entry in sorted(entries.items()):
        for noun in nouns:
            theirs: Mapping[str, object] = entry[noun]
            other = min(entries)
            if noun == "texts":  # ranks whose graphs differ have files of their own
                other = min(r for r in entries if r == rank or entries[r][noun].keys() & theirs)
            ours: Mapping[str, object] = entries[other][noun]
            if not ours or not theirs:
                continue
            if noun == "inputs" and len(ours) == len(theirs):  # each rank has names of its own
                theirs = dict(zip(ours, theirs.values(), strict=True))
            for key in {**ours, **theirs}:
                if ours.get(key) != theirs.get(key):
                    raise AgreementError(
                        f"ranks give {name!r} different {noun}: rank {other} has "
                        f"{key}={ours.get(key)!r}, and rank {rank} {key}={theirs.get(key)!r}: "
                        f"{FIXES[noun]}"
                    )
