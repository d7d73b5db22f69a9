"""Sums gradients in flat buffers and reduces them over data parallelism, under the backward.

    with GradReducer(model, group) as reducer:            # every rank of the group, together
        for batches in steps:
            for batch in batches[:-1]:
                with reducer.no_sync():
                    loss(model, batch).backward()
            loss(model, batches[-1]).backward()           # buckets are reduced once complete
            reducer.finish()                              # main gradients are the mean from here on
            with reducer.as_grads():
                optimizer.step()
            reducer.zero()

Each bucket has a flat buffer of *main gradients*, fp32 by default also for bf16 Parameters, and one
Program, an all-reduce of that buffer. Layers with `accumulate_into`, such as `GroupedLinear`, add
to it in place; other gradients move there as they come, and `.grad` is None again.

Note [When a bucket is reduced]
    Buckets are reduced in index order on every rank, in whatever order they become complete. Index
    0 holds the Parameters that were registered last. A bucket is complete when each of its
    Parameters, but those that are frozen, was ready as often as in the first step. In that one all
    are reduced in `finish()`, while it is counted: a Parameter may be ready several times in a
    step, by several backwards or reentrant checkpoints. The count is kept, until `relearn()`: a
    step with fewer is right, but its buckets wait for `finish()`, with what there is: 0 for a
    Parameter that was not used. A gradient for a bucket that was reduced is a `GradientError`,
    never a wrong sum.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from interlace.cost import Timeline
from interlace.errors import GradientError, OptionError
from interlace.optim.adam.state import local
from interlace.optim.bucket_runs import BucketRuns, all_reduced
from interlace.optim.grad_accumulator import GradAccumulator, accumulator_of
from interlace.optim.untraced import eager
from interlace.options import Options

ALIGNMENT = 128
"""Bytes that each Parameter's main gradient begins at a multiple of."""
GONE = (
    "its bucket is being reduced. It was ready oftener than in the step that was counted: call "
    "relearn() before a step whose backwards differ"
)
OVER = "its sum was reduced already: call zero() after the optimizer's step"


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
    """Main gradients of some Parameters, reduced over a process group.

    `params`: a module, whose `GroupedLinear`s and the like are attached, or Parameters. Those that
    are frozen take no part; all others must be on one device, and no DTensors. `group`: the ranks
    (of one host, as for every Executor), by default all. Between the first bucket that goes and the
    return of `finish()` nothing else may use it, for buckets go when they are complete; without
    one, a gloo group is made on the CPU. `bucket_bytes` bounds a bucket, unless one Parameter is
    larger.
    `main_grad_dtype` is float32, float64 or bfloat16, or None for each Parameter's own.
    `op` is "mean" (the sum, then divided) or "sum". Every rank gives the same.

    `options`: `time_out_s` bounds every wait for a peer, `overlap=False` reduces in `finish()`
    only, with the same bits, `transport="peer"` sums in rank order, `trace` keeps `timelines()`.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[nn.Parameter],
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = 25 << 20,
        main_grad_dtype: torch.dtype | None = torch.float32,
        op: Literal["mean", "sum"] = "mean",
        options: Options | None = None,
    ) -> None:
        check_reduction(op, bucket_bytes, main_grad_dtype)
        given = params.parameters() if isinstance(params, nn.Module) else params
        listed = [p for p in dict.fromkeys(given) if p.requires_grad]
        if len({p.device for p in listed}) > 1 or not listed:
            raise GradientError(
                f"{len(listed)} Parameters that require gradients, on "
                f"{sorted({str(p.device) for p in listed})}: give some, on one device"
            )
        if any(isinstance(param, DTensor) for param in listed):
            raise GradientError(
                "some of the Parameters are DTensors, whose gradients lie on their mesh as they "
                "come, maybe as partial sums: reduce those with fully_shard or "
                "DistributedDataParallel over the outer mesh, and give this the others"
            )
        if any(accumulator_of(param) is not None for param in listed):
            raise GradientError(
                "some of the Parameters have an accumulator: close() the GradReducer or the "
                "GradAccumulator that sums their gradients first"
            )
        buckets = _fill(listed[::-1], main_grad_dtype, bucket_bytes)
        programs = [
            (partial(all_reduced, f"reduce_bucket_{index}", bucket.flat, op), bucket.flat)
            for index, bucket in enumerate(buckets)
        ]
        chosen = options or Options()
        runs = BucketRuns(programs, group, chosen, apart=group is None)
        self._begin_with(buckets, runs, chosen)
        module = params if isinstance(params, nn.Module) else nn.Module()
        names = {param: name for name, param in module.named_parameters()}
        for executor, bucket in zip(runs.executors, buckets, strict=True):
            executor.carry(_contents(bucket, names))
        self.attach(module)

    @classmethod
    def over(cls, buckets: list[Bucket], runs: BucketRuns, options: Options) -> GradReducer:
        """One whose bucket number i the run number i reduces, as it may."""
        reducer = cls.__new__(cls)
        reducer._begin_with(buckets, runs, options)
        return reducer

    def _begin_with(self, buckets: list[Bucket], runs: BucketRuns, options: Options) -> None:
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
        self._wanted: dict[torch.Tensor, int] | None = None
        self._begin()
        self._attached: list[Any] = []

    def accumulator(self, param: torch.Tensor) -> GradAccumulator:
        """The accumulator of a Parameter, to which a layer of one's own adds its gradient."""
        if param not in self._accumulators:
            raise GradientError(f"the Parameter {list(param.shape)} was not given, or was frozen")
        return self._accumulators[param]

    def main_grad(self, param: torch.Tensor) -> torch.Tensor:
        """The main gradient of a Parameter: its shape, a view of its bucket."""
        grad = self.accumulator(param).grad
        assert grad is not None
        return grad

    def attach(self, module: nn.Module) -> None:
        """Lets every layer inside that can do so add to its weight's main gradient in place."""
        for layer in module.modules():
            attach: Any = getattr(layer, "accumulate_into", None)
            if attach is None or isinstance(layer.weight, DTensor):
                continue
            if layer.weight in self._accumulators:
                attach(self.accumulator(cast("torch.Tensor", layer.weight)))
                self._attached.append(layer)

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
        """Reduces what is left, and returns when main gradients are the same on every rank.

        On a GPU it returns at once, and the current stream comes after the reductions. Collective.
        Raises what made a reduction fail, on the CPU: every rank then calls `reset()`.
        """
        self._check(self._finished, "finish() was called before: call zero() after each step")
        left = [p for bucket in self.buckets[self._gone :] for p in bucket.params]
        stray = [list(param.shape) for param in left if param.grad is not None]
        if stray:
            raise GradientError(
                f"Parameters of shapes {stray} have a .grad that was not moved into their main "
                "gradient: was it set by hand, or the Parameter's data replaced? Make another "
                "GradReducer after such a change"
            )
        with self._lock:
            self._launch(len(self.buckets))
            self._finished = True
            self._refuse(OVER)
        self._runs.wait()
        self._wanted = self._wanted or dict(self._seen) or None

    @contextlib.contextmanager
    def as_grads(self) -> Iterator[None]:
        """Inside, each Parameter's `.grad` is its main gradient: for clipping, and an optimizer.

        `GradientError` before `finish()`, when they are this rank's alone, or on the way.
        Where the types differ, `.grad` has the main gradient's, not the Parameter's: an optimizer
        must take that (torch's fused and foreach AdamW do not).
        """
        self._check(not self._finished, "main gradients are not reduced yet: finish() first")
        held = self._accumulators
        with lent({cast("nn.Parameter", param): self.main_grad(param) for param in held}):
            yield

    @eager
    def zero(self) -> None:
        """Begins a new step: main gradients are 0."""
        self._check_idle()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.flat.zero_()
        self._begin()

    def relearn(self) -> None:
        """Forgets how often Parameters were ready: the next step reduces in `finish()` only."""
        self._check_idle()
        self._wanted = None

    def reset(self) -> None:
        """After a failure, on every rank together: main gradients are 0, and steps may go on."""
        self._check(False, "")
        self._runs.reset()
        self._finished, self._wanted = True, None
        self.zero()

    @property
    def finished(self) -> bool:
        """True if main gradients are reduced: from `finish()` to `zero()`."""
        return self._finished

    @property
    def going(self) -> bool:
        """True if buckets of this step are on the way, and `finish()` or `close()` is to come."""
        return self._gone > 0 and not self._finished and not self._closed

    def timelines(self) -> list[Timeline]:
        """When each bucket's reduction ran last; needs the option `trace`."""
        return [each.timeline() for each in self._runs.executors[: len(self.buckets)]]

    def _begin(self) -> None:
        """A step without any gradient yet."""
        self._seen: dict[torch.Tensor, int] = {}
        self._left = [set(bucket.params) for bucket in self.buckets]
        self._gone, self._finished = 0, False
        self._refuse(None)

    def _refuse(self, why: str | None, bucket: Bucket | None = None) -> None:
        for param in self._accumulators if bucket is None else bucket.params:
            self._accumulators[param].refuse(why)

    def _ready(self, accumulator: GradAccumulator) -> None:
        """Counts, and lets go of the buckets that are complete."""
        if not self._sync:
            return
        param = accumulator.param
        with self._lock:
            self._seen[param] = self._seen.get(param, 0) + 1
            if self._wanted is None or self._seen[param] < self._wanted.get(param, 1):
                return
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

    def _check(self, wrong: bool, why: str) -> None:
        if self._closed:
            raise GradientError("this GradReducer is closed: make another")
        if wrong:
            raise GradientError(why)

    def _check_idle(self) -> None:
        self._check(self.going, "buckets are on the way: finish() first")

    def close(self) -> None:
        """Takes hooks, thread and process group away; gradients go to `.grad` again."""
        if self._closed:
            return
        self._closed = True
        for layer in self._attached:
            layer.accumulate_into(None)
        for accumulator in self._accumulators.values():
            accumulator.close()
        self._runs.close()

    def __enter__(self) -> GradReducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(
    params: Sequence[nn.Parameter], dtype: torch.dtype | None, bucket_bytes: int
) -> list[Bucket]:
    """Parameters in that order, in buckets of one type and at most so many bytes."""
    filled: list[tuple[torch.dtype, list[nn.Parameter], list[int]]] = []
    for param in params:
        kind = dtype or param.dtype
        whole = ALIGNMENT // kind.itemsize
        padded = -(-param.numel() // whole) * whole
        last = filled[-1] if filled else None
        if last is None or last[0] != kind or (last[2][-1] + padded) * kind.itemsize > bucket_bytes:
            last = kind, list[nn.Parameter](), [0]
            filled.append(last)
        last[1].append(param)
        last[2].append(last[2][-1] + padded)
    return [laid_out(members, ends, max(ends[-1], 1), kind) for kind, members, ends in filled]


def _contents(bucket: Bucket, names: Mapping[nn.Parameter, str]) -> str:
    """Names and shapes of a bucket's Parameters: one of another rank may be as long, and of others,
    where a Parameter is frozen on one rank alone."""
    members = [f"{names.get(param, '')}{list(param.shape)}" for param in bucket.params]
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:8]
    return f"of {len(members)} gradients ({digest}), {members[0]} to {members[-1]}"


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
