"""Which tensors of a run may go before its end, and on whose stream their memory was made."""

from __future__ import annotations

from interlace.ir import parse
from interlace.ir.lifetimes import callers, homes, released_after

TEXT = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]], z: out[f32[4]]):
    unused = empty(f32[4])
    taken = empty(f32[4], stream="comm")
    main: call("aten.mul.Tensor", x, 2.0, out=(h := f32[4]))
    main: record(made)
    main: copy(h, y)
    comm: wait(made)
    comm: copy(x, taken)
    comm: call("aten.mul.Tensor", taken, 2.0, out=(g := f32[4]))
    comm: copy(g, z)
"""


def test_only_what_one_stream_made_and_uses_goes_early() -> None:
    program = parse(TEXT)
    assert callers(program) == "main"
    made = homes(program)
    # Allocs are made before the run, on the caller's stream; what a Call gives, on the Call's.
    assert (made["unused"], made["taken"], made["h"], made["g"]) == ("main", "main", "main", "comm")
    names = {name: index for index, found in released_after(program).items() for name in found}
    assert set(names) == {"h", "g"}
    assert [type(program.ops[names[name]]).__name__ for name in ("h", "g")] == ["Copy", "Copy"]
