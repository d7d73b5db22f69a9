"""The serial Programs of linear layers over a group; S is the number of a rank's rows.

layer = LinearLayer("reduce_scatter", "bf16", 512, (256,), (False,))
program = serial(layer, ranks=(0, 1), rows=64)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from interlace.float8.data import TAIL, width
from interlace.float8.recipe import E4M3, Recipe
from interlace.frontend.teams import as_axes
from interlace.ir import Program, Team
from interlace.ir.build import Builder, ElementType, Handle
from interlace.ir.sizes import deciding
from interlace.nn.parallel.layer import backward, forward

Shape = tuple[int, ...]
"""Sizes; what is computed from S is a `Size`, which has the arithmetic of an int."""


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """The facts by which the Programs of one layer differ from others'."""

    collective: str
    """As of `Operations`."""
    dtype: str
    inner: int
    """Columns of the input on this rank."""
    outer: tuple[int, ...]
    """Columns of each output on this rank."""
    biased: tuple[bool, ...]
    wanted: tuple[bool, ...] | None = None
    """The gradients of x, of each weight, and of each bias that a backward pass gives;
    None: this is the forward pass."""
    recipe: Recipe | None = None
    """As of `Operations`."""
    maxima: int = 1
    """Numbers that `float8_amax` gives."""
    keeps: bool = False
    """In the forward pass: true where backward will want x."""

    @property
    def returns_x(self) -> bool:
        """True where the forward pass returns x in FP8, last."""
        return self.recipe is not None and self.keeps


def serial(layer: LinearLayer, ranks: tuple[int, ...], rows: int) -> Program:
    """The serial Program for `rows` rows on each rank, and the others of their class."""
    teams, shown = as_axes((Team("tp", len(ranks), (ranks,)),), tuple(sorted(ranks)))
    builder = Builder(name_of(layer), teams, shown, lines=False)
    size = cast("int", builder.size("S", rows))
    with deciding(builder.sizes) as known:
        _write(builder, layer, size, len(ranks))
    builder.sizes = known.size_class()
    return builder.build()


def name_of(layer: LinearLayer) -> str:
    """The name of a layer's Programs."""
    named = {"all_gather": "all_gather_linear", "copy": "replicated_linear"}
    kind = named.get(layer.collective, f"linear_{layer.collective}")
    return kind if layer.wanted is None else f"{kind}_backward"


def _write(builder: Builder, layer: LinearLayer, size: int, ranks: int) -> None:
    """Declares the parameters, in the order of a run's tensors, and writes the ops."""
    ops = BuilderOperations(builder, layer, ranks)
    dtype, inner, gathers = layer.dtype, layer.inner, layer.collective == "all_gather"
    every = size if layer.collective == "copy" else size * ranks

    def weight(i: int, *shape: int) -> Handle:
        if layer.recipe is not None:
            return builder.input(f"w{i}", E4M3, (shape[0], width(shape[1])))
        return builder.input(f"w{i}", dtype, shape)

    if layer.wanted is None:
        rows = every if layer.collective == "reduce_scatter" else size
        x = builder.input("x", dtype, (rows, inner))
        weights: list[Handle] = []
        biases: list[Handle | None] = []
        for i, (outer, biased) in enumerate(zip(layer.outer, layer.biased, strict=True)):
            weights.append(weight(i, outer, inner))
            biases.append(builder.input(f"b{i}", dtype, (outer,)) if biased else None)
        builder.returns(*forward(ops, x, weights, biases, layer.keeps))
        return
    rows = every if gathers else size
    dys = [builder.input(f"dy{i}", dtype, (rows, outer)) for i, outer in enumerate(layer.outer)]
    saved = None
    if any(layer.wanted[1 : 1 + len(dys)]):
        shape: Shape = (size if gathers else every, inner)
        if layer.recipe is not None:
            shape = (size, width(inner)) if gathers else (inner, width(every))
        saved = builder.input("x", dtype if layer.recipe is None else E4M3, shape)
    weights = []
    if layer.wanted[0]:
        turned = layer.recipe is not None
        sizes = [(inner, outer) if turned else (outer, inner) for outer in layer.outer]
        weights = [weight(i, *shape) for i, shape in enumerate(sizes)]
    grads = backward(ops, layer.wanted, dys, saved, weights)
    builder.returns(*(grad for grad in grads if grad is not None))


class BuilderOperations:
    """`Operations` that write a Program: values are handles of whole buffers."""

    def __init__(self, builder: Builder, layer: LinearLayer, ranks: int) -> None:
        self.builder, self.dtype, self.maxima = builder, layer.dtype, layer.maxima
        self.collective, self.recipe, self.ranks = layer.collective, layer.recipe, ranks
        self.counts: dict[str, int] = {}

    def mm(self, a: Handle, b: Handle, bias: Handle | None = None) -> Handle:
        shape = _rows(a), _columns(b)
        if bias is None:
            return self._call("aten.mm.default", "product", shape, a, b)
        return self._call("aten.addmm.default", "product", shape, bias, a, b)

    def add(self, a: Handle, b: Handle) -> Handle:
        return self._call("aten.add.Tensor", "total", _shape(a), a, b)

    def sum_of_rows(self, dy: Handle) -> Handle:
        return self._call("aten.sum.dim_IntList", "db", (_columns(dy),), dy, (0,))

    def all_gather(self, rows: Handle) -> Handle:
        gathered = self._like(rows, "full", (_rows(rows) * self.ranks, _columns(rows)))
        self.builder.all_gather(rows, gathered)
        return gathered

    def reduce(self, collective: str, x: Handle, op: str = "sum") -> Handle:
        if collective == "all_reduce":
            reduced = self._like(x, "reduced", _shape(x))
            self.builder.all_reduce(x, reduced, reduce=op)
        else:
            reduced = self._like(x, "reduced", (_rows(x) // self.ranks, _columns(x)))
            self.builder.reduce_scatter(x, reduced, reduce=op)
        return reduced

    def amax(self, x: Handle) -> Handle:
        maxima = self._empty(f"{x.buffer.name}_amax", "f32", (self.maxima,))
        self.builder.call("interlace.float8_amax.out", x, out=maxima)
        return maxima

    def pack(
        self, form: str, x: Handle, amax: Handle, recipe: Recipe, kind: torch.dtype
    ) -> Handle | tuple[Handle, ...]:
        outs: list[Handle] = []
        name = f"{x.buffer.name}_8"
        if form != "across":
            outs.append(self._empty(name, kind, (_rows(x), width(_columns(x)))))
        if form != "rows":
            outs.append(self._empty(f"{name}_t", kind, (_columns(x), width(_rows(x)))))
        facts = x, amax, recipe.power_of_two, recipe.eps
        self.builder.call(f"interlace.float8_{form}.out", *facts, out=outs)
        return tuple(outs) if form == "pair" else outs[0]

    def pack_across(self, weight: Handle) -> Handle:
        return weight  # the caller packs it

    def turn(self, rows: Handle, by: Handle | None, blocks: int) -> Handle:
        shape = _columns(rows) - TAIL, width(_rows(rows))
        turned = self._like(rows, f"{rows.buffer.name}_t", shape)
        self.builder.call("interlace.float8_turn.out", rows, by, blocks, out=turned)
        return turned

    def packed_mm(
        self, a: Handle, b: Handle, blocks: int, bias: Handle | None, fast: bool
    ) -> Handle:
        product = self._empty("product", self.dtype, (_rows(a), _columns(b)))
        self.builder.call("interlace.float8_mm.out", a, b, blocks, bias, fast, out=product)
        return product

    def _call(self, fn: str, name: str, shape: Shape, *args: object) -> Handle:
        """A call that makes its result, of the layer's dtype."""
        made = self.builder.fresh(self._name(name), self.dtype, shape)
        self.builder.call(fn, *args, out=made)
        return made

    def _like(self, value: Handle, name: str, shape: Shape) -> Handle:
        return self._empty(name, value.buffer.dtype, shape)

    def _empty(self, name: str, dtype: ElementType, shape: Shape) -> Handle:
        return self.builder.empty(self._name(name), dtype, shape)

    def _name(self, name: str) -> str:
        """The name, numbered from its second use on."""
        self.counts[name] = count = self.counts.get(name, 0) + 1
        return name if count == 1 else f"{name}{count}"


def _shape(value: Handle) -> Shape:
    shape = cast("Shape", value.buffer.shape)
    return shape[::-1] if value.ir.steps else shape  # the only step is a transpose


def _rows(value: Handle) -> int:
    return _shape(value)[0]


def _columns(value: Handle) -> int:
    return _shape(value)[1]
