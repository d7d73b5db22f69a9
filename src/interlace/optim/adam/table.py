"""Many parameters in one launch: the table that adam/kernel.py reads, and what changes in it.

The table holds addresses and lengths and is uploaded once. Gradients may lie elsewhere at each
step and the scalars change, so these are uploaded at every step, in one small copy from pinned
memory, each time in a new buffer of torch's caching allocators.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.kernels.launch import kernel_of
from interlace.optim.adam.arithmetic import AdamSpec
from interlace.optim.adam.kernel import CHUNK, FIELDS, adam_source


class TableRow(NamedTuple):
    """One parameter: where its memory lies, by address (0: there is none)."""

    p: int
    m: int
    v: int
    w: int
    count: int
    base: int
    key: int


class Launch:
    """Parameters of one kind on one device, and the kernel that updates them."""

    def __init__(
        self, device: torch.device, spec: AdamSpec, works: Sequence[TableRow], *, aligned: bool
    ) -> None:
        self.device, self.pins = device, device.type == "cuda"
        self._count = len(works)
        self._program = kernel_of(device, adam_source, spec, aligned=aligned)
        blocks = torch.tensor([-(-work.count // CHUNK) for work in works], device="cpu")
        first = blocks.cumsum(0) - blocks
        words = [
            [*work[:6], work.key - (work.key >> 63 << 64), at]
            for work, at in zip(works, first.tolist(), strict=True)
        ]
        assert len(words[0]) == FIELDS
        self._blocks = int(blocks.sum())
        numbers = torch.arange(self._count, dtype=torch.int32, device="cpu")
        self._stream = self._current()
        self._table = self._upload(torch.tensor(words, dtype=torch.int64, device="cpu"))
        self._owners = self._upload(numbers.repeat_interleave(blocks))

    def run(
        self, grads: Sequence[int], rows: Sequence[Sequence[float]], row_of: Sequence[int]
    ) -> None:
        """One step. `grads` are addresses; `row_of` says which row of `rows` a parameter has."""
        if not self._blocks:
            return
        words = array("q", grads)
        words.extend(row_of)
        numbers = array("d")
        for row in rows:
            numbers.extend(row)
        words.frombytes(numbers.tobytes())
        dynamic = self._upload(torch.frombuffer(words, dtype=torch.int64))
        self._follow()
        at = dynamic.data_ptr()
        table, owners = self._table.data_ptr(), self._owners.data_ptr()
        args = (table, owners, at, self._count, at + 16 * self._count)
        self._program.launch(self._current(), self._blocks, args)

    def _current(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.pins else 0

    def _upload(self, host: Tensor) -> Tensor:
        if not self.pins:
            return host.clone()
        return host.pin_memory().to(self.device, non_blocking=True)

    def _follow(self) -> None:
        """Tells the allocator of a new stream."""
        if self._current() != self._stream:
            stream = torch.cuda.current_stream(self.device)
            for tensor in (self._table, self._owners):
                tensor.record_stream(stream)
