"""Shapes of sites that are timed: presets, and what the option `--shapes` says. Without torch.

>>> shapes_of("", "ag_gemm:8192,4096,7168 gemm_rs:4096,3584,4096", ["bf16"])
[('ag_gemm', 8192, 4096, 7168, 'bf16'), ('gemm_rs', 4096, 3584, 4096, 'bf16')]
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.errors import OptionError, choose_from

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
FLOAT8 = "f8e4m3"
DTYPE_NAMES = ("bf16", "f16", "f32", "f64")


def check_dtypes(names: Sequence[str], known: Sequence[str] = DTYPE_NAMES) -> None:
    """Raises OptionError for what is no element type of a benchmark."""
    for name in names:
        if name not in known:
            raise OptionError(f"{name!r} is no element type: {choose_from(name, known)}")


def _cases(op: str, *shapes: tuple[int, int, int]) -> list[tuple[str, int, int, int]]:
    return [(op, *shape) for shape in shapes]


SMALL_ROWS = (64, 128, 256, 512, 1024)

PRESETS: dict[str, list[tuple[str, int, int, int]]] = {
    "bars": [
        *_cases("ag_gemm", (8192, 8192, 14336), (8192, 8192, 2560), (4096, 4096, 7168)),
        *_cases("ag_gemm", (2048, 4096, 7168), (16384, 8192, 14336)),
        *_cases("gemm_rs", (8192, 7168, 8192), (8192, 2048, 8192), (4096, 3584, 4096)),
        *_cases("gemm_rs", (16384, 7168, 8192)),
        *_cases("gemm_ar", (4096, 3584, 4096), (1024, 3584, 4096), (256, 3584, 4096)),
        *_cases("ag_gemm", *((rows, 4096, 4096) for rows in SMALL_ROWS)),
        *_cases("gemm_rs", *((rows, 4096, 4096) for rows in SMALL_ROWS)),
    ],
    "others": [
        *_cases("ag_gemm", (8192, 5120, 6912), (6144, 6144, 4096), (3072, 2048, 8192)),
        *_cases("ag_gemm", (1536, 8192, 3584), (32768, 4096, 3584), (384, 2048, 5632)),
        *_cases("gemm_rs", (8192, 3456, 5120), (6144, 4096, 6144), (3072, 5632, 2048)),
        *_cases("gemm_rs", (1536, 3584, 8192), (32768, 3584, 4096), (384, 5632, 2048)),
        *_cases("gemm_ar", (2048, 2048, 8192), (512, 5632, 2048), (8192, 3584, 4096)),
    ],
    "tiny": [
        *_cases("ag_gemm", (64, 32, 48)),
        *_cases("gemm_rs", (64, 48, 32)),
        *_cases("gemm_ar", (64, 48, 32)),
    ],
    "cpu": [
        *_cases("ag_gemm", (256, 256, 512), (1024, 256, 768), (2048, 512, 2048)),
        *_cases("gemm_rs", (256, 512, 256), (1024, 768, 256), (2048, 2048, 512)),
        *_cases("gemm_ar", (256, 256, 256), (1024, 512, 512)),
    ],
}
"""`bars`: the shapes that the bars name; `others`: so that nothing is tuned to those; `tiny`: to
see that all works; `cpu`: to calibrate a CPU by, where the others take too long or tell too little.
"""


def shapes_of(
    presets: str, shapes: str, dtypes: Sequence[str]
) -> list[tuple[str, int, int, int, str]]:
    """Op, M, K, N and element type of `shapes`, such as `ag_gemm:8192,8192,14336
    gemm_rs:4096,3584,4096`, or without any of `presets`, with commas."""
    check_dtypes(dtypes, (*DTYPE_NAMES, FLOAT8))
    if shapes:
        return [(*_parsed(text), dtype) for text in shapes.split() for dtype in dtypes]
    names = [name.strip() for name in presets.split(",") if name.strip()]
    for name in names:
        if name not in PRESETS:
            raise OptionError(f"--preset {name}: {choose_from(name, PRESETS)}")
    every = [(shape, dtype) for name in names for dtype in dtypes for shape in PRESETS[name]]
    return [(*shape, dtype) for shape, dtype in every]


def _parsed(text: str) -> tuple[str, int, int, int]:
    op, _, sizes = text.partition(":")
    try:
        m, k, n = map(int, sizes.split(","))
    except ValueError:
        m = k = n = 0
    if min(m, k, n) < 1:
        raise OptionError(f"--shapes {text}: write them as ag_gemm:M,K,N, with spaces between")
    if op not in OPS:
        raise OptionError(f"--shapes {text}: {op!r} is no site: {choose_from(op, OPS)}")
    return op, m, k, n
