"""The same sites in the spellings that frontends and people use: text for a team of some size.

A spelling is the body of a serial Program; what it must be found as stands beside it. The reference
is the serial Program itself. Others, such as uneven and stacked rows, are in `random_sites`.
"""

from __future__ import annotations

import torch
from tests.passes.samples import Sample, integers
from tests.support.interpreter import run_ranks
from tests.support.torch_ops import DTYPES

from interlace.ir import Program, View, parse
from interlace.ir.sizes import numbers

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def spellings(w: int) -> dict[str, tuple[str, str]]:
    """(kind, text) by name, for a team of `w` ranks."""
    parts = ", ".join(f"full.chunk({i}, {w})" for i in range(w))
    return {
        "bias": (
            GATHER,
            f"""x: f32[3, 8], w: f32[5, 8], b: f32[5]):
    full = empty(f32[{3 * w}, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.addmm.default", b, full, w.permute(1, 0), out=(y := f32[{3 * w}, 5]))
    return y""",
        ),
        "gather-dim-1-clone": (
            GATHER,
            f"""x: f32[2, 3, 2, 4], w: f32[8, 5]):
    full = empty(f32[{2 * w}, 3, 2, 4])
    main: all_gather(x, full, team=tp)
    main: call("aten.cat.default", ({parts}), 1, out=(c := f32[2, {3 * w}, 2, 4]))
    main: call("aten.clone.default", c, out=(d := f32[2, {3 * w}, 2, 4]))
    main: call("aten.mm.default", d.view({6 * w}, 8), w, out=(y := f32[{6 * w}, 5]))
    return y""",
        ),
        "out-variants": (
            GATHER,
            f"""x: f32[3, 8], w: f32[8, 5], y: out[f32[{3 * w}, 5]]):
    full = empty(f32[{3 * w}, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.out", full, w, out=y)""",
        ),
        "cast-then-scatter": (
            SCATTER,
            f"""x: bf16[{3 * w}, 8], w: bf16[8, 5]):
    main: call("aten.mm.default", x, w, out=(y := bf16[{3 * w}, 5]))
    main: call("aten._to_copy.default", y, dtype=f32, out=(z := f32[{3 * w}, 5]))
    out = empty(f32[3, 5])
    main: reduce_scatter(z, out, reduce="sum", team=tp)
    return out""",
        ),
        "pointwise-then-scatter": (
            SCATTER,
            f"""x: f32[{3 * w}, 8], w: f32[8, 5], b: f32[5], r: f32[1, {3 * w}, 5],
      c: f32[{3 * w}, 1]):
    main: call("aten.mm.default", x, w, out=(y := f32[{3 * w}, 5]))
    main: call("aten.mul.Tensor", y.view(1, {3 * w}, 5), 2.0, out=(y2 := f32[1, {3 * w}, 5]))
    main: call("aten.add.Tensor", y2, b.view(1, 1, 5), out=(y3 := f32[1, {3 * w}, 5]))
    main: call("aten.relu.default", y3, out=(y4 := f32[1, {3 * w}, 5]))
    main: call("aten.add.Tensor", y4, r, out=(y5 := f32[1, {3 * w}, 5]))
    main: call("aten.mul.Tensor", y5.view({3 * w}, 5), c, out=(y6 := f32[{3 * w}, 5]))
    out = empty(f32[3, 5])
    main: reduce_scatter(y6, out, reduce="sum", team=tp)
    return out, y3""",
        ),
        "3d-all-reduce": (
            REDUCE,
            """x: f32[2, 5, 8], w: f32[8, 5], b: f32[5]):
    main: call("aten.addmm.default", b, x.view(10, 8), w, out=(y := f32[10, 5]))
    out = empty(f32[2, 5, 5])
    main: all_reduce(y.view(2, 5, 5), out, reduce="sum", team=tp)
    main: call("aten.relu.default", out, out=(z := f32[2, 5, 5]))
    return z""",
        ),
    }


def sample(name: str, ranks: int, seed: int) -> tuple[str, Sample]:
    """The kind of site that a spelling is, and the spelling as a sample of small integers."""
    kind, text = spellings(ranks)[name]
    return kind, as_sample(parse(f"def f(tp: Team[{ranks}], {text}\n"), seed)


def as_sample(program: Program, seed: int) -> Sample:
    """Small integers as inputs, and what the Program makes of them as it is."""
    generator = torch.Generator().manual_seed(seed)
    inputs: list[list[torch.Tensor]] = []
    for rank in program.world:
        box = program.boxes(rank)
        given = [b for b in program.params if b.kind == "input"]
        inputs.append(
            [
                integers(generator, *numbers(box(View(b.name)).sizes), dtype=DTYPES[b.dtype])
                for b in given
            ]
        )
    results = run_ranks(program, inputs, in_order=True)
    expected = [[t for t in found if isinstance(t, torch.Tensor)] for found in results]
    return Sample(program, inputs, expected)
