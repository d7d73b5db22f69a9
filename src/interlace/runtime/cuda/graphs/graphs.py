"""A Program captured in CUDA graphs, one for even and one for odd runs, which are replayed in turn.

A graph has its addresses and the values of its words in it, so each of the two has its own words
and copies of the slots, and takes back at its end what was raised.

Note [Words in graphs]
    Words of a graph are 0 before its run, which waits until they reach the values that the Program
    says. The next run, of the other graph, begins by writing 0 to them again, and then tells the
    peers that the run has ended. A peer writes them for the run after next only once it has heard
    that (in its words `ended`, which it clears), so no word is written while its last value is
    still awaited. All of this stands on a stream aside. Before the first run, of the even graph,
    its words `ended` say 1; those of the odd one are told by the first run. A word that a peer
    raises further than the Program waits for is awaited at the end of the graph: it would be taken
    for what the run after next awaits.

Note [Addresses in graphs]
    A pair of graphs serves a set of Parameters (and of what forward saved), which it reads where
    they lie: their addresses are the key. All other tensors (`moved`) are copied to a place of the
    pair's. The frontend says which these are (`GraphUse`); what loses its memory again and again
    is one of them from then on.

    A pair whose lent results are still referenced is not replayed: captured.py, Note [Where results
    lie]. What forward saves for backward is as a rule referenced because the backward is still to
    come (micro-batches, blocks that share code): a further pair is captured. Other results, such as
    an output that a caller keeps until it has the next one, are copied from then on.

    The graphs of a team share one pool, whichever Executors they are of: it has temporaries alone,
    and the runs of a team have an order on the host and on the device. Runs of different teams have
    none, and ranks that gave them one would wait for each other; an Executor without teams has a
    pool of its own. Capturing runs nothing, so no peer need do the same at that time. A pair that
    goes is reset once others have been captured, so that the pool stays.

Note [NCCL and addresses]
    With NCCL_GRAPH_REGISTER, its default, NCCL maps what a captured collective reads into the
    peers, and goes on reading it when the address has become another allocation's
    (github.com/fzyzcjy/torch_memory_saver/issues/88); with multicast all ranks must do it together.
    So it is turned off. Where the user set it, what an op of a backend uses is bound to its
    allocation, as what Put and Get use.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import Use
from interlace.comm.cuda.driver import uncollected
from interlace.comm.cuda.nccl import leave_unregistered
from interlace.comm.cuda.words import CudaSpace
from interlace.errors import ExecutorError
from interlace.runtime.calling.calls import Outputs, Thunk
from interlace.runtime.cuda.binder import Binding
from interlace.runtime.cuda.graphs.captured import GraphPair, launcher
from interlace.runtime.cuda.graphs.warm_up import capture_thread
from interlace.runtime.cuda.lanes import Lane, Words
from interlace.runtime.cuda.sharing import reaches
from interlace.runtime.engine import EngineContext
from interlace.runtime.prepare.plan import own_backends
from interlace.runtime.values import new_storage

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine


class GraphWords:
    """The words of one graph on one team: a `CudaSpace` whose base never moves."""

    def __init__(self, space: CudaSpace, signals: Sequence[str], first: bool) -> None:
        self.side, self.uses, self.span, self.base = space.side, space.uses, space.span, 0
        self.own, self.theirs, self.value = space.own, space.theirs, space.value
        self.last = space.last
        self._space = space
        size, me = self.side.size, self.side.me
        others = [member for member in range(size) if member != me]
        self.heard = [space.own("ended", member) for member in others] if self.uses else []
        self.told = space.theirs("ended", others) if self.uses else []
        self.raised = [space.own(name, member) for name in signals for member in range(size)]
        self.gotten = space.gotten
        for word in self.heard:
            self.side.driver.fill(word, int(first), 1)

    def begin(self) -> int:
        """Values count from 0 in every run."""
        return 0

    def local(self, count: int) -> int:
        """Words of this rank's own, which a run raises."""
        address = self._space.local(count)
        self.raised += [address + 4 * i for i in range(count)]
        return address


class GraphBinding(Binding):
    other: Mapping[str, GraphWords]
    """The words of the other graph, whose run was the last."""

    def __init__(
        self,
        engine: CudaEngine,
        spaces: Mapping[str, GraphWords],
        lanes: dict[str, Lane],
    ) -> None:
        self._taken, self._lanes = engine.driver.event(), lanes
        super().__init__(engine.context, engine.driver, spaces, engine)
        self.steps = [self._hand_over, *self.steps, *self.late()]

    def side(self, name: str) -> Lane:
        """Streams of captures: all graphs of their memory have the same."""
        if name not in self._lanes:
            self._lanes[name] = super().side(name)
        return self._lanes[name]

    def late(self) -> Iterator[Thunk]:
        """Waits for the last value of each word, where the ops await only one before it."""
        for team, signals in reaches(self.context.plan, "expects").items():
            words = self.spaces[team]
            for signal, values in signals.items():
                for member, value in enumerate(values):
                    last = words.last(signal, member) if value else 0
                    if last > value:
                        part = "wait", (words.own(signal, member),), lambda last=last: last
                        yield Words(self.driver, self.aside, (part,))

    def take(self, team: str, lane: Lane) -> Thunk | None:
        """Where the hand-over stands on another stream, that is waited for."""
        if lane is self.aside:
            return None
        return lambda: self.driver.wait_event(lane.handle, self._taken)

    def _hand_over(self) -> None:
        """Issues words before the ops: Note [Words in graphs]. Copies to peers wait for the peers'
        words, and not for many words of the other graph, of which each takes about 1 us."""
        aside, self.runs = self.aside.handle, 1
        mine, others = self.spaces.values(), self.other.values()
        heard = [word for words in mine for word in words.heard]
        taken = [("wait", word, 1) for word in heard] + [("write", word, 0) for word in heard]
        ended = [("write", word, 0) for words in others for word in words.raised]
        ended += [("write", word, 1) for words in others for word in words.told]
        apart = taken and len(ended) > MANY
        for number, todo in enumerate((taken, ended) if apart else ([*taken, *ended],)):
            batch = self.driver.batch(*((kind, (word,)) for kind, word, _ in todo))
            batch.run(aside, *(value for _, _, value in todo))
            if not number:
                self.driver.record(aside, self._taken)

    def close(self) -> None:
        super().close()
        self.driver.destroy_event(self._taken)


MANY = 16
"""Words that take longer to write than one more node of a graph."""
MOST = 256
"""Sets of addresses that have pairs at a time."""
FEW, RECENT = 3, 100
"""Times, in so many runs, that pairs are captured anew as memory that they read has gone, before
the tensors that lose theirs are copied."""
Key = tuple[int, ...]
"""The addresses of the tensors that a pair reads where they lie; where some move, behind the number
of all."""


class GraphMemory:
    """The pool of graphs, whose runs follow one another, and the streams that they are captured on:
    torch gives memory back to the stream that had it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.lanes: dict[str, Lane] = {}
        self._graphs = weakref.WeakSet[torch.cuda.CUDAGraph]()
        self._pool: Any = None

    def begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Begins a capture. Torch refuses a pool whose graphs are all gone."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        # NCCL's watchdog asks about events meanwhile.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        self._graphs.add(graph)

    def end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture. A pool in which one failed takes no other."""
        try:
            graph.capture_end()
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()
            raise

    def reset(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graphs.discard(graph)
        graph.reset()


@cache
def _memory_of(device: torch.device, team: object) -> GraphMemory:
    return GraphMemory(device)


def graph_memory(context: EngineContext) -> GraphMemory:
    """The memory of an Executor's graphs: Note [Addresses in graphs]."""
    teams = [team.key for team in context.resources.teams.values()]
    return _memory_of(context.device, min(teams)) if teams else GraphMemory(context.device)


class Graphs:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine, self._context = engine, engine.context
        context, plan = engine.context, engine.context.plan
        self.memory = memory = graph_memory(context)
        self.bindings: list[GraphBinding] = []
        for number, spaces in enumerate(context.resources.graph_spaces):
            words = {
                team: GraphWords(space, plan.demands[team].signals, first=number == 0)
                for team, space in spaces.items()
            }
            self.bindings.append(GraphBinding(engine, words, memory.lanes))
        for binding, other in zip(self.bindings, reversed(self.bindings), strict=True):
            binding.other = other.spaces
        self._entry = engine.driver.event()
        self._launcher = launcher(plan.program, engine.driver)
        ops = plan.program.ops
        bound = [op for op in ops if op.one_sided]
        if own_backends(plan) and not leave_unregistered():
            bound += [op for op in ops if (by := op.ordering()).meets is not None or by.messages]
        accesses = [access for op in bound for access in (*op.reads(), *op.writes())]
        self.crossing = {access.view.buffer for access in accesses}
        self.changed = {access.view.buffer for op in ops for access in op.writes()}
        moving = context.graph_use.moving
        self.moved = {i for i, name in enumerate(context.inputs.names) if name in moving}
        """Numbers of the inputs, and given outputs behind them, that come at any address."""
        every = frozenset(range(len(plan.program.returned())))
        self._saved = every if context.options.static_outputs else context.graph_use.saved
        self.lent = every
        self._frees = not {op.ordering().frees for op in ops}.isdisjoint(context.inputs.names)
        self.pairs: dict[Key, list[GraphPair]] = {}
        self._gone: list[int] = []
        """The recent runs at which memory that pairs read had gone."""
        self._runs = 0

    @property
    def spaces(self) -> Mapping[str, Any]:
        return self.bindings[(self._runs - 1) & 1].spaces

    def turn(self) -> int:
        """Which graph of a pair the next run is, that begins now."""
        self._runs += 1
        return self._runs - 1 & 1

    def find(
        self, given: Sequence[torch.Tensor], at: Key, stream: int, boxed: bool = False
    ) -> GraphPair:
        """Graphs for these tensors, captured if need be: Note [Addresses in graphs]. `boxed` runs
        have pairs of their own where the Program frees inputs."""
        boxed = boxed and self._frees
        key = self._key(at, boxed)
        for pair in self.pairs.get(key, ()):
            if pair.fits(given) and not pair.held(stream):
                return pair
        if not all(tensor.is_cuda for tensor in given):
            raise ExecutorError(
                f"{self._context.plan.program.name}: a CUDA graph cannot read a tensor of the CPU: "
                "give it on the GPU, or leave out graph=True"
            )
        self._engine.synchronize()  # bounded; the capture would wait, too
        old = self._outdated(at, given, stream, boxed)
        for pair in old:
            pair.let_go()
        try:
            pair = self._capture(given, boxed)
            self.pairs.setdefault(self._key(at, boxed), []).append(pair)
        finally:
            self._reset(old)
        return pair

    def _key(self, at: Key, boxed: bool) -> Key:
        """The addresses of what stays, and how many tensors there are: outputs may be given too."""
        if not self.moved:
            return (*at, 1) if boxed else at
        still = (address for i, address in enumerate(at) if i not in self.moved)
        return (2 * len(at) + boxed, *still)

    def _outdated(
        self, at: Key, given: Sequence[torch.Tensor], stream: int, boxed: bool
    ) -> list[GraphPair]:
        """Takes out the pairs that are not used again, as they were captured or at all."""
        key = self._key(at, boxed)
        pairs = self.pairs.pop(key, [])
        busy = frozenset[int]().union(*(pair.held(stream) for pair in pairs))
        loose = busy - self._saved
        self.lent -= loose
        kept = [pair for pair in pairs if pair.fits(given) and not loose]
        old = [pair for pair in pairs if pair not in kept]
        if kept:
            self.pairs[key] = kept
            return old
        gone = {each: set[int]().union(*(p.gone() for p in of)) for each, of in self.pairs.items()}
        over = [each for each, numbers in gone.items() if numbers]
        if over:
            self._gone = [run for run in self._gone if run > self._runs - RECENT] + [self._runs]
            if len(self._gone) > FEW:
                self.moved |= set[int]().union(*gone.values())
                self._gone.clear()
        if len(self.pairs) >= MOST or self._key(at, boxed) != key:
            over = [*self.pairs]
        return old + [pair for each in over for pair in self.pairs.pop(each)]

    def _capture(self, given: Sequence[torch.Tensor], boxed: bool) -> GraphPair:
        """A pair of graphs that is captured with these tensors."""
        driver, sets = self._engine.driver, (self.moved, self.crossing, self.lent)
        pair = GraphPair(self._context, driver, given, *sets, boxed)
        try:
            record = functools.partial(self._record, pair, given)
            capture_thread(self._context.device).run(record)
        except BaseException:
            with contextlib.suppress(Exception):
                self._reset([pair])  # NCCL would wait for it for as long as the error is kept
            raise
        return pair

    def _record(self, pair: GraphPair, given: Sequence[torch.Tensor]) -> None:
        """Captures both graphs of a pair on the graphs' stream. The places of what moves and the
        arena are the pool's while they are captured, as all temporaries."""
        values, device = self._context.values, self._context.device
        names = (*self._context.inputs.names, *self._context.outputs.names)
        named = dict(zip(names, given, strict=False))
        try:
            for turn in range(len(self.bindings)):
                self._engine.check()  # in a capture it would be told badly
                graph = torch.cuda.CUDAGraph()
                pair.graphs.append(graph)
                with uncollected(), torch.no_grad(), torch.cuda.stream(self.memory.stream):
                    self.memory.begin(graph)
                    try:
                        if not turn:
                            named |= pair.make_places(given)
                            values.move(new_storage(values.nbytes, device))
                        results = self.issue(turn, named, pair.homes)
                    finally:
                        self.memory.end(graph)
                pair.take_results(results, self.changed)
                del results  # so that its memory is the pool's again
                pair.launch.append(self._launcher(graph))
        finally:
            values.move(new_storage(0, device))

    def issue(
        self, turn: int, named: Mapping[str, torch.Tensor], homes: Mapping[str, torch.Tensor]
    ) -> Outputs:
        """Issues the ops into the capture; gives the results, which are brought to their homes."""
        context, values, binding = self._context, self._context.values, self.bindings[turn]
        names = [name for name in context.outputs.names if name not in named]
        outputs = dict(zip(names, context.outputs.new() if names else (), strict=True))
        first = {n: home for n, home in homes.items() if n in outputs or n in values.allocated}
        try:
            given = outputs | first | dict(named)
            values.begin(given, dict.fromkeys(context.plan.takes, Use(turn, 0)))
            values.homes = {name: homes[name] for name in homes.keys() - first.keys()}
            binding.issue(int(self.memory.stream.cuda_stream), self._entry)
            return context.results()
        except BaseException:  # else the capture's end would hide it: streams not joined
            with contextlib.suppress(Exception):
                binding.join()
            raise
        finally:
            values.homes = {}
            values.end()

    def _reset(self, pairs: Sequence[GraphPair]) -> None:
        for pair in pairs:
            pair.let_go()
            for graph in pair.graphs:
                self.memory.reset(graph)

    def drop(self) -> None:
        """Lets go of the graphs; the next run would capture them anew."""
        dropped, self.pairs = self.pairs, {}
        for pairs in dropped.values():
            self._reset(pairs)

    def close(self) -> None:
        self.drop()
        self._engine.driver.destroy_event(self._entry)
        for binding in self.bindings:
            binding.close()
