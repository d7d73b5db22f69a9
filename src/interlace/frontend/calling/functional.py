"""Collectives of torch.distributed that write into a tensor, where no TorchDynamo sees them.

TorchDynamo makes `dist.all_reduce(x)` a functional collective and a copy into `x`. So does this
while `interlace.compile` traces, with torch's own table of what becomes what:

    with functional_collectives():
        graph = trace(fn)                 # no c10d.allreduce_ is left in it
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import autograd
from torch.overrides import TorchFunctionMode

from interlace.errors import UnsupportedError


@contextlib.contextmanager
def functional_collectives() -> Iterator[None]:
    """Has collectives that write into a tensor be functional ones, in forward and backward.

    torch leaves a mode while it handles `torch.autograd.grad`, so backward enters it again.
    """
    mode, run_backward = _Mode(), autograd._engine_run_backward

    def within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    autograd._engine_run_backward = within  # pyright: ignore
    try:
        with mode:
            yield
    finally:
        autograd._engine_run_backward = run_backward  # pyright: ignore


class _Mode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = funcol.traceable_collective_remaps.get(func)
        if func is dist.broadcast:
            found = _broadcast
        if found is None:
            return func(*args, **(kwargs or {}))
        return _rewritten(func, found, args, kwargs or {})


class Done(dist.Work):
    """Stands for the handle of a collective that is complete where it was begun."""

    def wait(self, timeout: Any = None) -> bool:
        """Nothing is left to wait for: a Program runs communication under computation by itself."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


def _rewritten(
    func: Callable[..., Any],
    found: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    given = dict(inspect.signature(func).bind(*args, **kwargs).arguments)
    handle = given.pop("async_op", False)
    if "op" in given:
        if given["op"] not in funcol.REDUCE_OP_TO_STR:
            raise UnsupportedError(
                f"{func.__name__} with {given['op']} has no functional form: use one of "
                f"{sorted(funcol.REDUCE_OP_TO_STR.values())}, or "
                'torch.compile(..., backend="interlace"), which leaves it to Python'
            )
        given["op"] = funcol.REDUCE_OP_TO_STR[given["op"]]
    result = found(**given)
    return Done() if handle else result


def _broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """torch's table has no broadcast. The functional one counts the root in its group."""
    group = group or dist.group.WORLD
    assert group is not None
    root = dist.get_group_rank(group, src or 0) if group_src is None else group_src
    tensor.copy_(funcol.broadcast(tensor, root, group))
