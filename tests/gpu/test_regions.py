"""Regions that Inductor compiled, on a GPU: launched past its tuner, on inputs at any address."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.cases import on_a_gpu
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from interlace.ir import Call, parse
from interlace.options import Options
from interlace.passes import lower
from interlace.runtime import Executor

pytestmark = on_a_gpu(200)

TEXT = """
def layer(x: f32[64, 1024], y: f32[64, 1024]):
    @region
    def normed(a, b):
        t0 = aten.mul.Tensor(a, b)
        t1 = aten.mean.dim(t0, (1,), True)
        t2 = aten.sub.Tensor(t0, t1)
        t3 = aten.relu.default(t2)
        return t2, t3
    main: call("normed", x, y, out=(z := f32[64, 1024], r := f32[64, 1024]))
    return z, r
"""


def test_kernels_are_launched_past_the_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 64, 1024, device="cuda")
    with Executor(parse(TEXT), device="cuda", options=Options(regions="inductor")) as executor:
        executor.prepare()

        def no_tuner(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("the tuner was asked")

        monkeypatch.setattr(CachingAutotuner, "run", no_tuner)
        for _ in range(3):
            z, r = executor.run([x, y])
    wanted = x * y - (x * y).mean(1, keepdim=True)
    torch.testing.assert_close(z, wanted)
    torch.testing.assert_close(r, wanted.relu())


def test_an_input_that_lies_at_an_odd_address_is_read_right() -> None:
    x, y = torch.randn(2, 64 * 1024 + 1, device="cuda")
    odd, even = x[1:].view(64, 1024), y[:-1].view(64, 1024)
    with Executor(parse(TEXT), device="cuda", options=Options(regions="inductor")) as executor:
        executor.prepare()
        for a, b in ((odd, even), (even, odd), (even, even)):
            z, _ = executor.run([a, b])
            torch.testing.assert_close(z, a * b - (a * b).mean(1, keepdim=True))


NORM = """
def layer(x: bf16[64, 1024], y: bf16[64, 1024], w: bf16[1024], v: bf16[1024, 1024]):
    main: call("aten.add.Tensor", x, y, out=(z := bf16[64, 1024]))
    main: call("aten._fused_rms_norm.default", z, (1024,), w, 1e-5,
        out=(n := bf16[64, 1024], r := f32[64, 1]))
    main: call("aten.silu.default", n, out=(s := bf16[64, 1024]))
    main: call("aten.mm.default", n, v, out=(m := bf16[64, 1024]))
    main: call("aten.mul.Tensor", s, m, out=(p := bf16[64, 1024]))
    return z, r, p
"""


def test_a_norm_is_fused_with_its_neighbours() -> None:
    options = Options(regions="inductor")
    program = lower(parse(NORM), options)
    called = [op.fn for op in program.ops if isinstance(op, Call)]
    assert called == ["region_0", "aten.mm.out", "region_1"], called
    x, y = torch.randn(2, 64, 1024, device="cuda", dtype=torch.bfloat16)
    w, v = torch.randn(1025, 1024, device="cuda", dtype=torch.bfloat16).split([1, 1024])
    v = v / 32
    with Executor(program, device="cuda", options=options) as executor:
        executor.prepare()
        for _ in range(2):
            z, r, p = executor.run([x, y, w[0], v])
    wanted = (x + y).float()
    rms = (wanted.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    normed = (wanted * rms * w[0].float()).bfloat16()
    torch.testing.assert_close(z, x + y)
    torch.testing.assert_close(r, rms, rtol=1e-3, atol=1e-4)  # Inductor does not round between
    product = torch.nn.functional.silu(normed.float()) * (normed @ v).float()
    torch.testing.assert_close(p.float(), product, rtol=0.05, atol=0.05)
