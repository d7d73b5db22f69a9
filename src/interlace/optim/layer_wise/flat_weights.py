"""Weights in flat buffers that are gathered from their owners, while modules wait for them.

    weights = FlatWeights(module, buckets, runs, first=0, names=names)
    weights.start(order, wait=False)     # after an update: the gathers of all buckets are under way
    module(x)                            # each module waits for its own weights
    weights.synchronize()                # and this for all

Note [What waits]
    A module waits, in a forward-pre-hook, for the buckets of the Parameters that it holds itself.
    Some modules read Parameters of modules inside without calling these: a `UNITS` module, or one
    of a class that the caller names, waits for all Parameters inside, and so does a compiled one,
    inside which there are no hooks. A ParameterList is never called: who holds it waits. Whoever
    takes a state_dict, loads one, or runs the whole module without gradients waits for everything.
    What is read past all that is found out in training: a bucket's arrival counts as a change in
    place, which autograd reports for a Parameter that was saved before, and a gradient for a
    Parameter that nothing waited for is an error of the next step (not under DDP).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from interlace.errors import InterlaceError, OptimizerError
from interlace.optim.adam.state import local
from interlace.optim.bucket_runs import BucketRuns
from interlace.optim.grad_reducer import Bucket

UNITS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read what modules inside hold."""


class FlatWeights:
    """The Parameters of some buckets, which become views of the buckets' flat buffers.

    The gather of bucket i is run number `first + i`.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        runs: BucketRuns,
        first: int,
        names: Mapping[nn.Parameter, str],
        units: Collection[type[nn.Module]] = (),
    ) -> None:
        self.buckets = buckets
        self._runs, self._first, self._names = runs, first, names
        self._bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket.params}
        self.pending: set[int] = set()
        """Buckets whose gather nothing has waited for."""
        self.waited_s = 0.0
        """How long this rank has waited for gathers, on the CPU."""
        self._on_gpu = any(bucket.flat.is_cuda for bucket in buckets)
        self._waited: set[tuple[int, Any]] = set()
        """On GPUs, buckets and the streams that come after their gathers."""
        self.needed: dict[int, None] | None = {}
        """Buckets in the order in which modules came to need them; None: that is known."""
        for bucket in buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                with torch.no_grad():
                    view.copy_(local(param))
                if isinstance(param, DTensor):
                    param._local_tensor = view
                else:
                    param.data = view
        self._handles = [*self._hooks(module, (*UNITS, *units))]

    def start(self, order: Sequence[int], *, wait: bool) -> None:
        """Starts the gathers of all buckets, in that order."""
        self._waited.clear()
        for index in order:
            self._runs.start(self._first + index)
            self.pending.add(index)
        if wait:
            self.synchronize()

    def synchronize(self) -> None:
        """Returns when every gather is over; on CUDA the current stream comes after them."""
        for index in sorted(self.pending):
            self._finish(index, "synchronize()")
        if self._on_gpu:
            self._runs.wait()

    def check_place(self) -> None:
        """Raises OptimizerError for a Parameter that is no view of its buffer any more."""
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if local(param).data_ptr() != view.data_ptr() or param.dtype != view.dtype:
                    raise OptimizerError(
                        f"the data of {self._names[param]} was replaced after its LayerWise was "
                        "made (by .to(), an assignment to .data, load_state_dict(assign=True)?): "
                        "copy into the Parameter, or close() this LayerWise and make another"
                    )

    def close(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _finish(self, index: int, reader: str) -> None:
        """Waits for one gather."""
        begun = time.perf_counter()
        try:
            self._runs.wait(self._first + index)
        except InterlaceError as error:
            raise type(error)(
                f"bucket {index} ({self.about(index)}) was not gathered, for which {reader} "
                f"waited: {error}"
            ) from error
        self.waited_s += time.perf_counter() - begun
        self.pending.discard(index)
        torch.autograd.graph.increment_version(self.buckets[index].params)

    def about(self, index: int) -> str:
        """The Parameters of a bucket by name."""
        return shown([self._names[param] for param in self.buckets[index].params])

    def _before(self, name: str, indices: Sequence[int]) -> None:
        """What a module does before its forward."""
        if self.needed is not None:
            self.needed.update(dict.fromkeys(indices))
        if not self.pending and not self._on_gpu:
            return
        stream = torch.cuda.current_stream() if self._on_gpu else None
        for index in indices:
            if index in self.pending:
                self._finish(index, f"the forward of {name or 'the module'}")
            elif stream is not None and (index, stream) not in self._waited:
                self._runs.wait(self._first + index)  # another stream waited before
            self._waited.add((index, stream))

    def _whole(self) -> None:
        if self.pending and not torch.is_grad_enabled():
            self.synchronize()

    def _hooks(self, root: nn.Module, units: tuple[type[nn.Module], ...]) -> Iterator[Any]:
        compiled: list[str] = []
        for name, module in root.named_modules():
            yield module.register_state_dict_pre_hook(_hook(self.synchronize))
            yield module.register_load_state_dict_pre_hook(_hook(self.synchronize))
            if any(name.startswith(prefix) for prefix in compiled):
                continue
            if _is_compiled(module):
                compiled.append(f"{name}." if name else "")
            params = _read(module, units)
            indices = sorted({self._bucket_of[p] for p in params if p in self._bucket_of})
            if indices:
                waits = _hook(self._before, name, indices)
                yield module.register_forward_pre_hook(waits, prepend=True)  # others may read
        yield root.register_forward_pre_hook(_hook(self._whole), prepend=True)


def _hook(method: Callable[..., None], *args: object) -> Callable[..., None]:
    """Calls that, and keeps the weights alive: gathers go on if nobody else holds them any more."""

    def hook(*_: object) -> None:
        method(*args)

    disabled: Any = torch.compiler.disable(hook)  # what traces the module leaves it out
    return disabled


def _is_compiled(module: nn.Module) -> bool:
    inside: Any = getattr(module, "_compiled_call_impl", None)
    return inside is not None or hasattr(module, "_orig_mod")


def _read(module: nn.Module, units: tuple[type[nn.Module], ...]) -> list[nn.Parameter]:
    """What the forward of a module reads without calling another: see Note [What waits]."""
    if isinstance(module, units) or _is_compiled(module):
        return [*module.parameters()]
    lists = (nn.ParameterList, nn.ParameterDict)
    inside = [child for child in module.children() if isinstance(child, lists)]
    return [
        *module.parameters(recurse=False),
        *(param for child in inside for param in child.parameters()),
    ]


def shown(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
