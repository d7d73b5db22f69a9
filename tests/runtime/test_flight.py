"""How a message names an op: whole, or its beginning."""

from __future__ import annotations

from interlace.ir import parse
from interlace.runtime.flight import WIDTH, Flight

PROGRAM = parse(
    """
def f(tp: Team[2], x: f32[4], y: out[f32[4]]):
    main: copy(x, y)
    main: fused(
        part(call("aten.neg.out", x, out=y[0]), record(e)),
        part(expect(told, tp.rank + 1), call("aten.neg.out", x, out=y[1])),
    )
    side: wait(e)
    side: notify(told, to=tp.others)
"""
)


def test_ops_are_named_with_their_place() -> None:
    flight = Flight(PROGRAM, 1)
    assert flight.describe(0) == "rank 1, `main: copy(x, y)` (op 0 of f, from <text>:3)"
    assert flight.text(7) == "op 7"


def test_long_ops_are_cut() -> None:
    (fused,) = (op for op in PROGRAM.ops if len(str(op)) > 400)
    longer = PROGRAM.replace(ops=(type(fused)(parts=fused.parts * 9),))  # pyright: ignore
    shown = Flight(longer, 0).text(0)
    assert shown.startswith("`main: fused(part(call(")
    assert WIDTH < len(shown) < WIDTH + 40
    assert " ...` (op 0 of f" in shown
