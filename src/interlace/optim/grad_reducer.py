"""Sums gradients in flat buffers and reduces them over data parallelism, under the backward.

    reducer = GradReducer(buckets, runs, options)
    with reducer.no_sync():
        loss(model, first).backward()
    loss(model, last).backward()          # buckets are reduced once complete
    reducer.finish()                      # main gradients are reduced from here on
    reducer.zero()

Each bucket has a flat buffer of *main gradients*, which a Program reduces in place. Layers that
know accumulators, such as `GroupedLinear`, add to it in place; other gradients move there as they
come, and `.grad` is None again.

Note [When a bucket is reduced]
    Buckets are reduced in index order on every rank, in whatever order they become complete. Index
    0 holds the Parameters that were registered last. A bucket is complete when each of its
    Parameters, but those that are frozen, was ready once outside `no_sync()`; others wait for
    `finish()`, with what there is: 0 for a Parameter that was not used. A gradient for a bucket
    that was reduced is a `GradientError`, never a wrong sum: a second backward, or one that brings
    a gradient several times (reentrant checkpoints of tied weights), which `overlap=False` takes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from interlace.errors import GradientError, OptionError
from interlace.optim.adam.state import local
from interlace.optim.bucket_runs import BucketRuns
from interlace.optim.grad_accumulator import GradAccumulator
from interlace.optim.untraced import eager
from interlace.options import Options

GONE = (
    "its bucket is being reduced. fix: run all backwards of a step but the last in no_sync(); "
    "where one backward brings a gradient several times (reentrant checkpoints of tied weights), "
    "give Options(overlap=False)"
)
OVER = "its sum was reduced already: call zero_grad() after step()"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some Parameters' main gradients, and the flat buffer that they are views of."""

    params: tuple[nn.Parameter, ...]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]


def check_reduction(op: str, bucket_bytes: int, main_grad_dtype: torch.dtype | None) -> None:
    """Raises OptionError for what no reduction of main gradients takes."""
    if op not in ("mean", "sum") or bucket_bytes < 1:
        raise OptionError(f"op={op!r}, bucket_bytes={bucket_bytes}: mean or sum, from 1 up")
    if main_grad_dtype not in (None, torch.float32, torch.float64, torch.bfloat16):
        raise OptionError(f"main_grad_dtype={main_grad_dtype}: float32, float64 or bfloat16")


class GradReducer:
    """Main gradients of the Parameters of some buckets: bucket number i is reduced by run number i.

    Between the first bucket that goes and the return of `finish()` nothing else may use the runs'
    group, for buckets go when they are complete. Frozen Parameters may be unfrozen later. With the
    option `overlap=False` all are reduced in `finish()`, with the same bits.
    """

    def __init__(self, buckets: list[Bucket], runs: BucketRuns, options: Options) -> None:
        self.buckets = buckets
        """The buckets in the order in which they are reduced."""
        self._options, self._runs = options, runs
        self._accumulators: dict[torch.Tensor, GradAccumulator] = {}
        self._bucket_of: dict[torch.Tensor, int] = {}
        for index, bucket in enumerate(self.buckets):
            for param, view in zip(bucket.params, bucket.views, strict=True):
                with unfrozen(param):
                    self._accumulators[param] = GradAccumulator(param, view, on_ready=self._ready)
                self._bucket_of[param] = index
        self._lock = threading.Lock()
        self._sync = True
        self._finished = self._closed = False
        self._begin()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add to the main gradients: for all micro-batches but the last."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @eager
    def finish(self) -> None:
        """Reduces what is left, once a step, and returns when owners have their main gradients.

        On a GPU it returns at once, and the current stream comes after the reductions. Collective.
        Raises what made a reduction fail, on the CPU: every rank then calls `reset()`.
        """
        if self._finished:
            return
        self._check_open()
        left = [p for bucket in self.buckets[self._gone :] for p in bucket.params]
        stray = [list(param.shape) for param in left if param.grad is not None]
        if stray:
            raise GradientError(
                f"Parameters of shapes {stray} have a .grad that was not moved into their main "
                "gradient: was it set by hand, or the Parameter's data replaced? Make another "
                "LayerWise after such a change"
            )
        with self._lock:
            self._launch(len(self.buckets))
            self._finished = True
            self._refuse(OVER)
        self._runs.wait()

    @eager
    def zero(self) -> None:
        """Begins a new step: main gradients are 0."""
        self._check_open()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.flat.zero_()
        self._begin()

    def reset(self) -> None:
        """After a failure, on every rank together: main gradients are 0, and steps may go on."""
        self._check_open()
        self._runs.reset()
        self.zero()

    @property
    def going(self) -> bool:
        """True if buckets of this step are on the way, and `finish()` or `close()` is to come."""
        return self._gone > 0 and not self._finished and not self._closed

    def _begin(self) -> None:
        """A step without any gradient yet."""
        self._left = [set(bucket.params) for bucket in self.buckets]
        self._gone, self._finished = 0, False
        self._refuse(None)

    def _refuse(self, why: str | None, bucket: Bucket | None = None) -> None:
        for param in self._accumulators if bucket is None else bucket.params:
            self._accumulators[param].refuse(why)

    def _ready(self, accumulator: GradAccumulator) -> None:
        """Lets go of the buckets that are complete."""
        if not self._sync:
            return
        param = accumulator.param
        with self._lock:
            self._left[self._bucket_of[param]].discard(param)
            if not self._options.overlap:
                return
            complete = self._gone
            while complete < len(self._left) and not any(
                param.requires_grad for param in self._left[complete]
            ):
                complete += 1
            self._launch(complete)

    def _launch(self, end: int) -> None:
        """Starts the reductions of the buckets up to `end` that were not started."""
        for index in range(self._gone, end):
            bucket = self.buckets[index]
            self._refuse(GONE, bucket)
            self._gone = index + 1
            writers = [self._accumulators[param].writer for param in bucket.params]
            self._runs.start(index, writers)

    def _check_open(self) -> None:
        if self._closed:
            raise GradientError("this LayerWise is closed: make another")

    def close(self) -> None:
        """Takes hooks away, and closes the runs; gradients go to `.grad` again."""
        if self._closed:
            return
        self._closed = True
        for accumulator in self._accumulators.values():
            accumulator.close()
        self._runs.close()


def laid_out(
    params: Sequence[nn.Parameter], starts: Sequence[int], numel: int, dtype: torch.dtype
) -> Bucket:
    """A bucket of zeros, `numel` in all, in which each Parameter's place begins at its start.

    Of a DTensor, it has the part of this rank.
    """
    flat = torch.zeros(numel, dtype=dtype, device=params[0].device)
    views: list[torch.Tensor] = []
    for part, at in zip(map(local, params), starts, strict=False):
        strides = torch.empty_like(part, device="meta").stride()  # the Parameter's, if it is dense
        views.append(flat[at : at + part.numel()].as_strided(part.shape, strides))
    return Bucket(tuple(params), flat, tuple(views))


@contextlib.contextmanager
def lent(grads: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Inside, these are the `.grad` of Parameters, in their own types; afterwards that is None."""
    dtypes = {param: param.grad_dtype for param in grads}
    for param, grad in grads.items():
        if grad.dtype != param.dtype:
            param.grad_dtype = grad.dtype
        param.grad = grad
    try:
        yield
    finally:
        for param, dtype in dtypes.items():
            param.grad = None
            param.grad_dtype = dtype


@contextlib.contextmanager
def unfrozen(param: torch.Tensor) -> Iterator[None]:
    """Inside, the Parameter requires a gradient: one that is frozen may be trained later."""
    before = param.requires_grad
    try:
        param.requires_grad_(True)
        yield
    finally:
        param.requires_grad_(before)
