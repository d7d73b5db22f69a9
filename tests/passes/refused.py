"""Communications that are no site, with kind, part of the reason, and text for two ranks."""

from __future__ import annotations

REFUSED = {
    "select": (
        "all_gather",
        "a select or slice of the sharded dimension",
        """x: f32[3, 8], w: f32[8, 5]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full.select(0, 2).view(1, 8), w, out=(y := f32[1, 5]))
    return y""",
    ),
    "slice": (
        "all_gather",
        "only 4 of 6 gathered rows are used",
        """x: f32[3, 8], w: f32[8, 5]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full[1:5], w, out=(y := f32[4, 5]))
    return y""",
    ),
    "reversed": (
        "all_gather",
        "not in the order of the ranks",
        """x: f32[3, 8], w: f32[8, 5]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.cat.default", (full[3:6], full[0:3]), out=(s := f32[6, 8]))
    main: call("aten.mm.default", s, w, out=(y := f32[6, 5]))
    return y""",
    ),
    "padding-between": (
        "all_gather",
        "padding stands between the gathered rows",
        """x: f32[3, 8], w: f32[8, 5]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.constant_pad_nd.default", full, (0, 0, 1, 1), 0, out=(s := f32[8, 8]))
    main: call("aten.mm.default", s, w, out=(y := f32[8, 5]))
    return y""",
    ),
    "right-hand-side": (
        "all_gather",
        "right-hand side",
        """x: f32[3, 8], w: f32[5, 6]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", w, full, out=(y := f32[5, 8]))
    return y""",
    ),
    "contracted": (
        "all_gather",
        "the columns, not the rows",
        """x: f32[3, 8], w: f32[6, 5]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full.permute(1, 0), w, out=(y := f32[8, 5]))
    return y""",
    ),
    "columns-gathered": (
        "all_gather",
        "the columns, not the rows",
        """x: f32[3, 8], w: f32[16, 5]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.cat.default", (full.chunk(0, 2), full.chunk(1, 2)), 1,
               out=(s := f32[3, 16]))
    main: call("aten.mm.default", s, w, out=(y := f32[3, 5]))
    return y""",
    ),
    "times-itself": (
        "all_gather",
        "takes the gathered tensor twice",
        """x: f32[3, 8]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, full.permute(1, 0), out=(y := f32[6, 6]))
    return y""",
    ),
    "no-matmul": (
        "all_gather",
        "aten.relu.default, not a matmul, takes the gathered tensor",
        """x: f32[3, 8]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.relu.default", full, out=(y := f32[6, 8]))
    return y""",
    ),
    "returned": (
        "all_gather",
        "its result leaves the program",
        """x: f32[3, 8]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    return full""",
    ),
    "transposed-before-all-reduce": (
        "all_reduce",
        "in another order, or not all of them",
        """x: f32[6, 8], w: f32[8, 5]):
    main: call("aten.mm.default", x, w, out=(y := f32[6, 5]))
    out = empty(f32[5, 6])
    main: all_reduce(y.permute(1, 0), out, reduce="sum", team=tp)
    return out""",
    ),
    "columns-scattered": (
        "reduce_scatter",
        "the columns, not the rows",
        """x: f32[3, 8], w: f32[8, 4]):
    main: call("aten.mm.default", x, w, out=(y := f32[3, 4]))
    main: call("aten.cat.default", (y.chunk(0, 2, dim=1), y.chunk(1, 2, dim=1)),
               out=(s := f32[6, 2]))
    out = empty(f32[3, 2])
    main: reduce_scatter(s, out, reduce="sum", team=tp)
    return out""",
    ),
    "rows-dropped-before-scatter": (
        "reduce_scatter",
        "dropped or repeated",
        """x: f32[6, 8], w: f32[8, 5]):
    main: call("aten.mm.default", x, w, out=(y := f32[6, 5]))
    out = empty(f32[2, 5])
    main: reduce_scatter(y[1:5], out, reduce="sum", team=tp)
    return out""",
    ),
    "random-between": (
        "reduce_scatter",
        "aten.native_dropout.default, not a matmul",
        """x: f32[6, 8], w: f32[8, 5]):
    main: call("aten.mm.default", x, w, out=(y := f32[6, 5]))
    main: call("aten.native_dropout.default", y, 0.5, True, rng=True,
               out=(z := f32[6, 5], m := bool[6, 5]))
    out = empty(f32[3, 5])
    main: reduce_scatter(z, out, reduce="sum", team=tp)
    return out""",
    ),
    "weight-gradient": (
        "all_reduce",
        "the gradient of a weight",
        """x: f32[6, 8], g: f32[6, 5]):
    main: call("aten.mm.default", x.permute(1, 0), g, out=(y := f32[8, 5]))
    out = empty(f32[8, 5])
    main: all_reduce(y, out, reduce="sum", team=tp)
    return out""",
    ),
    "input-reduced": (
        "all_reduce",
        "no operator of the program, not a matmul",
        """x: f32[6, 8]):
    out = empty(f32[6, 8])
    main: all_reduce(x, out, reduce="sum", team=tp)
    return out""",
    ),
    "other-kind": (
        "broadcast",
        "broadcast is not overlapped chunk by chunk",
        """x: f32[6, 8]):
    out = empty(f32[6, 8])
    main: broadcast(x, out, root=0, team=tp)
    return out""",
    ),
}
"""Kind, part of the reason, and text for two ranks of communications that are no site."""
