"""Views of an input that is the same tensor in most runs, such as a parameter: made once for it.

    kept = KeptViews([box], make)
    (view,) = kept.of(weight)      # again only where `weight` is another tensor, or lies elsewhere

Note [Whose memory is kept]
    What is kept here must not keep alive what the caller lets go of. The tensor is held weakly, and
    its views, which are made of its storage and not as views of it (those would hold it), go with
    it. A tensor that stays and is given other memory (`param.data = other`) keeps the old memory
    until the next run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from interlace.ir import Box

Make = Callable[[torch.UntypedStorage, int, Box, torch.device], torch.Tensor]
"""What gives a box of a buffer that begins at some byte of a storage."""


class KeptViews:
    """The boxes of one input that calls take."""

    __slots__ = ("__weakref__", "_address", "_boxes", "_make", "_tensor", "_views")

    def __init__(self, boxes: Sequence[Box], make: Make) -> None:
        self._boxes, self._make = tuple(boxes), make
        self._tensor: weakref.ref[torch.Tensor] | None = None
        self._address = 0
        self._views: list[torch.Tensor] = []

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The views of a tensor, whose sizes, strides and type the caller has checked."""
        known = self._tensor
        if known is not None and known() is tensor and self._address == tensor.data_ptr():
            return self._views
        storage, start = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize
        self._views = [self._make(storage, start, box, tensor.device) for box in self._boxes]
        self._address = tensor.data_ptr()
        me = weakref.ref(self)

        def gone(which: weakref.ref[torch.Tensor]) -> None:
            kept = me()
            if kept is not None and kept._tensor is which:
                kept._tensor, kept._views = None, []

        self._tensor = weakref.ref(tensor, gone)
        return self._views
