"""The builder: what is written by hand equals what the text says, and mistakes name their line."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import interlace
from interlace.errors import ProgramError
from interlace.ir import (
    Call,
    Copy,
    DType,
    Fused,
    Group,
    HostSync,
    Loc,
    RankIndex,
    Recv,
    Send,
    Site,
    View,
    parse,
)
from interlace.ir.build import Builder, Handle

GOLDEN = Path(__file__).parents[1] / "golden"


def test_all_gather_matmul_as_in_the_golden_file() -> None:
    with interlace.program("all_gather_matmul_peer", team=4) as p:
        x = p.input("x", "f32", (2, 4))
        w = p.input("w", DType.f32, (4, 6))
        y = p.output("y", "f32", (8, 6))
        me = p.tp.rank
        full = p.alloc("full", "f32", (8, 4), symmetric=p.tp)
        with p.site(
            "all_gather_matmul",
            "layers.0.mlp.up",
            strategy="peer",
            protocol="get",
            predicted_ms=2.41,
        ) as site:
            p.copy(x, full[me])
            p.notify("ready", to=p.tp.others)
        p.record("e0")
        arrived: list[str] = []
        with p.stream("comm"):
            p.wait("e0")
            for k in (1, 2, 3):
                with p.at_site(site):
                    p.expect("ready", me + k)
                    p.get(full[me + k], peer=me + k)
                arrived.append(p.record())
        with p.at_site(site):
            p.mm(full[me], w, out=y[me])
        for k, event in enumerate(arrived, start=1):
            p.wait(event)
            with p.at_site(site):
                p.mm(full[me + k], w, out=y[me + k])
        p.free(full)
    assert p.program == parse((GOLDEN / "all_gather_matmul_peer.ilc").read_text())


def test_every_method_once() -> None:
    with interlace.program("every", mesh={"dp": 2, "tp": 2}) as p:
        rows = p.table("rows", (3, 1), team=p.tp)
        x = p.input("x", "f32", (4, 4))
        part = p.input("part", "f32", (rows[p.tp.rank], 4))
        y = p.output("y", "f32", (4, 4), strides=(1, 4))
        t = p.alloc("t", "f32", (4, 4), storage="arena", offset=64)
        full = p.alloc("full", "f32", (4, 4), symmetric="tp")
        n = p.empty("n", "f32", (4, 4))
        p.call("aten.mul.out", x, 2.0, out=t)
        s, d = p.fresh("s", "f32", (4, 4)), p.fresh("d", "bool", (4,))
        args = (x, [1, (t.t(), None)], "@device")
        p.call("aten.made_up.default", *args, out=(s, d), dim=-1, rng=True)
        p.call("aten.add_.Tensor", t, 1, out=t, mutates=True)
        p.copy(t[:2], y.t()[2:])
        p.copy(t[:, 1:3], s.view(16).slice(0, 0, 8).view(4, 2))
        p.copy(x.select(0, 1).view(1, -1).expand(4, 4), n)
        p.copy(x.chunk(p.tp.rank, rows), t.chunk(p.tp.rank, "rows"))
        p.copy(x.cast("i32").cast(DType.f32), t.as_strided((4, 4), (4, 1)))
        team = p.tp
        with p.stream("comm"), p.module("layers.0"):
            p.all_gather(part, full, splits=rows, team=team, backend="gloo")
            p.reduce_scatter(x, t[:2], team=team)
            p.all_reduce(t, team=team, reduce="max")
            p.broadcast(x, t, root=1, team=team)
            p.broadcast(t, team=p.dp)
            p.all_to_all(x, t, team=team)
            p.gather(x[:2], t, team=team)
            p.scatter(t, n[:2], team=team)
            p.reduce(x, t, team=team)
            p.barrier(team=team)
            with p.group():
                p.send(t, team.rank + 1, backend="gloo")
                p.recv(n, team.rank - 1)
            p.put(t, full, team.rank + 1)
            p.get(full, n, peer=1, team="tp")
            p.notify("ready", team.rank + 1, value=2)
            p.expect("ready", team.rank - 1, value=2)
            done = p.record()
        p.wait(done)
        p.host_sync()
        p.free(full, "t")
        p.returns(y, (s, 1.5), None)
    text = str(p.program)
    assert parse(text) == p.program
    for line in (
        'main: call("aten.mul.out", x, 2.0, out=t)',
        '"aten.made_up.default", x, (1, (t.permute(1, 0), None)), "@device", dim=-1,',
        "out=(s := f32[4, 4], d := bool[4])",
        "main: copy(t[0:2], y.permute(1, 0)[2:4])",
        "main: copy(t[:, 1:3], s.view(16)[0:8].view(4, 2))",
        "main: copy(x.chunk(tp.rank, rows), t.chunk(tp.rank, rows))",
        'part, full, splits=rows, team=tp, backend="gloo"',
        't, t, reduce="max", team=tp',
        'loc=("layers.0", ',
        "return y, (s, 1.5), None",
    ):
        assert line in text


def test_ops_know_the_line_that_wrote_them() -> None:
    with interlace.program("f", team=2) as p:
        x = p.input("x", "f32", (4,))
        p.host_sync()
        with p.group():
            p.send(x, p.tp.rank + 1)
        p.all_reduce(x)
    lines = Path(__file__).read_text().splitlines()
    for op in p.program.ops:
        assert op.loc.file == __file__
        word = {"HostSync": "host_sync", "Group": "group", "Collective": "all_reduce"}
        assert word[type(op).__name__] in lines[op.loc.line - 1]


def test_an_op_by_its_class() -> None:
    """`add` takes any op, with what a builder's methods take."""
    with interlace.program("f", team=2) as p:
        x, y = p.input("x", "f32", (4,)), p.output("y", "f32", (4,))
        p.add(Copy, src=x, dst=y)
        with p.stream("comm"), p.group():
            p.add(Send, src=x, peer=p.tp.rank + 1, backend="gloo")
            p.add(Recv, dst=y, peer=1, team=p.tp)
    copy, group = p.program.ops
    assert copy == Copy(src=View("x"), dst=View("y"))
    assert isinstance(group, Group)
    assert [member.team for member in group.ops] == ["tp", "tp"]
    assert {member.stream for member in group.ops} == {"comm"}
    assert copy.loc.file == __file__


def test_parts_of_a_fused_op() -> None:
    with interlace.program("f", team=2) as p:
        x, y = p.input("x", "f32", (2, 4)), p.output("y", "f32", (4, 4))
        with p.stream("side"), p.site("all_gather_matmul"), p.fused():
            with p.part():
                p.call("aten.neg.out", x, out=y[p.tp.rank])
                told = p.record()
            with p.part():
                p.expect("there", p.tp.rank + 1)
                p.call("aten.neg.out", x, out=y[p.tp.rank + 1])
        p.wait(told)
        p.notify("there", p.tp.others)
    fused, *_ = p.program.ops
    assert isinstance(fused, Fused)
    assert [[type(op).__name__ for op in part] for part in fused.parts] == [
        ["Call", "Record"],
        ["Expect", "Call"],
    ]
    assert {(op.stream, op.site) for op in (fused, *fused.members)} == {("side", 1)}
    assert [access.view for access in fused.writes()] == [y[p.tp.rank].ir, y[p.tp.rank + 1].ir]


def test_an_error_names_the_line_of_python() -> None:
    def wrong() -> None:
        with interlace.program("f", team=2) as p:
            x = p.input("x", "f32", (4, 4))
            y = p.output("y", "f32", (4, 2))
            p.copy(x, y)

    with pytest.raises(ProgramError) as raised:
        wrong()
    place = re.search(rf"from {re.escape(__file__)}:(\d+): copy from x", str(raised.value))
    assert place
    assert "p.copy(x, y)" in Path(__file__).read_text().splitlines()[int(place[1]) - 1]


def test_an_exception_inside_is_not_hidden() -> None:
    def stopped() -> None:
        with interlace.program("f", team=2) as p:
            p.free("nothing of that name")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stopped()


def test_building_by_hand() -> None:
    p = interlace.program("f", team=2, ranks=(4, 5))
    assert isinstance(p, Builder)
    p.host_sync()
    first = p.build()
    p.host_sync()
    assert len(first.ops) == 1
    assert p.build().ops == (HostSync(), HostSync())
    assert p.program.world == (4, 5)
    assert p.program.ops[0].loc == Loc(file=__file__, line=p.program.ops[0].loc.line)


def test_teams() -> None:
    p = interlace.program("f", team=2, groups={"pipe": [[0, 2], [1, 3]]}, ranks=(0, 1))
    assert p.tp.rank + 1 == RankIndex("tp", 1)
    assert p.pipe.groups == ((0, 2), (1, 3))
    assert p.program.team("pipe").size == 2
    with pytest.raises(AttributeError, match="did you mean 'pipe'"):
        _ = p.pipee


def test_streams_and_sites_end_with_their_block() -> None:
    p = interlace.program("f", team=2)
    with p.stream("comm"), p.site("all_gather", "up") as site, p.module("layers.0"):
        p.host_sync()
    p.host_sync()
    inside, outside = p.build().ops
    assert (inside.stream, inside.site, inside.loc.module) == ("comm", site, "layers.0")
    assert (outside.stream, outside.site, outside.loc.module) == ("main", None, "")
    assert p.program.sites == (Site(id=1, kind="all_gather", module="up"),)


def test_handles_carry_views() -> None:
    p = interlace.program("f", team=4)
    x = p.input("x", "f32", (8, 4))
    rows = p.table("rows", (1, 2, 3, 2))
    part = p.input("part", "f32", (rows[p.tp.rank], 4))
    assert x[p.tp.rank - 1].ir == View("x").chunk(RankIndex("tp", -1), 4)
    assert x[3].ir == View("x").chunk(3, 4)
    assert x[2:, :3].ir == View("x").slice(0, 2, 8).slice(1, 0, 3)
    assert x[:].ir == View("x")
    assert (x[1].shape, x.t().shape, x.buffer.dtype) == ((2, 4), (4, 8), DType.f32)
    assert str(x[p.tp.rank + 1].t()) == "x[tp.rank + 1].permute(1, 0)"
    assert part[0:1].ir == View("part").slice(0, 0, 1)


def test_dtypes_of_torch_are_arguments() -> None:
    from interlace.runtime.values import DTYPES

    p = interlace.program("f", team=2)
    x, y = p.input("x", "i16", (4,)), p.fresh("y", "f32", (4,))
    p.call("aten.to.dtype", x, [*DTYPES.values()], out=y)
    (call,) = p.build().ops
    assert isinstance(call, Call)
    assert call.args[1] == (*DTYPES,)


MISTAKES: dict[str, tuple[Callable[[Builder, Handle, Handle], object], str]] = {
    "dtype": (lambda p, x, part: p.input("z", "fp32", (4,)), "no element type is named 'fp32'"),
    "name": (lambda p, x, part: p.input("x", "f32", (4,)), "buffer 'x' is declared twice"),
    "table": (
        lambda p, x, part: p.table("rows", (1,), team="tp"),
        "table 'rows' is declared twice",
    ),
    "team": (lambda p, x, part: p.barrier(), "unclear which team this is for: give team="),
    "index": (lambda p, x, part: x[0], "unclear which team: write .chunk"),
    "index team": (lambda p, x, part: x[RankIndex("tpp")], "'tpp': did you mean 'tp'"),
    "step": (lambda p, x, part: x[0:4:2], "slices without steps only"),
    "uneven": (lambda p, x, part: part[1:], "has sizes .* on different ranks: give both ends"),
    "arg": (lambda p, x, part: p.call("a.b", object()), "cannot be an argument: give handles"),
    "group": (lambda p, x, part: inside(p.group(), p.host_sync), "move the HostSync out of it"),
    "fused": (
        lambda p, x, part: inside(p.fused(), p.host_sync),
        "put the HostSync in .with",
    ),
    "groups": (
        lambda p, x, part: interlace.program("f", groups={"pp": [[0, 1], [2]]}).build(),
        "groups of another size",
    ),
    "stream of a member": (
        lambda p, x, part: (inside(p.group(), lambda: sent_aside(p, x)), p.build()),
        "a group on 'main' holds an op on 'side'",
    ),
    "no fused": (lambda p, x, part: inside(p.part(), p.host_sync), "open it with `with p.fused"),
    "part": (
        lambda p, x, part: inside(p.fused(), lambda: inside(p.part(), lambda: p.copy(x, x))),
        "a part holds .* only: move the Copy out of it",
    ),
}


def sent_aside(p: Builder, x: Handle) -> None:
    with p.stream("side"):
        p.send(x, p.tp.rank)


def inside(context: AbstractContextManager[None], then: Callable[[], None]) -> None:
    with context:
        then()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name: str) -> None:
    p = interlace.program("f", mesh={"dp": 3, "tp": 2})
    x = p.input("x", "f32", (6, 4))
    rows = p.table("rows", (1, 3), team="tp")
    part = p.input("part", "f32", (rows[p.tp.rank], 4))
    mistake, told = MISTAKES[name]
    with pytest.raises(ProgramError, match=told):
        mistake(p, x, part)


def test_a_fresh_buffer_needs_its_call() -> None:
    p = interlace.program("f", team=2)
    t = p.fresh("t", "f32", (4,))
    p.copy(t, t)
    with pytest.raises(ProgramError, match="no buffer is named 't'"):
        p.build()


def test_two_ways_to_name_a_team() -> None:
    with pytest.raises(ProgramError, match="not both"):
        interlace.program("f", team=2, mesh={"tp": 2})


def test_generated_programs_name_no_line_of_python() -> None:
    with interlace.program("f", team=2, lines=False) as p:
        x, y = p.input("x", "f32", (4,)), p.output("y", "f32", (4,))
        with p.module("layers.0"):
            p.copy(x, y)
    assert [op.loc for op in p.program.ops] == [Loc("layers.0")]
