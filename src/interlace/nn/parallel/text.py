"""The serial Programs of tensor-parallel linear layers, as text: S is the number of a rank's rows.

    layer = LinearLayer("reduce_scatter", "bf16", 512, (256,), (False,))
    program = serial(layer, ranks=(0, 1), rows=64)

Note [FP8 layers]
    Where a layer has a recipe, what a matmul takes is quantised before it is gathered, and travels
    as packed rows (Note [Packed rows] in float8/data.py). The caller gives weights quantised. With
    a scale for each tensor, the forward Program also returns x for backward: as packed rows where
    they are gathered again, elsewhere as those of the transpose. The gradient of a weight is one
    matmul of transposes (Note [One scale for a sum over shards] in float8/quantization.py). With a
    scale for each row it sums over the rows, whose scales differ: that matmul, and what is gathered
    for it, is of the layer's own dtype. So are sums over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from interlace.float8.data import ALIGNMENT, TAIL, padded, width
from interlace.float8.recipe import Recipe
from interlace.frontend.importing.types import dtype_of
from interlace.frontend.teams import as_axes
from interlace.ir import Program, Team, parse

E4M3 = "f8e4m3"
"""The format of inputs and weights."""


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """What tells the Programs of one layer from others."""

    collective: str
    """`all_gather` of the rows before the matmuls; `reduce_scatter` or `all_reduce` after; `copy`:
    nothing, and backward all-reduces the gradient of x."""
    dtype: str
    inner: int
    """Columns of the input on this rank."""
    outer: tuple[int, ...]
    """Columns of each output on this rank."""
    biased: tuple[bool, ...]
    wanted: tuple[bool, ...] | None = None
    """Of the backward pass: the gradients of x, of each weight, and of each bias that it gives;
    None: this is the forward pass."""
    recipe: Recipe | None = None
    """How FP8 is made; None: the matmuls are of `dtype`."""
    maxima: int = 1
    """Numbers that `float8_amax` gives."""
    keeps: bool = False
    """Of the forward pass: whether backward will want x."""

    @property
    def packs(self) -> bool:
        """Whether x and gradients go through FP8 for all matmuls: see Note [FP8 layers]."""
        return self.recipe is not None and self.recipe.scaling == "tensor"

    @property
    def returns_x(self) -> bool:
        """Whether the forward pass returns x in FP8, last."""
        return self.packs and self.keeps


def serial(layer: LinearLayer, ranks: tuple[int, ...], rows: int) -> Program:
    """The serial Program for `rows` rows on each rank, and the others of their class."""
    text = _Text(layer, len(ranks), rows)
    if layer.wanted is None:
        text.forward()
    else:
        text.backward(layer.wanted)
    teams, shown = as_axes((Team("tp", len(ranks), (ranks,)),), tuple(sorted(ranks)))
    return parse(text.whole()).replace(teams=teams, ranks=shown)


def name_of(layer: LinearLayer) -> str:
    """Of its Programs."""
    named = {"all_gather": "all_gather_linear", "copy": "replicated_linear"}
    kind = named.get(layer.collective, f"linear_{layer.collective}")
    return kind if layer.wanted is None else f"{kind}_backward"


class _Text:
    def __init__(self, layer: LinearLayer, size: int, rows: int) -> None:
        self.layer, self.size, self.rows = layer, size, rows
        self.gathers = layer.collective == "all_gather"
        self.all = "S" if layer.collective == "copy" else f"{size} * S"
        self.rest = rows % ALIGNMENT
        self.transposed = False
        """Whether a width depends on how many zeros stand behind the rows of a transpose."""
        self.params: list[str] = []
        self.lines: list[str] = []
        self.results: list[str] = []

    def whole(self) -> str:
        """The text of the Program."""
        params = ", ".join([f"tp: Team[{self.size}]", f"S: Size[{self.rows}]", *self.params])
        known = [f"assume(S % {ALIGNMENT} == {self.rest})"] if self.transposed else []
        lines = [*known, *self.lines, f"return {', '.join(self.results)}"]
        return f"def {name_of(self.layer)}({params}):\n" + "".join(f"    {x}\n" for x in lines)

    # parts of the text, each with the name of what it makes

    def param(self, name: str, *shape: object, dtype: str = "") -> str:
        self.params.append(f"{name}: {self.typed(shape, dtype)}")
        return name

    def typed(self, shape: tuple[object, ...], dtype: str) -> str:
        return f"{dtype or self.layer.dtype}[{', '.join(map(str, shape))}]"

    def call(self, fn: str, of: str, name: str, *shape: object) -> str:
        self.lines.append(f'main: call("{fn}", {of}, out=({name} := {self.typed(shape, "")}))')
        return name

    def fill(self, fn: str, of: str, name: str, *shape: object, dtype: str = "") -> str:
        """A call of an operator that takes what it fills."""
        self.lines += [
            f"{name} = empty({self.typed(shape, dtype)})",
            f'main: call("{fn}", {of}, out={name})',
        ]
        return name

    def collective(
        self, kind: str, src: str, name: str, *shape: object, dtype: str = "", reduce: str = "sum"
    ) -> str:
        reduce = "" if kind == "all_gather" else f', reduce="{reduce}"'
        self.lines += [
            f"{name} = empty({self.typed(shape, dtype)})",
            f"main: {kind}({src}, {name}{reduce}, team=tp)",
        ]
        return name

    def across(self, rows: str) -> str:
        """The width of packed rows of the transpose of so many rows."""
        self.transposed = True
        count = 1 if rows == "S" else self.size
        return f"{rows} + {padded(count * self.rest) - count * self.rest + TAIL}"

    def rows8(
        self,
        x: str,
        name: str,
        columns: int,
        recipe: Recipe,
        rows: str,
        team: bool,
        across: bool = False,
    ) -> str:
        """`x` [rows, columns] as packed rows; `team`: of a scale that the ranks may share.

        `across` makes the transpose as well, with `_t` behind its name.
        """
        layer, amax = self.layer, "None"
        if layer.packs:
            amax, shape = f"{name}_amax", (layer.maxima,)
            self.fill("interlace.float8_amax.out", x, amax, *shape, dtype="f32")
            if team and recipe.scale == "team":
                kept, amax = amax, f"{name}_most"
                self.collective("all_reduce", kept, amax, *shape, dtype="f32", reduce="max")
        kind = dtype_of(recipe.forward if layer.wanted is None else recipe.gradient).value
        of = f"{x}, {amax}, {recipe.power_of_two}, {recipe.eps!r}"
        if not across:
            shape = rows, width(columns)
            return self.fill("interlace.float8_rows.out", of, name, *shape, dtype=kind)
        self.lines += [
            f"{name} = empty({self.typed((rows, width(columns)), kind)})",
            f"{name}_t = empty({self.typed((columns, self.across(rows)), kind)})",
            f'main: call("interlace.float8_pair.out", {of}, out=({name}, {name}_t))',
        ]
        return name

    def turned(self, rows: str, columns: int, kind: str, by: str, blocks: int) -> str:
        """The transpose of packed rows, as packed rows of one scale."""
        name, shape = f"{rows}_t", (columns, self.across(self.all))
        of = f"{rows}, {by}, {blocks}"
        return self.fill("interlace.float8_turn.out", of, name, *shape, dtype=kind)

    def mm8(
        self, rows: str, w: str, blocks: int, name: str, *shape: object, bias: str = "None"
    ) -> str:
        """Packed rows, of `blocks` scales, times packed rows."""
        forward = self.layer.wanted is None
        of = f"{rows}, {w}.permute(1, 0), {blocks if self.layer.packs else 0}, {bias}, {forward}"
        return self.fill("interlace.float8_mm.out", of, name, *shape)

    # the passes

    def forward(self) -> None:
        layer, recipe, inner = self.layer, self.layer.recipe, self.layer.inner
        given = self.all if layer.collective == "reduce_scatter" else "S"
        columns, kind, rows, saved = inner, "", self.param("x", given, inner), ""
        if recipe is not None:
            columns, kind = width(inner), E4M3
            turned = layer.returns_x and not self.gathers
            rows = self.rows8(rows, "x8", inner, recipe, given, self.gathers, turned)
            saved = "x8_t" if turned else "x8"
        if self.gathers:
            rows = self.collective("all_gather", rows, "full", self.all, columns, dtype=kind)
        height, blocks = (self.all, self.size) if self.gathers else (given, 1)
        for i, (outer, biased) in enumerate(zip(layer.outer, layer.biased, strict=True)):
            w = self.param(f"w{i}", outer, columns, dtype=kind)
            bias = self.param(f"b{i}", outer) if biased else "None"
            name, added = (f"y{i}", bias) if self.gathers else ("part", "None")
            if recipe is not None:
                y = self.mm8(rows, w, blocks, name, height, outer, bias=added)
            elif added == "None":
                y = self.call("aten.mm.default", f"{rows}, {w}.permute(1, 0)", name, height, outer)
            else:
                of = f"{added}, {rows}, {w}.permute(1, 0)"
                y = self.call("aten.addmm.default", of, name, height, outer)
            if not self.gathers:
                y = self.collective(layer.collective, y, "sum", "S", outer)
                if biased:
                    y = self.call("aten.add.Tensor", f"{y}, {bias}", "y", "S", outer)
            self.results.append(y)
        if layer.returns_x:
            self.results.append(saved)

    def backward(self, wanted: tuple[bool, ...]) -> None:
        count = len(self.layer.outer)
        self.for_x, self.for_w, self.for_b = wanted[0], wanted[1 : 1 + count], wanted[1 + count :]
        height = self.all if self.gathers else "S"
        dys = [self.param(f"dy{i}", height, n) for i, n in enumerate(self.layer.outer)]
        packs, inner, x = self.layer.packs, self.layer.inner, ""
        if any(self.for_w):
            kind, shape = "", ("S" if self.gathers else self.all, inner)
            if packs:
                kind = E4M3
                shape = ("S", width(inner)) if self.gathers else (inner, self.across(self.all))
            x = self.param("x", *shape, dtype=kind)
            if self.gathers:
                x = self.collective("all_gather", x, "full", self.all, shape[1], dtype=kind)
        if self.layer.collective == "reduce_scatter":
            self.backward_of_scatter(dys[0], x)
        else:
            self.backward_of_columns(dys, x)

    def backward_of_columns(self, dys: list[str], x: str) -> None:
        """x is whole, or was gathered anew for the gradients of weights."""
        layer, recipe, rows = self.layer, self.layer.recipe, dys
        for_w, x_t, across = bool(layer.packs and x), x, list[str]()
        if recipe is not None and (self.for_x or for_w):
            pair = for_w and not self.gathers
            facts = recipe, self.all, False, pair
            rows = [
                self.rows8(dy, f"g{i}", layer.outer[i], *facts)
                if self.for_x or self.for_w[i]
                else dy
                for i, dy in enumerate(dys)
            ]
            across = [f"{g}_t" for g in rows]
        if self.for_x:
            made = self.products(rows, blocks=1)
            kind = "reduce_scatter" if self.gathers else "all_reduce"
            dx = self.collective(kind, made, "dx", "S", layer.inner)
            self.results.append(dx)
        if for_w and self.gathers:
            assert recipe is not None
            x_t, kind = (
                self.turned(x, layer.inner, E4M3, "None", 0),
                dtype_of(recipe.gradient).value,
            )
            for i, wanted in enumerate(self.for_w):
                if wanted:
                    self.turned(rows[i], layer.outer[i], kind, x, self.size)
        for i, wanted in enumerate(self.for_w):
            if wanted:
                self.weight_gradient(i, across[i] if layer.packs else dys[i], x_t)
        self.bias_gradients(dys)

    def backward_of_scatter(self, dy: str, x: str) -> None:
        """The rows of dy are gathered, for all gradients."""
        layer, recipe, (outer,), bias = self.layer, self.layer.recipe, self.layer.outer, ""
        columns, kind, rows = outer, "", dy
        if layer.packs:
            assert recipe is not None
            if self.for_b[0]:
                bias = self.collective("all_reduce", self.total(dy, 0, "part"), "db0", outer)
                if not self.for_x and not x:
                    self.results.append(bias)
                    return
            columns, kind = width(outer), dtype_of(recipe.gradient).value
            rows = self.rows8(dy, "g", outer, recipe, "S", True)
        full = rows = self.collective("all_gather", rows, "full", self.all, columns, dtype=kind)
        if recipe is not None and not layer.packs and self.for_x:
            rows = self.rows8(full, "g", outer, recipe, self.all, False)
        if self.for_x:
            self.results.append(self.products([rows], blocks=self.size))
        if self.for_w[0]:
            packs = layer.packs
            dy = self.turned(full, outer, kind, "None", self.size) if packs else full
            self.weight_gradient(0, dy, x)
        if bias:
            self.results.append(bias)
        else:
            self.bias_gradients([full])

    def products(self, rows: list[str], blocks: int) -> str:
        """The sum of dy @ w over the weights."""
        layer, shape = self.layer, (self.all, self.layer.inner)
        total = ""
        for i, (dy, outer) in enumerate(zip(rows, layer.outer, strict=True)):
            if layer.recipe is None:
                w = self.param(f"w{i}", outer, layer.inner)
                made = self.call("aten.mm.default", f"{dy}, {w}", f"p{i}", *shape)
            else:
                w = self.param(f"w{i}", layer.inner, width(outer), dtype=E4M3)
                made = self.mm8(dy, w, blocks, f"p{i}", *shape)
            if total:
                made = self.call("aten.add.Tensor", f"{total}, {made}", f"s{i}", *shape)
            total = made
        return total

    def weight_gradient(self, i: int, dy: str, x: str) -> None:
        """Of dy and x, or in FP8 of the transposes of both."""
        shape = self.layer.outer[i], self.layer.inner
        if self.layer.packs:
            of = f"{dy}, {x}.permute(1, 0), 1, None, False"
            made = self.fill("interlace.float8_mm.out", of, f"dw{i}", *shape)
        else:
            made = self.call("aten.mm.default", f"{dy}.permute(1, 0), {x}", f"dw{i}", *shape)
        self.results.append(made)

    def bias_gradients(self, dys: list[str]) -> None:
        for i, wanted in enumerate(self.for_b):
            if wanted:
                self.results.append(self.total(dys[i], i, f"db{i}"))

    def total(self, dy: str, i: int, name: str) -> str:
        """The sum over the rows."""
        return self.call("aten.sum.dim_IntList", f"{dy}, [0]", name, self.layer.outer[i])
