"""Which Fused ops have a kernel: those whose parts say exactly what it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.fake_cuda import FakeKernel, fake_engine

from interlace.ir import Fused, Program, parse
from interlace.options import Options
from interlace.passes import run_pipeline
from interlace.runtime.cuda.launches.parts import gather_of, scatter_of
from interlace.runtime.prepare.plan import Plan, make_plan

LOWER = "find_sites,decompose{strategy=fused},schedule,plan_memory,insert_sync,fuse"
GATHER = """
def f(tp: Team[2], x: bf16[64, 256], w: bf16[256, 256], b: {bias}, y: out[bf16[128, 256]]):
    full = empty(bf16[128, 256])
    main: all_gather(x, full, team=tp)
    main: call("aten.addmm.out", b, full, w, out=y)
"""
SCATTER = """
def f(tp: Team[2], x: bf16[128, 256], w: bf16[256, 256], b: {bias}, y: out[bf16[64, 256]]):
    t = empty(bf16[128, 256])
    main: call("aten.addmm.out", b, x, w, out=t)
    main: reduce_scatter(t, y, reduce="sum", team=tp)
"""


def plan_of(program: Program) -> tuple[Plan, Fused, int]:
    """Rank 0's plan of a Program, and the one Fused in it."""
    plan = make_plan(program, 0, lambda team, asked: asked or "nccl")
    ((index, op),) = [(i, op) for i, op in enumerate(plan.program.ops) if isinstance(op, Fused)]
    return plan, op, index


@pytest.mark.parametrize("text", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_a_bias_is_one_row(text: str) -> None:
    """addmm takes others as well, which an edited schedule may have; a kernel reads one row."""
    made = run_pipeline(parse(text.format(bias="bf16[256]")), LOWER)
    plan, op, index = plan_of(made)
    parts = gather_of(plan, op) or scatter_of(plan, op, index)
    assert parts is not None
    assert parts.bias is not None
    shapes = ["bf16[1]", "bf16[64, 256]", "bf16[64, 1]", "bf16[1, 256]", "f32[256]"]
    for bias in (*shapes, "bf16[256].strides(2)"):
        other = parse(str(made).replace("b: bf16[256]", f"b: {bias}"))
        assert other != made
        plan, op, index = plan_of(other)
        assert gather_of(plan, op) is None
        assert scatter_of(plan, op, index) is None


@pytest.mark.parametrize("subs", [1, 2])
@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
def test_what_a_kernel_does_otherwise_is_none_of_it_in_order_either(
    in_order: bool, subs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the matmuls of the two would have bits of their own."""
    text = SCATTER.format(bias="bf16[256]").replace("128,", "1536,").replace("64,", "768,")
    made = run_pipeline(parse(text), LOWER.replace("fused", "fused,chunks=4"))
    plan, op, index = plan_of(made)
    parts = scatter_of(plan, op, index)
    assert parts is not None
    assert parts.subs == 2
    make = FakeKernel.__init__

    def with_subs(kernel: FakeKernel, *args: Any) -> None:
        make(kernel, *args)
        kernel.subs = subs

    monkeypatch.setattr(FakeKernel, "__init__", with_subs)
    sizes = (1536, 256), (256, 256), (256,)
    with fake_engine(made, 0, Options(in_order=in_order)) as fake:
        fake.run([torch.zeros(size, dtype=torch.bfloat16) for size in sizes])
        launched = [entry[2] for entry in fake.log if entry[0] == "launch"]
        called = [entry for entry in fake.log if entry[0] == "call" and "addmm" in entry[2]]
    if subs == 2:
        assert [launch.kind for launch in launched] == (["gather"] * 3 if in_order else ["scatter"])
        assert not called
    else:
        assert not launched
        assert len(called) == 3
