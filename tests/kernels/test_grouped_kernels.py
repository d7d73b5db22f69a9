"""The kernels of grouped linear layers: their arithmetic interpreted, their code for sm_90 read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import interlace

pytest.importorskip("triton")

from interlace.kernels.grouped import ROWS, SUMS, TILE
from interlace.kernels.grouped_kernel import rows_kernel, sums_kernel, wgrad_kernel
from interlace.kernels.launch import Source, block_type

SCRIPT = Path(__file__).with_name("grouped_interpreted.py")
SOURCE = Path(interlace.__file__).parents[1]
FP, BF, INT = "*fp32", "*bf16", "*i32"


def test_kernels_compute_what_their_twins_do(seed: int) -> None:
    """In a process of its own: Triton reads whether it interprets when a kernel is defined."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); sys.argv[1:] = ['{seed}', '6']\n"
    code += f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all right"


def wgrad_source(out: str, accumulate: bool) -> Source:
    tile = TILE["BK"]
    return Source(
        kernel=wgrad_kernel,
        types={
            "dy_desc": block_type(torch.bfloat16, tile, TILE["BM"]),
            "x_desc": block_type(torch.bfloat16, tile, TILE["BN"]),
            **{"dy": BF, "x": BF, "ends": INT, "out": out},
            **dict.fromkeys(("tokens", "rows", "columns"), "i32"),
        },
        constants={**TILE, "ACCUMULATE": accumulate},
        num_warps=8,
        num_stages=3,
        divisible={"rows": 16, "columns": 16},
    )


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("out", [FP, BF])
def test_wgrad_is_pipelined_and_spills_nothing(out: str, accumulate: bool) -> None:
    compiled = wgrad_source(out, accumulate).compile()
    ptx = compiled.asm["ptx"]
    assert "ld.local" not in ptx
    assert "wgmma.mma_async" in ptx
    assert ptx.count("cp.async.bulk.tensor") >= 4, "tiles come by TMA, some ahead of their use"
    assert "st.global.v4" in ptx
    assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("bias", [True, False])
def test_the_others_use_wide_accesses(bias: bool) -> None:
    types = {"y": BF, "bias": BF, "ends": INT, "groups": "i32", "tokens": "i32", "columns": "i32"}
    rows = Source(
        kernel=rows_kernel,
        types=types,
        constants={**ROWS, "BIAS": bias},
        num_warps=4,
        divisible={"columns": 16},
    )
    ptx = rows.compile().asm["ptx"]
    assert "st.global.v4" in ptx
    assert "ld.local" not in ptx
    types = {"dy": BF, "ends": INT, "out": BF, "tokens": "i32", "columns": "i32"}
    sums = Source(
        kernel=sums_kernel, types=types, constants=SUMS, num_warps=4, divisible={"columns": 16}
    )
    ptx = sums.compile().asm["ptx"]
    assert "ld.global.v4" in ptx
    assert "ld.local" not in ptx
