"""Random serial Programs full of sites, in random spellings, several layers deep.

A Program walks back and forth between shards (each rank its rows) and full matrices: gathers that
feed one or several matmuls, matmuls with pointwise operators after them that a reduce-scatter or an
all-reduce sums, uneven shards padded as `torch.chunk` cuts them, one or two stacks, values used
elsewhere as well. Between layers a remainder keeps the integers small, hence every sum exact.

    program = random_sites(random.Random(seed), world=3, layers=4)
"""

from __future__ import annotations

import random

from interlace.ir import Program, parse


class Maker:
    """Writes the text of a Program."""

    def __init__(self, rng: random.Random, world: int) -> None:
        self.rng, self.world = rng, world
        self.batch = rng.choice((1, 1, 2))
        self.total = rng.choice((world, 2 * world, 2 * world + 1, 3 * world - 1, 1))
        self.pitch = -(-self.total // world)
        self.rows = [max(0, min(self.pitch, self.total - i * self.pitch)) for i in range(world)]
        self.params: list[str] = []
        self.lines: list[str] = []
        self.results: list[str] = []
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def param(self, *sizes: int) -> str:
        name = f"p{len(self.params)}"
        self.params.append(f"{name}: f32{list(sizes)}")
        return name

    def call(self, fn: str, args: str, *sizes: int) -> str:
        name = self.name()
        self.lines.append(f'main: call("aten.{fn}", {args}, out=({name} := f32{list(sizes)}))')
        return name

    def alloc(self, *sizes: int) -> str:
        name = self.name()
        self.lines.append(f"{name} = empty(f32{list(sizes)})")
        return name

    def small(self, value: str, *sizes: int) -> str:
        """The value with its elements made -1, 0 or 1."""
        rest = self.call("remainder.Scalar", f"{value}, 3", *sizes)
        return self.call("sub.Tensor", f"{rest}, 1", *sizes)

    def matmul(self, lhs: str, rows: int, width: int, columns: int) -> str:
        weight = self.param(width, columns)
        match self.rng.randrange(3):
            case 0:
                return self.call(
                    "addmm.default", f"{self.param(columns)}, {lhs}, {weight}", rows, columns
                )
            case 1:
                bias = self.param(rows, columns)
                return self.call("addmm.default", f"{bias}, {lhs}, {weight}", rows, columns)
            case _:
                return self.call("mm.default", f"{lhs}, {weight}", rows, columns)

    def gather(self, shard: str, width: int) -> tuple[str, int]:
        """A gather of a shard (batch, pitch, width), and a full value made of it."""
        b, w, m, n = self.batch, self.world, self.pitch, self.total
        full = self.alloc(w * b, m, width)
        self.lines.append(f"main: all_gather({shard}, {full}, team=tp)")
        if b == 1:
            seen = f"{full}.view({w * m}, {width})[0:{n}]"
        else:
            parts = ", ".join(f"{full}.chunk({i}, {w})" for i in range(w))
            whole = self.call("cat.default", f"({parts}), 1", b, w * m, width)
            if n < w * m:
                whole = self.call("clone.default", f"{whole}[:, 0:{n}]", b, n, width)
            seen = f"{whole}.view({b * n}, {width})"
        columns = self.rng.choice((2, 3))
        outs = [self.matmul(seen, b * n, width, columns) for _ in range(self.rng.choice((1, 1, 3)))]
        if self.rng.random() < 0.3:
            grad = self.param(b * n, 2)
            self.results.append(self.call("mm.default", f"{seen}.permute(1, 0), {grad}", width, 2))
        if self.rng.random() < 0.2:
            self.results.append(full)
        total = outs[0]
        for other in outs[1:]:
            total = self.call("add.Tensor", f"{total}, {other}", b * n, columns)
        return self.small(total, b * n, columns), columns

    def product(self, full: str, width: int, columns: int) -> str:
        """Matmuls of a full value, and pointwise operators after them."""
        rows = self.batch * self.total
        value = self.matmul(full, rows, width, columns)
        if self.rng.random() < 0.4:
            other = self.matmul(full, rows, width, columns)
            value = self.call("add.Tensor", f"{value}, {other}", rows, columns)
        for _ in range(self.rng.randrange(3)):
            match self.rng.randrange(4):
                case 0:
                    value = self.call("relu.default", value, rows, columns)
                case 1:
                    value = self.call("mul.Tensor", f"{value}, 2.0", rows, columns)
                case 2:
                    vector = self.param(columns)
                    value = self.call("sub.Tensor", f"{vector}, {value}", rows, columns)
                case _:
                    like = self.param(rows, columns)
                    value = self.call("add.Tensor", f"{value}, {like}", rows, columns)
            if self.rng.random() < 0.2:
                self.results.append(value)
        return value

    def scatter(self, full: str, width: int) -> tuple[str, int]:
        """A reduce-scatter of a product of a full value: a shard again."""
        b, w, m, n = self.batch, self.world, self.pitch, self.total
        columns = self.rng.choice((2, 3))
        value = self.product(full, width, columns)
        parts: list[str] = []
        for i, rows in enumerate(self.rows):
            first = sum(self.rows[:i])
            part = f"{value}.view({b}, {n}, {columns})[:, {first}:{first + rows}]"
            if rows < m:
                pad = f"{part}, (0, 0, 0, {m - rows}), 0"
                part = self.call("constant_pad_nd.default", pad, b, m, columns)
            parts.append(part)
        src = self.call("cat.default", f"({', '.join(parts)})", w * b, m, columns)
        shard = self.alloc(b, m, columns)
        self.lines.append(f'main: reduce_scatter({src}, {shard}, reduce="sum", team=tp)')
        return self.small(shard, b, m, columns), columns

    def reduce(self, full: str, width: int) -> tuple[str, int]:
        """An all-reduce of a product of a full value."""
        rows, columns = self.batch * self.total, self.rng.choice((2, 3))
        value = self.product(full, width, columns)
        out = self.alloc(rows, columns)
        self.lines.append(f'main: all_reduce({value}, {out}, reduce="sum", team=tp)')
        return self.small(out, rows, columns), columns


def random_sites(rng: random.Random, world: int, layers: int) -> Program:
    """A serial Program of some layers, each a site or two."""
    maker = Maker(rng, world)
    width = 3
    shard = maker.param(maker.batch, maker.pitch, width)
    for _ in range(layers):
        full, width = maker.gather(shard, width)
        if rng.random() < 0.4:
            full, width = maker.reduce(full, width)
        shard, width = maker.scatter(full, width)
    maker.results.append(shard)
    head = ", ".join([f"tp: Team[{world}]", *maker.params])
    body = "\n    ".join([*maker.lines, f"return {', '.join(maker.results)}"])
    return parse(f"def random_sites({head}):\n    {body}\n")
