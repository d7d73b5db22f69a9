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
    One pair of graphs serves a set of Parameters: the tensors lie where it was captured with them,
    or (`moved`) are copied to a place of the pair's. Which of them move is seen when others come.
    Where the memory that all of these had is nobody's any more, or they have a quarter of the bytes
    at most, the pair is captured anew, and they are copied from then on. Otherwise it is another
    set of Parameters (blocks share the code, say), or of saved tensors: a further pair.

    A pair whose results are still referenced is not replayed: captured.py, Note [Where results
    lie]. Where these are the smaller part, such as an output that a caller keeps until it has the
    next one, the pair is captured anew and copies them from then on. Else a further pair is
    captured, as for a forward that comes before the backward of the last one. Beyond `MOST` pairs
    there is one that copies all that lies elsewhere than others have it, and all results.

    The graphs of a team share one pool, whichever Executors they are of: it has temporaries alone,
    and the runs of a team have an order on the host and on the device. Runs of different teams have
    none, and ranks that gave them one would wait for each other; an Executor without teams has a
    pool of its own. Capturing runs nothing, so no peer need do the same at that time.

Note [NCCL and addresses]
    With NCCL_GRAPH_REGISTER, its default, NCCL maps what a captured collective reads into the
    peers, and goes on reading it when the address has become another allocation's
    (github.com/fzyzcjy/torch_memory_saver/issues/88); with multicast all ranks must do it together.
    So it is turned off, unless the user set it, and a tensor that an op of a backend uses counts
    as moved also when its storage is gone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import Use
from interlace.comm.cuda.driver import uncollected
from interlace.comm.cuda.nccl import leave_unregistered
from interlace.comm.cuda.words import CudaSpace
from interlace.errors import ExecutorError
from interlace.ir import views_in
from interlace.runtime.calling.calls import Outputs, Thunk
from interlace.runtime.cuda.binder import Binding
from interlace.runtime.cuda.graphs.captured import GraphPair, Layout, Touched, launcher, layouts_of
from interlace.runtime.cuda.graphs.warm_up import capture_thread
from interlace.runtime.cuda.lanes import Lane, Words
from interlace.runtime.cuda.sharing import reaches
from interlace.runtime.engine import EngineContext
from interlace.runtime.prepare.plan import own_backends

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
MOST, FEW = 64, 4
"""Pairs of an Executor that copy no results, at most; the part of a run's bytes that is copied
rather than that there is a further pair."""
EVERY = range(1 << 30)
"""Numbers of all results."""


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


Key = tuple[int, ...]


class Graphs:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine, self._context = engine, engine.context
        demands = self._context.plan.demands
        self.memory = memory = graph_memory(self._context)
        self.bindings: list[GraphBinding] = []
        for number, spaces in enumerate(self._context.resources.graph_spaces):
            words = {
                team: GraphWords(space, demands[team].signals, first=number == 0)
                for team, space in spaces.items()
            }
            self.bindings.append(GraphBinding(engine, words, memory.lanes))
        for binding, other in zip(self.bindings, reversed(self.bindings), strict=True):
            binding.other = other.spaces
        self._entry = engine.driver.event()
        self._launcher = launcher(self._context.plan.program, engine.driver)
        self.pairs: list[GraphPair] = []
        self._layouts: list[Layout] | None = None
        """Results that operators make, once a graph was captured."""
        if own_backends(self._context.plan):
            leave_unregistered()
        ops = self._context.plan.program.ops
        between = [op for op in ops if (by := op.ordering()).meets is not None or by.messages]
        copies = [op for op in ops if op.one_sided]
        self.bound, self.crossing = (
            {access.view.buffer for op in some for access in (*op.reads(), *op.writes())}
            for some in (between, copies)
        )
        self.changed = {access.view.buffer for op in ops for access in op.writes()}
        self.crossing -= {*self._context.values.registered}  # which are kept
        returned = self._context.plan.program.returned()
        made = {view.buffer for arg in returned for view in views_in(arg)}
        self._made = made & self._context.values.allocated.keys()
        """Buffers of results that the Program allocates."""
        self._runs = 0

    @property
    def spaces(self) -> Mapping[str, Any]:
        return self.bindings[(self._runs - 1) & 1].spaces

    def turn(self) -> int:
        """Which graph of a pair the next run is, that begins now."""
        self._runs += 1
        return self._runs - 1 & 1

    def find(
        self, given: Sequence[torch.Tensor], num_inputs: int, at: Key, stream: int
    ) -> GraphPair:
        """Graphs for these tensors, captured if need be: Note [Addresses in graphs]."""
        busy: GraphPair | None = None
        for pair in self.pairs:
            if pair.fits(at, given):
                if not (held := pair.held(stream)):
                    return pair
                busy = pair
                if not pair.much(held):
                    break
        if not all(tensor.is_cuda for tensor in given):
            raise ExecutorError(
                f"{self._context.plan.program.name}: a CUDA graph cannot read a tensor of the CPU: "
                "give it on the GPU, or leave out graph=True"
            )
        alike = [pair for pair in self.pairs if len(pair.addresses) == len(at)]
        moved, replaced = frozenset[int](), None
        copied: Collection[int] = frozenset()
        if busy is not None:
            moved, copied, held = busy.moved, busy.copied, busy.held(stream)
            if not busy.much(held) and not self._context.options.static_outputs:
                copied, replaced = frozenset((*copied, *held)), busy
        elif alike:
            near = min(alike, key=lambda pair: _nbytes(pair.off(at), given))
            off, free = near.off(at), not near.held(stream)
            few = free and FEW * _nbytes(off, given) <= _nbytes(range(len(given)), given)
            if few or not any(map(near.lives, off)):
                moved, copied, replaced = near.moved | off, near.copied, near if free else None
        if replaced is None and len(self.pairs) >= MOST:
            replaced = next((pair for pair in alike if pair.copied is EVERY), None)
            others = [replaced] if replaced is not None else alike
            moved = frozenset[int]().union(*(pair.moved | pair.off(at) for pair in others))
            copied = EVERY
        if replaced is not None:
            self._engine.synchronize()
            self.pairs.remove(replaced)
            replaced.let_go()
        try:
            self.pairs.append(self._capture(given, num_inputs, moved, copied))
        finally:
            if replaced is not None:  # only now, so that the pool stays
                self._reset(replaced)
        return self.pairs[-1]

    def _capture(
        self,
        given: Sequence[torch.Tensor],
        num_inputs: int,
        moved: frozenset[int],
        copied: Collection[int],
    ) -> GraphPair:
        """Captures a pair of graphs, in which the `moved` tensors have places of their own."""
        outputs = self._context.outputs.names
        names = (*self._context.inputs.names, *outputs)[: len(given)]
        touched = Touched(
            *(
                frozenset(i for i, name in enumerate(names) if name in buffers)
                for buffers in (self.changed, self.bound, self.crossing)
            )
        )
        self._engine.synchronize()
        pair = GraphPair(given, num_inputs, self._engine.driver, touched, moved, copied)
        lasting = self._lasting(() if len(given) > num_inputs else outputs)
        named = lasting | dict(zip(names, pair.tensors(given), strict=True))
        try:
            record = functools.partial(self._record, pair, named, pair.tensors(given), lasting)
            capture_thread(self._context.device).run(record)
        except BaseException:
            with contextlib.suppress(Exception):
                self._reset(pair)  # NCCL would wait for them for as long as the error is kept
            raise
        return pair

    def _record(
        self,
        pair: GraphPair,
        named: Mapping[str, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        lasting: Mapping[str, torch.Tensor],
    ) -> None:
        """Captures both graphs of a pair; the first graph of all twice, if it shows that operators
        make results, which need memory outside of the pool."""
        held = [held.tensor for held in self._context.values.registered.values()]
        facts = tensors, held, [*lasting.values()]
        if self._layouts is not None:
            pair.make(self._layouts)
        for turn in range(len(self.bindings)):
            results = self._captured(pair, turn, named)
            if self._layouts is None:
                self._layouts = layouts_of(results, *facts)
                pair.make(self._layouts)
                if pair.own:
                    del results
                    results = self._captured(pair, turn, named)
                    self.memory.reset(pair.graphs.pop(0))
            pair.take_results(results, *facts)
            pair.launch.append(self._launcher(pair.graphs[turn]))

    def _captured(self, pair: GraphPair, turn: int, named: Mapping[str, torch.Tensor]) -> Outputs:
        """The results of the ops, which are captured on the graphs' stream."""
        self._engine.check()  # in a capture it would be told badly
        graph = torch.cuda.CUDAGraph()
        pair.graphs.append(graph)
        with uncollected(), torch.no_grad(), torch.cuda.stream(self.memory.stream):
            self.memory.begin(graph)
            try:
                results = self.issue(turn, named)
                pair.bring(results)
                return results
            finally:
                graph.capture_end()

    def issue(self, turn: int, named: Mapping[str, torch.Tensor]) -> Outputs:
        """Issues the ops into the capture; gives the results."""
        values, binding = self._context.values, self.bindings[turn]
        try:
            values.begin(named, dict.fromkeys(self._context.plan.takes, Use(turn, 0)))
            binding.issue(int(self.memory.stream.cuda_stream), self._entry)
            return self._context.results()
        except BaseException:  # else the capture's end would hide it: streams not joined
            with contextlib.suppress(Exception):
                binding.join()
            raise
        finally:
            values.end()

    def _lasting(self, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Memory of a pair for what the Program allocates for results, and for the `outputs`."""
        with torch.inference_mode(False):
            made = {name: self._context.values.allocated[name]() for name in self._made}
            new = self._context.outputs.new() if outputs else ()
            return made | dict(zip(outputs, new, strict=True))

    def _reset(self, pair: GraphPair) -> None:
        pair.let_go()
        for graph in pair.graphs:
            self.memory.reset(graph)

    def drop(self) -> None:
        """Lets go of the graphs; the next run would capture them anew."""
        dropped, self.pairs = self.pairs, []
        for pair in dropped:
            self._reset(pair)

    def close(self) -> None:
        self.drop()
        self._engine.driver.destroy_event(self._entry)
        for binding in self.bindings:
            binding.close()


def _nbytes(numbers: Collection[int], tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensors[i].nbytes for i in numbers)
