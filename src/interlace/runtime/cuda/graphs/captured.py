"""A Program in two CUDA graphs, which read and write at the addresses that they were captured with.

    pair = GraphPair(context, driver, given, moved, crossing, lent)
    places = pair.make_places(given)         # in the capture of the first of its graphs
    pair.take_results(results, written)      # of each
    pair.fits(given), pair.held(stream)      # before a replay
    outputs = pair.run(turn, stream, given)

Note [Where results lie]
    Results that a pair lends (`lent`) lie in memory of its own, outside of the graphs' pool: there
    another graph would write them with its temporaries. What the Program allocates for such a
    result is that memory; what a Call makes is copied there at once. Each run hands
    out new tensors of it. While one of them is referenced, by whatever view, the pair is not
    replayed: the number of references to each storage tells (`held`). Graphs cannot be given other
    addresses, so there is a further pair then. The other results are copied behind each replay. A
    result that is an input, or a view of one, is made of the tensor that the caller gave. What
    forward hands to backward alone is one storage, in which results of that backward lie: spent.py.

Note [Copies and allocations]
    A graph's copy between two GPUs keeps the allocation and not only the address. Once that is
    freed (torch does when its cache is emptied, or no memory is left), and another is made at the
    same address, the copy engine reads or writes near address 0: the process loses its GPU (Xid 31,
    CUDA_ERROR_LAUNCH_FAILED), or ends by SIGSEGV. Copies within a GPU and kernels go by the address
    alone, and memory of expandable segments that is mapped anew is the same allocation and copied
    as ever (H100, driver 580, CUDA 13.0). So of the caller's tensors that Put and Get read or write
    each replay asks for the allocation's number, which takes the host 0.7 us a tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.memory import tensor_at
from interlace.cost.memory import aligned
from interlace.ir import Box, Call, Program, View, views_in
from interlace.ir.operators import facts_of
from interlace.ir.ops import Arg
from interlace.ir.sizes import greatest
from interlace.runtime.calling.calls import Outputs
from interlace.runtime.cuda.graphs.spent import ByteRange, homes_in, is_handed, note_handed
from interlace.runtime.engine import EngineContext
from interlace.runtime.values import DTYPES, at, copier, derive, maker, new_storage, once, whole
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


def by_address(item: torch.Tensor) -> torch.Tensor:
    """The tensor, in memory that is known by its address alone."""
    storage = item.untyped_storage()
    with torch.inference_mode(False):
        raw = tensor_at(storage.data_ptr(), storage.nbytes(), item.device).untyped_storage()
        empty = torch.empty(0, dtype=item.dtype, device=item.device)
        return empty.set_(raw, item.storage_offset(), item.shape, item.stride())  # pyright: ignore


def _in_one_piece(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's memory; 0 where it is not all the tensor's."""
    each = once(tensor)
    steps = zip(each.shape, each.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return span * tensor.itemsize if span == each.numel() else 0


def _storage(tensor: torch.Tensor) -> tuple[StorageWeakRef, int]:
    """The storage of a tensor, and the bytes in it before the tensor."""
    storage = tensor.untyped_storage()
    return StorageWeakRef(storage), tensor.data_ptr() - storage.data_ptr()


class GraphPair:
    """Two graphs, what is copied into and out of them, and the memory of the results they lend."""

    def __init__(
        self,
        context: EngineContext,
        driver: Driver,
        given: Sequence[torch.Tensor],
        moved: Collection[int],
        crossing: Collection[str],
        lent: Collection[int],
        boxed: bool = False,
    ) -> None:
        """`moved` are the numbers of the caller's tensors that come at any address, `crossing` the
        buffers that Put and Get read or write, `lent` the numbers of the lent results. With
        `boxed`, nobody has what the Program frees of `given` afterwards."""
        self._context, self._driver, self._lent = context, driver, lent
        self._num_inputs = len(context.inputs.names)
        names = (*context.inputs.names, *context.outputs.names)[: len(given)]
        self._numbers = {name: number for number, name in enumerate(names)}
        full = {name: i for name, i in self._numbers.items() if given[i].numel()}
        self.moved = {name: i for name, i in full.items() if i in moved}
        still = {name: i for name, i in full.items() if i not in moved}
        self._still = {i: (given[i].data_ptr(), _storage(given[i])) for i in still.values()}
        """Address and storage of each tensor that is read where it lies, by number."""
        self._crossing = {
            i: driver.buffer_id(given[i].data_ptr())
            for name, i in still.items()
            if name in crossing
        }
        """Number of the allocation that copies of the graphs are bound to, by tensor."""
        self._spent: dict[str, tuple[int, int]] = {}
        """Results in memory of an input: its number, and the first byte in its storage."""
        self._donors: dict[int, tuple[int, int]] = {}
        """Address and bytes of the storage of each such input."""
        self.homes = self._memory(given, crossing, boxed)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.launch: list[Launch] = []
        self.places: dict[int, torch.Tensor] = {}
        """Where the graphs read and write tensors that are moved, by number."""
        self._ins: list[tuple[int, torch.Tensor, int, int]] = []
        self._outs: list[tuple[int, torch.Tensor]] = []
        self._gives: list[list[Give]] = []
        self._stream: int | None = None
        """Stream of the last run, where callers may still be reading results."""

    def _memory(
        self, given: Sequence[torch.Tensor], crossing: Collection[str], boxed: bool
    ) -> dict[str, torch.Tensor]:
        """Memory of this pair for the buffers that lent results are in, and what is known of it."""
        plan, numbers = self._context.plan, dict[str, set[int]]()
        for number, arg in enumerate(plan.program.returned()):
            for view in views_in(arg) if number in self._lent else ():
                if view.buffer not in self._numbers:
                    numbers.setdefault(view.buffer, set()).add(number)
        boxes = {name: whole(plan.buffers[name]) for name in numbers}
        handed = {name for name, of in numbers.items() if of <= self._context.graph_use.handed}
        with torch.inference_mode(False):  # later runs may be outside of it
            homes = self._spend(given, boxes, crossing) if boxed else {}
            homes |= self._together({n: boxes[n] for n in boxes if n in handed - homes.keys()})
            for name in boxes.keys() - homes.keys():
                homes[name] = maker(boxes[name], self._context.device)()
        own = [name for name in homes if name not in self._spent]
        storages = {(s := homes[name].untyped_storage())._cdata: s for name in own}
        lent_in = {pointer: set[int]() for pointer in storages}
        for name in own:
            lent_in[homes[name].untyped_storage()._cdata] |= numbers[name]
        self._watched = [
            (s, s.nbytes(), storage_use_count(pointer), frozenset(lent_in[pointer]))
            for pointer, s in storages.items()
        ]
        """The storages, their bytes, the references that the pair has to each, and its results."""
        return homes

    def _together(self, boxes: Mapping[str, Box]) -> dict[str, torch.Tensor]:
        """Memory in one storage, which is known as handed: spent.py."""
        starts, total = dict[str, int](), 0
        for name, box in boxes.items():
            starts[name] = total
            total += aligned(greatest(box.hull[1]))
        storage = new_storage(total, self._context.device)
        if total:
            note_handed(storage)
        return {name: at(storage, starts[name], box) for name, box in boxes.items()}

    def _spend(
        self, given: Sequence[torch.Tensor], boxes: Mapping[str, Box], crossing: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Homes in memory of inputs: spent.py. Copies to peers stay in memory of the pair."""
        spent = self._context.graph_use.spent
        of_name = {name: i for name, i in self._numbers.items() if name in spent}
        donors = [i for i in of_name.values() if i in self._still and is_handed(given[i])]
        spans = {name: ByteRange.of(given[i]) for name, i in of_name.items() if i in donors}
        sizes = {name: greatest(box.hull[1]) for name, box in boxes.items() if name not in crossing}
        homes = dict[str, torch.Tensor]()
        for name, home in homes_in(self._context.plan.program, sizes, spans).items():
            box = boxes[name]
            mine = [i for i in donors if ByteRange.of(given[i]).storage == home.storage]
            i = min(mine, key=lambda i: given[i].dtype != DTYPES[box.dtype])
            storage = given[i].untyped_storage()
            self._spent[name], self._donors[i] = (i, home.start), (home.storage, storage.nbytes())
            homes[name] = by_address(at(storage, home.start, box))
        return homes

    def fits(self, given: Sequence[torch.Tensor]) -> bool:
        """True if the graphs can read these tensors, which lie where they are to lie, and write
        their results, whose memory no caller has given back (`resize_`)."""
        if any(storage.nbytes() != nbytes for storage, nbytes, *_ in self._watched):
            return False
        for i, known in self._donors.items():
            storage = given[i].untyped_storage()
            if (storage.data_ptr(), storage.nbytes()) != known or not is_handed(given[i]):
                return False
        return all(given[i].is_cuda for i in self.moved.values()) and not self._replaced()

    def _replaced(self) -> set[int]:
        """Tensors at whose address there is another allocation: Note [Copies and allocations]."""
        known, buffer_id = self._crossing, self._driver.buffer_id
        return {i for i in known if buffer_id(self._still[i][0]) != known[i]}

    def gone(self) -> set[int]:
        """Tensors whose memory, where the graphs read it, is nobody's any more."""
        found = self._replaced()
        for i, (address, (ref, skip)) in self._still.items():
            storage = storage_behind(ref.cdata)
            if storage is None or storage.data_ptr() + skip != address:
                found.add(i)
        return found

    def held(self, stream: int) -> frozenset[int]:
        """The lent results that may still be used: Note [Where results lie]."""
        if self._stream not in (None, stream):  # reads there are behind no event
            return frozenset(self._lent if self.homes else ())
        held = frozenset[int]()
        for storage, _, own, numbers in self._watched:
            if storage_use_count(storage._cdata) != own:
                held |= numbers
        return held

    def make_places(self, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Memory for the tensors that are moved. Within a capture it is the pool's, as temporaries
        are; the pair knows it by its address."""
        own: dict[str, torch.Tensor] = {}
        for name, i in self.moved.items():
            facts: Any = {"dtype": given[i].dtype, "device": given[i].device}
            own[name] = torch.empty_strided(given[i].shape, given[i].stride(), **facts)
            self.places[i] = place = by_address(own[name])
            if i < self._num_inputs:
                self._ins.append((i, once(place), place.data_ptr(), _in_one_piece(place)))
        return own

    def take_results(self, results: Outputs, written: Collection[str]) -> None:
        """Takes the results of a graph as it was captured; `written` buffers are copied back."""
        returned = self._context.plan.program.returned()
        pairs = enumerate(zip(returned, results, strict=True))
        self._gives.append([self._give(number, arg, item) for number, (arg, item) in pairs])
        self._outs = [
            (i, self.places[i])
            for name, i in self.moved.items()
            if i >= self._num_inputs or name in written
        ]

    def _give(self, number: int, arg: Arg, item: Any) -> Give:
        if isinstance(arg, tuple):
            parts = [self._give(number, *part) for part in zip(arg, item, strict=True)]
            return lambda given: tuple([part(given) for part in parts])
        if not isinstance(arg, View) or item is None:
            return lambda given: item
        box, name = self._context.values.box(arg), arg.buffer
        is_whole = box == whole(self._context.plan.buffers[name])
        if (place := self._numbers.get(name)) is not None:
            if is_whole:
                return operator.itemgetter(place)
            return lambda given: derive(given[place], box)
        if number in self._lent and name in self._spent:
            return self._of_input(*self._spent[name], box)
        if number in self._lent:
            home = self.homes[name]
            return (lambda given: home.data) if is_whole else lambda given: derive(home.data, box)
        copy = copier(by_address(item) if item.numel() else item)
        return lambda given: copy()

    def _of_input(self, i: int, start: int, box: Box) -> Give:
        """A result in the storage of an input, at this byte."""
        offset = start // box.dtype.itemsize + box.offset

        def give(given: Sequence[torch.Tensor]) -> torch.Tensor:
            if given[i].dtype == DTYPES[box.dtype]:  # in a third of the time
                return given[i].data.as_strided(box.sizes, box.strides, offset)  # pyright: ignore
            return at(given[i].untyped_storage(), start, box)

        return give

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
        self._stream = stream
        return tuple([give(given) for give in self._gives[turn]])

    def let_go(self) -> None:
        """Lets go of the results' memory, once the runs have ended."""
        self.launch.clear()
        self.homes.clear()
        self._gives.clear()
        self._watched.clear()
