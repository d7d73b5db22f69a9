"""Weights in flat buffers that are gathered from their owners, while modules wait for them.

    weights = FlatWeights(module, buckets, runs, first=0, names=names)
    weights.start(order, wait=False)     # after an update: the gathers of all buckets are under way
    module(x)                            # each module waits for its own weights
    weights.synchronize()                # and this for all

Note [What waits]
    A Parameter waits when it is read, by whatever (arriving.py). Before that, a module waits, in a
    forward-pre-hook, for the buckets of the Parameters that it holds itself: so an error names the
    module that waited, and each stream that runs a module waits. A `UNITS` module waits for all
    Parameters inside, and so does a compiled one, inside which there are no hooks. A ParameterList
    is never called: who holds it waits. Whoever takes a state_dict, loads one, or runs the whole
    module without gradients waits for everything; so does a module that was compiled later, before
    anything is computed: torch traces hooks then, and what waits breaks its graph. Inside a
    checkpoint a break may lose gradients, so nothing waits there.

Note [Own storages]
    A Parameter has its memory in a flat buffer, and a storage of its own for that: torch cannot
    trace DTensors whose local tensors are views of one buffer, and a Parameter that is saved would
    bring the whole buffer along.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from interlace.errors import InterlaceError, OptimizerError
from interlace.optim.adam.state import local
from interlace.optim.bucket_runs import BucketRuns
from interlace.optim.grad_reducer import Bucket
from interlace.optim.layer_wise.arriving import arriving
from interlace.optim.untraced import eager

UNITS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read what modules inside hold."""
NOTHING = (getattr, (contextlib.nullcontext(), "__exit__"))
"""Pickled and copied form of a hook: Python's own function that takes anything and does nothing.
"""


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
    ) -> None:
        self.buckets = buckets
        self._runs, self._first, self._names = runs, first, names
        self._bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket.params}
        self.pending: set[int] = set()
        """The buckets whose gather nothing has waited for."""
        self.idle = True
        """True if no gather is pending: the guard of a traced hook."""
        self.waited_s = 0.0
        """Seconds that this rank has waited for gathers, on the CPU."""
        self._on_gpu = any(bucket.flat.is_cuda for bucket in buckets)
        self._waited: set[tuple[int, Any]] = set()
        """On GPUs, buckets and the streams that come after their gathers."""
        for bucket in buckets:
            for param, view in zip(bucket.params, bucket.views, strict=True):
                with torch.no_grad():
                    view.copy_(local(param))
                own = torch.from_dlpack(view)  # see Note [Own storages]
                if isinstance(param, DTensor):
                    param._local_tensor = own
                else:
                    param.data = own
        self._own = [[type(param) for param in bucket.params] for bucket in buckets]
        """The classes of Parameters, and those that they have while they arrive."""
        self._arriving: list[dict[Any, Any]] = [
            {kind: arriving(kind, partial(self._read, index)) for kind in set(kinds)}
            for index, kinds in enumerate(self._own)
        ]
        self._handles = [*self._hooks(module)] if buckets else []

    def start_rest(self, *, wait: bool) -> None:
        """Starts the gathers of all buckets that were not started, in order."""
        self.start([i for i in range(len(self.buckets)) if i not in self.pending], wait=wait)

    def start(self, order: Sequence[int], *, wait: bool) -> None:
        """Starts the gathers of these buckets."""
        self._waited.clear()
        for index in order:
            self._runs.start(self._first + index)
            self.pending.add(index)
            self.idle = False
            for param, kind in zip(self.buckets[index].params, self._own[index], strict=True):
                param.__class__ = self._arriving[index][kind]
        if wait:
            self.synchronize()

    @eager
    def synchronize(self) -> None:
        """Returns when every gather is over; on CUDA the current stream comes after them."""
        for index in sorted(self.pending):
            self._finish(index, "synchronize()")
        if self._on_gpu:
            self._runs.wait()

    def drop(self) -> None:
        """Nothing waits any more for what was started: its values are undefined."""
        for index in sorted(self.pending):
            self._arrived(index)

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
        self._arrived(index)
        torch.autograd.graph.increment_version(self.buckets[index].params)

    def _arrived(self, index: int) -> None:
        for param, kind in zip(self.buckets[index].params, self._own[index], strict=True):
            param.__class__ = kind
        self.pending.discard(index)
        self.idle = not self.pending

    @eager
    def _read(self, index: int) -> None:
        self._finish(index, "a read of a Parameter")

    def about(self, index: int) -> str:
        """The Parameters of a bucket by name."""
        return shown([self._names[param] for param in self.buckets[index].params])

    def before(self, name: str, indices: Sequence[int], *, whole: bool) -> None:
        """Waits for a module's weights before its forward; the whole one without grad, for all."""
        if whole and self.pending and not torch.is_grad_enabled():
            self.synchronize()
        stream = torch.cuda.current_stream() if self._on_gpu else None
        for index in indices:
            if index in self.pending:
                self._finish(index, f"the forward of {name or 'the module'}")
            elif stream is not None and (index, stream) not in self._waited:
                self._runs.wait(self._first + index)  # another stream waited before
            self._waited.add((index, stream))

    def _hooks(self, root: nn.Module) -> Iterator[Any]:
        compiled: list[str] = []
        for name, module in root.named_modules():
            yield module.register_state_dict_pre_hook(EagerHook(self, self.synchronize))
            yield module.register_load_state_dict_pre_hook(EagerHook(self, self.synchronize))
            if any(name.startswith(prefix) for prefix in compiled):
                continue
            if _is_compiled(module):
                compiled.append(f"{name}." if name else "")
            params = _needed(module)
            own = sorted({self._bucket_of[p] for p in params if p in self._bucket_of})
            whole = module is root
            kind = TracedHook if not _is_compiled(module) else EagerHook
            hook = kind(self, partial(self.before, name, own, whole=whole))
            yield module.register_forward_pre_hook(hook, prepend=True)  # others may read


class EagerHook:
    """Waits for weights. A copy of the module that has it has a hook that does nothing."""

    def __init__(self, weights: FlatWeights, wait: Callable[[], None]) -> None:
        self._weights, self._wait = weights, wait

    @eager
    def __call__(self, *_: object) -> None:
        self._wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return NOTHING


class TracedHook(EagerHook):
    """The same of a module that may be traced: then it has no graph break where nothing is to be
    waited for, and else waits for everything.
    """

    def __call__(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._wait()
        elif not self._weights.idle:
            self._weights.synchronize()


def _is_compiled(module: nn.Module) -> bool:
    inside: Any = getattr(module, "_compiled_call_impl", None)
    return inside is not None or hasattr(module, "_orig_mod")


def _needed(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that a module waits for before its forward: see Note [What waits]."""
    if isinstance(module, UNITS) or _is_compiled(module):
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
