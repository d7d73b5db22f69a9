"""A Program in two CUDA graphs, which read and write at the addresses that they were captured with.

    pair = GraphPair(given, num_inputs, driver, touched, moved, copied)
    pair.take_results(results, tensors, kept)        # once for each of its graphs
    pair.fits(addresses, given), pair.held(stream)   # before a replay
    outputs = pair.run(turn, stream, given)

Note [Where results lie]
    Results of a pair lie in memory of its own, outside of the graphs' pool, which has temporaries
    alone: other graphs write those at any time. What a Program allocates for a result is that
    memory; what an operator makes is copied there at the end of the graph. Each run hands out new
    tensors of it. While one of them is referenced, by whatever view, the pair is not replayed: the
    number of references to each storage tells (`held`). Graphs cannot be given other addresses, so
    the alternatives are a further pair, or copies that are made behind each replay (`copied`).

    Gradients of Parameters are such results: a caller who lets go of `.grad` before the next
    backward has them in the pair's memory, which nobody else needs meanwhile, and nothing is
    copied. Copies would take the same bytes at the end of a backward. With gradients that are
    accumulated the first pair's stay referenced, and a second pair serves all later backwards.

Note [Copies and allocations]
    A graph's copy between two GPUs keeps the allocation and not only the address. Once that is
    freed (torch does when its cache is emptied, or no memory is left), and another is made at the
    same address, the copy engine reads or writes near address 0: the process loses its GPU (Xid 31,
    CUDA_ERROR_LAUNCH_FAILED), or ends by SIGSEGV. Copies within a GPU and kernels go by the address
    alone, and memory of expandable segments that is mapped anew is the same allocation and copied
    as ever (H100, driver 580, CUDA 13.0). So of the caller's tensors that Put and Get read or write
    each replay asks for the allocation's number, which takes the host 0.7 us a tensor. Where that
    is another, the tensor does not lie where the graphs have it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.memory import tensor_at
from interlace.ir import Call, Program
from interlace.ir.operators import facts_of
from interlace.runtime.calling.calls import Outputs
from interlace.runtime.values import copier, once
from interlace.torch_private import storage_behind, storage_use_count

Give = Callable[[Sequence[torch.Tensor]], Any]
"""One result of a replay, of the tensors that it was given."""
Launch = Callable[[int], None]
"""Launches a graph on a stream, the caller's current one."""


def may_draw(program: Program) -> bool:
    """True if a run may draw random numbers: regions and operators without facts may."""
    regions = {region.name for region in program.regions}
    items = [step for op in program.ops for step in op.steps]
    return any(
        op.draws or op.fn in regions or facts_of(op.fn) is None
        for op in items
        if isinstance(op, Call)
    )


def launcher(program: Program, driver: Driver) -> Callable[[torch.cuda.CUDAGraph], Launch]:
    return (lambda graph: lambda _: graph.replay()) if may_draw(program) else driver.launcher


def leaves(results: Outputs) -> Iterator[tuple[int, Any]]:
    """Results and parts of results that are no tuples, with their numbers."""

    def flat(items: Outputs) -> Iterator[Any]:
        for item in items:
            yield from flat(item) if isinstance(item, tuple) else (item,)

    return enumerate(flat(results))


def copy_of(item: torch.Tensor) -> Give:
    """Function that copies what lies in memory that a graph knows by its address alone."""
    storage, empty = item.untyped_storage(), torch.empty(0, dtype=item.dtype, device=item.device)
    raw = tensor_at(storage.data_ptr(), storage.nbytes(), item.device).untyped_storage()
    copy = copier(empty.set_(raw, item.storage_offset(), item.shape, item.stride()))  # pyright: ignore
    return lambda given: copy()


def _in_one_piece(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's memory; 0 where it is not all the tensor's."""
    each = once(tensor)
    steps = zip(each.shape, each.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return span * tensor.itemsize if span == each.numel() else 0


@dataclass(frozen=True)
class Touched:
    """Numbers of the caller's tensors, by what a Program does with them."""

    written: frozenset[int] = frozenset()
    bound: frozenset[int] = frozenset()
    """Tensors that a backend may have mapped into the peers (graphs.py, Note [NCCL and
    addresses])."""
    crossing: frozenset[int] = frozenset()
    """Tensors that Put and Get read or write."""


class GraphPair:
    """Two graphs, what is copied into and out of them, and the memory of their results."""

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        num_inputs: int,
        driver: Driver,
        touched: Touched,
        moved: frozenset[int],
        copied: Collection[int],
    ) -> None:
        """`moved` are the numbers of the caller's tensors that come at any address, and have places
        of their own; `copied` those of the results of which each run gets copies."""
        self._driver, self._bound = driver, touched.bound - moved
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.launch: list[Launch] = []
        self.moved, self.copied = moved, copied
        self.addresses = tuple([tensor.data_ptr() for tensor in given])
        """Where the tensors lay when the graphs were captured."""
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in given]
        self._skips = [t.data_ptr() - t.untyped_storage().data_ptr() for t in given]
        self._crossing = {
            i: driver.buffer_id(self.addresses[i])
            for i in touched.crossing - moved
            if given[i].numel()
        }
        """Number of the allocation that copies of the graphs are bound to, by tensor."""
        self._still = [i for i in range(len(given)) if i not in moved]
        self._looked_at = [*{*self._bound, *self._crossing}]
        with torch.inference_mode(False):  # later runs may copy into them outside of it
            self.places = {
                i: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                for i, t in enumerate(given)
                if i in moved
            }
        self._ins = [
            (i, once(place), place.data_ptr(), _in_one_piece(place))
            for i, place in self.places.items()
            if i < num_inputs
        ]
        self._outs = [
            (i, place)
            for i, place in self.places.items()
            if i >= num_inputs or i in touched.written
        ]
        self.own: dict[int, torch.Tensor] = {}
        """Results that are handed out where they lie, by number."""
        self._gives: list[list[Give]] = []
        self._lasting: list[torch.UntypedStorage] = []
        """Memory that the graphs write, also where its results are copied."""
        self._watched: list[tuple[Any, int, int, frozenset[int]]] = []
        """Each storage of these, its references from here, its bytes, the results in it."""
        self.stream: int | None = None
        """Stream of the last run, where callers may still be reading results."""

    def off(self, addresses: Sequence[int]) -> frozenset[int]:
        """The tensors that do not lie where the graphs have them, but for those that are copied."""
        return frozenset(
            i for i in self._still if addresses[i] != self.addresses[i] or self._is_another(i)
        )

    def _is_another(self, i: int) -> bool:
        """True if other memory has come to lie at the address of a tensor, and that counts."""
        if i in self._bound and self._storages[i].expired():
            return True
        number = self._crossing.get(i)
        return number is not None and self._driver.buffer_id(self.addresses[i]) != number

    def fits(self, addresses: Sequence[int], given: Sequence[torch.Tensor]) -> bool:
        """True if every tensor lies where the graphs have it, or is copied there."""
        if addresses != self.addresses:
            if not self.moved or len(addresses) != len(self.addresses):
                return False
            if any(addresses[i] != self.addresses[i] for i in self._still):
                return False
        if any(map(self._is_another, self._looked_at)):
            return False
        return all(given[i].is_cuda for i in self.moved)

    def lives(self, i: int) -> bool:
        """True if the memory that a tensor had at capture is still somebody's, at that address."""
        storage = storage_behind(self._storages[i].cdata)
        return storage is not None and storage.data_ptr() + self._skips[i] == self.addresses[i]

    def held(self, stream: int) -> frozenset[int]:
        """The results of the last run that may still be used: Note [Where results lie]."""
        if self.stream not in (None, stream):  # callers' reads on that stream are behind no event
            return frozenset(self.own)
        found = frozenset[int]()
        for storage, count, _, numbers in self._watched:
            if storage_use_count(storage._cdata) != count:
                found |= numbers
        return found

    def much(self, numbers: frozenset[int]) -> bool:
        """True if results have more than half of the bytes of all."""
        own = sum(nbytes for _, _, nbytes, _ in self._watched)
        return 2 * sum(b for _, _, b, each in self._watched if each & numbers) > own

    def tensors(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors that the graphs read and write: the given ones, or places of their own."""
        return [self.places.get(index, tensor) for index, tensor in enumerate(given)]

    def make(self, layouts: Sequence[Layout]) -> None:
        """Makes memory for what operators make, but for the copied ones."""
        with torch.inference_mode(False):
            for layout in layouts:
                parts = {n: facts for n, facts in layout.parts.items() if n not in self.copied}
                if parts:
                    memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=layout.device)
                    storage = memory.untyped_storage()
                    for number, (dtype, *facts) in parts.items():
                        empty = torch.empty(0, dtype=dtype, device=layout.device)
                        self.own[number] = empty.set_(storage, *facts)  # pyright: ignore

    def bring(self, results: Outputs) -> None:
        """In a capture: copies what operators made to where it is handed out."""
        done = set[int]()
        for number, item in leaves(results):
            if (own := self.own.get(number)) is not None:
                storage, source = own.untyped_storage(), item.untyped_storage()
                if storage.data_ptr() not in {*done, source.data_ptr()}:
                    done.add(storage.data_ptr())
                    _bytes(storage).copy_(_bytes(source))

    def take_results(
        self,
        results: Outputs,
        tensors: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        lasting: Collection[torch.Tensor],
    ) -> None:
        """Takes the results of a graph that was captured with these `tensors`. Of the registered
        ones (`kept`) and of `lasting` memory, which was made for results, nothing is copied."""
        self._lasting = [tensor.untyped_storage() for tensor in lasting]
        storages = {storage.data_ptr() for storage in self._lasting}
        for number, item in leaves(results):
            lies = isinstance(item, torch.Tensor) and item.untyped_storage().data_ptr() in storages
            if lies and number not in self.copied and _place(item, tensors) is None:
                self.own.setdefault(number, _plain(item))
        numbers = iter(range(1 << 30))
        self._gives.append([self._give(item, numbers, tensors, kept) for item in results])
        groups: dict[int, list[int]] = {}
        for number, tensor in self.own.items():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
        self._watched = []
        for each in groups.values():
            storage = self.own[each[0]].untyped_storage()
            self._watched.append((storage, len(each) + 1, storage.nbytes(), frozenset(each)))

    def _give(
        self,
        item: Any,
        numbers: Iterator[int],
        tensors: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
    ) -> Give:
        if isinstance(item, tuple):
            parts = [self._give(part, numbers, tensors, kept) for part in item]
            return lambda given: tuple([part(given) for part in parts])
        number = next(numbers)
        if not isinstance(item, torch.Tensor) or any(item is tensor for tensor in kept):
            return lambda given: item
        if not item.numel():
            empty = torch.empty_strided(
                item.shape, item.stride(), dtype=item.dtype, device=item.device
            )
            copy = copier(empty)
            return lambda given: copy()
        if (place := _place(item, tensors)) is not None:
            return operator.itemgetter(place)
        if (own := self.own.get(number)) is not None:
            return lambda given: own.data
        return copy_of(item)

    def run(self, turn: int, stream: int, given: Sequence[torch.Tensor]) -> Outputs:
        """A replay, with copies of what comes at any address, in and out."""
        for index, place, address, nbytes in self._ins:
            if nbytes:
                self._driver.copy(stream, address, given[index].data_ptr(), nbytes)
            else:
                place.copy_(once(given[index]))
        self.launch[turn](stream)
        for index, place in self._outs:
            given[index].copy_(place)
        self.stream = stream
        return tuple([give(given) for give in self._gives[turn]])

    def let_go(self) -> None:
        """Lets go of all memory but the graphs' own, once their runs have ended."""
        for each in (self.launch, self.places, self._ins, self._outs, self.own):
            each.clear()
        self._gives.clear()
        self._watched.clear()
        self._lasting.clear()


def _place(item: torch.Tensor, tensors: Sequence[torch.Tensor]) -> int | None:
    """The number of the caller's tensor that a result is: no view of other strides or type."""
    for index, tensor in enumerate(tensors):
        alike = item.shape == tensor.shape and item.stride() == tensor.stride()
        if alike and item.dtype == tensor.dtype and item.data_ptr() == tensor.data_ptr():
            return index
    return None


def _plain(item: torch.Tensor) -> torch.Tensor:
    """The tensor, as runs within and outside of inference mode can hand it out."""
    with torch.inference_mode(False):
        if not item.is_inference():
            return item.data
        empty = torch.empty(0, dtype=item.dtype, device=item.device)
        facts = item.storage_offset(), item.shape, item.stride()
        return empty.set_(item.untyped_storage(), *facts)  # pyright: ignore


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore


@dataclass(frozen=True)
class Layout:
    """A storage with results in it."""

    nbytes: int
    device: torch.device
    parts: dict[int, tuple[Any, ...]]
    """Type, offset, shape and strides of each result there, by number."""


def layouts_of(
    results: Outputs,
    tensors: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor],
    lasting: Collection[torch.Tensor],
) -> list[Layout]:
    """Storages that operators made for results: they are none of what the graph was captured
    with."""
    known = {t.untyped_storage().data_ptr() for t in (*tensors, *kept, *lasting)}
    found: dict[int, Layout] = {}
    for number, item in leaves(results):
        if isinstance(item, torch.Tensor) and item.numel():
            storage = item.untyped_storage()
            if storage.data_ptr() not in known:
                of = Layout(storage.nbytes(), item.device, {})
                parts = found.setdefault(storage.data_ptr(), of).parts
                parts[number] = item.dtype, item.storage_offset(), item.shape, item.stride()
    return list(found.values())
