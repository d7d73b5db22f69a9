"""Many parameters in one launch: the table that adam/kernel.py reads, and what changes in it.

The table holds addresses and lengths and is uploaded once. Gradients may lie elsewhere at each
step and the scalars change, so these are uploaded at every step, in one small copy from pinned
memory, each time in a new buffer of torch's caching allocators.

Note [Capture]
    A captured copy reads its pinned source again at every replay, and a captured kernel the table;
    both are kept for good (`Launch.baked`). No pinned memory may be allocated during a capture, so
    a buffer is set aside at the step before. A small kernel counts steps and computes the scalars
    before the large one, so that a replay counts as a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from interlace.errors import OptimizerError
from interlace.kernels.launch import kernel_of
from interlace.optim.adam.arithmetic import ROW, AdamSpec, Hyper
from interlace.optim.adam.kernel import CHUNK, FIELDS, PREPARE, adam_source, prepare_source


class TableRow(NamedTuple):
    """One parameter: where its memory lies, by address (0: there is none)."""

    p: int
    m: int
    v: int
    vmax: int
    w: int
    count: int
    base: int
    key: int
    step: int
    """The address of its count of steps, where the device counts."""


class Launch:
    """Parameters of one kind on one device, and the kernel that updates them. `counts`: the device
    counts steps, by `run_counting`; else the host, and `run` is called.
    """

    def __init__(
        self,
        device: torch.device,
        spec: AdamSpec,
        works: Sequence[TableRow],
        *,
        aligned: bool,
        counts: bool,
    ) -> None:
        self.device, self.pins = device, device.type == "cuda"
        self.baked: list[tuple[Tensor | None, ...]] = []
        self._count = len(works)
        self._program = kernel_of(device, adam_source, spec, aligned=aligned, counted=counts)
        self._prepare = kernel_of(device, prepare_source) if counts else None
        blocks = torch.tensor([-(-work.count // CHUNK) for work in works], device="cpu")
        first = blocks.cumsum(0) - blocks
        words = [
            [*work[:7], work.key - (work.key >> 63 << 64), at, work.step]
            for work, at in zip(works, first.tolist(), strict=True)
        ]
        assert len(words[0]) == FIELDS
        self._blocks = int(blocks.sum())
        numbers = torch.arange(self._count, dtype=torch.int32, device="cpu")
        self._stream = self._current()
        self._table = self._upload(torch.tensor(words, dtype=torch.int64, device="cpu"))
        self._owners = self._upload(numbers.repeat_interleave(blocks))
        self.rows, self._spare = None, None
        if counts:
            self.rows = torch.empty(self._count, ROW, dtype=torch.float64, device=device)

    def check(self) -> None:
        """Raises OptimizerError where a step would be captured that cannot be."""
        if self.pins and self._spare is None and torch.cuda.is_current_stream_capturing():
            raise OptimizerError(
                "an optimizer step is captured in a CUDA graph with capturable=False, or without a "
                "step outside of it since the last capture: construct the optimizer with "
                "capturable=True and run one step, on a side stream, before each capture"
            )

    def run(
        self, grads: Sequence[int], rows: Sequence[Sequence[float]], row_of: Sequence[int]
    ) -> None:
        """One step. `grads` are addresses; `row_of` says which row of `rows` a parameter has."""
        dynamic = self._upload_words(grads, row_of, rows, ())
        at = dynamic.data_ptr()
        self._launch(at, at + 16 * self._count)

    def run_counting(
        self,
        grads: Sequence[int],
        hypers: Sequence[tuple[float | Tensor, Hyper]],
        row_of: Sequence[int],
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """The same where the device counts; a learning rate that lies there is read there.
        `found_inf` (fp32, one element) skips the step if it is not 0; gradients come multiplied
        by `scale`.
        """
        assert self._prepare is not None
        assert self.rows is not None
        given = [_hyper_row(lr, hyper) for lr, hyper in hypers]
        rates = [lr for lr, _ in hypers if isinstance(lr, Tensor)]
        dynamic = self._upload_words(grads, row_of, given, (scale, found_inf, *rates))
        at, rows = dynamic.data_ptr(), self.rows.data_ptr()
        flags = [0 if t is None else t.data_ptr() for t in (scale, found_inf)]
        args = (self._table.data_ptr(), at, self._count, at + 16 * self._count, rows, *flags)
        self._prepare.launch(self._current(), -(-self._count // PREPARE), args)
        self._launch(at, rows)

    def _launch(self, dynamic: int, rows: int) -> None:
        if self._blocks:
            args = (self._table.data_ptr(), self._owners.data_ptr(), dynamic, self._count, rows)
            self._program.launch(self._current(), self._blocks, args)

    def _current(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.pins else 0

    def _upload(self, host: Tensor) -> Tensor:
        if not self.pins:
            return host.clone()
        return host.pin_memory().to(self.device, non_blocking=True)

    def _upload_words(
        self,
        grads: Sequence[int],
        row_of: Sequence[int],
        rows: Sequence[Sequence[float]],
        kept: tuple[Tensor | None, ...],
    ) -> Tensor:
        """Addresses, numbers of rows and the rows; `kept` are what a capture must keep as well."""
        words = array("q", grads)
        words.extend(row_of)
        padded = array("d")
        for row in rows:
            padded.extend(row)
            padded.extend((0.0,) * (ROW - len(row)))
        words.frombytes(padded.tobytes())
        host = torch.frombuffer(words, dtype=torch.int64)
        if self.pins and torch.cuda.is_current_stream_capturing():
            return self._bake(host, kept)
        if self.pins:
            self._follow(len(host))
        return self._upload(host)

    def _follow(self, words: int) -> None:
        """Outside of a capture: sets pinned memory aside for one, which uploads as many `words` as
        any step, and tells the allocator of a new stream.
        """
        if self._prepare is not None and self._spare is None:
            self._spare = torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=True)
        if self._current() != self._stream:
            stream = torch.cuda.current_stream(self.device)
            for tensor in (self._table, self._owners, self.rows):
                if tensor is not None:
                    tensor.record_stream(stream)

    def _bake(self, host: Tensor, kept: tuple[Tensor | None, ...]) -> Tensor:
        """Uploads in a capture; see Note [Capture]."""
        assert self._spare is not None, "see `check`"
        staged, self._spare = self._spare, None
        staged.copy_(host)
        dynamic = torch.empty(len(host), dtype=torch.int64, device=self.device)
        dynamic.copy_(staged, non_blocking=True)
        self.baked.append((staged, dynamic, *kept))
        return dynamic


def _hyper_row(lr: float | Tensor, hyper: Hyper) -> tuple[float, ...]:
    """Row that `prepare_kernel` makes scalars of; a learning rate on the device, by address."""
    address = array("q", [lr.data_ptr() if isinstance(lr, Tensor) else 0])
    (at,) = array("d", address.tobytes())
    value = 0.0 if isinstance(lr, Tensor) else lr
    sign = -1.0 if hyper.maximize else 1.0
    return value, at, *hyper.betas, hyper.eps, hyper.weight_decay, sign, float(hyper.coupled)
