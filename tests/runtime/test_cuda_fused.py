"""The kernels of Fused ops: what must hold for one, and what runs where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.fake_cuda import fake_engine

import interlace.float8  # noqa: F401  (registers operators)
from interlace.errors import ProgramError
from interlace.ir import Fused, Program, parse, validate
from interlace.ir.kernels import KernelMatmul
from interlace.kernels.gemm import support
from interlace.options import Options
from interlace.passes import run_pipeline
from interlace.runtime.cuda.launches import fused as fused_file

LOWER = "find_sites,decompose{strategy=fused},schedule,plan_memory,insert_sync,fuse"
GATHER = """
def f(tp: Team[2], x: bf16[64, 256], w: bf16[256, 256], b: {bias}, y: out[bf16[128, 256]]):
    full = empty(bf16[128, 256])
    main: all_gather(x, full, team=tp)
    main: call("aten.addmm.out", b, full, w, out=y)
"""
SCATTER = """
def f(tp: Team[2], x: bf16[1536, 256], w: bf16[256, 256], b: {bias}, y: out[bf16[768, 256]]):
    t = empty(bf16[1536, 256])
    main: call("aten.addmm.out", b, x, w, out=t)
    main: reduce_scatter(t, y, reduce="sum", team=tp)
"""
PACKED = """
def f(tp: Team[2], x: f8e4m3[128, 336], w: f8e4m3[256, 336], b: bf16[256], y: out[bf16[256, 256]]):
    full = empty(f8e4m3[256, 336])
    main: all_gather(x, full, team=tp)
    main: call("interlace.float8_mm.out", full, w.permute(1, 0), 2, b, True, out=y)
"""
SIZES = (1536, 256), (256, 256), (256,)


def lowered(text: str, chunks: int = 0) -> Program:
    made = run_pipeline(
        parse(text.format(bias="bf16[256]")), LOWER.replace("fused", f"fused,chunks={chunks}")
    )
    (op,) = [op for op in made.ops if isinstance(op, Fused)]
    assert op.kernel is not None
    return made


def without_kernel(text: str) -> Program:
    for kernel in ("gather_matmul()", "scatter_matmul()", "scatter_matmul(pieces=2)"):
        text = text.replace(f" kernel={kernel},", "")
    assert "kernel=" not in text
    return parse(text)


@pytest.mark.parametrize("text", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_a_bias_is_one_row(text: str) -> None:
    """addmm takes others as well, which an edited schedule may have; a kernel reads one row."""
    made = str(lowered(text))
    validate(parse(made))
    shapes = ["bf16[1]", "bf16[64, 256]", "bf16[64, 1]", "bf16[1, 256]", "f32[256]"]
    for bias in (*shapes, "bf16[256].strides(2)"):
        other = made.replace("b: bf16[256]", f"b: {bias}")
        with pytest.raises(ProgramError, match=r"the parts are not what .* does: its bias"):
            validate(parse(other))
        validate(without_kernel(other))


@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
def test_the_kernel_computes_in_order_too(in_order: bool) -> None:
    """Else the matmuls of the two would have bits of their own."""
    with fake_engine(lowered(SCATTER, 4), 0, Options(in_order=in_order)) as fake:
        fake.run([torch.zeros(size, dtype=torch.bfloat16) for size in SIZES])
        launched = [entry[2] for entry in fake.log if entry[0] == "launch"]
        called = [entry for entry in fake.log if entry[0] == "call" and "addmm" in entry[2]]
    assert [launch.kind for launch in launched] == (["gather"] * 3 if in_order else ["scatter"])
    assert not called


@pytest.mark.parametrize("kernel", [True, False], ids=["not-on-this-GPU", "none-named"])
def test_parts_run_one_by_one_without_a_kernel(
    kernel: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """With a warning, where the op names one."""
    made = lowered(SCATTER, 4) if kernel else without_kernel(str(lowered(SCATTER, 4)))
    with fake_engine(made, 0, refuses="it is old") as fake:
        fake.run([torch.zeros(size, dtype=torch.bfloat16) for size in SIZES])
        called = [entry for entry in fake.log if entry[0] == "call" and "addmm" in entry[2]]
        assert not any(entry[0] == "launch" for entry in fake.log)
    assert len(called) == 3
    told = [str(warning.message) for warning in recwarn]
    wanted = "no scatter_matmul here, so its parts run one after another: it is old"
    assert sum(wanted in text for text in told) == kernel


def packed_inputs() -> list[torch.Tensor]:
    rows = (torch.zeros(count, 336, dtype=torch.float8_e4m3fn) for count in (128, 256))
    return [*rows, torch.zeros(256, dtype=torch.bfloat16)]


@pytest.mark.kernels
@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
def test_packed_rows_go_to_their_kernel(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is told of the numbers of a row alone, and of the types of both factors."""
    made, told, facts_of = lowered(PACKED), list[dict[str, Any]](), fused_file._facts

    def noted(matmul: KernelMatmul) -> dict[str, Any]:
        told.append(facts_of(matmul))
        return told[-1]

    monkeypatch.setattr(fused_file, "_facts", noted)
    with fake_engine(made, 0, Options(in_order=in_order)) as fake:
        x, w, b = packed_inputs()
        fake.run([x, w, b])
        launched = [entry[2] for entry in fake.log if entry[0] == "launch"]
        assert not any(entry[0] == "call" for entry in fake.log)
    assert [launch.size for launch in launched] == ([1, 1] if in_order else [2])
    given = launched[0].tensors
    assert given["x"].data_ptr() == x.data_ptr()
    assert (given["w"].shape, given["bias"].shape) == ((336, 256), (256,))
    for facts in told:
        assert (facts["rows"], facts["inner"], facts["columns"]) == (128, 336 - 128, 256)
        assert facts["packed"] == (torch.float8_e4m3fn, torch.float8_e4m3fn)
        assert (facts["dtype"], facts["transposed"], facts["bias"]) == (torch.bfloat16, True, True)


def test_another_gluon_has_no_kernel_for_packed_rows(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(support, "has_gluon", lambda: False)
    with fake_engine(lowered(PACKED), 0) as fake:
        fake.run(packed_inputs())
        called = [entry for entry in fake.log if entry[0] == "call" and "float8_mm" in entry[2]]
        assert not any(entry[0] == "launch" for entry in fake.log)
    assert len(called) == 2
    assert any("written for Triton 3.6 and 3.7" in str(told.message) for told in recwarn)
