"""`auto` looks at a site once more in the whole schedule."""

from __future__ import annotations

import pytest

from interlace.ir import parse
from interlace.options import Options
from interlace.passes import lower, pipeline
from interlace.runtime.machine import default_machine
from interlace.verify import check

OTHER = """
    z = empty(bf16[4096, 4096])
    main: call("aten.mm.out", a, b, out=z)
    return y, z
"""
GATHER = """
def layer(
    tp: Team[4], x: bf16[2048, 4096], w: bf16[4096, 1024], a: bf16[4096, 8192], b: bf16[8192, 4096]
):
    full = alloc(bf16[8192, 4096])
    y = empty(bf16[8192, 1024])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.out", full, w, out=y)
"""


@pytest.mark.parametrize("other", [False, True])
def test_what_lies_under_other_computation_stays_whole(
    other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other matmul hides the gather, whose own matmul is faster in one piece."""
    serial = parse(GATHER + (OTHER if other else "    return y\n"))
    machine, options = default_machine("h200"), Options(regions="inductor")
    program = lower(serial, options, machine)
    assert check(program).sound
    (site,) = program.sites
    assert (site.strategy == "serial") is other
    assert ("the whole schedule" in site.reason) is other
    monkeypatch.setattr(pipeline, "MOST_OPS", 0)
    (alone,) = lower(serial, options, machine).sites
    assert alone.strategy != "serial"
    assert alone.serial_ms == site.serial_ms
