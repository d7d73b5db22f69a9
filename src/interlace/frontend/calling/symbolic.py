"""Fixes two errors of torch in a trace where DTensor computes with symbolic sizes.

    with symbolic_sizes():
        compiled = aot_autograd(...)(gm, examples)

- DTensor asks for `sym_max(s0, 1)`. Where that is `s0`, torch takes it for the source of every
  other `s0`, its own argument among them, and follows sources until Python's stack overflows.
  Here the earlier source stays. (Not every version of torch has the function that records it.)
- A product of three sizes is written as `operator.mul` of three, which takes two.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental import proxy_tensor

from interlace.frontend.calling.tracing import patched


@contextlib.contextmanager
def symbolic_sizes() -> Iterator[None]:
    """Both, around a trace."""
    register: Any = getattr(proxy_tensor, "_sym_register", None)
    handlers: Any = {**proxy_tensor._sympy_handlers(), sympy.Mul: _product}

    def registered(tracer: Any, func: Any, args: tuple[Any, ...], out: Any) -> None:
        sources = tracer.sympy_expr_tracker
        expr = out.node.expr if isinstance(out, torch.SymInt) else None
        before = sources.get(expr)
        register(tracer, func, args, out)
        if before is not None:
            sources[expr] = before

    mended: dict[str, Any] = {"_sympy_handlers": lambda: handlers}
    if register is not None:
        mended["_sym_register"] = registered
    with patched(proxy_tensor, **mended):
        yield


def _product(*sizes: Any) -> Any:
    return functools.reduce(operator.mul, sizes)
