"""The work of a pipeline stage for one microbatch, as the text of serial Programs.

    text = StageText(MODELS["llama3-70b"], layers=20, tp=8, dp=32, sequence=8192)
    program = parse(text.forward())          # x -> y, and the tensors for backward
    program = parse(text.backward(last=True))

Each layer's weights are one flat tensor, `w0`, and so are their gradients, `g0`, summed over the
microbatches: the last backward scatters the sum over `dp`, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from interlace_bench.layers.models import LayerDims

NORM, NORM_BACK = "aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"
ATTENTION = "aten._scaled_dot_product_flash_attention.default"
ATTENTION_BACK = "aten._scaled_dot_product_flash_attention_backward.default"
SAVED = ("x", "n1", "i1", "qkv", "o", "lse", "oc", "mid", "n2", "i2", "u", "act")
"""Tensors of a layer's forward that backward needs."""


@dataclass(frozen=True, slots=True)
class StageText:
    """The texts of one stage."""

    dims: LayerDims
    layers: int
    tp: int
    dp: int
    sequence: int

    @property
    def rows(self) -> int:
        """The positions that a rank has."""
        return self.sequence // self.tp

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """A rank's part of each weight of a layer."""
        dims, tp = self.dims, self.tp
        keys = dims.dim // dims.heads * dims.kv_heads
        return {
            "qkv": (dims.dim, (dims.dim + 2 * keys) // tp),
            "o": (dims.dim // tp, dims.dim),
            "up": (dims.dim, 2 * dims.hidden // tp),
            "down": (dims.hidden // tp, dims.dim),
            "norm1": (dims.dim,),
            "norm2": (dims.dim,),
        }

    @property
    def flat(self) -> int:
        """Elements of a layer's weights, up to a multiple of `dp`."""
        count = sum(_count(shape) for shape in self.weights.values())
        return -(-count // self.dp) * self.dp

    def shapes(self) -> dict[str, str]:
        """The types of what a layer saves, and of what goes in."""
        dims, s, r = self.dims, self.sequence, self.rows
        heads, wide = dims.heads // self.tp, self.weights["qkv"][1]
        hidden, each = self.weights["down"][0], dims.dim // dims.heads
        return {
            **dict.fromkeys(("x", "n1", "mid", "n2"), f"bf16[{r}, {dims.dim}]"),
            **dict.fromkeys(("i1", "i2"), f"f32[{r}, 1]"),
            "qkv": f"bf16[{s}, {wide}]",
            "o": f"bf16[1, {heads}, {s}, {each}]",
            "lse": f"f32[1, {heads}, {s}]",
            "oc": f"bf16[1, {s}, {heads}, {each}]",
            "u": f"bf16[{s}, {2 * hidden}]",
            "act": f"bf16[{s}, {hidden}]",
        }

    def saved(self) -> list[tuple[str, str]]:
        """Names and types of the tensors of forward that backward needs."""
        shapes = self.shapes()
        return [(f"{name}_{i}", shapes[name]) for i in range(self.layers) for name in SAVED]

    def forward(self) -> str:
        """From `x_0` to the stage's output, which is the first result, before what it saves."""
        lines: list[str] = []
        for i in range(self.layers):
            lines += self._forward(i)
        names = [name for name, _ in self.saved() if name != "x_0"]
        lines.append(f"return x_{self.layers}, {', '.join(names)}")
        return self._text("forward", [("x_0", self.shapes()["x"])], ["w"], lines)

    def backward(self, last: bool) -> str:
        """From `dy` to the gradient of the stage's input, the one result."""
        lines, dy = list[str](), "dy"
        for i in reversed(range(self.layers)):
            more, dy = self._backward(i, dy)
            lines += more
            if last:
                norms = f"{self._part('g', i, 'norm1', 'norm2')}"
                lines += [
                    f'main: all_reduce({norms}, {norms}, reduce="sum", team=tp)',
                    f'main: reduce_scatter(g{i}, s{i}, reduce="sum", team=dp)',
                ]
        lines.append(f"return {dy},")
        params = [("dy", self.shapes()["x"]), *self.saved()]
        return self._text("backward", params, ["w", "g", *(["s"] if last else [])], lines)

    def update(self) -> str:
        """Each rank updates its shard of the weights, which all of `dp` gather."""
        lines: list[str] = []
        for i in range(self.layers):
            lines += [
                f'main: call("aten.lerp_.Scalar", m{i}, s{i}, 0.1, out=m{i}, mutates=True)',
                f'main: call("aten.sub_.Tensor", o{i}, m{i}, alpha=0.001, out=o{i}, mutates=True)',
                f"main: all_gather(o{i}, w{i}, team=dp)",
                f'main: call("aten.zero_.default", g{i}, out=g{i}, mutates=True)',
            ]
        return self._text("update", [], ["w", "g", "s", "m", "o"], [*lines, "return ()"])

    def _text(
        self, name: str, params: list[tuple[str, str]], flats: list[str], lines: list[str]
    ) -> str:
        size = {"w": self.flat, "g": self.flat}
        given = [f"{param}: {kind}" for param, kind in params]
        given += [
            f"{flat}{i}: bf16[{size.get(flat, self.flat // self.dp)}]"
            for flat in flats
            for i in range(self.layers)
        ]
        head = f"def {name}(dp: Team[{self.dp}], tp: Team[{self.tp}], {', '.join(given)}):"
        return "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"

    def _part(self, flat: str, layer: int, name: str, until: str = "") -> str:
        """A weight, or its gradient, as a view of the flat tensor."""
        weights, start = self.weights, 0
        for each, shape in weights.items():
            if each == name:
                break
            start += _count(shape)
        stop = start + _count(weights[name]) + (_count(weights[until]) if until else 0)
        shape = weights[name]
        view = f".view({shape[0]}, {shape[1]})" if len(shape) > 1 else ""
        return f"{flat}{layer}[{start}:{stop}]{view}"

    def _gathered(self, of: str, name: str) -> list[str]:
        kind = f"bf16[{self.sequence}, {self.dims.dim}]"
        return [f"{name} = empty({kind})", f"main: all_gather({of}, {name}, team=tp)"]

    def _scattered(self, of: str, name: str) -> list[str]:
        kind = f"bf16[{self.rows}, {self.dims.dim}]"
        return [
            f"{name} = empty({kind})",
            f'main: reduce_scatter({of}, {name}, reduce="sum", team=tp)',
        ]

    def _heads(self, i: int) -> list[str]:
        """Views of queries, keys and values."""
        dims, wide = self.dims, self.weights["qkv"][1]
        each, q = dims.dim // dims.heads, dims.dim // self.tp
        keys = (wide - q) // 2
        cuts = [(0, q), (q, q + keys), (q + keys, wide)]
        return [
            f"qkv_{i}[:, {a}:{b}].view(1, {self.sequence}, {(b - a) // each}, {each})"
            ".permute(0, 2, 1, 3)"
            for a, b in cuts
        ]

    def _forward(self, i: int) -> list[str]:
        shapes, dims, s = self.shapes(), self.dims, self.sequence
        hidden, q = self.weights["down"][0], dims.dim // self.tp
        row, wide = shapes["x"], f"bf16[{s}, {dims.dim}]"

        def norm(n: int, x: str) -> str:
            gain = self._part("w", i, f"norm{n}")
            outs = f"n{n}_{i} := {row}, i{n}_{i} := {shapes['i1']}"
            return f'main: call("{NORM}", {x}, [{dims.dim}], {gain}, 1e-05, out=({outs}))'

        return [
            norm(1, f"x_{i}"),
            *self._gathered(f"n1_{i}", f"full1_{i}"),
            _mm(f"full1_{i}", self._part("w", i, "qkv"), f"qkv_{i}", shapes["qkv"]),
            f'main: call("{ATTENTION}", {", ".join(self._heads(i))}, 0.0, True, '
            f"out=(o_{i} := {shapes['o']}, lse_{i} := {shapes['lse']}))",
            f'main: call("aten.clone.default", o_{i}.permute(0, 2, 1, 3), '
            f'memory_format="@contiguous_format", out=(oc_{i} := {shapes["oc"]}))',
            _mm(f"oc_{i}.view({s}, {q})", self._part("w", i, "o"), f"p1_{i}", wide),
            *self._scattered(f"p1_{i}", f"a_{i}"),
            _call("aten.add.Tensor", f"x_{i}, a_{i}", f"mid_{i}", row),
            norm(2, f"mid_{i}"),
            *self._gathered(f"n2_{i}", f"full2_{i}"),
            _mm(f"full2_{i}", self._part("w", i, "up"), f"u_{i}", shapes["u"]),
            _call("aten.silu.default", f"u_{i}[:, 0:{hidden}]", f"gate_{i}", shapes["act"]),
            _call(
                "aten.mul.Tensor",
                f"gate_{i}, u_{i}[:, {hidden}:{2 * hidden}]",
                f"act_{i}",
                shapes["act"],
            ),
            _mm(f"act_{i}", self._part("w", i, "down"), f"p2_{i}", wide),
            *self._scattered(f"p2_{i}", f"b_{i}"),
            _call("aten.add.Tensor", f"mid_{i}, b_{i}", f"x_{i + 1}", row),
        ]

    def _backward(self, i: int, dy: str) -> tuple[list[str], str]:
        shapes, dims, s = self.shapes(), self.dims, self.sequence
        hidden, q = self.weights["down"][0], dims.dim // self.tp
        row, act, wide = shapes["x"], shapes["act"], f"bf16[{s}, {dims.dim}]"

        def grad(name: str, a: str, b: str) -> list[str]:
            """Adds what a weight's gradient is for this microbatch."""
            shape, part = self.weights[name], self._part("g", i, name)
            return [
                _mm(f"{a}.permute(1, 0)", b, f"t{name}_{i}", f"bf16[{shape[0]}, {shape[1]}]"),
                _add(part, f"t{name}_{i}"),
            ]

        def norm(n: int, dn: str, x: str) -> list[str]:
            gain = self._part("w", i, f"norm{n}")
            outs = f"dh{n}_{i} := {row}, dg{n}_{i} := bf16[{dims.dim}]"
            of = f"{dn}, {x}, [{dims.dim}], i{n}_{i}, {gain}, [True, True]"
            made = f'main: call("{NORM_BACK}", {of}, out=({outs}))'
            return [made, _add(self._part("g", i, f"norm{n}"), f"dg{n}_{i}")]

        def turned(name: str) -> str:
            return f"{self._part('w', i, name)}.permute(1, 0)"

        heads, parts = self._heads(i), ("dq", "dk", "dv")
        each, keys = dims.dim // dims.heads, (self.weights["qkv"][1] - q) // 2
        kinds = [f"bf16[1, {s}, {n // each}, {each}]" for n in (q, keys, keys)]
        outs = ", ".join(f"{p}_{i} := {kind}" for p, kind in zip(parts, kinds, strict=True))
        flat = ", ".join(
            f"{p}_{i}.view({s}, {n})" for p, n in zip(parts, (q, keys, keys), strict=True)
        )
        lines = [
            *self._gathered(dy, f"dyf_{i}"),
            _mm(f"dyf_{i}", turned("down"), f"da_{i}", act),
            *grad("down", f"act_{i}", f"dyf_{i}"),
            _call("aten.mul.Tensor", f"da_{i}, u_{i}[:, {hidden}:{2 * hidden}]", f"dg_{i}", act),
            _call("aten.silu_backward.default", f"dg_{i}, u_{i}[:, 0:{hidden}]", f"du1_{i}", act),
            _call("aten.silu.default", f"u_{i}[:, 0:{hidden}]", f"again_{i}", act),
            _call("aten.mul.Tensor", f"da_{i}, again_{i}", f"du2_{i}", act),
            _call("aten.cat.default", f"[du1_{i}, du2_{i}], 1", f"du_{i}", shapes["u"]),
            _mm(f"du_{i}", turned("up"), f"q2_{i}", wide),
            *self._scattered(f"q2_{i}", f"dn2_{i}"),
            *self._gathered(f"n2_{i}", f"again2_{i}"),
            *grad("up", f"again2_{i}", f"du_{i}"),
            *norm(2, f"dn2_{i}", f"mid_{i}"),
            _call("aten.add.Tensor", f"{dy}, dh2_{i}", f"dmid_{i}", row),
            *self._gathered(f"dmid_{i}", f"dmf_{i}"),
            _mm(f"dmf_{i}", turned("o"), f"do_{i}", f"bf16[{s}, {q}]"),
            *grad("o", f"oc_{i}.view({s}, {q})", f"dmf_{i}"),
            f'main: call("{ATTENTION_BACK}", do_{i}, {", ".join(heads)}, o_{i}, lse_{i}, '
            f"out=({outs}))",
            _call("aten.cat.default", f"[{flat}], 1", f"dqkv_{i}", shapes["qkv"]),
            _mm(f"dqkv_{i}", turned("qkv"), f"q1_{i}", wide),
            *self._scattered(f"q1_{i}", f"dn1_{i}"),
            *self._gathered(f"n1_{i}", f"again1_{i}"),
            *grad("qkv", f"again1_{i}", f"dqkv_{i}"),
            *norm(1, f"dn1_{i}", f"x_{i}"),
            _call("aten.add.Tensor", f"dmid_{i}, dh1_{i}", f"dx_{i}", row),
        ]
        return lines, f"dx_{i}"


def _count(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _call(fn: str, of: str, name: str, kind: str) -> str:
    return f'main: call("{fn}", {of}, out=({name} := {kind}))'


def _mm(a: str, b: str, name: str, kind: str) -> str:
    return _call("aten.mm.default", f"{a}, {b}", name, kind)


def _add(to: str, what: str) -> str:
    return f'main: call("aten.add_.Tensor", {to}, {what}, out={to}, mutates=True)'
