"""Who makes and who uses each value of a serial Program, and what its bytes are made of.

A buffer is a value where one op makes all of it; views and data movement (cat, clone, pad, ...) are
looked through down to a root:

    >>> values = Dataflow(program, rank=0)
    >>> values.contents(View("t3").view(8, 4), "gathered", root_contents, row_bytes=16)
    (ByteRun(start=0, length=64, source=0, offset=0), ...)
"""

from __future__ import annotations

from functools import cached_property

from interlace.ir import Arg, Box, Copy, Op, Program, View
from interlace.ir.operators import is_kind
from interlace.ir.overlap import rank_dependent
from interlace.ir.sizes import Int
from interlace.ir.types import TableEntry
from interlace.passes.sites.rows import Contents, Refused, concatenated, padded, seen, stored
from interlace.passes.strategies.emitter import Names
from interlace.passes.uses import Uses

CAT, PADS = "aten.cat.default", "aten.constant_pad_nd.default"


class Dataflow(Uses):
    """The values of a Program as one rank sees them."""

    def __init__(self, program: Program, rank: int) -> None:
        super().__init__(program)
        self._box = program.boxes(rank)
        self._uneven = {
            name
            for name, buffer in self.buffers.items()
            if any(isinstance(dim, TableEntry) for dim in buffer.shape)
        }
        self.ranked = False
        """True once a box was asked for that may be another one on another rank."""

    @cached_property
    def names(self) -> Names:
        """The names that the Program takes; what is tried out adds to a copy."""
        return Names(self.program)

    def box(self, view: View) -> Box:
        """The box of a view on this rank."""
        if not self.ranked:
            self.ranked = view.buffer in self._uneven or any(map(rank_dependent, view.steps))
        return self._box(view)

    def maker(self, name: str) -> tuple[int, Op] | None:
        """The one op that makes all of a value, or None where there is none or more than one."""
        made = self.makers.get(name, [])
        if len(made) != 1 or self.buffers[name].kind == "input":
            return None
        for access in self.touched[made[0]][1]:
            if access.view.buffer == name and access.view.covers_buffer:
                return made[0], self.program.ops[made[0]]
        return None

    def leaves(self, name: str) -> bool:
        """True if a value is returned, or an output."""
        return name in self.returned or self.buffers[name].kind == "output"

    def whole(self, view: View) -> bool:
        """True if a view is its whole buffer in row-major order, whatever its sizes."""
        box, full = self.box(view), self.box(View(view.buffer))
        same = box.numel * box.dtype.itemsize == full.numel * full.dtype.itemsize
        return same and box.contiguous and full.contiguous and box.offset == full.offset == 0

    def moved(self, name: str) -> tuple[View, ...] | None:
        """The views whose elements a buffer holds in another order, if an op did only that."""
        index, op = self.maker(name) or (-1, None)
        call = self.calls.get(index)
        if call is None:
            if not (isinstance(op, Copy) and op.dst.covers_buffer):
                return None
            return (op.src,) if self.box(op.src).dtype == self.box(op.dst).dtype else None
        first = call.args[0] if call.args else None
        filled = call.fn == PADS and len(call.args) > 2 and call.args[2] != 0
        if not is_kind(call.fn, "movement") or len(call.fresh) != 1 or filled:
            return None
        if call.fn == CAT and isinstance(first, tuple):
            return tuple([part for part in first if isinstance(part, View)])
        return (first,) if isinstance(first, View) else None

    def root(self, name: str) -> str:
        """The buffer that this one's elements come from; itself where an op computed them."""
        sources = self.moved(name)
        if not sources:
            return name
        roots = {self.root(view.buffer) for view in sources}
        if len(roots) > 1:
            raise Refused("several values are put together here")
        return roots.pop()

    def between(self, name: str, root: str) -> dict[str, int]:
        """The moved buffers from `name` back to its root, with the ops that make them."""
        found: dict[str, int] = {}
        stack = [name]
        while stack:
            current = stack.pop()
            if current != root and current not in found and (made := self.maker(current)):
                found[current] = made[0]
                stack += [view.buffer for view in self.moved(current) or ()]
        return found

    def contents(self, view: View, root: str, origin: Contents, row_bytes: Int) -> Contents:
        """The contents of a view, given those of the buffer `root` (in storage order); Refused
        where that cuts rows of `row_bytes` bytes, if there are to be such rows."""
        memory: dict[str, Contents] = {root: origin}
        return seen(self._stored(view.buffer, memory), self.box(view), row_bytes)

    def _stored(self, name: str, memory: dict[str, Contents]) -> Contents:
        if name not in memory:
            memory[name] = stored(self._moved(name, memory), self.box(View(name)))
        return memory[name]

    def _seen(self, view: View, memory: dict[str, Contents]) -> Contents:
        return seen(self._stored(view.buffer, memory), self.box(view))

    def _moved(self, name: str, memory: dict[str, Contents]) -> Contents:
        """The contents of a buffer that an op filled with elements of others, in another order."""
        (index, _), sources = self.maker(name) or (-1, None), self.moved(name)
        assert sources is not None, f"{name} is neither the root nor moved"
        call = self.calls.get(index)
        if call is not None and call.fn == CAT:
            boxes = [(view, self.box(view)) for view in sources]
            boxes = [(view, box) for view, box in boxes if box.sizes != (0,)]  # torch skips these
            parts = [(self._seen(v, memory), box.sizes, box.dtype.itemsize) for v, box in boxes]
            dim = call.args[1] if len(call.args) > 1 else dict(call.kwargs).get("dim", 0)
            return concatenated(parts, _int(dim)) if parts else ()
        (src,) = sources
        if call is None:
            return self._seen(src, memory)
        if call.fn == PADS:
            box, pads = self.box(src), call.args[1]
            assert isinstance(pads, tuple)
            sizes = list(map(_int, pads))
            return padded(self._seen(src, memory), box.sizes, box.dtype.itemsize, sizes)
        return self._seen(src, memory)


def _int(arg: Arg) -> int:
    if not isinstance(arg, int):
        raise Refused(f"an operator has {arg!r} where a number was expected")
    return arg
