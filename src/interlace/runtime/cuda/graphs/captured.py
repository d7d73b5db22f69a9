"""A Program in two CUDA graphs, which read and write at the addresses that they were captured with.

captured = GraphPair(given, num_inputs, driver, moved, written, bound, crossing)
tensors = captured.tensors(given)                              # what is to be captured
captured.keep(results, tensors, kept, static)                  # once for each of its `graphs`
captured.bring(stream, given)                                  # before a replay, where it `moves`,
captured.take(given)                                           # and after it
captured.gives[turn](given)                                    # its results

No tensor of the caller's is kept alive, so between runs its memory is free for others: a graph is
replayed with tensors that lie at its addresses, and these are what it reads.

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

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.memory import tensor_at
from interlace.ir import Call, Program
from interlace.ir.operators import facts_of
from interlace.runtime.calling.calls import Outputs
from interlace.runtime.values import copier, once

Give = Callable[[Sequence[torch.Tensor]], Outputs]
"""The results of a replay, of the tensors that it was given."""
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


def _in_one_piece(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's memory; 0 where it is not all the tensor's."""
    each = once(tensor)
    steps = zip(each.shape, each.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return span * tensor.itemsize if span == each.numel() else 0


def giver(
    results: Outputs,
    outs: Sequence[tuple[int, torch.Tensor]],
    kept: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor] | None = None,
) -> Give:
    """The results of a replay: the caller's tensors, by number, that are whole results (`outs`,
    inputs among them); what is `kept`; and copies of the rest, which no replay writes again. With
    `others`, what lies in none of these is given as it is."""
    storages = None if others is None else {t.untyped_storage().data_ptr() for t in others}
    gives = [_give(item, outs, kept, storages) for item in results]
    if gives and all(isinstance(give, operator.itemgetter) for give in gives):
        places = [_place(item, outs) for item in results]
        return operator.itemgetter(*places) if len(places) > 1 else lambda given: (gives[0](given),)
    if all(isinstance(give, functools.partial) for give in gives):
        same = tuple(results)
        return lambda given: same
    return lambda given: tuple([give(given) for give in gives])


def _same(item: Any, given: Sequence[torch.Tensor]) -> Any:
    return item


def _place(item: Any, outs: Sequence[tuple[int, torch.Tensor]]) -> int | None:
    """The number of the caller's tensor that a result is: no view of other strides or type."""
    for index, tensor in outs:
        alike = item.shape == tensor.shape and item.stride() == tensor.stride()
        if alike and item.dtype == tensor.dtype and item.data_ptr() == tensor.data_ptr():
            return index
    return None


def _give(
    item: Any,
    outs: Sequence[tuple[int, torch.Tensor]],
    kept: Sequence[torch.Tensor],
    storages: set[int] | None,
) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Returns a function that makes one result, of the tensors that a replay is given.

    A copy is made from memory that the result does not own: other graphs of the same pool can use
    it, and so can others where it is the caller's.
    """
    if isinstance(item, tuple):
        parts = [_give(part, outs, kept, storages) for part in item]
        return lambda given: tuple([part(given) for part in parts])
    if not isinstance(item, torch.Tensor):
        return functools.partial(_same, item)
    made = torch.empty(0, dtype=item.dtype, device=item.device)
    if not item.numel():
        copy = copier(made.new_empty_strided(item.shape, item.stride()))
        return lambda given: copy()
    if any(item is tensor for tensor in kept):
        return functools.partial(_same, item)
    if (place := _place(item, outs)) is not None:
        return operator.itemgetter(place)
    storage = item.untyped_storage()
    if storages is not None and storage.data_ptr() not in storages:
        return functools.partial(_same, item)
    raw = tensor_at(storage.data_ptr(), storage.nbytes(), item.device).untyped_storage()
    copy = copier(made.set_(raw, item.storage_offset(), item.shape, item.stride()))  # pyright: ignore
    return lambda given: copy()


def _bytes_beside(results: Outputs, others: Sequence[torch.Tensor]) -> int:
    """The bytes of what results lie in, but for the memory of other tensors."""
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    found = {
        storage.data_ptr(): storage.nbytes()
        for item in results
        if isinstance(item, torch.Tensor)
        and (storage := item.untyped_storage()).data_ptr() not in known
    }
    return sum(found.values())


class GraphPair:
    """Both graphs, what is copied into and out of them, and what gives their results."""

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        num_inputs: int,
        driver: Driver,
        moved: frozenset[int],
        written: frozenset[int],
        bound: frozenset[int],
        crossing: frozenset[int],
    ) -> None:
        """`moved` are the numbers of the tensors that come at any address and have places of their
        own, `written` of those that the Program changes, `bound` of those whose storage counts
        (Note [NCCL and addresses]), `crossing` of those that Put and Get read or write."""
        self._driver = driver
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.launch: list[Launch] = []
        self.gives: list[Give] = []
        """The results of a replay, by graph: the caller's tensors, or what no replay writes."""
        self.used = 0
        self.own = 0
        """Bytes of results that a graph of these keeps, at most."""
        self.moved, self.moves = moved, bool(moved)
        self.addresses = [tensor.data_ptr() for tensor in given]
        """Where the tensors lay when the graphs were captured."""
        self._still = [
            (i, t.data_ptr(), StorageWeakRef(t.untyped_storage()) if i in bound else None)
            for i, t in enumerate(given)
            if i not in moved
        ]
        self.crossing = {
            i: driver.buffer_id(self.addresses[i]) for i in crossing - moved if given[i].numel()
        }
        """Number of the allocation that copies of the graphs are bound to, by tensor."""
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
            (i, place) for i, place in self.places.items() if i >= num_inputs or i in written
        ]

    def off(self, addresses: Sequence[int]) -> set[int]:
        """The tensors that do not lie where the graphs have them, but for those that are copied."""
        return {*self._off(addresses)}

    def fits(self, addresses: Sequence[int]) -> bool:
        """True if every tensor that is not copied lies where the graphs have it."""
        return len(addresses) == len(self.addresses) and not any(True for _ in self._off(addresses))

    def _off(self, addresses: Sequence[int]) -> Iterator[int]:
        for index, address, storage in self._still:
            if (
                addresses[index] != address
                or (storage is not None and storage.expired())
                or (index in self.crossing and self._is_another(index))
            ):
                yield index

    def _is_another(self, index: int) -> bool:
        return self._driver.buffer_id(self.addresses[index]) != self.crossing[index]

    @property
    def replaced(self) -> bool:
        """True if the graphs can serve nobody again: Note [Copies and allocations]."""
        return any(map(self._is_another, self.crossing))

    def takes(self, given: Sequence[torch.Tensor]) -> bool:
        return all(given[index].is_cuda for index in self.places)

    def tensors(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors that the graphs read and write: the given ones, or places of their own."""
        return [self.places.get(index, tensor) for index, tensor in enumerate(given)]

    def keep(
        self,
        results: Outputs,
        tensors: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        static: bool,
    ) -> None:
        """Takes the results of a graph that was captured with these `tensors`: `giver`."""
        whole = list(enumerate(tensors))
        self.gives.append(giver(results, whole, kept, tensors if static else None))
        if static:
            self.own = max(self.own, _bytes_beside(results, [*tensors, *kept]))

    def bring(self, stream: int, given: Sequence[torch.Tensor]) -> None:
        """Copies what comes at any address to where the graphs read it."""
        for index, place, address, nbytes in self._ins:
            if nbytes:
                self._driver.copy(stream, address, given[index].data_ptr(), nbytes)
            else:
                place.copy_(once(given[index]))

    def take(self, given: Sequence[torch.Tensor]) -> None:
        """Copies what the graphs wrote to where the caller wants it."""
        for index, place in self._outs:
            given[index].copy_(place)

    def retire(self) -> None:
        """Lets go of all memory but the graphs' own, once their runs have ended."""
        self.launch.clear()
        self.places.clear()
        self._ins, self._outs = [], []

    def reset(self) -> None:
        self.launch.clear()
        for graph in self.graphs:
            graph.reset()
