"""Symbolic sizes of a traced graph, as those of a Program.

    values = Symbols(placeholders).values(args)   # {"s77": 128}, of the call at hand
    with deciding(size_class(values)) as known:
        sizes_of(fake)                            # (s77, 256)

TorchDynamo and AOTAutograd write sizes as sympy expressions of symbols, `FloorDiv` and others; what
is no polynomial for a whole class of sizes is a `SizeError`. Then a graph that communicates is
imported for the very sizes of each call, and one that does not runs as it was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx

from interlace.errors import SizeError
from interlace.frontend.importing.nodes import flatten
from interlace.ir.sizes import Int, NamedSize, SizeClass, at, named


def pin(graph: fx.Graph) -> None:
    """Keeps the sizes of a graph as they were traced, for `size_of`.

    What AOTAutograd compares in a run, such as the layout of a gradient, torch would note as a fact
    about symbols, although the guards are made by then: `s0` would be 8 from there on.
    """
    for node in graph.nodes:
        for value in flatten(node.meta.get("val")):
            numbers = [value]
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                numbers = [*value.shape, *value.stride(), value.storage_offset()]
            for number in numbers:
                if isinstance(number, torch.SymInt):
                    number.node._expr = number.node.expr


def size_of(value: Any) -> Int:
    """A size that tracing recorded, symbolic or not."""
    return _size(value.node._expr) if isinstance(value, torch.SymInt) else int(value)


def sizes_of(values: Iterable[object]) -> tuple[Int, ...]:
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


class Symbols:
    """Where the arguments of a graph tell the symbols that it has.

    Some stand in expressions alone: of uneven shards, one that is padded has the stride
    `256 * s76` and no size `s76`.
    """

    def __init__(self, placeholders: Sequence[object]) -> None:
        numbers = [
            (number.node._expr, index, read)
            for index, fake in enumerate(placeholders)
            for number, read in _numbers(fake)
        ]  # symbols by themselves first
        numbers.sort(key=lambda number: not isinstance(number[0], sympy.Symbol))
        self._readers: dict[str, Callable[[Sequence[object], Mapping[str, int]], int]] = {}
        unknown = {symbol for expr, _, _ in numbers for symbol in expr.free_symbols}
        found = True
        while found:
            found = False
            for expr, index, read in numbers:
                symbols = expr.free_symbols & unknown
                if read is None or len(symbols) != 1:
                    continue
                (symbol,) = symbols
                reader = _solved(expr, symbol, index, read)
                if reader is not None:
                    found = True
                    unknown.remove(symbol)
                    self._readers[symbol.name] = reader
        self._missing = sorted(map(str, unknown))

    def values(self, args: Sequence[object]) -> dict[str, int]:
        """The value of each in a call."""
        if self._missing:
            raise SizeError(f"no argument tells the size {self._missing[0]}")
        found: dict[str, int] = {}
        for name, reader in self._readers.items():
            found[name] = value = reader(args, found)
            if value < 0:
                raise SizeError("a number of the call is negative, and a size is not")
        return found


def _solved(
    expr: Any, symbol: Any, index: int, read: Callable[[Any], int]
) -> Callable[[Sequence[object], Mapping[str, int]], int] | None:
    """Reader of a symbol from an argument that is linear in it, given the others; else None."""
    if expr == symbol:
        return lambda args, _: read(args[index])
    if not expr.is_polynomial(*expr.free_symbols):
        return None
    factor, rest = expr.coeff(symbol, 1), expr.coeff(symbol, 0)
    if sympy.expand(factor * symbol + rest - expr) != 0:
        return None
    times, more = _size(factor), _size(rest)

    def solve(args: Sequence[object], known: Mapping[str, int]) -> int:
        by = at(times, known)
        value, left = divmod(read(args[index]) - at(more, known), by) if by else (0, 1)
        if left:
            raise SizeError(f"no argument tells the size {symbol}: one is {expr}")
        return value

    return solve


def _numbers(fake: object) -> Iterator[tuple[torch.SymInt, Callable[[Any], int] | None]]:
    """Yields each symbolic size and stride of an argument with its reader in a call; None for the
    stride of a dimension of size 1, which tells nothing."""
    if isinstance(fake, torch.SymInt):
        yield fake, int
    elif isinstance(fake, torch.Tensor):
        for dim, (size, stride) in enumerate(zip(fake.shape, fake.stride(), strict=True)):
            if isinstance(size, torch.SymInt):
                yield size, lambda given, dim=dim: given.shape[dim]
            if isinstance(stride, torch.SymInt):
                one = type(size) is int and size == 1
                yield stride, None if one else lambda given, dim=dim: given.stride(dim)


def size_class(values: Mapping[str, int]) -> SizeClass:
    """All sizes of these names, decided for these values."""
    return SizeClass(tuple([NamedSize(name, value) for name, value in sorted(values.items())]))
