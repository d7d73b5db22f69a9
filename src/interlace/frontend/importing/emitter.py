"""Output of a graph's import: buffers and ops of a Program under construction.

emitter = SerialEmitter(torch.device("cpu"))
y = emitter.call("aten.relu.default", (x,), Buffer("y", DType.f32, (8, 4), "fresh"))
emitter.reshaped(y, (32,))        # a View; a contiguous copy first where it must be
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from interlace.errors import ProgramError
from interlace.frontend.importing.types import NOWHERE, on_host
from interlace.frontend.importing.views import adjacent, shorten
from interlace.ir import (
    Alloc,
    Box,
    Buffer,
    Call,
    Copy,
    DType,
    Loc,
    Op,
    Reshape,
    Site,
    View,
    views_in,
)
from interlace.ir.sizes import Int

TAKEN = {"rng", "main", "comm", "inf", "nan", *(str(dtype) for dtype in DType)}
"""Words that mean something else in a Program's text."""


class SerialEmitter:
    """Collects the ops of a serial Program; every name is used once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []
        self.loc = Loc()
        self.sites: list[Site] = []
        """Communications that no pass could know for what they are."""
        self.host: set[str] = set()
        """Buffers that stay on the CPU in a graph on a GPU."""
        self._names: dict[str, int] = dict.fromkeys(TAKEN, 0)

    def name(self, wanted: str) -> str:
        """`wanted` as an identifier that nothing else has."""
        base = "".join(c if c.isalnum() and c.isascii() else "_" for c in wanted) or "value"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = f"v_{base}"
        found = base
        while found in self._names:
            self._names[base] = self._names.get(base, 0) + 1
            found = f"{base}_{self._names[base]}"
        self._names[found] = 0
        return found

    def reserve(self, names: Iterable[str]) -> None:
        """Names that no buffer has."""
        self._names.update(dict.fromkeys(names, 0))

    def box(self, view: View) -> Box:
        """The box of a view."""
        return view.box(self.buffers[view.buffer], NOWHERE)

    def sizes(self, view: View) -> tuple[Int, ...]:
        """The sizes of a view."""
        return self.box(view).sizes

    def fresh(self, name: str, dtype: DType, sizes: tuple[Int, ...]) -> Buffer:
        """A contiguous buffer for a result, not yet declared."""
        return Buffer(self.name(name), dtype, sizes, "fresh")

    def declare(self, buffer: Buffer, like: torch.Tensor | None = None) -> View:
        """Notes a buffer that an op (or the Program's header) declares; it is where `like` is."""
        self.buffers[buffer.name] = buffer
        if like is not None and on_host(like, self.device):
            self.host.add(buffer.name)
        return View(buffer.name)

    def emit(self, op: Op) -> None:
        """Appends an op."""
        self.ops.append(op)

    def site(self, kind: str, reason: str) -> int:
        """A new site: its number, for its ops."""
        number = len(self.sites) + 1
        self.sites.append(Site(id=number, kind=kind, module=self.loc.module, reason=reason))
        return number

    def call(
        self,
        fn: str,
        args: tuple[Any, ...],
        result: Buffer,
        kwargs: Mapping[str, Any] | None = None,
    ) -> View:
        """A Call that makes one result."""
        view = self.declare(result)
        given = [view.buffer for arg in args for view in views_in(arg)]
        if given and self.host.issuperset(given):
            self.host.add(result.name)
        pairs = tuple((kwargs or {}).items())
        self.emit(Call(fn=fn, args=args, kwargs=pairs, fresh=(result,), loc=self.loc))
        return view

    def empty(self, name: str, dtype: DType, sizes: tuple[Int, ...]) -> View:
        """A fresh buffer for a collective or a copy to fill."""
        buffer = self.fresh(name, dtype, sizes)
        self.emit(Alloc(buffer=buffer, loc=self.loc))
        return self.declare(buffer)

    def joined(self, views: Sequence[View], dim: int, sizes: tuple[Int, ...]) -> View | None:
        """The views one after another along `dim`, where they are neighbours in memory."""
        if math.prod(sizes[:dim]) != 1 or not math.prod(sizes):
            return None
        filled = [view for view in views if self.box(view).numel]
        return adjacent(filled, self.buffers[filled[0].buffer], sizes)

    def concatenated(
        self, views: Sequence[View], dim: int, sizes: tuple[Int, ...], name: str
    ) -> View:
        """The views one after another along `dim`: a view where they are neighbours in memory."""
        found = self.joined(views, dim, sizes)
        if found is not None:
            return found
        result = self.fresh(name, self.box(views[0]).dtype, sizes)
        return self.call("aten.cat.default", (tuple(views), dim), result)

    def copied(self, view: View) -> View:
        """A contiguous copy."""
        box = self.box(view)
        result = self.fresh(f"{view.buffer}_copy", box.dtype, box.sizes)
        return self.call(
            "aten.clone.default", (view,), result, {"memory_format": "@contiguous_format"}
        )

    def contiguous(self, view: View) -> View:
        """The view, or a contiguous copy of it."""
        return view if self.box(view).contiguous else self.copied(view)

    def viewed(self, view: View, sizes: tuple[Int, ...]) -> View | None:
        """The view with other sizes, or None where that needs a copy."""
        buffer = self.buffers[view.buffer]
        longer = view.then(Reshape(sizes))
        try:
            return shorten(longer, buffer, longer.box(buffer, NOWHERE))
        except ProgramError:
            return None

    def reshaped(self, view: View, sizes: tuple[Int, ...]) -> View:
        """The view with other sizes; of a contiguous copy where it must be."""
        found = self.viewed(view, sizes) or self.viewed(self.copied(view), sizes)
        assert found is not None, f"{view} of {self.sizes(view)} has no sizes {sizes}"
        return found

    def copy_into(self, src: View, dst: View) -> None:
        """Writes `src` (expanded) into `dst`; nothing where they are the same box."""
        target = self.box(dst)
        if src.buffer == dst.buffer:
            if self.box(src) == target:
                return
            if self.box(src).overlaps(target):
                src = self.copied(src)
        if self.sizes(src) != target.sizes:
            src = src.expand(*target.sizes)
        if self.host.isdisjoint((src.buffer, dst.buffer)):
            self.emit(Copy(src=src, dst=dst, loc=self.loc))
        else:
            fn = "aten.copy_.default"
            self.emit(Call(fn=fn, args=(dst, src), outs=(dst,), mutates=True, loc=self.loc))
