"""The kernels of the cross-entropy: their arithmetic in the interpreter, and what is compiled."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from interlace.kernels.cross_entropy import Problem, Shards, Terms, new_word

SCRIPT = Path(__file__).with_name("interpreted_cross_entropy.py")
SOURCE = Path(interlace.__file__).parents[1]


def test_kernels_compute_what_the_twin_does(seed: int) -> None:
    """In a process of its own: Triton reads whether it interprets when a kernel is defined."""
    pytest.importorskip("triton")
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); sys.argv[1:] = ['{seed}', '20']\n"
    code += f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all right"


POINTERS = {
    "target": "*i64", "sizes": "*i64", "word": "*i64", "denominator": "*fp32",
    **dict.fromkeys(("weight", "stats", "merged", "out", "losses", "upstream", "divisor"), "*fp32"),
    **dict.fromkeys(("kept", "loss"), "*fp32"),
}  # fmt: skip
NUMBERS = ("smoothing", "z_loss", "softcap", "number")
FLAGS: dict[str, Any] = {
    "RANK": 0, "WORLD": 1, "MEASURED": False, "DIMS": 1, "STRIDED": False, "EVEN": True,
    "SMOOTH": False, "WEIGHTED": False, "ZLOSS": False, "CAP": False,
}  # fmt: skip


def ptx_of(name: str, element: str, constants: dict[str, Any], warps: int) -> str:
    """The PTX of a kernel for Hopper."""
    from interlace.kernels import cross_entropy_kernel as kernels
    from interlace.kernels.launch import Source

    kernel = getattr(kernels, name)
    of_elements = dict.fromkeys(("logits", "grad"), f"*{element}")
    floats = dict.fromkeys(NUMBERS, "fp32")
    types = dict.fromkeys(kernel.arg_names, "i32") | POINTERS | of_elements | floats
    source = Source(kernel=kernel, types=types, constants=constants, num_warps=warps)
    return source.compile().asm["ptx"]


OPTIONS = [
    {},
    {"EVEN": False},
    {"SMOOTH": True, "ZLOSS": True},
    {"CAP": True, "EVEN": False},
    {"SMOOTH": True, "WEIGHTED": True},
    {"RANK": 2, "WORLD": 4, "MEASURED": True, "DIMS": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["stats_kernel", "grad_kernel"])
def test_loads_of_16_bytes_and_no_spills(name: str, element: str, options: dict) -> None:
    """Each thread has its loads of 16 bytes under way together, also in rows of odd length."""
    pytest.importorskip("triton")
    from interlace.kernels.cross_entropy_launch import GRAD_UNROLL, UNROLL, WARPS

    forward = name == "stats_kernel"
    loads = UNROLL if forward else GRAD_UNROLL
    weight = {} if options.get("WEIGHTED") else {"weight": None}
    cut = {"U": loads, "LANES": 32 * WARPS, "VEC": 4 if element == "fp32" else 8}
    # fmt: off
    own: dict[str, Any] = (
        {"FINISH": True, "stats": None} if forward
        else {"ALIKE": True, "PER_ROW": False, "DIVIDED": True, "SCALED": True}
    )
    # fmt: on
    sizes = {} if options.get("MEASURED") else {"sizes": None}
    ptx = ptx_of(name, element, {**FLAGS, **weight, **sizes, **cut, **own, **options}, WARPS)
    assert "ld.local" not in ptx, "registers were spilled"
    of_weights = (8 if element != "fp32" else 4) // 4 * loads if options.get("WEIGHTED") else 0
    wide = len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", ptx))
    if options.get("SMOOTH") and options.get("WEIGHTED"):
        assert loads <= wide <= loads + of_weights
    else:
        assert wide == loads
        exponentials = len(re.findall(r"ex2\.approx", ptx))
        assert exponentials >= loads * cut["VEC"]
    if not forward:
        assert len(re.findall(r"st\.global(?:\.\w+)*\.v4\.b32", ptx)) == loads


@pytest.mark.parametrize("picks", [True, False])
def test_the_small_kernels_compile(picks: bool) -> None:
    pytest.importorskip("triton")
    flags = {k: v for k, v in FLAGS.items() if k not in ("STRIDED", "EVEN")}
    constants = {**flags, "PICK": picks, "FINISH": not picks, "BLOCK": 128, "SMOOTH": True}
    assert "ld.local" not in ptx_of("merge_kernel", "bf16", constants, 4)
    total = {"MEAN": True, "GIVEN": False, "BLOCK": 4096, "denominator": None}
    assert "ld.local" not in ptx_of("total_kernel", "bf16", total, 16)


@pytest.mark.parametrize(
    ("shape", "view", "dims", "even"),
    [
        ((8, 64), lambda x: x, 1, True),
        ((2, 4, 64), lambda x: x, 1, True),
        ((2, 5, 64), lambda x: x[:, :-1], 2, True),
        ((2, 4, 61), lambda x: x, 1, False),
        ((2, 4, 80), lambda x: x[..., :64], 1, True),
        ((2, 4, 80), lambda x: x[..., :63], 1, False),
        ((3, 2, 64), lambda x: x.transpose(0, 1), 2, True),
        ((2, 3, 4, 6, 64), lambda x: x.permute(3, 2, 1, 0, 4), 1, True),
    ],
)
def test_rows_are_found_without_a_copy(
    shape: tuple[int, ...], view: Any, dims: int, even: bool
) -> None:
    pytest.importorskip("triton")
    from interlace.kernels.cross_entropy_launch import Layout

    x = view(torch.zeros(shape, dtype=torch.bfloat16))
    y = torch.zeros(x.shape[:-1], dtype=torch.int64)
    problem = Problem(x, y, None, Terms(), Shards.alone(x.shape[-1]), new_word("cpu"))
    layout = Layout(problem)
    assert (layout.dims, layout.even) == (dims, even)
    copied = layout.logits.data_ptr() != x.data_ptr()
    assert copied == (len(shape) > 4), "only what takes more than three strides is copied"
