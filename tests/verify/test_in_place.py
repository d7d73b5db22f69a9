"""Ops whose operands share bytes: which forms are accepted, and which are refused and how."""

from __future__ import annotations

import pytest

from interlace.ir import parse, parse_set
from interlace.verify import Report, check

HEAD = """def f(dp: Team[2], tp: Team[3], x: f32[6, 6], y: f32[6, 6], v: f32[6]):
    rows = table(tp, 3, 1, 2)
{}"""
ARENA = (
    'a = alloc(f32[6, 6], storage="s", offset=0)\n'
    'b = alloc(f32[6, 6], storage="s", offset={})\n'
    "main: copy(x, a)\n"
)
REGION = """    @region
    def region_0(i0, i1):
        t0 = {}(i0, i1)
        return t0
"""


def text(body: str, region: str = "") -> str:
    return HEAD.format(region) + "".join(f"    {line.strip()}\n" for line in body.splitlines())


def checked(body: str, region: str = "") -> Report:
    return check(parse(text(body, region)))


ALLOWED = {
    "a copy of a view to itself": "main: copy(x[tp.rank], x[tp.rank])",
    "a copy between rows that interleave": "main: copy(x.slice(1, 0, 3), x.slice(1, 3, 6))",
    "pointwise": 'main: call("aten.add.out", x, y, out=x)',
    "pointwise, of one column": (
        'main: call("aten.add.out", x.slice(1, 0, 1), v.view(6, 1), out=x.slice(1, 0, 1))'
    ),
    "pointwise, copied": 'main: call("aten.add.Tensor", x, y, out=x)',
    "pointwise, by its own overload": (
        'main: call("aten.mul_.Tensor", x, x, out=x, mutates=True)'
    ),
    "a written argument of a matmul": (
        'main: call("aten.addmm_.default", x, y, y, out=x, mutates=True)'
    ),
    "written arguments of a list": (
        'main: call("aten._foreach_add_.List", (x[0:1], x[1:2]), (y[0:1], y[1:2]), '
        "out=(x[0:1], x[1:2]), mutates=True)"
    ),
    "a matmul into other rows": (
        'main: call("aten.mm.out", x.slice(0, 0, 1), y, out=x.slice(0, 1, 2))'
    ),
    "the bytes of as_strided themselves": (
        'main: call("aten.add.out", x.as_strided((5,), (7,), 0), 1, out=x[0:5, 5:6].view(5))'
    ),
    "random numbers": 'main: call("aten.bernoulli_.float", x, 0.5, out=x, mutates=True, rng=True)',
    "an all-reduce": 'main: all_reduce(x, x, reduce="sum", team=tp)',
    "a broadcast": "main: broadcast(x, x, root=1, team=tp)",
    "a reduction to the root": 'main: reduce(x, x, reduce="max", root=2, team=tp, backend="gloo")',
    "an all-gather of the own part": "main: all_gather(x[tp.rank], x, team=tp)",
    "of its own rows": "main: all_gather(x.chunk(tp.rank, rows), x, team=tp, splits=rows)",
    "a reduce-scatter to it": 'main: reduce_scatter(x, x[dp.rank], reduce="sum", team=dp)',
    "to its own rows": (
        'main: reduce_scatter(x, x.chunk(tp.rank, rows), reduce="avg", team=tp, splits=rows)'
    ),
    "a gather of it": 'main: gather(x[tp.rank], x, root=1, team=tp, backend="peer")',
    "a scatter to it": 'main: scatter(x, x[tp.rank], root=1, team=tp, backend="gloo")',
    "memory of a peer's": (
        "full = alloc(f32[6, 6], symmetric=tp)\n main: copy(x, full)\n main: barrier(team=tp)\n"
        "comm: get(full[0:2], full[2:4], peer=tp.rank + 1)\n comm: barrier(team=tp)\n"
        "comm: free(full)"
    ),
    "bytes of an arena beside one another": (
        ARENA.format(144) + 'main: call("aten.mm.out", a, y, out=b)'
    ),
    "an all-gather of fewer rows than columns": (
        "main: all_gather(x.slice(0, 0, 3)[tp.rank], x.slice(0, 0, 3), team=tp)"
    ),
    "the same bytes of an arena": ARENA.format(0) + 'main: call("aten.neg.out", a, out=b)',
}  # fmt: skip


@pytest.mark.parametrize("body", ALLOWED.values(), ids=ALLOWED)
def test_a_form_that_is_right_is_accepted(body: str) -> None:
    report = checked(body)
    assert not {f.kind for f in report.findings} & {"in-place"}, report


REFUSED = {
    "a copy to the next rows": ("main: copy(x.slice(0, 0, 5), x.slice(0, 1, 6))", (0, 5), "view"),
    "a copy of the same bytes in another order": (
        "main: copy(x.permute(1, 0), x)", (0, 5), "view",
    ),
    "a copy to another type": ("main: copy(v.cast(i32), v)", (0, 5), "view"),
    "a matmul": ('main: call("aten.mm.out", x, y, out=x)', (0, 5), "a copy of x"),
    "a matmul of what is added to": (
        'main: call("aten.addmm_.default", x, x, y, out=x, mutates=True)', (0, 5), "a copy of x",
    ),
    "pointwise, moved": (
        'main: call("aten.add.out", v.slice(0, 0, 5), 1, out=v.slice(0, 1, 6))', (0, 5), "view",
    ),
    "pointwise, of its own row": ('main: call("aten.add.out", x, x[0:1], out=x)', (0, 5), "x[0:1]"),
    "a reduction": ('main: call("aten.sum.IntList_out", x, (1,), out=x[:, 0:1])', (0, 5), "copy"),
    "an argument of a list that another writes": (
        'main: call("aten._foreach_add_.List", (x[0:1], x[1:2]), (y[0:1], x[0:1]), '
        "out=(x[0:1], x[1:2]), mutates=True)", (0, 5), "copy",
    ),
    "two outputs": (
        'main: call("aten.split_copy.Tensor_out", x, 2, out=(y.slice(0, 0, 3), y.slice(0, 2, 5)))',
        (0, 5), "of its own",
    ),
    "an output given twice": (
        'main: call("aten._foreach_add_.Scalar", (v, v), 1, out=(v, v), mutates=True)',
        (0, 5), "of its own",
    ),
    "an output given twice, behind an empty one": (
        'main: call("aten.split_with_sizes_copy.out", x, (0, 0, 2, 2, 2), '
        "out=(y[0:0], y[0:0], y[0:2], y[0:2], y[2:4]))", (0, 5), "of its own",
    ),
    "an all-to-all": ("main: all_to_all(x, x, team=tp)", (0, 5), "a copy of x"),
    "an all-gather of the first part": (
        "main: all_gather(x.slice(0, 0, 2), x, team=tp)", (1, 2, 4, 5), "own part",
    ),
    "an all-gather of the next part": (
        "main: all_gather(x[tp.rank + 1], x, team=tp)", (0, 5), "own part",
    ),
    "a reduce-scatter to the first part": (
        'main: reduce_scatter(x, x.slice(0, 0, 3), reduce="sum", team=dp)', (3, 4, 5), "own part",
    ),
    "a gather on a backend unknown": (
        "main: gather(x[tp.rank], x, root=1, team=tp)", (1, 4), 'backend="gloo"',
    ),
    "a second gather, whose root has another part": (
        'main: gather(x.slice(0, 0, 2), x, root=0, team=tp, backend="gloo")\n'
        'main: gather(x.slice(0, 0, 2), x, root=1, team=tp, backend="gloo")', (1, 4), "own part",
    ),
    "a scatter by NCCL": (
        'main: scatter(x, x[tp.rank], root=0, team=tp, backend="nccl")', (0, 3), 'backend="peer"',
    ),
    "a put to oneself": (
        "s = alloc(f32[6, 6], symmetric=tp)\n main: copy(x, s)\n"
        "main: put(s[0:2], s[0:2], peer=tp.rank + 3)\n main: free(s)", (0, 5), "copy",
    ),
    "a get from oneself, on one rank": (
        "s = alloc(f32[6, 6], symmetric=tp)\n main: copy(x, s)\n main: barrier(team=tp)\n"
        "main: get(s[0:2], peer=1, team=tp)\n main: barrier(team=tp)\n main: free(s)",
        (1, 4), "copy",
    ),
    "other bytes of an arena": (
        ARENA.format(16) + 'main: call("aten.neg.out", a, out=b)', (0, 5), "view",
    ),
    "as_strided": (
        'main: call("aten.add.out", x.as_strided((6,), (7,), 0), v, out=x[0:1].view(6))',
        (0, 5), "view",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "ends", "fix"), REFUSED.values(), ids=REFUSED)
def test_a_form_that_is_wrong_is_refused(body: str, ends: tuple[int, ...], fix: str) -> None:
    report = checked(body)
    (finding,) = (finding for finding in report.errors if finding.kind == "in-place")
    wanted = tuple(range(6)) if ends == (0, 5) else ends
    assert finding.ranks == wanted, report
    assert fix in finding.fix, report
    assert "share" in finding.message or "twice" in finding.message


TOLD = {
    "a copy": (
        "main: copy(x.slice(0, 0, 5), x.slice(0, 1, 6))",
        "copy reads x[0:5] and writes x[1:6], which share bytes, and are not one and the same view",
        "or give it just the same view to read and to write",
        (24, 144),
    ),
    "a backend": (
        'main: scatter(x, x[tp.rank], root=0, team=tp, backend="nccl")',
        "scatter reads x and writes x[tp.rank], which share bytes",
        'or name a backend that works in place: backend="gloo" or backend="peer"',
        (0, 48),
    ),
    "twice": (
        'main: call("aten.split_copy.Tensor_out", x.slice(0, 0, 4), 2, out=(y[0:2], y[0:2]))',
        "aten.split_copy.Tensor_out writes y[0:2] and y[0:2], twice the same bytes",
        "write each to bytes of its own",
        (0, 48),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "message", "fix", "extent"), TOLD.values(), ids=TOLD)
def test_what_a_finding_says(body: str, message: str, fix: str, extent: tuple[int, int]) -> None:
    (finding,) = (finding for finding in checked(body).errors if finding.kind == "in-place")
    assert finding.message == message
    assert finding.fix.endswith(fix), finding.fix
    (op,) = finding.ops
    assert message.partition(" ")[2].startswith(f"{op.role}, ")
    assert (op.buffer, op.bytes) == ("y" if "twice" in message else "x", extent)


def test_a_message_to_oneself_is_two_ops_that_race() -> None:
    rows = "x.slice(0, 0, 4)", "x.slice(0, 2, 6)"
    group = "main: group(send({}, peer=tp.rank), recv({}, peer=tp.rank))"
    assert checked(group.format(*rows)).kinds() == {"race"}
    assert checked(group.format("x.slice(0, 0, 3)", "x.slice(0, 3, 6)")).sound


@pytest.mark.parametrize(("fn", "right"), [("aten.add.Tensor", True), ("aten.mm.default", False)])
def test_a_region_is_what_its_body_is(fn: str, right: bool) -> None:
    assert checked('main: call("region_0", x, y, out=x)', REGION.format(fn)).sound == right


def test_a_member_of_a_fused_op_is_an_op_of_its_own() -> None:
    body = 'main: fused(part(call("aten.mm.out", x, y, out={})))'
    assert checked(body.format("x")).kinds() == {"in-place"}
    assert checked("z = empty(f32[6, 6])\n" + body.format("z")).sound


def test_the_own_part_of_a_class_of_sizes() -> None:
    text = "def f(tp: Team[3], S: Size[6], x: f32[S, 6]):\n"
    text += "    main: all_gather(x[tp.rank], x, team=tp)"
    report = check(parse(text))
    assert report.sound, report
    assert report.sizes.holds({"S": 12})


def test_a_set_of_programs_is_checked_on_each_of_its_ranks() -> None:
    program = parse(text("main: all_gather(x.slice(0, 0, 2), x, team=tp)"))
    report = check([program.instantiate(rank) for rank in program.world])
    assert {rank for finding in report.errors for rank in finding.ranks} == {1, 2, 4, 5}


def test_a_rank_on_its_own_beside_ranks_that_turn_is_looked_at() -> None:
    text = """
def first(tp: Team[[0, 1]], x: f32[4], y: out[f32[8]]):
    ranks(0, 1)
    main: all_gather(x, y, team=tp)


def second(tp: Team[[0, 1]], x: f32[4]):
    ranks(2)
    main: copy(x[0:2], x[{}:{}])
"""
    assert (report := check(parse_set(text.format(2, 4)))).sound, report
    assert report.symmetry is not None
    (finding,) = check(parse_set(text.format(1, 3))).errors
    assert (finding.kind, finding.ranks) == ("in-place", (2,))
