"""Serial Programs of mixture-of-experts layers: all-to-alls around matmuls, in several spellings.

`W` ranks have `E` experts each; every rank sends `C` tokens to each expert. `spellings(W)` gives
(kinds of its all-to-alls, text) by name.
"""

from __future__ import annotations

DISPATCH, COMBINE = "all_to_all_matmul", "matmul_all_to_all"


def clone(source: str, name: str, sizes: str, dtype: str = "f32") -> str:
    """A line that puts a view in row-major order."""
    return (
        f'main: call("aten.clone.default", {source}, memory_format="@contiguous_format", '
        f"out=({name} := {dtype}[{sizes}]))"
    )


def layer(w: int, e: int, c: int, k: int, n: int, dtype: str = "f32") -> str:
    """Tokens to experts, two matmuls with an activation between, and back."""
    return f"""def f(tp: Team[{w}], x: {dtype}[{w * e}, {c}, {k}], w: {dtype}[{e}, {k}, {n}],
      u: {dtype}[{e}, {n}, {k}]):
    r = empty({dtype}[{w * e}, {c}, {k}])
    main: all_to_all(x, r, team=tp)
    {clone(f"r.view({w}, {e}, {c}, {k}).permute(1, 0, 2, 3)", "t", f"{e}, {w}, {c}, {k}", dtype)}
    main: call("aten.bmm.default", t.view({e}, {w * c}, {k}), w,
               out=(h := {dtype}[{e}, {w * c}, {n}]))
    main: call("aten.relu.default", h, out=(a := {dtype}[{e}, {w * c}, {n}]))
    main: call("aten.bmm.default", a, u, out=(y := {dtype}[{e}, {w * c}, {k}]))
    {clone(f"y.view({e}, {w}, {c}, {k}).permute(1, 0, 2, 3)", "s", f"{w}, {e}, {c}, {k}", dtype)}
    out = empty({dtype}[{w * e}, {c}, {k}])
    main: all_to_all(s.view({w * e}, {c}, {k}), out, team=tp)
    return out
"""


def spellings(w: int) -> dict[str, tuple[tuple[str, ...], str]]:
    """(kinds, text) by name, for a team of `w` ranks."""
    m, n = 3 * w, 3 * w - 1
    head = f"def f(tp: Team[{w}], x: f32[{w}, 2, 3, 8]"
    got = f"""r = empty(f32[{w}, 2, 3, 8])
    main: all_to_all(x, r, team=tp)
    {clone("r.permute(1, 0, 2, 3)", "t", f"2, {w}, 3, 8")}"""
    sent = f"""{clone(f"z.view(2, {w}, 3, 5).permute(1, 0, 2, 3)", "s", f"{w}, 2, 3, 5")}
    out = empty(f32[{w}, 2, 3, 5])
    main: all_to_all(s, out, team=tp)"""
    return {
        "gate-and-up": (
            (DISPATCH,),
            f"""{head}, w: f32[2, 8, 5], v: f32[2, 8, 4]):
    {got}
    main: call("aten.bmm.default", t.view(2, {m}, 8), w, out=(y := f32[2, {m}, 5]))
    main: call("aten.bmm.default", t.view(2, {m}, 8), v, out=(z := f32[2, {m}, 4]))
    return y, z
""",
        ),
        "biases": (
            (DISPATCH,),
            f"""{head}, w: f32[2, 8, 5], b: f32[2, 1, 5], c: f32[2, {m}, 5], d: f32[{m}, 1]):
    {got}
    main: call("aten.baddbmm.default", b, t.view(2, {m}, 8), w, out=(y := f32[2, {m}, 5]))
    main: call("aten.baddbmm.default", c, t.view(2, {m}, 8), w, beta=2, out=(z := f32[2, {m}, 5]))
    main: call("aten.baddbmm.default", d, t.view(2, {m}, 8), w, out=(q := f32[2, {m}, 5]))
    return y, z, q
""",
        ),
        "received-used": (
            (DISPATCH,),
            f"""{head}, w: f32[2, 8, 5], y: out[f32[2, {m}, 5]]):
    {got}
    main: call("aten.bmm.out", t.view(2, {m}, 8), w, out=y)
    return y, r, t
""",
        ),
        "one-expert": (
            (DISPATCH, COMBINE),
            f"""def f(tp: Team[{w}], x: f32[{m}, 8], w: f32[8, 5], b: f32[8], u: f32[5, 8]):
    r = empty(f32[{m}, 8])
    main: all_to_all(x, r, team=tp)
    main: call("aten.mm.default", r, w, out=(h := f32[{m}, 5]))
    main: call("aten.relu.default", h, out=(a := f32[{m}, 5]))
    main: call("aten.addmm.default", b, a, u, out=(y := f32[{m}, 8]))
    out = empty(f32[{m}, 8])
    main: all_to_all(y, out, team=tp)
    return out
""",
        ),
        "pointwise-then-back": (
            (COMBINE,),
            f"""def f(tp: Team[{w}], a: f32[2, {m}, 8], w: f32[2, 8, 5], b: f32[2, 1, 5], d: f32[5],
      p: f32[2, {m}, 1], q: f32[2, {m}, 5]):
    main: call("aten.bmm.default", a, w, out=(y := f32[2, {m}, 5]))
    main: call("aten.add.Tensor", y, b, out=(y1 := f32[2, {m}, 5]))
    main: call("aten.mul.Tensor", y1, p, out=(y2 := f32[2, {m}, 5]))
    main: call("aten.sub.Tensor", y2, d, out=(y3 := f32[2, {m}, 5]))
    main: call("aten.add.Tensor", y3, q, out=(z := f32[2, {m}, 5]))
    {sent}
    return out, y1
""",
        ),
        "last-row-padded": (
            (COMBINE,),
            f"""def f(tp: Team[{w}], a: f32[2, {n}, 8], w: f32[2, 8, 5]):
    main: call("aten.bmm.default", a, w, out=(y := f32[2, {n}, 5]))
    main: call("aten.constant_pad_nd.default", y, (0, 0, 0, 1), 0, out=(z := f32[2, {m}, 5]))
    {sent}
    return out
""",
        ),
        "batch-and-sequence": (
            (DISPATCH, COMBINE),
            f"""def f(tp: Team[{w}], x: f32[{2 * w}, 3, 8], w: f32[8, 5], u: f32[5, 8]):
    r = empty(f32[{2 * w}, 3, 8])
    main: all_to_all(x, r, team=tp)
    main: call("aten.cat.default", ({", ".join(f"r.chunk({i}, {w})" for i in range(w))}), 1,
               out=(t := f32[2, {m}, 8]))
    main: call("aten.mm.default", t.view({2 * m}, 8), w, out=(h := f32[{2 * m}, 5]))
    main: call("aten.relu.default", h.view(2, {m}, 5), out=(a := f32[2, {m}, 5]))
    main: call("aten.mm.default", a.view({2 * m}, 5), u, out=(y := f32[{2 * m}, 8]))
    main: call("aten.cat.default",
               ({", ".join(f"y.view(2, {m}, 8).chunk({i}, {w}, dim=1)" for i in range(w))}),
               out=(s := f32[{2 * w}, 3, 8]))
    out = empty(f32[{2 * w}, 3, 8])
    main: all_to_all(s, out, team=tp)
    return out
""",
        ),
    }


REFUSED = {
    "groups-are-data": (
        "aten._grouped_mm.default, not a matmul whose groups have sizes known beforehand, takes "
        "the received tensor",
        """x: bf16[8, 16], w: bf16[2, 16, 16], ends: i32[2]):
    r = empty(bf16[8, 16])
    main: all_to_all(x, r, team=tp)
    main: call("aten._grouped_mm.default", r, w, ends, out=(y := bf16[8, 16]))
    return y""",
    ),
    "order-is-data": (
        "an order that is data: no chunk's place is known beforehand",
        """x: f32[8, 4], w: f32[2, 4, 5], order: i64[8]):
    r = empty(f32[8, 4])
    main: all_to_all(x, r, team=tp)
    main: call("aten.index.Tensor", r, (order,), out=(t := f32[8, 4]))
    main: call("aten.bmm.default", t.view(2, 4, 4), w, out=(y := f32[2, 4, 5]))
    return y""",
    ),
    "rank-by-rank": (
        "not one stretch of each of the matmul's 4 stacks",
        """x: f32[4, 3, 8], w: f32[4, 8, 5]):
    r = empty(f32[4, 3, 8])
    main: all_to_all(x, r, team=tp)
    main: call("aten.bmm.default", r, w, out=(y := f32[4, 3, 5]))
    return y""",
    ),
    "nothing-around": (
        "after it: its result leaves the program; before it: no operator of the program",
        """x: f32[4, 8]):
    r = empty(f32[4, 8])
    main: all_to_all(x, r, team=tp)
    return r""",
    ),
    "uneven": (
        "its parts are uneven",
        """x: f32[5, 8], w: f32[8, 4]):
    rows = table(tp, 2, 3)
    sizes = table(tp, 4, 6)
    r = empty(f32[sizes[tp.rank], 8])
    main: all_to_all(x, r, team=tp, splits=rows)
    return r""",
    ),
}
"""Part of the reason, and text for two ranks of all-to-alls that are no site."""
