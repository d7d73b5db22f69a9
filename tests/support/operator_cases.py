"""Calls of torch's operators with arguments, from the samples of torch.testing's `op_db`.

    for case in cases():
        print(case.fn, case.args)          # aten.add.out, with out= memory in case.outs

Each sample gives the calls of the dispatcher that it leads to, the operator of the sample's own
name, and of both the overloads in place and with `out=` that take the same arguments.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = (torch.float32, torch.int64)
SAMPLES = 12
"""Samples of an operator and a dtype that are looked at."""
CASES = 4
"""Calls of an overload and a dtype that are kept."""
LARGEST = 1 << 16
"""Elements of a tensor; longer ones are left out."""
SPACES = ("aten", "prims")

Op = torch._ops.OpOverload


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A call of an operator: what it is given, and the form that it is a case of."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: str
    """`made` makes its results, `in place` writes an argument, `out` fills given memory."""
    info: str

    @property
    def fn(self) -> str:
        return str(self.op)


def copied(value: Any) -> Any:
    """Arguments with tensors of their own; the same tensor stays the same, layouts stay."""
    known: dict[int, torch.Tensor] = {}

    def copy(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in known:
            plain = item.detach()
            span = 1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))
            flat = plain.as_strided((span if plain.numel() else 0,), (1,)).clone()
            known[id(item)] = flat.as_strided(plain.shape, plain.stride(), 0)
        return known[id(item)]

    return pytree.tree_map(copy, value)


def tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)]


def plain(value: Any) -> bool:
    """Returns True if all tensors are plain: strided, on a CPU, of no subclass, none too large."""
    return all(
        type(item) in (torch.Tensor, torch.nn.Parameter)
        and item.layout == torch.strided
        and not item.is_quantized
        and item.device.type == "cpu"
        and item.numel() <= LARGEST
        for item in tensors(value)
    )


class _Recorder(TorchDispatchMode):
    """Notes every call that reaches the dispatcher, before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Op, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, dict(kwargs or {})
        if isinstance(func, Op) and func.namespace in SPACES and plain(given):
            self.calls.append((func, *copied(given)))
        return func(*args, **(kwargs or {}))


def _own(name: str, args: Any, kwargs: Any) -> Op | None:
    """The overload of the sample's own operator that takes its arguments."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    try:
        with torch.no_grad():
            overload = torch._C._jit_resolve_packet(f"aten::{name}", *copied(args), **kwargs)
    except Exception:
        return None
    return found if (found := getattr(packet, overload or "default")).name() in _names() else None


@cache
def _names() -> frozenset[str]:
    """Names of the dispatcher's overloads; TorchScript has further ones of its own."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def _calls(info: Any, dtype: torch.dtype) -> Iterator[tuple[Op, Any, Any]]:
    try:
        samples = info.sample_inputs("cpu", dtype)
        for _, sample in zip(range(SAMPLES), samples, strict=False):
            args = (sample.input, *sample.args)
            own = (
                _own(info.aten_name, args, sample.kwargs) if plain((args, sample.kwargs)) else None
            )
            if own is not None:
                yield own, *copied((args, dict(sample.kwargs)))
            recorder = _Recorder()
            try:
                with torch.no_grad(), recorder:
                    info.op(*copied(args), **sample.kwargs)
            except Exception:  # some samples need a device or a library
                continue
            yield from recorder.calls
    except Exception:
        return


def _siblings(op: Op) -> Iterator[tuple[str, Op]]:
    """The overloads in place and with `out=` of an operator, and the operator itself."""
    space = getattr(torch.ops, op.namespace)
    base = op._schema.name.partition("::")[2]
    taken = [a for a in op._schema.arguments if not a.is_out]
    wanted = [(a.name, str(a.type)) for a in taken]
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
    outs = any(a.is_out for a in op._schema.arguments)
    yield "out" if outs else "in place" if writes else "made", op
    for form, name in (("in place", f"{base}_"), ("out", base), ("made", base.removesuffix("_"))):
        packet = getattr(space, name, None)
        for overload in packet.overloads() if packet is not None else ():
            try:
                found = getattr(packet, overload)
            except RuntimeError:
                continue
            if (
                found is op
                or found.name() not in _names()
                or any(a.is_out for a in found._schema.arguments) != (form == "out")
            ):
                continue
            mine = [(a.name, str(a.type)) for a in found._schema.arguments if not a.is_out]
            if mine == wanted:
                yield form, found


def cases(seed: int = 0) -> Iterator[Case]:
    """All cases, with the samples of a seed."""
    from torch.testing._internal.common_methods_invocations import op_db

    infos = sorted(op_db, key=lambda info: (info.name, info.variant_test_name))
    kept: defaultdict[tuple[str, torch.dtype], int] = defaultdict(int)
    for info in infos:
        for dtype in DTYPES:
            if not info.supports_dtype(dtype, "cpu"):
                continue
            torch.manual_seed(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for called, args, kwargs in _calls(info, dtype):
                    for form, op in _siblings(called):
                        if kept[str(op), dtype] < CASES:
                            kept[str(op), dtype] += 1
                            inputs = {a.name for a in op._schema.arguments if not a.is_out}
                            named = {key: value for key, value in kwargs.items() if key in inputs}
                            own, given = copied((args, named))
                            yield Case(op, own, given, form, info.name)
