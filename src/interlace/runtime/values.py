"""The per-run table: every tensor that the calls of a Program take, by place.

Views of storage that stays are made once, those of the arena whenever it moves (arena.py). Those of
inputs, outputs and slots are filled in when a run starts, those of fresh buffers when the buffer is
made. A call reads its arguments by place, so the hot path makes no view and looks up no name.

    place = values.own(View("x").chunk(0, 2))
    values.begin({"x": x}, takes)
    values.items[place]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace import ir
from interlace.comm import Slot
from interlace.comm.collectives import Counts
from interlace.errors import ExecutorError, ProgramError
from interlace.ir.sizes import Int, greatest, numbers
from interlace.runtime.run_sizes import RunSizes
from interlace.torch_private import cuda_device, quick_empty_strided

DTYPES: Mapping[ir.DType, torch.dtype] = {
    ir.DType.f64: torch.float64,
    ir.DType.f32: torch.float32,
    ir.DType.bf16: torch.bfloat16,
    ir.DType.f16: torch.float16,
    ir.DType.f8e4m3: torch.float8_e4m3fn,
    ir.DType.f8e5m2: torch.float8_e5m2,
    ir.DType.i64: torch.int64,
    ir.DType.i32: torch.int32,
    ir.DType.i16: torch.int16,
    ir.DType.i8: torch.int8,
    ir.DType.u64: torch.uint64,
    ir.DType.u32: torch.uint32,
    ir.DType.u16: torch.uint16,
    ir.DType.u8: torch.uint8,
    ir.DType.bool: torch.bool,
    ir.DType.c64: torch.complex64,
    ir.DType.c128: torch.complex128,
}
ALIGN = 256


def whole(buffer: ir.Buffer) -> ir.Box:
    """The box of a whole buffer of one rank's Program."""
    sizes = tuple([dim for dim in buffer.shape if not isinstance(dim, ir.TableEntry)])
    assert len(sizes) == len(buffer.shape), f"{buffer.name} was not instantiated"
    strides = ir.contiguous_strides(sizes) if buffer.strides is None else buffer.strides
    return ir.Box(0, sizes, strides, buffer.dtype)


def nbytes(buffer: ir.Buffer) -> int:
    """Bytes from a buffer's first element to the end of its last, for any sizes of the class."""
    return greatest(whole(buffer).hull[1])


def at(storage: torch.UntypedStorage, start: int, box: ir.Box) -> torch.Tensor:
    """The box of a buffer that begins at byte `start` of a storage."""
    offset, rest = divmod(start, box.dtype.itemsize)
    if rest:
        raise ProgramError(f"byte {start} is no multiple of the size of {box.dtype}")
    if start + box.hull[1] > storage.nbytes() and box.numel:  # `set_` would make it larger
        raise ExecutorError(
            f"a tensor of {list(box.sizes)} {box.dtype} lies beyond the end of its storage of "
            f"{storage.nbytes()} bytes: was its memory freed (untyped_storage().resize_)?"
        )
    empty = torch.empty(0, dtype=DTYPES[box.dtype], device=storage.device)
    return empty.set_(storage, offset + box.offset, box.sizes, box.strides)  # pyright: ignore


def derive(base: torch.Tensor, box: ir.Box) -> torch.Tensor:
    """A box of a buffer that is a tensor of the caller's or of this run's own."""
    if base.dtype == DTYPES[box.dtype]:
        if not box.offset:  # torch then begins where the base does
            return base.as_strided(box.sizes, box.strides)  # pyright: ignore
        start = base.storage_offset() + box.offset
        return base.as_strided(box.sizes, box.strides, start)  # pyright: ignore
    start = int(base.storage_offset()) * base.itemsize
    return at(base.untyped_storage(), start, box)


def maker(box: ir.Box, device: torch.device) -> Callable[[], torch.Tensor]:
    """Returns a function that makes tensors of the box as Inductor's code does, which takes half
    the time of torch's public function; it uses the current device, if that is a GPU."""
    sizes, strides, dtype = numbers(box.sizes), numbers(box.strides), DTYPES[box.dtype]
    slow = functools.partial(torch.empty_strided, sizes, strides, dtype=dtype, device=device)
    quick = quick_empty_strided(device.type)
    if quick is None or device.type not in ("cpu", "cuda"):
        return slow
    if device.type == "cpu":
        return functools.partial(quick, sizes, strides, dtype)
    current: Callable[[], int] = cuda_device
    index = device.index or 0
    return lambda: quick(sizes, strides, dtype) if current() == index else slow()


def new_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Memory that torch allocates."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def laid_out(buffers: Mapping[str, ir.Buffer]) -> tuple[dict[str, int], int]:
    """Where the storage of every local buffer begins in one arena, and the bytes of the arena."""
    sizes: dict[tuple[bool, str], int] = {}
    keys = {
        buffer.name: (bool(buffer.storage), buffer.storage or buffer.name)
        for buffer in buffers.values()
        if buffer.kind == "local"
    }
    for name, key in keys.items():
        buffer = buffers[name]
        sizes[key] = max(sizes.get(key, 0), buffer.offset + nbytes(buffer))
    starts, total = dict[tuple[bool, str], int](), 0
    for key, size in sizes.items():
        starts[key] = total
        total += -(-size // ALIGN) * ALIGN
    return {name: starts[key] for name, key in keys.items()}, total


@dataclass(slots=True)
class _Family:
    """A buffer of this run: where the table has it, and the views of it that calls take."""

    place: int
    views: dict[int, ir.Box] = field(default_factory=dict[int, ir.Box])


def _touched(program: ir.Program) -> Iterator[str]:
    for op in program.ops:
        made = {buffer.name for buffer in op.declares()}
        for access in (*op.reads(), *op.writes()):
            if access.view.buffer not in made:
                yield access.view.buffer


class ValueTable:
    def __init__(
        self,
        program: ir.Program,
        box: Callable[[ir.View], ir.Box],
        slots: Mapping[str, Slot],
        device: torch.device,
        sizes: RunSizes,
        host: frozenset[str] = frozenset(),
    ) -> None:
        self.sizes = sizes
        """Source of the numbers of sizes that differ from run to run."""
        self.host = host
        """Buffers that are on the CPU, whatever the device is."""
        self.items: list[Any] = []
        """Values that calls read; places stay the same, contents of some change from run to run."""
        self._program = program
        self.box = box
        self.device = device
        self._buffers = program.buffers()
        returned = (view.buffer for arg in program.returned() for view in ir.views_in(arg))
        self.used = frozenset((*returned, *_touched(program)))
        """Buffers that it returns, or that an op touches which is not the Call that makes them."""
        self._slots = slots
        self._places: dict[tuple[str, int | None, ir.Box], int] = {}
        self._counts: dict[int, tuple[Counts, int]] = {}
        self._families: dict[str, _Family] = {}
        self._viewed: list[_Family] = []
        """Inputs and outputs of which calls take views."""
        self._symmetric: dict[int, tuple[str, list[torch.Tensor]]] = {}
        self.homes: Mapping[str, torch.Tensor] = {}
        """Memory that buffers which Calls make are brought to, by name: of results of graphs."""
        self.takes: Mapping[str, int] = {}
        """The number of this run's take of each symmetric buffer: an odd one has the second copy of
        its slot."""
        self._template: list[Any] = []
        self._starts, self.nbytes = laid_out(self._buffers)
        """Where local buffers begin in the arena, and the bytes of it that a run needs at most."""
        self.arena = new_storage(0, device)
        """The memory that places of local buffers have views of: none at first."""
        self._base = 0
        self._temporaries: dict[int, tuple[int, ir.Box]] = {}
        """Where each place of a local buffer lies in the arena."""
        self.allocated: dict[str, Callable[[], torch.Tensor]] = {}
        """The buffers that a run allocates before its ops, and what makes each."""
        for op in program.ops:
            buffer = op.ordering().takes
            if buffer is not None and buffer.kind == "fresh":

                def size(box: ir.Box, name: str = buffer.name) -> None:
                    self.allocated[name] = maker(box, self.device)

                sizes.follow_box(whole(buffer), size)
        for kind in ("input", "output", "fresh"):  # `start` is given the first two in this order
            for buffer in (b for b in self._buffers.values() if b.kind == kind):
                self._families[buffer.name] = _Family(self._add())

    def _add(self) -> int:
        """A place that has nothing between runs."""
        self.items.append(None)
        self._template.append(None)
        return len(self.items) - 1

    def _keep(self, place: int, value: Any) -> None:
        """Has a value at a place in this run and the next ones."""
        self.items[place] = self._template[place] = value

    def constant(self, value: Any) -> int:
        place = self._add()
        self._keep(place, value)
        return place

    def numbers(self, sizes: Sequence[Int], read: Callable[[tuple[int, ...]], Any]) -> int:
        """The place of what `read` makes of the numbers that these sizes are."""
        place = self._add()
        self.sizes.follow(sizes, lambda found: self._keep(place, read(found)))
        return place

    def own(self, view: ir.View, member: int | None = None) -> int:
        """The place of a view of this rank's memory, or (symmetric) of a member's."""
        return self.at(view.buffer, self.box(view), member)

    def counts(self, index: int, op: ir.Collective, earlier: int | None) -> Counts | None:
        """The counts of the all-to-all at `index`, where they are data; `earlier` is an exchange
        that has the same."""
        if op.sent is None or op.received is None:
            return None
        items, sent, received = self.items, self.own(op.sent), self.own(op.received)
        counts = Counts(lambda: (items[sent], items[received]))
        if earlier is not None:
            counts.earlier = self._counts[earlier][0]
            counts.swapped = self._counts[earlier][1] != sent
        self._counts[index] = counts, sent
        return counts

    def at(self, name: str, box: ir.Box, member: int | None = None) -> int:
        """The place of a box of a buffer, of this rank's memory or of that of a team's `member`."""
        key = (name, member, box)
        if key not in self._places:
            memory = self._memory(name, member)
            if name in self._starts:
                place = self._temporary(self._starts[name] + self._buffers[name].offset, box)
            elif not memory:
                place = self._of_the_run(self._buffers[name], box)
            else:
                place = self._lasting(name, memory, box)
            self._places[key] = place
        return self._places[key]

    def _temporary(self, start: Int, box: ir.Box) -> int:
        """The place of a box of the arena, from this byte on."""
        place = self._add()

        def tell(here: ir.Box, start: int) -> None:
            self._temporaries[place] = start, here
            if self.arena.nbytes() or not here.numel:  # else `move` makes the view
                self._keep(place, at(self.arena, start, here))

        self.sizes.follow_box(box, tell, start)
        return place

    def move(self, arena: torch.UntypedStorage) -> None:
        """Has the temporaries of the next runs in this memory; in none, where it is empty."""
        self.arena, empty = torch.UntypedStorage(0), not arena.nbytes()  # should an interrupt come
        with torch.inference_mode(False), torch.no_grad():
            for place, (start, box) in self._temporaries.items():
                self._keep(place, None if empty and box.numel else at(arena, start, box))
        self.arena, self._base = arena, arena.data_ptr()

    def _lasting(
        self, name: str, memory: Sequence[tuple[torch.UntypedStorage, Int]], box: ir.Box
    ) -> int:
        """The place of a box of storage that stays, or of a slot's copy in each run."""
        place, pair = self._add(), [torch.empty(0)] * 2
        if len(memory) == 2:
            self._symmetric[place] = name, pair
        for copy, (storage, start) in enumerate(memory):

            def tell(
                here: ir.Box, start: int, storage: torch.UntypedStorage = storage, copy: int = copy
            ) -> None:
                pair[copy] = at(storage, start, here)
                if len(memory) == 1:
                    self._keep(place, pair[0])

            self.sizes.follow_box(box, tell, start)
        return place

    def _memory(self, name: str, member: int | None) -> list[tuple[torch.UntypedStorage, Int]]:
        """The storage and the first byte of a buffer, if it stays: of a slot, of both copies."""
        buffer = self._buffers[name]
        if buffer.kind == "symmetric":
            slot = self._slots[name]
            copies = slot.copies[slot.me if member is None else member]
            skip = buffer.offset
            return [(c.untyped_storage(), int(c.storage_offset()) + skip) for c in copies]
        return []

    def _of_the_run(self, buffer: ir.Buffer, box: ir.Box) -> int:
        family = self._families[buffer.name]
        if box == whole(buffer):
            return family.place
        if not box.numel and buffer.kind == "fresh":  # it may be gone, or not there yet
            device = torch.device("cpu") if buffer.name in self.host else self.device
            made = functools.partial(torch.empty, dtype=DTYPES[box.dtype], device=device)
            return self.numbers(box.sizes, made)
        if not family.views and buffer.kind != "fresh":
            self._viewed.append(family)
        place = self._add()
        self.sizes.follow_box(box, functools.partial(family.views.__setitem__, place))
        return place

    def address(self, view: ir.View, member: int | None = None) -> Callable[[], int]:
        """Returns a function that gives the address of a view in each run, here or at a member."""
        box, items, name = self.box(view), self.items, view.buffer
        memory, skip = self._memory(name, member), box.offset * box.dtype.itemsize
        if name in self._starts:
            start = self._starts[name] + self._buffers[name].offset
            inside = self.sizes.sized([start + skip], lambda numbers: numbers[0])
            return lambda: self._base + inside.now
        first = [storage.data_ptr() + start + skip for storage, start in memory] or [skip]
        found = self.sizes.sized(first, lambda numbers: numbers)
        if not memory:
            place = self._families[name].place
            return lambda: items[place].data_ptr() + found.now[0]
        if len(memory) == 2:
            return lambda: found.now[self.takes[name] & 1]
        return lambda: found.now[0]

    def family(self, name: str) -> tuple[int, ...]:
        """All places that hold a buffer of this run or a view of it."""
        family = self._families[name]
        return (family.place, *family.views)

    def new(self) -> dict[str, torch.Tensor]:
        """Makes the tensors that `begin` allocates where they are not given."""
        return {name: make() for name, make in self.allocated.items()}

    def begin(self, given: Mapping[str, torch.Tensor], takes: Mapping[str, int]) -> None:
        """Fills in what this run was given, its slots' copies and the buffers it allocates."""
        for name, tensor in given.items():
            self.bind(name, tensor)
        self._fill(takes, given)

    def start(self, tensors: Sequence[torch.Tensor], takes: Mapping[str, int]) -> None:
        """`begin` for the tensors of all inputs, and then outputs, in the Program's order."""
        items = self.items
        items[: len(tensors)] = tensors
        for family in self._viewed:
            for place, box in family.views.items():
                items[place] = derive(items[family.place], box)
        if takes or self.allocated:
            self._fill(takes, ())

    def _fill(self, takes: Mapping[str, int], given: Container[str]) -> None:
        self.takes = takes
        for place, (name, pair) in self._symmetric.items():
            self.items[place] = pair[takes[name] & 1]
        for name, make in self.allocated.items():
            if name not in given:
                self.bind(name, make())

    def bind(self, name: str, tensor: torch.Tensor) -> None:
        family, items = self._families[name], self.items
        if self.homes and name in self.homes:
            once(self.homes[name]).copy_(once(tensor))
            tensor = self.homes[name]
        items[family.place] = tensor
        for place, box in family.views.items():
            items[place] = derive(tensor, box)

    def end(self) -> None:
        self.items[:] = self._template

    def drop(self) -> None:
        """Lets go of all memory, for good: who holds this may be garbage of cycles for long."""
        self._slots, self.arena = {}, torch.UntypedStorage(0)
        for held in (self.items, self._template, self._symmetric, self._temporaries, self.sizes):
            held.clear()


def alike(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """True if these strides reach the same elements: in dimensions of one they do not matter."""
    return tensor.numel() == 0 or all(
        size == 1 or got == wanted
        for size, got, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with what is expanded only once: torch writes nothing that stands there twice."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor
    sizes = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides)]  # noqa: B905
    return tensor.as_strided(sizes, strides)


def copier(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Function that copies a tensor with its strides; a clone of a view with gaps has others."""
    if torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor.clone
    facts = {"dtype": tensor.dtype, "device": tensor.device}
    sizes, strides, source = tensor.shape, tensor.stride(), once(tensor)

    def copy() -> torch.Tensor:
        made = torch.empty_strided(sizes, strides, **facts)
        once(made).copy_(source)
        return made

    return copy


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one that torch has conjugated or negated only by a mark."""
    return copier(tensor)() if tensor.is_conj() or tensor.is_neg() else tensor
