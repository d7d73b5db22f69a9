"""Rows of FP8 in blocks: one that has rows of several scales is refused, wherever they moved."""

from __future__ import annotations

import re

import pytest

from interlace.float8 import Recipe
from interlace.ir import Program, parse, parse_set
from interlace.nn.parallel.serial import LinearLayer, serial
from interlace.options import Options
from interlace.passes.pipeline import lower
from interlace.strategies import StrategyName
from interlace.verify import Report, check

QUANTISED = """\
amax = empty(f32[1])
most = empty(f32[1])
main: call("interlace.float8_amax.out", x, out=amax)
x8 = empty(f8e4m3[4, 64])
main: call("interlace.float8_rows.out", x, amax, True, 0.0, out=x8)
full = empty(f8e4m3[12, 64])
main: all_gather(x8, full, team=tp)
"""
SHARED = QUANTISED.replace(
    "x8 =", 'main: all_reduce(amax, most, reduce="max", team=tp)\nx8 ='
).replace("x, amax, T", "x, most, T")
BY_ROW = QUANTISED.replace("x, amax, T", "x, None, T")
PAIR = """\
u_amax = empty(f32[1])
main: call("interlace.float8_amax.out", u, out=u_amax)
two = empty(f8e4m3[8, 64])
main: call("interlace.float8_rows.out", x, amax, True, 0.0, out=two[0:4])
main: call("interlace.float8_rows.out", u, u_amax, True, 0.0, out=two[4:8])
"""
"""Rows of two calls in one buffer."""
RING = """\
ring = alloc(f8e4m3[12, 64], symmetric=tp)
main: copy(x8, ring[tp.rank])
main: barrier(team=tp)
main: get(ring[tp.rank + 1], peer=tp.rank + 1)
main: get(ring[tp.rank + 2], peer=tp.rank + 2)
"""
MESSAGE = (
    QUANTISED
    + """\
got = empty(f8e4m3[8, 64])
late = empty(f8e4m3[4, 64])
u_amax = empty(f32[1])
main: call("interlace.float8_amax.out", u, out=u_amax)
main: record(made)
comm: wait(made)
comm: group(recv(got[0:4], peer=tp.rank - 1), recv(late, peer=tp.rank + 1))
comm: record(come)
main: send(x8, peer=tp.rank + 1)
main: call("interlace.float8_rows.out", u, u_amax, True, 0.0, out=x8)
main: send(x8, peer=tp.rank - 1)
main: wait(come)
main: copy(x8, got[4:8])
"""
)
"""The rows that were sent are written over, and the new ones stand behind those that came."""
EACH_OWN = """\
main: call("interlace.float8_rows.out", x, {}, True, 0.0, out=two[0:4])
main: call("interlace.float8_rows.out", u, {}, True, 0.0, out=two[4:8])
"""
FREED = "main: barrier(team=tp)\nmain: free(ring)\n"


def mm(rows: str, blocks: int, w: str = "w", height: int = 12, name: str = "y") -> str:
    return (
        f"{name} = empty(bf16[{height}, 16])\n"
        f'main: call("interlace.float8_mm.out", {rows}, {w}.permute(1, 0), {blocks}, None, True, '
        f"out={name})\n"
    )


def checked(body: str) -> Report:
    """Checks a schedule of 3 ranks, whose results are y."""
    params = "x: bf16[4, 32], u: bf16[4, 32], w: f8e4m3[16, 64], v: f8e4m3[16, 64]"
    lines = [*body.splitlines(), "return y"]
    return check(parse(f"def f(tp: Team[3], {params}):\n" + "".join(f"    {x}\n" for x in lines)))


RIGHT = {
    "a block for each rank": QUANTISED + mm("full", 3),
    "rows of one rank": QUANTISED + mm("x8", 1, height=4),
    "smaller blocks": QUANTISED + mm("full", 12),
    "a part of a rank's rows": QUANTISED + mm("full[5:8]", 1, height=3),
    "a scale that all share": SHARED + mm("full", 1),
    "such rows in blocks that cut ranks": SHARED + mm("full", 2),
    "each row its own": BY_ROW + mm("full", 0),
    "two quantisations, two blocks": QUANTISED + PAIR + mm("two", 2, height=8),
    "one maximum for two calls": QUANTISED + PAIR.replace("u, u_amax", "u, amax")
    + mm("two", 1, height=8),
    "rows that a peer has": QUANTISED + RING + mm("ring", 3) + FREED,
    "a matrix of three in another order": QUANTISED
    + "turned = empty(f8e4m3[12, 64])\n"
    "main: copy(full.view(3, 4, 64).permute(1, 0, 2), turned.view(4, 3, 64))\n"
    + mm("turned", 12),
    "rows that a call moved": QUANTISED
    + 'main: call("aten.cat.default", (full[tp.rank + 1], x8), out=(both := f8e4m3[8, 64]))\n'
    + mm("both", 2, height=8),
    "rows that were sent": MESSAGE + mm("got", 2, height=8),
    "parts of a root's rows, beside own ones": QUANTISED + "own = empty(f8e4m3[8, 64])\n"
    "main: scatter(full, own[0:4], root=2, team=tp)\nmain: copy(x8, own[4:8])\n"
    + mm("own", 1, height=8),
    "a weight of one rank": QUANTISED + "all = empty(f8e4m3[48, 64])\n"
    "main: all_gather(w, all, team=tp)\n" + mm("full", 3, "all[16:32]"),
    "rows of another type": QUANTISED + "wide = empty(f32[12, 64])\nback = empty(f8e4m3[12, 64])\n"
    "main: copy(full, wide)\nmain: copy(wide, back)\n" + mm("back", 1),
    "rows that a call changed": QUANTISED
    + 'main: call("aten.neg.default", full, out=(back := f8e4m3[12, 64]))\n' + mm("back", 1),
    "columns of two ranks": QUANTISED
    + 'main: call("aten.cat.default", (full[tp.rank].slice(1, 0, 32), '
    "full[tp.rank + 1].slice(1, 32, 64)), 1, out=(both := f8e4m3[4, 64]))\n"
    + mm("both", 1, height=4),
    "what is not known": QUANTISED
    + 'main: call("aten.flip.default", full, (0,), out=(back := f8e4m3[12, 64]))\n'
    + mm("back", 1),
}  # fmt: skip


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_blocks_of_one_scale_are_accepted(body: str) -> None:
    report = checked(body)
    assert report.sound, report


WRONG = {
    "one block of all ranks": (
        QUANTISED + mm("full", 1),
        "rows 0 to 11 of full, block 0 of 1, ",
    ),
    "blocks that cut ranks": (
        QUANTISED + mm("full", 2),
        "rows 0 to 5 of full, block 0 of 2, ",
    ),
    "a maximum of the rank alone": (
        SHARED.replace("x, most, T", "x, amax, T") + mm("full", 1),
        "they have several",
    ),
    "two calls in one block": (
        QUANTISED + PAIR + mm("two", 1, height=8),
        "rows 0 to 7 of two, ",
    ),
    "the one call's maximum is reduced": (
        SHARED + PAIR.replace("x, amax", "x, most") + mm("two", 1, height=8),
        "they have several",
    ),
    "rows that a peer has": (QUANTISED + RING + mm("ring", 1) + FREED, "they have several"),
    "rows that were sent": (
        MESSAGE + mm("got", 1, height=8),
        "they have several",
    ),
    "rows of the root": (
        QUANTISED + "main: broadcast(x8, full[0:4], root=1, team=tp)\n"
        + mm("full[4:12]", 1, height=8),
        "they have several",
    ),
    "parts of a root's rows": (
        QUANTISED + "own = empty(f8e4m3[8, 64])\nmain: scatter(full, own[0:4], root=2, team=tp)\n"
        "main: copy(full[tp.rank + 1], own[4:8])\n" + mm("own", 1, height=8),
        "they have several",
    ),
    "rows in another order": (
        QUANTISED + "turned = empty(f8e4m3[12, 64])\n"
        "main: copy(full.view(3, 4, 64).permute(1, 0, 2), turned.view(4, 3, 64))\n"
        + mm("turned", 3),
        "rows 0 to 3 of turned, block 0 of 3, ",
    ),
    "the second block": (
        QUANTISED + "main: copy(full[0:1], full[7:8])\n" + mm("full", 3),
        "block 1 of 3, ",
    ),
    "rows that a call moved": (
        QUANTISED
        + 'main: call("aten.cat.default", (full[tp.rank + 1], x8), out=(both := f8e4m3[8, 64]))\n'
        + mm("both", 1, height=8),
        "they have several",
    ),
    "rows of two exchanged": (
        QUANTISED + "mine = empty(f8e4m3[12, 64])\nback = empty(f8e4m3[12, 64])\n"
        + "".join(f"main: copy(x8, mine[{i}:{i + 4}])\n" for i in (0, 4, 8))
        + "main: all_to_all(mine, back, team=tp)\n" + mm("back", 1),
        "they have several",
    ),
    "rows that one group sent": (
        QUANTISED + "got = empty(f8e4m3[8, 64])\n"
        "main: group(send(x8, peer=tp.rank + 1), recv(got[0:4], peer=tp.rank - 1), "
        "send(x8, peer=tp.rank + 2), recv(got[4:8], peer=tp.rank - 2))\n" + mm("got", 1, height=8),
        "they have several",
    ),
    "two maxima that all share": (
        SHARED + "two = empty(f8e4m3[8, 64])\nother = empty(f32[1])\n"
        'main: all_reduce(amax, other, reduce="max", team=tp)\n'
        + EACH_OWN.format("most", "other") + mm("two", 1, height=8),
        "they have several",
    ),
    "one maximum, one of two scales a power of two": (
        QUANTISED + "two = empty(f8e4m3[8, 64])\n"
        + EACH_OWN.format("amax", "amax").replace("True", "False", 1) + mm("two", 1, height=8),
        "they have several",
    ),
    "no call but the one": (
        "all = empty(f8e4m3[48, 64])\nmain: all_gather(v, all, team=tp)\n"
        + mm("all", 1, height=48),
        "they have several",
    ),
    "each row its own, two to a block": (
        BY_ROW + mm("full", 6), "each has its own",
    ),
    "each row its own": (BY_ROW + mm("full", 3), "each has its own"),
    "a weight of two ranks": (
        QUANTISED + "all = empty(f8e4m3[48, 64])\nmain: all_gather(w, all, team=tp)\n"
        + mm("full", 3, "all[8:24]"),
        "they have several",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "told"), WRONG.values(), ids=WRONG)
def test_a_block_of_several_scales_is_refused(body: str, told: str) -> None:
    report = checked(body)
    assert report.kinds() == {"scale"}, report
    (finding,) = report.errors
    assert finding.message.startswith("float8_mm multiplies rows ")
    assert finding.ranks == (0, 1, 2)
    assert re.search(told, finding.message), finding.message
    assert "interlace.float8_mm" in finding.ops[0].text


def test_uneven_parts_are_followed() -> None:
    body = QUANTISED.replace("main: all_gather(x8, full, team=tp)", "").rstrip() + (
        "\nrows = table(tp, 4, 4, 4)\nmain: all_gather(x8, full, splits=rows, team=tp)\n"
    )
    assert checked(body + mm("full", 3)).sound
    assert checked(body + mm("full", 1)).kinds() == {"scale"}


def test_a_fault_is_told_once_and_of_the_ranks_that_have_it() -> None:
    first = QUANTISED + "got = empty(f8e4m3[8, 64])\nmain: copy(x8, got[0:4])\n"
    report = checked(
        first + "main: broadcast(x8, got[4:8], root=1, team=tp)\n" + mm("got", 1, height=8)
    )
    (finding,) = report.errors
    assert finding.ranks == (0, 2)
    assert [(op.rank, op.line) for op in finding.ops] == [(0, 13)]
    assert "by the scale of row 0, and they have several" in finding.message
    assert "let a block have the rows of one quantisation" in finding.fix


@pytest.mark.parametrize("rows", ["full, None", "w, full", "full, w"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_a_transpose_takes_rows_and_what_they_are_beside_in_blocks(rows: str, blocks: int) -> None:
    turned = f'turned = empty(f8e4m3[32, 144])\nmain: call("interlace.float8_turn.out", {rows}, '
    report = checked(QUANTISED + f"{turned}{blocks}, out=turned)\n" + mm("full", 3))
    told = "float8_turn multiplies rows 0 to 11 of full, block 0 of 1, "
    assert [finding.message.startswith(told) for finding in report.errors] == [True] * (blocks == 1)


def test_only_the_root_has_the_rows_that_it_gathers() -> None:
    body = QUANTISED + "".join(f"main: copy(x8, full[{i}:{i + 4}])\n" for i in (0, 4, 8))
    (finding,) = checked(body + "main: gather(x8, full, root=1, team=tp)\n" + mm("full", 1)).errors
    assert finding.ranks == (1,)


def test_one_of_two_programs_takes_blocks() -> None:
    head = "def f{}(tp: Team[[0, 1, 2]], x: bf16[4, 32], w: f8e4m3[16, 64]):\n    ranks({})\n"
    bodies = (QUANTISED + mm("full", 1) + "return y\n", QUANTISED)
    texts = [
        head.format(k, ranks) + "".join(f"    {line}\n" for line in body.splitlines())
        for k, (ranks, body) in enumerate(zip(("0, 2", "1"), bodies, strict=True))
    ]
    (finding,) = check(parse_set("\n\n".join(texts))).errors
    assert (finding.kind, finding.ranks) == ("scale", (0, 2))


def test_a_message_without_another_end_hides_no_block() -> None:
    report = checked(QUANTISED + mm("full", 1) + "comm: send(w, peer=tp.rank + 1)\n")
    assert report.kinds() == {"scale", "mismatch", "deadlock"}


def test_parts_of_a_class_of_sizes() -> None:
    text = """
def f(tp: Team[3], S: Size[6], x: f8e4m3[S, 64], w: f8e4m3[16, 64], y: out[bf16[S, 16]]):
    t = alloc(f8e4m3[S, 64])
    main: all_to_all(x, t, team=tp)
    main: call("interlace.float8_mm.out", t, w.permute(1, 0), 3, None, True, out=y)
"""
    report = check(parse(text))
    assert report.sound, report
    assert report.sizes.holds({"S": 12})


def lowered(strategy: StrategyName, collective: str, rows: int) -> Program:
    layer = LinearLayer(collective, "bf16", 32, (16,), (False,), recipe=Recipe())
    if collective == "reduce_scatter":  # where dy is gathered
        layer = LinearLayer(collective, "bf16", 32, (16,), (False,), (True, False, False), Recipe())
    return lower(serial(layer, (0, 1, 2), rows), Options(strategy=strategy))


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("strategy", ["pipeline", "ring", "peer"])
def test_what_strategies_make_is_right_for_a_class_of_sizes(
    strategy: StrategyName, collective: str
) -> None:
    report = check(lowered(strategy, collective, 64))
    assert report.sound, report
    assert report.sizes.holds({"S": 124})


def test_a_strategy_s_schedule_with_another_number_of_blocks_is_refused() -> None:
    text = str(lowered("pipeline", "all_gather", 64))
    assert "w0.permute(1, 0), 3, None" in text
    assert check(parse(text)).sound
    report = check(parse(text.replace("w0.permute(1, 0), 3, None", "w0.permute(1, 0), 1, None")))
    assert report.kinds() == {"scale"}
