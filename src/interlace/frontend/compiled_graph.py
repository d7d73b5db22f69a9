"""A compiled graph: what AOTAutograd calls, with a bound Program for each signature it met.

    graph = CompiledGraph("forward", gm, setting)
    graph.prepare()                 # for the sizes it was traced with, if they are concrete
    outputs = graph([x, w])         # boxed: the list of arguments is emptied

Bound Programs are kept by signature (sizes, strides, element types, numbers); the least recently
used goes when there are more than `Options.cache_size`. They are freed with the graph (as
`torch.compiler.reset()` drops it), and when one of their process groups is destroyed. A graph may
have none: see Note [As traced] in importing/exchanges.py.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from interlace.errors import SizeError
from interlace.frontend.binding import Bound, bind, with_regions
from interlace.frontend.caches import Shelf
from interlace.frontend.calling.arguments import Imported, signature
from interlace.frontend.calling.forwards import Forwards, Saved
from interlace.frontend.dynamo import GraphOrigin
from interlace.frontend.importing.exchanges import GraphPlaces, KnownPlaces, communications
from interlace.frontend.importing.importer import import_graph
from interlace.frontend.importing.nodes import (
    comes_anywhere,
    complete,
    counted_in_storage,
    draws_random_numbers,
    location,
    propagate,
)
from interlace.frontend.importing.symbols import Symbols, pin
from interlace.frontend.teams import Teams
from interlace.ir import View, views_in
from interlace.options import Options
from interlace.runtime.calling.regions import compile_symbolic
from interlace.runtime.engine import GraphUse
from interlace.torch_private import DisableAutocast, is_any_autocast_enabled, keeps_graph
from interlace.torch_private.dynamo import boxed_nop

log = logging.getLogger(__name__)

Boxed = list[Any]
"""The arguments of a call, in a list that the callee empties."""
Run = Callable[[Boxed], Sequence[object]]

MOST_CAPTURED = 8
"""Sizes of a graph with symbols that have CUDA graphs, with the option `graph`; more run eager."""
UNCLASSED = "runs as traced: its sizes change, and no class of them has one Program"
"""Remark on a graph that communicates nothing; the reason follows."""
STAGES = "import", "cache", "agreement", "choice", "lowering", "proof", "binding"
"""Stages of a compilation, in the order in which the log has their seconds."""
INDUCTOR = "compiled by Inductor as a whole: its sizes change, and it communicates nothing"


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts that the graphs of one compilation share."""

    options: Options
    meshes: tuple[DeviceMesh, ...] = ()
    labels: tuple[str, ...] = ()
    """The user's names of the arguments."""
    state: frozenset[int] = frozenset()
    """Positions of the arguments that are parameters and buffers."""
    device: str = "cpu"
    origin: GraphOrigin | None = None
    """Where TorchDynamo met it, if that traced it."""
    forwards: Forwards = field(default_factory=Forwards, compare=False)
    places: KnownPlaces = field(default_factory=KnownPlaces, compare=False)


def recorded_signature(gm: fx.GraphModule) -> Hashable | None:
    """The signature that a graph was traced with; None where it is symbolic."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    numbers: list[object] = []
    for value in values:
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return None
        if isinstance(value, torch.Tensor):
            numbers += [*value.shape, *value.stride()]
    if any(isinstance(number, torch.SymInt) for number in numbers):
        return None
    return signature(values)


class CompiledGraph:
    """One graph of a compilation, called with boxed arguments."""

    def __init__(self, kind: str, gm: fx.GraphModule, setting: Setting) -> None:
        self._boxed_call = True  # AOTAutograd looks for it on the object itself
        self.kind = kind
        self.setting = setting
        self.graph = gm.graph
        self._gm = gm
        self._places = GraphPlaces(gm.graph, setting.places, kind)
        if kind == "backward":
            places = gm.graph.find_nodes(op="placeholder")
            setting.forwards.num_saved = sum("tangents" not in str(n.target) for n in places)
            setting.forwards.are_counted = any(communications(gm.graph))
        self._unscheduled, self._captured = "", 0
        self._import_s = 0.0
        self._single = ""
        """Why each Program of a graph with symbols is for one size alone; empty: for classes."""
        self.counted = counted_in_storage(gm.graph)
        """Positions of the arguments whose offsets in their storages the Program depends on."""
        self._run: Run | None = None
        """Callable that runs the graph without a Program; None until that is needed."""
        places = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        self._traced = None if recorded_signature(gm) is None else self._facts(places)
        if self._traced is None:
            self._single = "as_strided counts from the start of a storage" if self.counted else ""
            # Now: later torch has facts of its own about symbols, see `pin`.
            for node, value in (complete(gm) or {}).items():
                node.meta.setdefault("val", value)
            pin(gm.graph)
        self._symbols = Symbols(places)
        place = next(filter(None, (location(node).module for node in gm.graph.nodes)), "")
        name = f"a {kind} graph{f' of {place}' if place else ''}"
        self._shelf = Shelf(name, setting.options.cache_size)
        self.observer: Callable[[Run, Boxed], Sequence[object]] | None = None
        """Runs a call in place of the graph, which it is given with the arguments."""
        weakref.finalize(self, self._shelf.clear)

    def __call__(self, args: Boxed) -> Sequence[object]:
        """The graph's outputs; `args` is emptied, so that nothing lives longer than it must.

        Note [Autocast is in the graph]: the casts of the code that was traced are operators of the
        graph. Under a caller's autocast, as of a backward pass in one, they would be cast again.
        """
        if is_any_autocast_enabled():
            with DisableAutocast():
                return self(args)
        return self._call(args) if self.observer is None else self.observer(self._call, args)

    def _call(self, args: Boxed) -> Sequence[object]:
        last, backward = self._shelf.last, self.kind == "backward"
        if last is None or (self.setting.places.traced and self.unscheduled):
            return self._call_anew(args)
        (others, facts), bound, at = last
        if (others or self.counted) and self._facts(args, others) != facts:
            return self._call_anew(args)
        origin = self.setting.forwards.origin(args) if backward else None
        # A CUDA graph writes its results where freed inputs lay, whoever still refers to them.
        boxed = backward and not (self.setting.options.graph and keeps_graph())
        results = bound.run(args, at, origin, boxed, True)
        if results is None:
            return self._call_anew(args)
        if self.kind == "forward":
            self.setting.forwards.note(results)
        args.clear()
        return results

    def _call_anew(self, args: Boxed) -> Sequence[object]:
        """A call that differs from the one before in what the Program depends on: sizes, strides,
        element types or numbers. The Executor compares those of the tensors that it takes."""
        if self._run is None and self.unscheduled:
            self._shelf.clear()
            self._run = boxed_nop(self._gm, [])
        if self._run is not None:
            return self._run(args)
        found = self._for(self._facts(args), args)
        if found is None:  # it is unscheduled from now on
            return self._call_anew(args)
        self._shelf.last, (bound, symbols) = None, found
        taken, at = {*bound.imported.inputs}, bound.at(symbols)
        known = [isinstance(arg, torch.Tensor | bool | int | float) for arg in args]
        others = [place for place, is_known in enumerate(known) if is_known and place not in taken]
        facts, backward = self._facts(args, others), self.kind == "backward"
        origin = self.setting.forwards.origin(args) if backward else None
        boxed = backward and not (self.setting.options.graph and keeps_graph())
        results = bound.run(args, at, origin, boxed)
        assert results is not None
        self._shelf.last = (others, facts), bound, at
        if self.kind == "forward":
            self.setting.forwards.note(results)
        args.clear()
        return results

    @property
    def bound(self) -> list[Bound]:
        """Its bound Programs, the most recently used last."""
        return self._shelf.all()

    @property
    def unscheduled(self) -> str:
        """Why it has no Program, and what runs it instead; empty: it has."""
        return self._unscheduled or self._places.traced

    def prepare(self) -> None:
        """Binds the Program of the sizes that were traced, where they are numbers."""
        self._places.ask(self.setting.options.timeout_s)
        if self.unscheduled:
            return
        if self._traced is None and self._suits_inductor():
            inference = self.kind == "inference"
            self._run, self._unscheduled = compile_symbolic(self._gm, inference), INDUCTOR
        if self._traced is not None and self._shelf.get(self._traced) is None:
            with DisableAutocast():  # Note [Autocast is in the graph]
                self._bind(self._traced, self._imported())

    def _facts(self, args: Sequence[Any], places: Sequence[int] | None = None) -> Hashable:
        """Facts of the arguments at some places, or of all, that the Program depends on."""
        some = args if places is None else [args[place] for place in places]
        return signature(some), *[args[place].storage_offset() for place in self.counted]

    def close(self) -> None:
        """Frees its bound Programs; a later call makes them anew."""
        self._shelf.clear()

    def _suits_inductor(self) -> bool:
        """Returns True if Inductor suits a graph with symbols best: nothing is there to overlap."""
        options, device = self.setting.options, torch.device(self.setting.device)
        regions = with_regions(options, device.type)[0].regions
        return (
            regions == "inductor"
            and not options.graph
            and not any(communications(self.graph))
            and not any(map(draws_random_numbers, self.graph.nodes))
        )

    def _for(
        self, key: Hashable, args: Sequence[object]
    ) -> tuple[Bound, Mapping[str, int] | None] | None:
        """The bound Program for arguments of this signature, with what the symbols are: of a class
        of sizes, if there can be one, else of these very sizes where the graph communicates. None:
        there is to be none."""
        found = self._shelf.get(key)
        if found is not None or self._traced is not None:
            return found or self._bind(key, self._imported(args)), None
        if self.setting.options.graph and self._captured < MOST_CAPTURED:
            self._captured += 1
            return self._bind(key, self._imported(args), "CUDA graphs are for one size"), None
        found, symbols, why = None, None, self._single
        try:
            symbols = self._symbols.values(args)
            found = self._shelf.fitting(symbols)
            if found is None and not why:
                imported = self._imported(symbols=symbols)
                found = self._bind(("class", key), imported, symbols=symbols)
                why = self._single = found.executor.single
        except SizeError as error:
            why = str(error)
            if symbols is not None:  # else it is of this call
                self._single = why
        if found is None or found.executor.sizes == found.executor.sizes.alone():
            self._unscheduled = "" if any(communications(self.graph)) else UNCLASSED
        if self._unscheduled:
            log.info("%s %s: %s", self.kind, self._unscheduled, why or f"it was for {symbols}")
            return None
        return found or self._bind(key, self._imported(args), why, symbols), symbols

    def _bind(
        self,
        key: Hashable,
        given: tuple[Imported, Teams],
        why: str = "",
        symbols: Mapping[str, int] | None = None,
    ) -> Bound:
        """Binds an imported Program with the other ranks, and keeps it under this key; `why` it is
        for one size alone, if it is; `symbols` are TorchDynamo's, where there are some."""
        began, (imported, teams) = time.perf_counter(), given
        groups = teams.process_groups()
        bound = bind(self.kind, imported, groups, self.setting.options, self.setting.device)
        named = bound.executor.sizes
        bound = replace(bound, why_single=why or bound.executor.single, symbols=symbols or {})
        sites, took = bound.program.sites, time.perf_counter() - began
        stages = {"import": self._import_s, **bound.seconds}
        log.info(
            "bound %s%s: %d of %d communications overlapped, %d ops, in %.3f s (%s)%s%s",
            self.kind,
            f" where {named}" if named.sizes else "",
            sum(site.strategy != "serial" for site in sites),
            len(sites),
            len(bound.program.ops),
            took + self._import_s,
            ", ".join(f"{stage} {stages[stage]:.3f}" for stage in STAGES if stage in stages),
            ", as an earlier process kept it" if bound.is_kept else "",
            f"; for these sizes alone: {bound.why_single}" if bound.why_single else "",
        )
        self._shelf.put(key, bound, list(groups.values()))
        return bound

    def _imported(
        self, args: Sequence[object] | None = None, symbols: Mapping[str, int] | None = None
    ) -> tuple[Imported, Teams]:
        """The serial Program with its calling convention, and the teams that it names: for these
        arguments' sizes, for the class of these sizes, or for the sizes that were traced."""
        begun = time.perf_counter()
        teams, labels = Teams.of_torch(self.setting.meshes), self.setting.labels
        values = (
            None if args is None or self._facts(args) == self._traced else propagate(self._gm, args)
        )
        found = import_graph(
            self._gm,
            name=self.kind,
            teams=teams,
            labels=labels,
            values=values,
            sizes=symbols,
            given_up=self._given_up(),
        )
        found = replace(found, graph_use=self._graph_use(found))
        self._import_s = time.perf_counter() - begun
        return found, teams

    def _given_up(self) -> frozenset[int]:
        """Positions of the arguments that a backward may be the last to use: all but parameters
        and buffers, which their module holds."""
        if self.kind != "backward":
            return frozenset()
        every = frozenset(range(len(self.graph.find_nodes(op="placeholder"))))
        return every - self._saved("state")

    def _saved(self, kind: Saved) -> set[int]:
        """Positions of the arguments of a backward that forward saved and that are of this kind."""
        places = enumerate(self.graph.find_nodes(op="placeholder"))
        tensors = [i for i, node in places if isinstance(node.meta.get("val"), torch.Tensor)]
        return {i for i, saved in zip(tensors, self.setting.forwards.saved) if saved == kind}  # noqa: B905

    def _graph_use(self, imported: Imported) -> GraphUse:
        """Facts for CUDA graphs: parameters stay, and what forward saves, but for inputs."""
        forwards, state = self.setting.forwards, self.setting.state
        places, program = self.graph.find_nodes(op="placeholder"), imported.program
        anywhere = {i for i, place in enumerate(places) if comes_anywhere(place, state)}
        params = [buffer.name for buffer in program.params]
        names = {position: name for position, name in zip(imported.inputs, params)}  # noqa: B905
        backward = self.kind == "backward"
        anywhere |= self._saved("input") if backward else set()
        moving = frozenset([names[i] for i in names.keys() & anywhere])
        if self.kind != "forward":
            spent = self._saved("handed") if backward else set[int]()
            return GraphUse(moving, spent=frozenset([names[i] for i in names.keys() & spent]))
        outputs = imported.outputs[len(imported.outputs) - forwards.num_saved :]
        saved = {number: None for number in outputs if isinstance(number, int)}
        results = dict(enumerate(program.returned()))
        shown = {v.buffer for n in results.keys() - saved for v in views_in(results[n])}
        kinds: dict[int, Saved] = {}
        for number in saved:
            if isinstance(view := results[number], View):
                mine: Saved = "shown" if view.buffer in shown else "handed"
                given: Saved = "input" if view.buffer in moving else "state"
                kinds[number] = given if view.buffer in params else mine
        forwards.saved = [*kinds.values()]
        made = [kind in ("shown", "handed") for kind in forwards.saved]
        forwards.marks = slice(made.index(True), made.index(True) + 1) if any(made) else slice(None)
        handed = [number for number, kind in kinds.items() if kind == "handed"]
        return GraphUse(moving, frozenset(saved), frozenset(handed))
