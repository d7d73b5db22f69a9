"""Where one Parameter's gradient is summed: an object that layers find, as long as it is held.

    weight = GradAccumulator(layer.weight)                       # sums in `.grad` itself
    weight = GradAccumulator(p, torch.zeros_like(p, dtype=torch.float32), on_ready=reduce_it)

A layer that can add to a gradient in place asks `destination()` in its backward, adds there and
returns None to autograd. What autograd itself brings, from other uses of the same Parameter, is
added too. The accumulator is *ready* when a backward has done all uses of the Parameter.

Note [When a gradient is complete]
    A backward that reaches a leaf ends at the leaf's node, once, after every use in that graph has
    run, with the sum of what they returned, or with nothing at all if they returned None. So the
    hook after that node says "complete", for tied weights, for gradients that went into a buffer,
    and inside checkpoints alike. torch's own DDP hooks it too. With `use_reentrant=True`, and with
    several backwards of one graph, a Parameter is ready several times.

Note [Streams]
    The node runs on the stream where the leaf was first used, and nothing makes that stream wait
    for a layer that returned None on another. So the accumulator remembers the stream that wrote
    last: the next writer waits for it, and so does the node.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from interlace.errors import GradientError
from interlace.optim.adam.state import local
from interlace.torch_private import cuda_raw_stream, current_graph_task_id, will_engine_execute_node

SUMS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types that a gradient may be summed in."""


class GradAccumulator:
    """Sums the gradient of one Parameter in a buffer, or in its `.grad`.

    Args:
        param: a Parameter that requires a gradient and has no accumulator yet. It keeps its type
            and device.
        buffer: the sum, of the Parameter's shape (of a DTensor, of this rank's part) and of a
            floating type; it is added to from what it holds: zero it first. Without one the sum is
            `param.grad`, which a layer adds to in place where it exists. That is right under
            `DistributedDataParallel`, best with `gradient_as_bucket_view=True` and
            `zero_grad(set_to_none=False)`.
        on_ready: called as `on_ready(accumulator)` whenever a backward has completed the gradient,
            by the thread that runs it.

    Raises:
        GradientError: the Parameter or the buffer cannot serve.
    """

    def __init__(
        self,
        param: torch.nn.Parameter,
        buffer: torch.Tensor | None = None,
        *,
        on_ready: Callable[[GradAccumulator], None] | None = None,
    ) -> None:
        if not param.requires_grad or not param.is_leaf:
            raise GradientError(
                f"a tensor of shape {list(param.shape)} is no Parameter that requires a gradient: "
                "frozen Parameters need no accumulator"
            )
        if accumulator_of(param) is not None:
            raise GradientError(
                f"a Parameter of shape {list(param.shape)} has an accumulator: close() that one, "
                "or the LayerWise that made it, first"
            )
        if buffer is not None and (
            buffer.shape != local(param).shape
            or buffer.device != param.device
            or buffer.dtype not in SUMS
            or buffer.requires_grad
            or any(
                step == 0 < size - 1
                for step, size in zip(buffer.stride(), buffer.shape, strict=True)
            )
        ):
            raise GradientError(
                f"a buffer {buffer.dtype} {list(buffer.shape)} on {buffer.device} with strides "
                f"{list(buffer.stride())} cannot hold the gradient of {param.dtype} "
                f"{list(local(param).shape)} on {param.device}"
            )
        self.param = param
        self.buffer = buffer
        self.on_ready = on_ready
        self._refusal: str | None = None
        self._device = param.device.index if param.device.type == "cuda" else None
        self.writer: Any = None
        """On CUDA, the stream that wrote last,"""
        self._handle: int | None = None
        """and its handle, which tells more cheaply whether it is the current one."""
        self._running: set[int] = set()
        """The threads that are in the Parameter's node now."""
        self._node: Any = get_gradient_edge(param).node  # kept, or else its hooks go
        # The node belongs to C++, where a cycle would stay for ever.
        me: weakref.ref[GradAccumulator] = weakref.ref(self)
        handles = [
            self._node.register_prehook(lambda *_: _call(me, "_enter")),
            param.register_post_accumulate_grad_hook(Take(me)),
            self._node.register_hook(lambda *_: _call(me, "_leave")),
        ]
        self._finalizer = weakref.finalize(self, _remove, handles)

    @property
    def grad(self) -> torch.Tensor | None:
        """The sum so far."""
        return self.param.grad if self.buffer is None else self.buffer

    def destination(self) -> torch.Tensor | None:
        """The tensor that a layer may add this gradient to, in its backward; None: return it.

        It is to be returned where there is no sum yet, where hooks on the Parameter want to see it,
        where a backward collects it for `torch.autograd.grad` or does not want it at all, and after
        `close()`.
        """
        if self.grad is None or not self._finalizer.alive:
            return None
        if self.param._backward_hooks or not self._accumulates():
            return None
        self._settle()
        return self.grad

    def mark_ready(self) -> None:
        """Says that the gradient is complete. After a backward of torch's this is done already."""
        if self._device is not None:
            self._become_writer(self._device, waits=False)
        if self.on_ready is not None:
            self.on_ready(self)

    def refuse(self, why: str | None) -> None:
        """From now on what comes is an error, which says why; with None it is welcome again."""
        self._refusal = why

    def close(self) -> None:
        """Takes the hooks away: from now on gradients go to `.grad` as ever, a layer's too."""
        self._finalizer()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise GradientError("an accumulator belongs to one Parameter: make another for the copy")

    def _accumulates(self) -> bool:
        """True if the backward under way sums this gradient, as `backward()` does."""
        if current_graph_task_id() < 0:
            return True
        try:
            return will_engine_execute_node(self._node)
        except RuntimeError:  # for a leaf that `torch.autograd.grad` wants
            return False

    def _enter(self) -> None:
        """The node begins: what a hook on the Parameter hears until it ends is this node's."""
        self._settle()
        self._running.add(threading.get_ident())

    def _leave(self) -> None:
        self._running.discard(threading.get_ident())
        self.mark_ready()

    def _settle(self) -> None:
        """The current stream waits for the one that wrote last; see Note [Streams]."""
        if self._refusal is not None:
            raise GradientError(
                f"a gradient of a Parameter {list(self.param.shape)} came late: {self._refusal}"
            )
        if self._device is not None:
            self._become_writer(self._device, waits=True)

    def _become_writer(self, device: int, *, waits: bool) -> None:
        """Notes the current stream as the writer; it waits for the one before, if that differs."""
        handle = cuda_raw_stream(device)
        if handle == self._handle:
            return
        stream = torch.cuda.current_stream(device)
        if waits and self.writer is not None:
            stream.wait_stream(self.writer)
        self.writer, self._handle = stream, handle

    def _take(self) -> None:
        """Moves what autograd brought into the buffer.

        This hook stays with the Parameter when its data is replaced; those of its node go if the
        type or the device of the data changes.
        """
        if threading.get_ident() not in self._running:
            raise GradientError(
                f"the type or the device of a Parameter {list(self.param.shape)} (now "
                f"{self.param.dtype} on {self.param.device}) was changed after its GradAccumulator "
                "or LayerWise was made, which no longer hears of its gradients: close() that, "
                "and make another"
            )
        if self.buffer is not None and self.param.grad is not None:
            with torch.no_grad():
                self.buffer.add_(local(placed_grad(self.param)))
            self.param.grad = None


class Take:
    """The hook that moves what autograd brought; by it `accumulator_of` finds the accumulator."""

    def __init__(self, accumulator: weakref.ref[GradAccumulator]) -> None:
        self.accumulator = accumulator

    def __call__(self, _: torch.Tensor) -> None:
        _call(self.accumulator, "_take")


def placed_grad(param: torch.Tensor) -> torch.Tensor:
    """The gradient; of a DTensor laid out as that is, for it may come as partial sums."""
    grad = param.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        if grad.placements != param.placements:
            return grad.redistribute(param.device_mesh, param.placements)
    return grad


def accumulator_of(param: torch.Tensor) -> GradAccumulator | None:
    """The accumulator of a Parameter that is not closed, if it has one."""
    hooks: Any = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    found = (hook.accumulator() for hook in hooks.values() if isinstance(hook, Take))
    return next(filter(None, found), None)


def _call(accumulator: weakref.ref[GradAccumulator], method: str) -> None:
    found = accumulator()
    if found is not None:
        getattr(found, method)()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
