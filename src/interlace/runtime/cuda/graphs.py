"""A Program captured in two CUDA graphs, for even and odd runs, which are replayed in turn.

A graph has its addresses and the values of its words in it, so each of the two has its own words
and copies of the slots, and takes back at its end what was raised.

Note [Words in graphs]
    Words of a graph are 0 before its run, which waits until they reach the values that the Program
    says. The next run, of the other graph, begins by writing 0 to them again, and then tells the
    peers that the run has ended. A peer writes them for the run after next only once it has heard
    that (in its words `ended`, which it clears), so no word is written while its last value is
    still awaited. All of this stands on a stream aside, under the computation. Before the first
    run, of the even graph, its words `ended` say 1; those of the odd one are told by the first run.

Note [Addresses in graphs]
    A graph reads and writes what lay at the addresses that it was captured with: those of the first
    run. A tensor that comes at another address later gets a place of its own that it is copied
    through from then on, and the graphs are captured anew, at most once for each tensor. Parameters
    stay where they are and are never copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm import Use
from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.space import CudaSpace
from interlace.errors import ExecutorError
from interlace.runtime.cuda.binding import Binding
from interlace.runtime.cuda.homes import Home, Pick, home_of, lasting, picker
from interlace.runtime.cuda.lanes import Lane, Thunk
from interlace.runtime.engine import Context

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine


class GraphWords:
    """The words of one graph on one team: a `CudaSpace` whose base never moves."""

    def __init__(self, space: CudaSpace, signals: Sequence[str], first: bool) -> None:
        self.side, self.uses, self.span, self.base = space.side, space.uses, space.span, 0
        self.own, self.theirs, self.value = space.own, space.theirs, space.value
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
    """The ops of a Program as one graph issues them."""

    other: Mapping[str, GraphWords]
    """The words of the other graph, whose run was the last."""

    def __init__(
        self,
        context: Context,
        driver: Driver,
        spaces: Mapping[str, GraphWords],
        engine: CudaEngine,
    ) -> None:
        self._taken = driver.event()
        super().__init__(context, driver, spaces, engine)

    def take(self, team: str, lane: Lane) -> Thunk | None:
        """Where the hand-over stands on another stream, that is waited for."""
        if lane is self.aside:
            return None
        return lambda: self.driver.wait_event(lane.handle, self._taken)

    def begin(self) -> None:
        """The hand-over: Note [Words in graphs]."""
        aside, self.runs = self.aside.handle, 1
        mine, others = self.spaces.values(), self.other.values()
        todo = [("wait", word, 1) for words in mine for word in words.heard]
        todo += [("write", word, 0) for words in mine for word in words.heard]
        todo += [("write", word, 0) for words in others for word in words.raised]
        todo += [("write", word, 1) for words in others for word in words.told]
        batch = self.driver.batch(*((kind, (word,)) for kind, word, _ in todo))
        batch.run(aside, *(value for _, _, value in todo))
        self.driver.record(aside, self._taken)

    def close(self) -> None:
        """Gives events back."""
        super().close()
        self.driver.destroy_event(self._taken)


class Graphs:
    """The two graphs of an engine."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine, self._context = engine, engine.context
        demands = self._context.plan.demands
        self._bindings: list[Any] = []
        for number, spaces in enumerate(self._context.crew.graph_spaces):
            words = {
                team: GraphWords(space, demands[team].signals, first=number == 0)
                for team, space in spaces.items()
            }
            self._bindings.append(GraphBinding(self._context, engine.driver, words, engine))
        for binding, other in zip(self._bindings, reversed(self._bindings), strict=True):
            binding.other = other.spaces
        self._entry = engine.driver.event()
        self._stream: Any = torch.cuda.Stream(self._context.device)
        self._baked: list[torch.Tensor] = []
        self._copied: set[int] = set()
        self.moves = False
        """Whether a run copies tensors."""
        self._own_outs = False
        self._graphs: list[Any] = []
        self._results: list[tuple[Any, ...]] = []
        self._homes: list[list[Home]] = []
        self._picks: list[Pick | None] = []
        self._still: list[tuple[int, int]] = []
        """Where the tensors lie that the graphs read and write in place, by number."""
        self._ins: list[tuple[int, torch.Tensor, int, int]] = []
        """Inputs that are copied: number, tensor and address of the graphs', and bytes; 0: not in
        one piece."""
        self._outs: list[tuple[int, torch.Tensor]] = []
        """What is written and is copied: outputs, and inputs that the Program changes."""
        self._runs = 0

    @property
    def spaces(self) -> Mapping[str, Any]:
        """The words of the last run, by team."""
        return self._bindings[(self._runs - 1) & 1].spaces

    def run(
        self,
        names: tuple[Sequence[str], Sequence[str]],
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        make: Callable[[], Sequence[torch.Tensor]],
        results: Callable[[], tuple[Any, ...]],
    ) -> tuple[Any, ...]:
        """Replays the graph whose turn it is; captures both first, where need be.

        `names` of the inputs and outputs; `make` gives outputs where the caller gives none.
        """
        given = [*inputs, *(out or ())]
        if self._own_outs != (out is None) or not self._in_place(given):
            self._look(names, given, len(inputs), out is None, make, results)
        turn, self._runs = self._runs & 1, self._runs + 1
        return self._engine.replay(self._graphs[turn], turn, given)

    def _in_place(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether all tensors lie where the graphs have them, but for those that are copied."""
        if not self._graphs or len(given) != len(self._baked):
            return False
        for index, address in self._still:
            if given[index].data_ptr() != address:
                return False
        return not self.moves or all(given[index].is_cuda for index in self._copied)

    def _look(
        self,
        names: tuple[Sequence[str], Sequence[str]],
        given: list[torch.Tensor],
        num_inputs: int,
        own_outs: bool,
        make: Callable[[], Sequence[torch.Tensor]],
        results: Callable[[], tuple[Any, ...]],
    ) -> None:
        """Finds out which tensors are copied from now on, and captures both graphs anew."""
        if not all(tensor.is_cuda for tensor in given):
            raise ExecutorError(
                f"{self._context.plan.program.name}: a CUDA graph cannot read a tensor of the CPU: "
                "give it on the GPU, or leave out graph=True"
            )
        if self._graphs and self._own_outs == own_outs:
            for index, address in self._still:
                like = given[index]
                if like.data_ptr() != address:
                    self._copied.add(index)
                    with torch.inference_mode(False):  # later runs may copy into it outside of it
                        self._baked[index] = torch.empty_strided(
                            like.shape, like.stride(), dtype=like.dtype, device=like.device
                        )
        else:
            self._baked, self._copied, self._own_outs = list(given), set(), own_outs
        self._still = [
            (index, tensor.data_ptr())
            for index, tensor in enumerate(self._baked)
            if index not in self._copied
        ]
        self.moves = bool(self._copied)
        homes = [(index, self._baked[index]) for index in sorted(self._copied)]
        self._ins = [
            (index, home, home.data_ptr(), home.nbytes if home.is_contiguous() else 0)
            for index, home in homes
            if index < num_inputs
        ]
        ops, params = self._context.plan.program.ops, names[0]
        written = {access.view.buffer for op in ops for access in op.writes()}
        self._outs = [
            (index, home)
            for index, home in homes
            if index >= num_inputs or params[index] in written
        ]
        self._capture(names, num_inputs, make, results)

    def bring(self, stream: int, given: Sequence[torch.Tensor]) -> None:
        """Copies what comes at other addresses to where the graphs read it."""
        for index, home, address, nbytes in self._ins:
            if nbytes:
                self._engine.driver.copy(stream, address, given[index].data_ptr(), nbytes)
            else:
                home.copy_(given[index])

    def take(self, given: Sequence[torch.Tensor]) -> None:
        """Copies what the graphs wrote to where the caller wants it."""
        for index, home in self._outs:
            given[index].copy_(home)

    def give(self, turn: int, given: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The results of a replay: the graph's own, or what no other replay writes, copied as a
        part of the run."""
        if self._context.options.static_outputs:
            return self._results[turn]
        pick = self._picks[turn]
        if pick is not None:
            return pick(given)
        homes, results = self._homes[turn], self._results[turn]
        return tuple(
            [lasting(item, home, given) for item, home in zip(results, homes, strict=True)]
        )

    def _settle(self, num_inputs: int) -> None:
        """Which results of each graph lie in which tensors of the caller's: once for each capture,
        since these then stay where they are, or are copied."""
        outs = [(i, tensor) for i, tensor in enumerate(self._baked) if i >= num_inputs]
        kept = [held.tensor for held in self._context.values.registered.values()]
        self._homes = [[home_of(item, outs, kept) for item in results] for results in self._results]
        self._picks = [picker(homes) for homes in self._homes]

    def _capture(
        self,
        names: tuple[Sequence[str], Sequence[str]],
        num_inputs: int,
        make: Callable[[], Sequence[torch.Tensor]],
        results: Callable[[], tuple[Any, ...]],
    ) -> None:
        """Captures both graphs: nothing runs, so no peer need do the same now."""
        values, device = self._context.values, self._context.device
        torch.cuda.current_stream(device).synchronize()
        if self._graphs:
            self._engine.synchronize()  # they may be under way, on whatever stream
        for graph in self._graphs:
            graph.reset()
        self._graphs, self._results = [], []
        for turn, binding in enumerate(self._bindings):
            graph: Any = torch.cuda.CUDAGraph()
            uses = dict.fromkeys(self._context.plan.takes, Use(turn, 0))
            self._engine.check()  # in a capture it would be told badly
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                outs = make() if self._own_outs else self._baked[num_inputs:]
                given = dict(zip(names[0], self._baked, strict=False))
                given.update(zip(names[1], outs, strict=True))
                binding.main.handle = int(self._stream.cuda_stream)
                try:
                    values.begin(given, uses)
                    binding.issue(self._entry)
                    self._results.append(results())
                except BaseException:  # else the capture's end would hide it: streams not joined
                    with contextlib.suppress(Exception):
                        binding.join()
                    raise
                finally:
                    values.end()
            self._graphs.append(graph)
        self._settle(num_inputs)

    def drop(self) -> None:
        """Lets go of the graphs; the next run would capture them anew."""
        graphs, self._graphs = self._graphs, []
        for graph in graphs:
            graph.reset()
        self._results, self._baked, self._still, self._ins, self._outs = [], [], [], [], []

    def close(self) -> None:
        """Lets go of the graphs and their events."""
        self.drop()
        self._engine.driver.destroy_event(self._entry)
        for binding in self._bindings:
            binding.close()
