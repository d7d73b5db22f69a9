"""Calls of the operators that stand in every schedule, with as little of Python as can be.

run = quick_call(op, torch.mm, values)
run()                    # torch.mm(a, b, out=y), whatever a, b and y are this time
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from interlace.errors import ExecutorError
from interlace.ir import Call, View
from interlace.runtime.values import Values

Thunk = Callable[[], None]

QUICK: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten.mm.out": torch.mm,
        "aten.addmm.out": torch.addmm,
        "aten.bmm.out": torch.bmm,
        "aten.add.out": torch.add,
    }
)
"""The same operators by torch's own bindings, which cost the host a microsecond less."""


def quick_call(op: Call, fn: Callable[..., Any], values: Values) -> Thunk:
    """A call of one of `QUICK`, of tensors alone.

    The shape of its result follows from those of its arguments, which are the same in every run:
    that it is the output's is seen once.
    """
    items, (out,) = values.items, [values.own(view) for view in op.outs]
    first, second, *third = [values.own(arg) for arg in op.args if isinstance(arg, View)]
    (view,) = op.outs
    size, known = values.box(view).sizes, False

    def check() -> None:
        nonlocal known
        if items[out].shape != size:
            raise resized(op, items[out].shape, size)
        known = True

    def run_two() -> None:
        fn(items[first], items[second], out=items[out])
        if not known:
            check()

    def run_three() -> None:
        fn(items[first], items[second], items[third[0]], out=items[out])
        if not known:
            check()

    return run_three if third else run_two


def resized(op: Call, got: Sequence[int], wanted: Sequence[int]) -> ExecutorError:
    return ExecutorError(
        f"{op.fn} gives a result of shape {list(got)}, but the Program has {list(wanted)} for it"
    )
