"""Patches in force while AOTAutograd traces code that TorchDynamo does not see.

    with tracing(name):
        graph = trace(module)  # whose own code runs `with lent(module, tensors), Watch(objects)`

- AOTAutograd sees what it is given: a parameter that is no argument would be a constant. So the
  module is lent its arguments in place of its parameters and buffers while its code runs.
- `torch.utils.checkpoint` saves nothing and runs its function again in backward. Traced as it is,
  both runs land in one joint graph, where equal nodes are merged and the second run with them. So a
  checkpoint only marks its nodes (`CHECKPOINT_KEY`), and `mark_checkpoints` has the partitioner
  recompute them.
- Code that cannot be traced is refused with an error that names a remedy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from interlace.errors import TeamError, UnsupportedError
from interlace.frontend.calling.call_key import tensors_of
from interlace.frontend.importing.nodes import MODULE_KEY, flatten, users_line
from interlace.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    sympy_handlers,
)
from interlace.torch_private.dynamo import dynamo_config

CHECKPOINT_KEY = "interlace_checkpoint"
"""Where a node's checkpointed region is noted, in `meta["custom"]`."""

_GENERATORS = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",  # newer releases (2.14.1, 2.15) call this
)


@contextlib.contextmanager
def tracing(name: str) -> Iterator[None]:
    """All of it, around a trace of what has this name."""
    with (
        fx_traceback.preserve_node_meta(),  # else inference notes no modules
        checkpoints_marked(),
        own_errors(name),
        # What torch.compile was given runs as it was written, and is traced with all else.
        torch.compiler.set_stance("force_eager"),
        dynamo_config.patch(error_on_nested_fx_trace=False),
        # Code that asks `torch.compiler.is_compiling()` before it looks at values need not look.
        patched(torch.compiler, _is_compiling_flag=True),
    ):
        yield


@contextlib.contextmanager
def patched(module: object, **values: object) -> Iterator[None]:
    """A module with other values of some names."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# -- sizes that are symbols ------------------------------------------------------------------------


@contextlib.contextmanager
def symbolic_sizes() -> Iterator[None]:
    """Around a trace in which DTensor computes with symbolic sizes.

    Fixes two errors of torch:

    - DTensor asks for `sym_max(s0, 1)`. Where that is `s0`, torch takes it for the source of every
      other `s0`, its own argument among them, and follows sources until Python's stack overflows.
      Here the earlier source stays. (Not every version of torch has the function that records it.)
    - A product of three sizes is written as `operator.mul` of three, which takes two.
    """
    register: Any = getattr(proxy_tensor, "_sym_register", None)
    handlers: Any = {**sympy_handlers(), sympy.Mul: _product}

    def registered(tracer: Any, func: Any, args: tuple[object, ...], out: Any) -> None:
        sources = tracer.sympy_expr_tracker
        expr = out.node.expr if isinstance(out, torch.SymInt) else None
        before = sources.get(expr)
        register(tracer, func, args, out)
        if before is not None:
            sources[expr] = before

    mended: dict[str, object] = {"_sympy_handlers": lambda: handlers}
    if register is not None:
        mended["_sym_register"] = registered
    with patched(proxy_tensor, **mended):
        yield


def _product(*sizes: Any) -> Any:
    return functools.reduce(operator.mul, sizes)


# -- the module's tensors as arguments -------------------------------------------------------------


@contextlib.contextmanager
def lent(module: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Has a module use `tensors` in place of its own, in the order of `tensors_of`, and note where
    nodes are. One that stands in several places, as do tied weights, is replaced in all of them."""
    replaced = dict(zip(map(id, tensors_of(module).values()), tensors, strict=True))
    members: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (held, name, own)
        for part in module.modules()
        for held in (part._parameters, part._buffers)
        for name, own in held.items()
        if own is not None
    ]
    with _named_modules(module):
        try:
            for held, name, own in members:
                held[name] = replaced[id(own)]
            yield
        finally:
            for held, name, own in members:
                held[name] = own


@contextlib.contextmanager
def _named_modules(module: nn.Module) -> Iterator[None]:
    """Notes on traced nodes which submodule they come from, as TorchDynamo would."""
    open_contexts: list[contextlib.AbstractContextManager[object]] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            context = fx_traceback.annotate({MODULE_KEY: name})
            context.__enter__()
            open_contexts.append(context)

        return hook

    def leave(*_: object) -> None:
        open_contexts.pop().__exit__(None, None, None)

    def leave_all() -> None:
        while open_contexts:  # torch calls no hook after an error while it is compiling
            leave()

    with contextlib.ExitStack() as stack:
        stack.callback(leave_all)
        for name, child in module.named_modules():
            if name:
                before = child.register_forward_pre_hook(enter(name), prepend=True)
                after = child.register_forward_hook(leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield


# -- checkpoints -----------------------------------------------------------------------------------


@contextlib.contextmanager
def checkpoints_marked() -> Iterator[None]:
    """Has `torch.utils.checkpoint(use_reentrant=False)` mark nodes instead of running twice."""
    numbers = itertools.count(1)

    def marking(function: Callable[..., object], *_: object, **__: object) -> Iterator[None]:
        with fx_traceback.annotate({CHECKPOINT_KEY: next(numbers)}):
            yield

    found = [name for name in _GENERATORS if hasattr(torch_checkpoint, name)]
    assert found, "torch.utils.checkpoint has changed: a checkpoint would go unnoticed"
    with patched(torch_checkpoint, **dict.fromkeys(found, marking)):
        yield


def mark_checkpoints(graph: fx.Graph) -> None:
    """Tells the partitioner to do the forward nodes of checkpointed regions again in backward."""
    for node in graph.nodes:
        region = (node.meta.get("custom") or {}).get(CHECKPOINT_KEY)
        forward = node.meta.get("partitioner_tag") == "is_forward"
        if region is not None and forward and node.op == "call_function":
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta.setdefault("ac_graph_id", region)


# -- refusals --------------------------------------------------------------------------------------


def unreached(name: str) -> UnsupportedError:
    """The error for a tensor that is neither an argument nor known to be held by the module."""
    return UnsupportedError(
        f"{name} uses a tensor that is not among its arguments, parameters and buffers: pass it as "
        "an argument, register it (register_buffer), or use "
        'torch.compile(module, backend="interlace")'
    )


class Watch(TorchFunctionMode):
    """Ends a trace before anything is done to a tensor of which it knows nothing: torch ends it
    only where such a tensor meets another, and would write this one, or take it for a constant."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[object],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = (*args, *(kwargs or {}).values())
        reads = getattr(func, "__name__", "") == "__get__"  # an attribute: sizes and the like
        if not reads and any(map(_is_real, flatten(given))):
            line = users_line()
            raise unreached(f"{func}{f' at {line}' if line else ''}")
        return func(*args, **(kwargs or {}))


def _is_real(value: object) -> bool:
    return type(getattr(value, "_local_tensor", value)) in (torch.Tensor, nn.Parameter)


@contextlib.contextmanager
def own_errors(name: str) -> Iterator[None]:
    """Says what torch says of what cannot be traced in words that help."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        what, where = "Python decides by", users_line(error)
        if isinstance(error, DynamicOutputShapeException):
            what = "sizes depend on"
        raise UnsupportedError(
            f"{name} cannot be compiled as a whole: {what} the values of a tensor "
            f"({error.func}){f' at {where}' if where else ''}. Compute that outside and pass it, "
            'or use torch.compile(..., backend="interlace"), which leaves such lines to Python'
        ) from error
    except (AssertionError, RuntimeError) as error:
        if "convert all Tensors to FakeTensors" in str(error):
            raise unreached(name) from error
        if "resolve the process group" in str(error):
            raise TeamError(
                f"{name} communicates in a process group that was destroyed ({error}). Fix: make "
                "the group, its mesh and the module on it anew"
            ) from error
        if "use_reentrant=True" in str(error):
            raise UnsupportedError(
                f"{name} has a checkpoint with use_reentrant=True, which runs a backward of its "
                "own in the middle of tracing: give it use_reentrant=False"
            ) from error
        raise


def refuse_sharded(module: nn.Module) -> None:
    """Refuses modules of `fully_shard`: their hooks gather and free, and must not be traced."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, part in module.named_modules():
        if fsdp is not None and isinstance(part, fsdp.FSDPModule):
            raise UnsupportedError(
                f"{name or type(part).__name__} is sharded by fully_shard, whose hooks gather "
                'its parameters when it runs: use torch.compile(..., backend="interlace"), '
                "which leaves them to Python, or give interlace.compile the parts inside"
            )
