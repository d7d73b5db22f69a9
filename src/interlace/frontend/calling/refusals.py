"""What `interlace.compile` cannot trace, said in words that help.

refuse_sharded(state)
with own_errors(fn):
    graph = trace(fn)             # in which the user's own code runs `with Watch()`
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.overrides import TorchFunctionMode

from interlace.errors import UnsupportedError
from interlace.frontend.calling.state import State
from interlace.frontend.importing.locs import raised_at


class Unreached(UnsupportedError):
    """A tensor was met that is neither an argument nor known to be held by the function."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} uses a tensor that is not among its arguments: "
            "pass it as an argument, or give interlace.compile the module that holds it"
        )


class Watch(TorchFunctionMode):
    """Ends a trace before anything is done to a tensor of which it knows nothing: torch ends it
    only where such a tensor meets another, and would write this one, or take it for a constant."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        reads = getattr(func, "__name__", "") == "__get__"  # an attribute: sizes and the like
        if not reads and any(map(_is_real, (*given, *_listed(given)))):
            raise Unreached(str(func))
        return func(*args, **(kwargs or {}))


def _listed(given: Sequence[Any]) -> Iterator[Any]:
    return (item for value in given if isinstance(value, list | tuple) for item in value)


def _is_real(value: Any) -> bool:
    return type(getattr(value, "_local_tensor", value)) in (torch.Tensor, nn.Parameter)


@contextlib.contextmanager
def own_errors(fn: Callable[..., Any]) -> Iterator[None]:
    """Says what torch says of what cannot be traced in words that help."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    try:
        yield
    except AssertionError as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise Unreached(name) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        what, where = "Python decides by", raised_at(error)
        if isinstance(error, DynamicOutputShapeException):
            what = "sizes depend on"
        raise UnsupportedError(
            f"{name} cannot be compiled as a whole: {what} the values of a tensor "
            f"({error.func}){f' at {where}' if where else ''}. Compute that outside and pass it, "
            'or use torch.compile(..., backend="interlace"), which leaves such lines to Python'
        ) from error
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise UnsupportedError(
            f"{name} has a checkpoint with use_reentrant=True, which runs a backward of its own in "
            "the middle of tracing: give it use_reentrant=False, or use "
            'torch.compile(..., backend="interlace")'
        ) from error


def refuse_sharded(state: State) -> None:
    """What `fully_shard` has wrapped runs hooks that gather and free, which must not be traced."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for prefix, module in state.modules:
        for name, part in module.named_modules(prefix=prefix):
            if isinstance(part, FSDPModule):
                raise UnsupportedError(
                    f"{name or type(part).__name__} is sharded by fully_shard, whose hooks gather "
                    'its parameters when it runs: use torch.compile(..., backend="interlace"), '
                    "which leaves them to Python, or give interlace.compile the parts inside"
                )
