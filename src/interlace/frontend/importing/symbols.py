"""Symbolic sizes of a traced graph, as those of a Program.

    values = symbols(placeholders, args)          # {"s77": 128}, of the call at hand
    with deciding(size_class(values)) as known:
        sizes_of(fake)                            # (s77, 256)

TorchDynamo and AOTAutograd write sizes as sympy expressions of symbols, `FloorDiv` and others; what
is no polynomial for a whole class of sizes is a `SizeError`, and the graph is imported for the very
sizes of each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import sympy
import torch

from interlace.errors import SizeError
from interlace.ir.size_class import NamedSize, SizeClass
from interlace.ir.sizes import Int, named


def size_of(value: Any) -> Int:
    """A size that tracing recorded, symbolic or not."""
    return _size(value.node.expr) if isinstance(value, torch.SymInt) else int(value)


def sizes_of(values: Iterable[Any]) -> tuple[Int, ...]:
    """Several of them, such as a fake tensor's shape."""
    return tuple(map(size_of, values))


def _size(expr: Any) -> Int:
    match expr:
        case sympy.Integer():
            return int(expr)
        case sympy.Symbol():
            return named(expr.name)
        case sympy.Add():
            return sum(map(_size, expr.args), start=_ZERO)
        case sympy.Mul():
            return _product(map(_size, expr.args))
        case sympy.Pow() if isinstance(expr.exp, sympy.Integer) and expr.exp > 0:
            return _product([_size(expr.base)] * int(expr.exp))
        case _:
            kind, args = type(expr).__name__, list(map(_size, expr.args))
    match kind, args:
        case ("FloorDiv" | "CleanDiv", [one, other]):
            return one // other
        case ("Mod" | "PythonMod", [one, other]):
            return one % other
        case ("ModularIndexing", [one, by, modulus]):
            return one // by % modulus
        case ("Max", [*_]):
            return reduce(max, args)  # type: ignore[type-var]
        case ("Min", [*_]):
            return reduce(min, args)  # type: ignore[type-var]
        case _:
            raise SizeError(f"{expr} is no polynomial of sizes")


def _product(sizes: Iterable[Int]) -> Int:
    found: Int = 1
    for size in sizes:
        found = found * size
    return found


_ZERO: Int = 0


def symbols(placeholders: Sequence[Any], args: Sequence[Any]) -> dict[str, int]:
    """The value in a call of each symbol that a graph's arguments have."""
    found: dict[str, int] = {}
    pending: list[tuple[Any, int]] = []
    for fake, given in zip(placeholders, args, strict=True):
        if isinstance(fake, torch.SymInt):
            pending.append((fake, int(given)))
        elif isinstance(fake, torch.Tensor) and isinstance(given, torch.Tensor):
            pending += zip(
                (*fake.shape, *fake.stride()), (*given.shape, *given.stride()), strict=True
            )
    for number, value in pending:
        if isinstance(number, torch.SymInt) and isinstance(number.node.expr, sympy.Symbol):
            found.setdefault(number.node.expr.name, value)
    needed = {
        str(symbol)
        for number, _ in pending
        if isinstance(number, torch.SymInt)
        for symbol in number.node.expr.free_symbols
    }
    if missing := sorted(needed - found.keys()):
        raise SizeError(f"no argument is as large as {missing[0]}")
    return found


def size_class(values: Mapping[str, int]) -> SizeClass:
    """All sizes of these names, decided for these values."""
    return SizeClass(tuple([NamedSize(name, value) for name, value in sorted(values.items())]))
