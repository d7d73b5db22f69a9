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
    An allocator gives a caller the same few addresses again and again, so each set of addresses
    gets a pair of graphs of its own, up to `MOST` (more of short Programs: layers of one shape
    share theirs), and nothing is copied. What comes at others goes
    through one more pair, in which every tensor that has moved so far has a place that it is copied
    through; such addresses get graphs of their own when they come again and others have not been
    used for `STALE` runs. All graphs of the even runs use the same words, slots and memory, as do
    those of the odd ones. Capturing runs nothing, so no peer need do the same at that time.

    A pair whose copies to peers are bound to memory that has been freed serves nobody again, and
    makes room at once: captured.py, Note [Copies and allocations]. A pair that goes is reset once
    others have been captured in its memory: a capture without others waits for the whole device.

    With `static_outputs` a pair keeps memory for its results. Where that is `MUCH`, and few bytes
    lie elsewhere than one of `MOST` pairs has them, a pair that copies these takes the place of all
    that it serves; there are at most `MOST` of those as well.

Note [NCCL and addresses]
    With NCCL_GRAPH_REGISTER, its default, NCCL maps what a captured collective reads into the
    peers, and goes on reading it when the address has become another allocation's
    (github.com/fzyzcjy/torch_memory_saver/issues/88); with multicast all ranks must do it together.
    So it is turned off, unless the user set it, and Programs with ops of a backend have the one
    pair only, in which a tensor that such an op uses counts as moved also when its storage is
    gone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import Use
from interlace.comm.cuda.driver import Driver, uncollected
from interlace.comm.cuda.nccl import leave_unregistered
from interlace.comm.cuda.words import CudaSpace
from interlace.errors import ExecutorError
from interlace.ir import View
from interlace.runtime.calling.calls import Outputs, Thunk
from interlace.runtime.cuda.binder import Binding
from interlace.runtime.cuda.graphs.captured import GraphPair, launcher
from interlace.runtime.cuda.graphs.warm_up import capture_thread
from interlace.runtime.cuda.lanes import Lane, Words
from interlace.runtime.cuda.sharing import reaches
from interlace.runtime.engine import EngineContext
from interlace.runtime.prepare.plan import own_backends
from interlace.runtime.values import whole

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
        context: EngineContext,
        driver: Driver,
        spaces: Mapping[str, GraphWords],
        engine: CudaEngine,
    ) -> None:
        self._taken = driver.event()
        super().__init__(context, driver, spaces, engine)
        self.steps = [self._hand_over, *self.steps, *self.late()]

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
MOST, MOST_OPS = 8, 1024
"""Pairs of graphs of a Program: 8, or as many as have so many ops together."""
MUCH, FEW = 64 << 20, 4
"""Bytes of a graph's own results from which on few are copied in their stead: a quarter at most."""
STALE = 1000
"""Runs after which graphs that were not used make room for others."""
SEEN = 64

Key = tuple[int, ...]


class Graphs:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine, self._context = engine, engine.context
        demands = self._context.plan.demands
        self.bindings: list[GraphBinding] = []
        for number, spaces in enumerate(self._context.resources.graph_spaces):
            words = {
                team: GraphWords(space, demands[team].signals, first=number == 0)
                for team, space in spaces.items()
            }
            self.bindings.append(GraphBinding(self._context, engine.driver, words, engine))
        for binding, other in zip(self.bindings, reversed(self.bindings), strict=True):
            binding.other = other.spaces
        self._entry = engine.driver.event()
        self._launcher = launcher(self._context.plan.program, engine.driver)
        self._stream = torch.cuda.Stream(self._context.device)
        self.at: dict[Key, GraphPair] = {}
        """Pairs for tensors at these addresses, with nothing to copy."""
        self.near: list[GraphPair] = []
        """Pairs for tensors of which few come at any address, and are copied."""
        self.through: dict[int, GraphPair] = {}
        """Pairs for all other addresses, by the number of tensors."""
        self._retired: list[GraphPair] = []
        """Pairs that serve nobody, kept until others are captured in their memory."""
        self.seen: dict[Key, None] = {}
        self.single = bool(own_backends(self._context.plan))
        """True if there is only the pair for all addresses: Note [NCCL and addresses]."""
        if self.single:
            leave_unregistered()
        ops = self._context.plan.program.ops
        between = [op for op in ops if (by := op.ordering()).meets is not None or by.messages]
        self.bound = {
            access.view.buffer for op in between for access in (*op.reads(), *op.writes())
        }
        """Buffers that a backend may have mapped into the peers."""
        copies = [op for op in ops if op.one_sided]
        reached = {access.view.buffer for op in copies for access in (*op.reads(), *op.writes())}
        self.crossing = reached
        """Buffers that Put and Get read or write: captured.py, Note [Copies and allocations]."""
        self.changed = {access.view.buffer for op in ops for access in op.writes()}
        self.made: dict[int, dict[str, torch.Tensor]] = {}
        """Memory that the graphs of a turn return, where the caller gives none."""
        self.results = () if self.single else self._results()
        """The buffers of the results, where all of them are the Program's own: each run is given
        new tensors for these, behind its inputs, and nothing is copied."""
        self._makers = [self._context.values.allocated[name] for name in self.results]
        self._runs = 0

    def _results(self) -> tuple[str, ...]:
        context, buffers = self._context, self._context.plan.buffers
        args = context.plan.program.returned()
        known = context.values.allocated
        views = [arg for arg in args if isinstance(arg, View) and arg.buffer in known]
        whole_ones = {v.buffer for v in views if context.values.box(v) == whole(buffers[v.buffer])}
        if context.options.static_outputs or context.outputs.names or len(whole_ones) < len(args):
            return ()
        return tuple([view.buffer for view in views])

    def new(self) -> list[torch.Tensor]:
        """New tensors for the `results`."""
        return [make() for make in self._makers]

    @property
    def spaces(self) -> Mapping[str, Any]:
        return self.bindings[(self._runs - 1) & 1].spaces

    def turn(self, found: GraphPair) -> int:
        """Which of a pair the next run is, that begins now."""
        self._runs = found.used = self._runs + 1
        return self._runs - 1 & 1

    def find(self, given: Sequence[torch.Tensor], num_inputs: int) -> GraphPair:
        """Graphs for these tensors, captured if need be: Note [Addresses in graphs]."""
        key = tuple([tensor.data_ptr() for tensor in given])
        if (known := self.at.get(key)) is not None:
            if not known.replaced:
                return known
            self._retire(self.at.pop(key))
        count = len(key)
        through = self.through.get(count)
        off = set[int]() if through is None else through.off(key)
        if through is not None and self.single and not off and through.takes(given):
            return through
        if not all(tensor.is_cuda for tensor in given):
            raise ExecutorError(
                f"{self._context.plan.program.name}: a CUDA graph cannot read a tensor of the CPU: "
                "give it on the GPU, or leave out graph=True"
            )
        if not self.single:
            near = next((pair for pair in self.near if pair.fits(key)), None)
            if near is not None:
                return near
            oldest = min(self.at, key=lambda at: self.at[at].used, default=key)
            full = len(self.at) >= max(MOST, MOST_OPS // len(self._context.plan.program.ops))
            if full and self.at[oldest].replaced:
                self._retire(self.at.pop(oldest))
                full = False
            if full and (made := self._bring_near(key, given, num_inputs)) is not None:
                return made
            if full and key in self.seen and self._runs - self.at[oldest].used >= STALE:
                self._retire(self.at.pop(oldest))
                full = False
            if not full:
                self.seen.pop(key, None)
                self.at[key] = self._capture(given, num_inputs, frozenset())
                return self.at[key]
            self.seen[key] = None
            if len(self.seen) > SEEN:
                del self.seen[next(iter(self.seen))]
        if through is not None and not off:
            return through
        moved = {i for at in self.at if len(at) == count for i in range(count) if at[i] != key[i]}
        if through is not None:
            moved |= through.moved | off
            self._retire(self.through.pop(count))
        self.through[count] = self._capture(given, num_inputs, frozenset(moved))
        return self.through[count]

    def _bring_near(
        self, key: Key, given: Sequence[torch.Tensor], num_inputs: int
    ) -> GraphPair | None:
        """Graphs that copy the few bytes that lie elsewhere than earlier ones, with memory of their
        own, have them; these take the place of all that they serve."""
        if len(self.near) >= MOST:
            oldest = min(self.near, key=lambda pair: pair.used)
            if not oldest.replaced:
                return None
            self.near.remove(oldest)
            self._retire(oldest)
        found: list[tuple[int, frozenset[int]]] = []
        for pair in (*self.near, *self.at.values()):
            if len(pair.addresses) == len(key) and pair.own >= MUCH:
                moved = pair.moved | pair.off(key)
                nbytes = sum(given[i].nbytes for i in moved)
                if nbytes * FEW <= pair.own:
                    found.append((nbytes, moved))
        if not found:
            return None
        moved = min(found, key=lambda each: each[0])[1]
        made = self._capture(given, num_inputs, moved)
        pairs = [*self.near, *self.at.values()]
        served = [pair for pair in pairs if made.fits(pair.addresses)]
        self._engine.synchronize()
        self.at = {at: pair for at, pair in self.at.items() if pair not in served}
        self.near = [*(pair for pair in self.near if pair not in served), made]
        for pair in served:
            pair.reset()
        return made

    def _retire(self, pair: GraphPair) -> None:
        """Lets go of a pair of graphs, once their runs have ended, on whatever stream. They are
        reset when others have been captured in their memory: `_capturing`."""
        self._engine.synchronize()
        pair.retire()
        self._retired.append(pair)

    def _capture(
        self, given: Sequence[torch.Tensor], num_inputs: int, moved: frozenset[int]
    ) -> GraphPair:
        """Captures a pair of graphs, in which the `moved` tensors have places of their own."""
        static = self._context.options.static_outputs
        outputs = self._context.outputs.names or self.results
        names = (*self._context.inputs.names, *outputs)[: len(given)]
        changed, bound, crossing = (
            frozenset(i for i, name in enumerate(names) if name in buffers)
            for buffers in (self.changed, self.bound, self.crossing)
        )
        others = [*self.at.values(), *self.near, *self.through.values(), *self._retired]
        made = GraphPair(given, num_inputs, self._engine.driver, moved, changed, bound, crossing)
        tensors = made.tensors(given)
        self._engine.synchronize()  # the first capture waits for the device: here it is bounded
        try:
            for turn in range(len(self.bindings)):
                graph = torch.cuda.CUDAGraph()
                made.graphs.append(graph)
                named = self._memory(turn, () if len(given) > num_inputs else outputs)
                named |= zip(names, tensors, strict=True)
                self._engine.check()  # in a capture it would be told badly
                pool = others[0].graphs[turn].pool() if others else None
                capture = functools.partial(self._captured, graph, pool, turn, named)
                results = capture_thread(self._context.device).run(capture)
                made.launch.append(self._launcher(graph))
                made.keep(results, tensors, (), static)
        except BaseException:
            with contextlib.suppress(Exception):
                made.reset()  # NCCL would wait for them for as long as the error is kept
            raise
        for pair in self._retired:
            pair.reset()
        self._retired.clear()
        return made

    def _captured(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: Any,
        turn: int,
        named: Mapping[str, torch.Tensor],
    ) -> Outputs:
        """The results of the ops, which are captured."""
        with uncollected(), torch.no_grad(), self._capturing(graph, pool):
            return self.issue(turn, named)

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """A capture on the graphs' stream. The first waits for the device and empties the cache;
        later ones share its memory, and must not wait for what the caller awaits."""
        mode = "thread_local"  # NCCL's watchdog asks about events meanwhile
        if pool is None:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode=mode):
                yield
            return
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool, capture_error_mode=mode)
            try:
                yield
            finally:
                graph.capture_end()

    def issue(self, turn: int, named: Mapping[str, torch.Tensor]) -> Outputs:
        """Issues the ops into the capture; gives the results."""
        values, binding = self._context.values, self.bindings[turn]
        try:
            values.begin(named, dict.fromkeys(self._context.plan.takes, Use(turn, 0)))
            binding.issue(int(self._stream.cuda_stream), self._entry)
            return self._context.results()
        except BaseException:  # else the capture's end would hide it: streams not joined
            with contextlib.suppress(Exception):
                binding.join()
            raise
        finally:
            values.end()

    def _memory(self, turn: int, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors that the graphs of a turn return, where the caller gives none for `names`: with
        new version counters, since a backward may have saved those returned before."""
        with torch.inference_mode(False):
            if turn not in self.made:
                made = self._context.values.new()
                self.made[turn] = {n: t for n, t in made.items() if n not in self.results}
            made = self.made[turn]
            if not made.keys() >= set(names):
                made |= zip(names, self._context.outputs.new(), strict=True)
            return {name: tensor.data for name, tensor in made.items()}

    def drop(self) -> None:
        """Lets go of the graphs; the next run would capture them anew."""
        dropped = [*self.at.values(), *self.near, *self.through.values(), *self._retired]
        for held in (self.at, self.near, self.through, self._retired, self.seen, self.made):
            held.clear()
        for captured in dropped:
            captured.reset()

    def close(self) -> None:
        self.drop()
        self._engine.driver.destroy_event(self._entry)
        for binding in self.bindings:
            binding.close()
