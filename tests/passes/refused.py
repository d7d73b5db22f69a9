"""Communications that are no site, with kind, part of the reason, and text for two ranks."""

from __future__ import annotations


def made(fn: str, args: str, out: str) -> str:
    """A line that calls an operator."""
    return f'main: call("aten.{fn}", {args}, out=({out}))'


def gather(params: str, *lines: str, result: str = "y") -> str:
    """An all-gather of `x` into `full`, and what takes it."""
    first = ["full = empty(f32[6, 8])", "main: all_gather(x, full, team=tp)"]
    return "\n    ".join([f"x: f32[3, 8]{params}):", *first, *lines, f"return {result}"])


def scatter(params: str, *lines: str, out: str, sent: str) -> str:
    """The lines before a reduce-scatter of `sent`."""
    last = [
        f"out = empty(f32[{out}])",
        f'main: reduce_scatter({sent}, out, reduce="sum", team=tp)',
        "return out",
    ]
    return "\n    ".join([f"{params}):", *lines, *last])


def reduce(params: str, *lines: str, out: str, sent: str) -> str:
    """The lines before an all-reduce of `sent`."""
    return scatter(params, *lines, out=out, sent=sent).replace("reduce_scatter", "all_reduce")


REFUSED = {
    "select": (
        "all_gather",
        "a select or slice of the sharded dimension",
        gather(
            ", w: f32[8, 5]",
            made("mm.default", "full.select(0, 2).view(1, 8), w", "y := f32[1, 5]"),
        ),
    ),
    "slice": (
        "all_gather",
        "only 4 of 6 gathered rows are used",
        gather(", w: f32[8, 5]", made("mm.default", "full[1:5], w", "y := f32[4, 5]")),
    ),
    "reversed": (
        "all_gather",
        "not in the order of the ranks",
        gather(
            ", w: f32[8, 5]",
            made("cat.default", "(full[3:6], full[0:3])", "s := f32[6, 8]"),
            made("mm.default", "s, w", "y := f32[6, 5]"),
        ),
    ),
    "padding-between": (
        "all_gather",
        "padding stands between the gathered rows",
        gather(
            ", w: f32[8, 5]",
            made("constant_pad_nd.default", "full, (0, 0, 1, 1), 0", "s := f32[8, 8]"),
            made("mm.default", "s, w", "y := f32[8, 5]"),
        ),
    ),
    "right-hand-side": (
        "all_gather",
        "right-hand side",
        gather(", w: f32[5, 6]", made("mm.default", "w, full", "y := f32[5, 8]")),
    ),
    "contracted": (
        "all_gather",
        "the columns, not the rows",
        gather(", w: f32[6, 5]", made("mm.default", "full.permute(1, 0), w", "y := f32[8, 5]")),
    ),
    "columns-gathered": (
        "all_gather",
        "the columns, not the rows",
        gather(
            ", w: f32[16, 5]",
            made("cat.default", "(full.chunk(0, 2), full.chunk(1, 2)), 1", "s := f32[3, 16]"),
            made("mm.default", "s, w", "y := f32[3, 5]"),
        ),
    ),
    "times-itself": (
        "all_gather",
        "takes the gathered tensor twice",
        gather("", made("mm.default", "full, full.permute(1, 0)", "y := f32[6, 6]")),
    ),
    "no-matmul": (
        "all_gather",
        "aten.relu.default, not a matmul, takes the gathered tensor",
        gather("", made("relu.default", "full", "y := f32[6, 8]")),
    ),
    "returned": ("all_gather", "its result leaves the program", gather("", result="full")),
    "transposed-before-all-reduce": (
        "all_reduce",
        "in another order, or not all of them",
        reduce(
            "x: f32[6, 8], w: f32[8, 5]",
            made("mm.default", "x, w", "y := f32[6, 5]"),
            out="5, 6",
            sent="y.permute(1, 0)",
        ),
    ),
    "columns-scattered": (
        "reduce_scatter",
        "the columns, not the rows",
        scatter(
            "x: f32[3, 8], w: f32[8, 4]",
            made("mm.default", "x, w", "y := f32[3, 4]"),
            made("cat.default", "(y.chunk(0, 2, dim=1), y.chunk(1, 2, dim=1))", "s := f32[6, 2]"),
            out="3, 2",
            sent="s",
        ),
    ),
    "rows-dropped-before-scatter": (
        "reduce_scatter",
        "dropped or repeated",
        scatter(
            "x: f32[6, 8], w: f32[8, 5]",
            made("mm.default", "x, w", "y := f32[6, 5]"),
            out="2, 5",
            sent="y[1:5]",
        ),
    ),
    "random-between": (
        "reduce_scatter",
        "aten.native_dropout.default, not a matmul",
        scatter(
            "x: f32[6, 8], w: f32[8, 5]",
            made("mm.default", "x, w", "y := f32[6, 5]"),
            'main: call("aten.native_dropout.default", y, 0.5, True, rng=True,\n'
            "               out=(z := f32[6, 5], m := bool[6, 5]))",
            out="3, 5",
            sent="z",
        ),
    ),
    "weight-gradient": (
        "all_reduce",
        "the gradient of a weight",
        reduce(
            "x: f32[6, 8], g: f32[6, 5]",
            made("mm.default", "x.permute(1, 0), g", "y := f32[8, 5]"),
            out="8, 5",
            sent="y",
        ),
    ),
    "input-reduced": (
        "all_reduce",
        "no operator of the program, not a matmul",
        reduce("x: f32[6, 8]", out="6, 8", sent="x"),
    ),
    "other-kind": (
        "broadcast",
        "broadcast is not overlapped chunk by chunk",
        reduce("x: f32[6, 8]", out="6, 8", sent="x")
        .replace("all_reduce", "broadcast")
        .replace('reduce="sum"', "root=0"),
    ),
}
"""Kind, part of the reason, and text for two ranks of communications that are no site."""
