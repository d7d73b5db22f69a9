"""fuse: what comes together, what goes before and after it, and what is refused."""

from __future__ import annotations

import pytest

from interlace.errors import PassError
from interlace.ir import (
    Call,
    Copy,
    Expect,
    Free,
    Fused,
    FusedKernel,
    Get,
    Notify,
    Program,
    Put,
    Record,
    Wait,
    parse,
    validate,
)
from interlace.passes import run_pipeline
from interlace.passes.fuse import SUM, Fuse, groups
from interlace.passes.strategies import pieces as pieces_file
from interlace.passes.uses import used_by
from interlace.verify import check

LOWER = "find_sites,decompose{strategy=fused},schedule,plan_memory,insert_sync"

GATHER = """
def f(tp: Team[2], x: bf16[4, 8], w: bf16[8, 8], y: out[bf16[8, 8]], z: out[bf16[4, 8]]):
    site(1, "all_gather_matmul", strategy="fused", chunks=2)
    slots = alloc(bf16[2, 4, 8], symmetric=tp, stream="comm", site=1)
    comm: record(e1, site=1)
    comm: put(x, slots[tp.rank].view(4, 8), peer=tp.rank - 1, site=1)
    comm: record(e2, site=1)
    comm: notify(arrived, to=tp.rank - 1, site=1)
    main: call("aten.mm.out", x, w, out=y[tp.rank], site=1)
    main: wait(e1, site=1)
    main: expect(arrived, tp.rank + 1, site=1)
    main: call("aten.mm.out", slots[tp.rank + 1].view(4, 8), w, out=y[tp.rank + 1], site=1)
    main: wait(e2)
    main: free(slots)
    main: call("aten.neg.out", x, out=z)
"""
"""A gather as the passes before leave it."""

LAYER = """
def f(tp: Team[2], x: bf16[4, 8], w: bf16[8, 8], v: bf16[8, 8], u: bf16[8, 8]):
    full = empty(bf16[8, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(h := bf16[8, 8]))
    main: call("aten.mm.default", full, u, out=(g := bf16[8, 8]))
    main: call("aten.mul.Tensor", h, g, out=(a := bf16[8, 8]))
    main: call("aten.mm.default", a, v, out=(t := bf16[8, 8]))
    y = empty(bf16[4, 8])
    main: reduce_scatter(t, y, reduce="sum", team=tp)
    main: call("aten.add.Tensor", x, y, out=(z := bf16[4, 8]))
    return z
"""


def fused(program: Program) -> list[Fused]:
    return [op for op in program.ops if isinstance(op, Fused)]


def lowered(program: Program, options: str = "") -> Program:
    """The Program with its sites fused, as `decompose{strategy=fused,...}` cuts them."""
    return run_pipeline(program, f"{LOWER.replace('fused', f'fused{options}')},fuse")


def reduced(size: int, rows: int, kind: str = "reduce_scatter", columns: int = 8) -> Program:
    """A matmul whose result is reduced, so many rows of it to each rank (or all to all)."""
    kept = rows if kind == "reduce_scatter" else size * rows
    return parse(f"""
def f(tp: Team[{size}], x: bf16[{size * rows}, 8], w: bf16[8, {columns}],
      y: out[bf16[{kept}, {columns}]]):
    t = empty(bf16[{size * rows}, {columns}])
    main: call("aten.mm.out", x, w, out=t)
    main: {kind}(t, y, reduce="sum", team=tp)
""")


def test_waits_go_before_and_the_own_rows_come_first() -> None:
    program = parse(GATHER)
    check(program).raise_if_unsound()
    made = Fuse().run(program)
    check(made).raise_if_unsound()
    check(made, in_order=True).raise_if_unsound()
    (op,) = fused(made)
    assert [[type(m).__name__ for m in part] for part in op.parts] == [["Call"], ["Expect", "Call"]]
    main = [type(other) for other in made.ops if other.stream == "main"]
    assert main == [Wait, Fused, Wait, Free, Call]
    assert made.sites[0].strategy == "fused"
    assert not made.remarks


def packed(rows: int, of: str, kinds: str = "f8e4m3 f8e4m3 bf16", scatter: bool = False) -> Program:
    """Packed rows that are gathered and multiplied, or multiplied and scattered."""
    a, b, out = kinds.split()
    given, whole = (2 * rows, "x") if scatter else (rows, "full")
    body = [
        f"full = empty({a}[{2 * rows}, 160])",
        "main: all_gather(x, full, team=tp)",
        f"t = empty({out}[{2 * rows}, 32])",
        f'main: call("interlace.float8_mm.out", {whole}, w.permute(1, 0), {of}, out=t)',
        f"y = empty({out}[{rows}, 32])",
        'main: reduce_scatter(t, y, reduce="sum", team=tp)',
        f"return {'y' if scatter else 't'}",
    ]
    body = body[2:] if scatter else [*body[:4], body[-1]]
    head = f"def f(tp: Team[2], x: {a}[{given}, 160], w: {b}[32, 160], v: {out}[32]):"
    return parse("\n    ".join([head, *body]))


@pytest.mark.parametrize("kinds", ["f8e4m3 f8e4m3 bf16", "f8e5m2 f8e4m3 f16"])
@pytest.mark.parametrize("of", ["1, None, True", "2, None, True", "2, v, True", "2, v, True, None"])
def test_packed_rows_have_a_kernel(of: str, kinds: str) -> None:
    """Each part is a block of one scale, whether ranks have one each or the same."""
    made = lowered(packed(128, of, kinds))
    (op,) = fused(made)
    assert op.kernel == FusedKernel(kind="gather_matmul")
    assert [m.args[2] for m in op.members if isinstance(m, Call)] == [1, 1]
    assert_sound(made)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (packed(128, "0, None, True"), "its rows have their own scales"),
        (packed(128, "2, None, False"), "it asks for sums in fp32"),
        (packed(128, "2, None"), "has arguments that the kernel does not take"),
        (packed(64, "2, None, True"), "whole tiles of 128 rows, and a rank has 64"),
        (packed(128, "2, None, True", "f8e5m2 f8e5m2 bf16"), "f8e5m2 and f8e5m2"),
        (packed(128, "2, None, True", "f8e4m3 f8e4m3 f32"), "its result is f32"),
        (packed(128, "1, None, True", scatter=True), "no kernel multiplies FP8 before a reduction"),
    ],
)
def test_packed_rows_that_no_kernel_multiplies_are_put(program: Program, told: str) -> None:
    made = lowered(program)
    assert not fused(made)
    (site,) = made.sites
    assert (site.strategy, site.protocol) == ("peer", "put")
    assert told in site.reason


@pytest.mark.parametrize(("rows", "whole"), [(256, True), (200, False)])
def test_a_class_of_packed_rows_is_of_whole_tiles_where_a_kernel_takes_them(
    rows: int, whole: bool
) -> None:
    made = lowered(
        parse(f"""
def f(tp: Team[2], S: Size[{rows}], x: f8e4m3[S, 160], w: f8e4m3[32, 160], y: out[bf16[2 * S, 32]]):
    full = empty(f8e4m3[2 * S, 160])
    main: all_gather(x, full, team=tp)
    main: call("interlace.float8_mm.out", full, w.permute(1, 0), 2, None, True, out=y)
""")
    )
    assert bool(fused(made)) == whole
    assert ("S % 128 == 0" in made.sizes.assumptions()) == whole
    assert any("%" in told for told in made.sizes.assumptions()) == whole


@pytest.mark.parametrize(("rows", "pieces"), [(64, 1), (256, 2), (384, 1)])
def test_pieces_that_are_asked_for_are_of_whole_tiles(rows: int, pieces: int) -> None:
    made = lowered(reduced(2, rows), ",chunks=4")
    (op,) = fused(made)
    assert op.kernel == FusedKernel(kind="scatter_matmul", pieces=pieces)
    assert_sound(made)


NEG = '    main: call("aten.neg.out", x, out=z)\n'
REFUSED = {
    "aten.neg.out stands between them": (
        (NEG, ""),
        ("    main: expect(", f"{NEG}    main: expect("),
    ),
    "they are on several streams": (
        ('main: call("aten.mm.out", slots', 'side: call("aten.mm.out", slots'),
    ),
    # The second chunk waits for what another stream does with the first.
    "one of them waits for e4, which comes after it": (
        (NEG, ""),
        (
            "    main: wait(e1, site=1)\n",
            "    main: record(e3)\n    comm: wait(e3)\n    comm: copy(y[tp.rank], z)\n"
            "    comm: record(e4)\n    main: wait(e1, site=1)\n    main: wait(e4)\n",
        ),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_chunks_that_cannot_become_one_op_are_refused(why: str) -> None:
    text = GATHER
    for old, new in REFUSED[why]:
        text = text.replace(old, new)
    with pytest.raises(PassError, match=f"site 1 cannot become one op: {why}"):
        Fuse().run(parse(text))


def test_it_comes_last_and_once() -> None:
    made = Fuse().run(parse(GATHER))
    assert groups(made) == []
    assert Fuse().run(made) == made
    for name in ("insert_sync", "schedule", "plan_memory"):
        with pytest.raises(PassError, match="the pass fuse comes last"):
            run_pipeline(made, name)


def test_schedule_and_memory_leave_kernels_whole() -> None:
    planned = run_pipeline(parse(LAYER), LOWER)
    found = groups(planned)
    assert len(found) == 3  # two matmuls share the gather
    for group in found:
        between = planned.ops[group[0] : group[-1] + 1]
        mine = [op for op in between if op.stream == "main" and not isinstance(op, Wait | Record)]
        assert {op.site for op in mine} == {planned.ops[group[0]].site}
    made = Fuse().run(planned)
    kinds = [op.kernel.kind for op in fused(made) if op.kernel is not None]
    assert kinds == ["gather_matmul", "gather_matmul", "scatter_matmul"]
    assert not any(remark.pass_name == "fuse" for remark in made.remarks)
    assert_sound(made)
    buffers = made.buffers()
    for op in fused(made):  # what a kernel writes shares no bytes with anything else that it uses
        used = [buffers[name] for name in used_by((op,))]
        places = [buffer.offset for buffer in used if buffer.storage == "arena"]
        assert len({*places}) == len(places)


@pytest.mark.parametrize("size", [2, 4])
def test_own_rows_are_summed_beside_the_kernel(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of at least BESIDE_BYTES and GROUP_ROWS: all but the last on the stream that awaits
    the peers'."""
    # a rank's rows are 512, of 8192 bytes
    for least, height, pieces in (
        *((2048, 128, 4), (2049, 128, 2), (4097, 128, 1)),
        *((2048, 129, 2), (2048, 256, 2), (2048, 257, 1)),
    ):
        monkeypatch.setattr(pieces_file, "BESIDE_BYTES", least)
        monkeypatch.setattr(pieces_file, "GROUP_ROWS", height)
        made = lowered(reduced(size, 512))
        assert check(made).sound
        (kernel,) = fused(made)
        own = {1: 1, 2: 3, 4: 4}[pieces]  # 128 rows are no halves
        assert kernel.kernel == FusedKernel(kind="scatter_matmul", pieces=pieces, own=own)
        assert made.sites[0].chunks == size * pieces
        mine = [m.outs[0].buffer == "t_slots" for m in kernel.members if isinstance(m, Call)]
        assert mine == [False] * ((size - 1) * pieces) + [True] * own
        sums = [op for op in made.ops if isinstance(op, Call) and op.fn == SUM]
        sums.sort(key=lambda op: made.boxes(0)(op.outs[0]).offset)
        assert [op.stream for op in sums] == ["arrivals"] * (own - 1) + ["main"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rows", [2048, 4096])
def test_no_sum_beside_the_kernel_waits_for_its_end(rows: int, size: int) -> None:
    """Though what the last sum awaits, behind the kernel, says as much as what these await."""
    made = lowered(reduced(size, rows, columns=8192))
    (kernel,) = fused(made)
    pieces = rows // 1024
    assert kernel.kernel == FusedKernel(kind="scatter_matmul", pieces=pieces, own=pieces + 1)
    after = made.ops[made.ops.index(kernel) :]
    behind = [op.event for op in after if isinstance(op, Record) and op.stream == "main"]
    beside = [
        i for i, op in enumerate(made.ops) if isinstance(op, Call) and op.stream == "arrivals"
    ]
    assert len(beside) == pieces
    waits = [op.event for op in made.ops[: beside[-1]] if isinstance(op, Wait)]
    assert not {*waits} & {*behind}


def gathered(rows: int, columns: int, size: int) -> Program:
    """Rows that are gathered, kept and multiplied."""
    whole = f"full: out[bf16[{rows * size}, 64]]"
    return parse(f"""
def f(tp: Team[{size}], x: bf16[{rows}, 64], w: bf16[64, {columns}], {whole}):
    main: all_gather(x, full, team=tp)
    y = empty(bf16[{rows * size}, {columns}])
    main: call("aten.mm.out", full, w, out=y)
    return y
""")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("rows", "columns", "least", "pieces"),
    [
        *((512, 32, 65536, 4), (512, 32, 65537, 1)),
        *((512, 24, 1, 1), (512, 40, 1, 1), (640, 32, 1, 1)),
    ],
)
def test_rows_that_come_in_time_come_in_quarters(
    rows: int, columns: int, least: int, pieces: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are whole tiles, PIECE_BYTES together, and come about as fast as they are used:
    three quarters travel together, then one, and to others two by two."""
    monkeypatch.setattr(pieces_file, "PIECE_BYTES", least)
    monkeypatch.setattr(pieces_file, "TIMELY_COLUMNS", range(32, 40))
    made = lowered(gathered(rows, columns, size))
    kernel = FusedKernel(kind="gather_matmul", pieces=pieces)
    assert [op.kernel for op in fused(made)] == [kernel]
    assert made.sites[0].chunks == size * pieces
    heights = [made.boxes(0)(op.src).sizes[0] for op in made.ops if isinstance(op, Put)]
    told = [op.value for op in made.ops if isinstance(op, Notify)]
    awaited = [member.value for member in fused(made)[0].members if isinstance(member, Expect)]
    assert awaited == [*range(1, pieces + 1)] * (size - 1)
    if pieces == 4:
        assert heights == [384, 128, *[256] * 2 * (size - 2)]
        assert told == [3, 4, *[2, 4] * (size - 2)]
    else:
        assert (heights, told) == ([rows] * (size - 1), [1] * (size - 1))
    assert_sound(made)


@pytest.mark.parametrize("strategy", ["fused", "peer,protocol=put"])
@pytest.mark.parametrize("size", [2, 4])
def test_rows_that_are_used_again_stay_where_peers_put_them(size: int, strategy: str) -> None:
    """As in a backward, where the gradient that is gathered for one matmul is a factor of another:
    one copy, of the own rows, which stands behind the puts."""
    rows = 256 * size
    made = run_pipeline(
        parse(f"""
def f(tp: Team[{size}], dy: bf16[256, 64], w: bf16[64, 32], x: bf16[{rows}, 48]):
    full = empty(bf16[{rows}, 64])
    main: all_gather(dy, full, team=tp)
    dx = empty(bf16[{rows}, 32])
    main: call("aten.mm.out", full, w, out=dx)
    main: call("aten.mm.default", full.permute(1, 0), x, out=(dw := bf16[64, 48]))
    return dx, dw
"""),
        f"{LOWER.replace('fused', strategy)},fuse",
    )
    assert [b.name for b in made.buffers().values() if b.kind == "symmetric"] == ["full"]
    (copy,) = (i for i, op in enumerate(made.ops) if isinstance(op, Copy))
    puts = [i for i, op in enumerate(made.ops) if isinstance(op, Put)]
    assert len(puts) == size - 1
    assert max(puts) < copy
    assert len(fused(made)) == (strategy == "fused")
    assert_sound(made)


def assert_sound(made: Program) -> None:
    check(made).raise_if_unsound()
    check(made, in_order=True).raise_if_unsound()
    assert parse(str(made)) == made
    for rank in made.world:
        validate(made.instantiate(rank))


@pytest.mark.parametrize("size", [2, 4])
def test_large_all_reduces_go_in_slabs(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SLAB_FLOPS and more each, and a rank's part SLAB_BYTES: three at least, or none."""
    flops, nbytes = 2 * size * 768 * 8 * 8, 768 * 16
    for slabs, work, part in (
        *((6, flops // 6, nbytes // 6), (3, flops // 5, nbytes // 6), (3, flops // 6, nbytes // 3)),
        *((0, flops // 2, nbytes // 6), (0, flops // 6, nbytes // 2)),
    ):
        monkeypatch.setattr(pieces_file, "SLAB_FLOPS", work)
        monkeypatch.setattr(pieces_file, "SLAB_BYTES", part)
        made = lowered(reduced(size, 768, "all_reduce"))
        assert check(made).sound
        (kernel,) = fused(made)
        slabbed = {"pieces": slabs, "own": 0} if slabs else {}
        assert kernel.kernel == FusedKernel(kind="scatter_matmul", **slabbed)
        calls = [member for member in kernel.members if isinstance(member, Call)]
        assert len(calls) == size * max(slabs, 1)
        assert made.sites[0].chunks == len(calls)
        own = [call.outs[0].buffer == "t_slots" for call in calls]
        assert own == ([False] * (size - 1) + [True]) * max(slabs, 1)
        sums = [op for op in made.ops if isinstance(op, Call) and op.fn == SUM]
        assert [op.stream for op in sums] == ["arrivals"] * (slabs - 1) + ["main"]
        gets = [op for op in made.ops if isinstance(op, Get)]
        assert [op.stream for op in gets] == ["arrivals"] * max(slabs - 1, 0) * (size - 1)
        copies = [op.stream for op in made.ops if isinstance(op, Copy)]
        assert copies == ["arrivals"] * max(slabs - 1, 0)
