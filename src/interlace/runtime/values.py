"""The per-run table: every tensor that the calls of a Program take, by place.

Views of storage that stays (the arena) are made once, at bind time. Those of inputs, outputs and
slots are filled in when a run starts, those of fresh buffers when the buffer is made. A call reads
its arguments by place, so the hot path makes no view and looks up no name.

    place = values.own(View("x").chunk(0, 2))
    values.begin({"x": x}, uses)
    values.items[place]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from interlace.comm import Registered, Slot, Use
from interlace.errors import ExecutorError, ProgramError
from interlace.ir import Alloc, Arg, Box, Buffer, Call, DType, Program, View, contiguous_strides

DTYPES: Mapping[DType, torch.dtype] = {
    DType.f64: torch.float64,
    DType.f32: torch.float32,
    DType.bf16: torch.bfloat16,
    DType.f16: torch.float16,
    DType.f8e4m3: torch.float8_e4m3fn,
    DType.f8e5m2: torch.float8_e5m2,
    DType.i64: torch.int64,
    DType.i32: torch.int32,
    DType.i16: torch.int16,
    DType.i8: torch.int8,
    DType.u64: torch.uint64,
    DType.u32: torch.uint32,
    DType.u16: torch.uint16,
    DType.u8: torch.uint8,
    DType.bool: torch.bool,
    DType.c64: torch.complex64,
    DType.c128: torch.complex128,
}
ALIGN = 256


def whole(buffer: Buffer) -> Box:
    """The box of a whole buffer of a concrete Program."""
    sizes = tuple(int(dim) for dim in buffer.shape if isinstance(dim, int))
    assert len(sizes) == len(buffer.shape), f"{buffer.name} was not instantiated"
    strides = contiguous_strides(sizes) if buffer.strides is None else buffer.strides
    return Box(0, sizes, strides, buffer.dtype)


def nbytes(buffer: Buffer) -> int:
    """Bytes from a buffer's first element to the end of its last."""
    return whole(buffer).hull[1]


def at(storage: torch.UntypedStorage, start: int, box: Box, device: torch.device) -> torch.Tensor:
    """The box of a buffer that begins at byte `start` of a storage."""
    offset, rest = divmod(start, box.dtype.itemsize)
    if rest:
        raise ProgramError(f"byte {start} is no multiple of the size of {box.dtype}")
    if start + box.hull[1] > storage.nbytes() and box.numel:  # `set_` would make it larger
        raise ExecutorError(
            f"a tensor of {list(box.sizes)} {box.dtype} lies beyond the end of its storage of "
            f"{storage.nbytes()} bytes: was its memory freed (untyped_storage().resize_)?"
        )
    empty = torch.empty(0, dtype=DTYPES[box.dtype], device=device)
    return empty.set_(storage, offset + box.offset, box.sizes, box.strides)  # pyright: ignore


def derive(base: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a buffer that is a tensor of the caller's or of this run's own."""
    if base.dtype == DTYPES[box.dtype]:
        if not box.offset:  # torch then begins where the base does
            return base.as_strided(box.sizes, box.strides)
        return base.as_strided(box.sizes, box.strides, base.storage_offset() + box.offset)
    start = int(base.storage_offset()) * base.itemsize
    return at(base.untyped_storage(), start, box, base.device)


@dataclass(slots=True)
class _Family:
    """A buffer of this run: where the table has it, and the views of it that calls take."""

    place: int
    views: list[tuple[int, Box]] = field(default_factory=list)


def _returned(args: Sequence[Arg]) -> Iterator[str]:
    for arg in args:
        if isinstance(arg, View):
            yield arg.buffer
        elif isinstance(arg, tuple):
            yield from _returned(arg)


def _touched(program: Program) -> Iterator[str]:
    for op in program.ops:
        made = {buffer.name for buffer in op.fresh} if isinstance(op, Call) else set[str]()
        for access in (*op.reads(), *op.writes()):
            if access.view.buffer not in made:
                yield access.view.buffer


class Values:
    """The table of one bound Program."""

    def __init__(
        self,
        program: Program,
        box: Callable[[View], Box],
        slots: Mapping[str, Slot],
        device: torch.device,
        host: frozenset[str] = frozenset(),
        registered: Mapping[str, Registered] | None = None,
    ) -> None:
        self.registered = registered or {}
        """What peers reach of the caller's memory, by name: the same in every run."""
        self.host = host
        """Buffers that are on the CPU, whatever the device is."""
        self.items: list[Any] = []
        """What the calls read; places stay the same, contents of some change from run to run."""
        self._program = program
        self.box = box
        """The strided box of a view on this rank."""
        self.device = device
        self._buffers = program.buffers()
        self.used = frozenset((*_returned(program.returned()), *_touched(program)))
        """Buffers that it returns, or that an op touches which is not the Call that makes them."""
        self._slots = slots
        self._places: dict[tuple[str, int | None, Box], int] = {}
        self._families: dict[str, _Family] = {}
        self._symmetric: list[tuple[int, str, tuple[torch.Tensor, torch.Tensor]]] = []
        self.copies: dict[str, int] = {}
        """Which copy of its slot each symmetric buffer has in this run."""
        self._template: list[Any] = []
        self._constant: set[int] = set()
        self._arena, self._starts = self._lay_out()
        self._allocated = tuple(
            (op.buffer.name, whole(op.buffer))
            for op in program.ops
            if isinstance(op, Alloc) and op.buffer.kind == "fresh"
        )
        for buffer in self._buffers.values():
            if buffer.kind in ("input", "output", "fresh"):
                self._families[buffer.name] = _Family(self._add(None, constant=False))

    @property
    def arena_nbytes(self) -> int:
        """Bytes of local storage that this table keeps."""
        return self._arena.nbytes()

    def _lay_out(self) -> tuple[torch.UntypedStorage, dict[str, int]]:
        """Gives every local buffer its first byte in one arena."""
        sizes: dict[str, int] = {}
        locals_ = [b for b in self._buffers.values() if b.kind == "local"]
        for buffer in locals_:
            key = f"shared {buffer.storage}" if buffer.storage else f"own {buffer.name}"
            sizes[key] = max(sizes.get(key, 0), buffer.offset + nbytes(buffer))
        starts, total = {}, 0
        for key, size in sizes.items():
            starts[key] = total
            total += -(-size // ALIGN) * ALIGN
        arena = torch.empty(total, dtype=torch.uint8, device=self.device).untyped_storage()
        return arena, {
            b.name: b.offset + starts[f"shared {b.storage}" if b.storage else f"own {b.name}"]
            for b in locals_
        }

    def _add(self, value: Any, constant: bool) -> int:
        place = len(self.items)
        self.items.append(value)
        self._template.append(value if constant else None)
        if constant:
            self._constant.add(place)
        return place

    def is_constant(self, place: int) -> bool:
        """Whether the content of a place is the same in every run."""
        return place in self._constant

    def constant(self, value: Any) -> int:
        """A place for a value that never changes."""
        return self._add(value, constant=True)

    def own(self, view: View) -> int:
        """The place of a view of this rank's memory."""
        return self.at(view.buffer, self.box(view))

    def at(self, name: str, box: Box) -> int:
        """The place of a box of this rank's memory."""
        buffer = self._buffers[name]
        if buffer.kind == "symmetric":
            return self._in_slot(buffer, self._slots[name].me, box)
        if name in self.registered:
            return self._in_registered(name, self.registered[name].me, box)
        key = (name, None, box)
        if key not in self._places:
            family = self._families.get(name)
            if family is None:
                tensor = at(self._arena, self._starts[name], box, self.device)
                self._places[key] = self._add(tensor, constant=True)
            elif box == whole(buffer):
                self._places[key] = family.place
            elif not box.numel and buffer.kind == "fresh":  # it may be gone, or not there yet
                device = torch.device("cpu") if name in self.host else self.device
                tensor = torch.empty(box.sizes, dtype=DTYPES[box.dtype], device=device)
                self._places[key] = self._add(tensor, constant=True)
            else:
                place = self._places[key] = self._add(None, constant=False)
                family.views.append((place, box))
        return self._places[key]

    def remote(self, view: View, member: int) -> int:
        """The place of a view of a symmetric or registered buffer in a peer's memory."""
        if view.buffer in self.registered:
            return self._in_registered(view.buffer, member, self.box(view))
        return self._in_slot(self._buffers[view.buffer], member, self.box(view))

    def _in_registered(self, name: str, member: int, box: Box) -> int:
        key = (name, member, box)
        if key not in self._places:
            copy = self.registered[name].copies[member]
            start = int(copy.storage_offset())
            tensor = at(copy.untyped_storage(), start, box, copy.device)
            self._places[key] = self._add(tensor, constant=True)
        return self._places[key]

    def callers(self, view: View) -> tuple[torch.Tensor, Box | None] | None:
        """The caller's own tensor of what is registered, and which box of it, if not all of it;
        None for anything else."""
        held = self.registered.get(view.buffer)
        if held is None:
            return None
        box = self.box(view)
        return held.tensor, None if box == whole(self._buffers[view.buffer]) else box

    def _in_slot(self, buffer: Buffer, member: int, box: Box) -> int:
        key = (buffer.name, member, box)
        if key not in self._places:
            first, second = (
                at(
                    copy.untyped_storage(),
                    int(copy.storage_offset()) + buffer.offset,
                    box,
                    copy.device,
                )
                for copy in self._slots[buffer.name].copies[member]
            )
            place = self._places[key] = self._add(None, constant=False)
            self._symmetric.append((place, buffer.name, (first, second)))
        return self._places[key]

    def address(self, view: View, member: int | None = None) -> Callable[[], int]:
        """What gives the address of a view in each run, without making a tensor of it.

        With `member` the view is in that peer's copy of a symmetric or registered buffer.
        """
        buffer, box = self._buffers[view.buffer], self.box(view)
        items, skip = self.items, box.offset * box.dtype.itemsize
        if buffer.kind == "symmetric":
            slot = self._slots[view.buffer]
            pair = slot.copies[slot.me if member is None else member]
            first, second = (copy.data_ptr() + buffer.offset + skip for copy in pair)
            copies, name = self.copies, view.buffer
            return lambda: second if copies[name] else first
        if held := self.registered.get(view.buffer):
            there = held.copies[held.me if member is None else member].data_ptr() + skip
            return lambda: there
        if buffer.kind == "local":
            fixed = self._arena.data_ptr() + self._starts[view.buffer] + skip
            return lambda: fixed
        place = self._families[view.buffer].place
        return lambda: items[place].data_ptr() + skip

    def family(self, name: str) -> tuple[int, ...]:
        """All places that hold a buffer of this run or a view of it."""
        family = self._families[name]
        return (family.place, *(place for place, _ in family.views))

    # -- a run -----------------------------------------------------------------------------------

    def _new(self, box: Box) -> torch.Tensor:
        dtype = DTYPES[box.dtype]
        return torch.empty_strided(box.sizes, box.strides, dtype=dtype, device=self.device)

    def new(self) -> dict[str, torch.Tensor]:
        """What `begin` allocates where it is not given."""
        return {name: self._new(box) for name, box in self._allocated}

    def begin(self, given: Mapping[str, torch.Tensor], uses: Mapping[str, Use]) -> None:
        """Fills in what this run was given, its slots' copies and the buffers it allocates."""
        items, copies = self.items, self.copies
        for name, tensor in given.items():
            self.bind(name, tensor)
        for name, use in uses.items():
            copies[name] = use.copy
        for place, name, pair in self._symmetric:
            items[place] = pair[uses[name].copy]
        for name, box in self._allocated:
            if name not in given:
                self.bind(name, self._new(box))

    def starter(
        self, names: Sequence[str]
    ) -> Callable[[Sequence[torch.Tensor], Mapping[str, Use]], None]:
        """`begin` for tensors in the order of these names, without a look-up for each.

        Asked for once every op is bound.
        """
        items, families = self.items, [self._families[name] for name in names]
        places = [family.place for family in families]
        views = [(*view, family.place) for family in families for view in family.views]
        more = bool(self._symmetric or self._allocated)

        def start(tensors: Sequence[torch.Tensor], uses: Mapping[str, Use]) -> None:
            if len(tensors) != len(places):
                raise ExecutorError(f"{len(tensors)} tensors for {len(places)} parameters")
            for place, tensor in zip(places, tensors):  # noqa: B905
                items[place] = tensor
            for place, box, whole in views:
                items[place] = derive(items[whole], box)
            if more or uses:
                self.begin({}, uses)

        return start

    def bind(self, name: str, tensor: torch.Tensor) -> None:
        """A buffer of this run now is this tensor."""
        family, items = self._families[name], self.items
        items[family.place] = tensor
        for place, box in family.views:
            items[place] = derive(tensor, box)

    def end(self) -> None:
        """Lets go of everything that belongs to the run."""
        self.items[:] = self._template

    def drop(self) -> None:
        """Lets go of all memory, for good: who holds this may be garbage of cycles for long."""
        self.registered, self._slots, self._arena = {}, {}, torch.UntypedStorage(0)
        for held in (self.items, self._template, self._symmetric):
            held.clear()
