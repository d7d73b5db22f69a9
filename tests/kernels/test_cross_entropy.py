"""The kernels of the cross-entropy: their arithmetic in the interpreter, and what is compiled."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.support.launched import Launched
from tests.support.resources import spills

from interlace.nn.cross_entropy.steps import Problem, Shards, Terms, new_word

FLAGS: dict[str, Any] = {
    "RANK": 0, "WORLD": 1, "MEASURED": False, "DIMS": 1, "EVEN": True,
    "SMOOTH": False, "WEIGHTED": False, "ZLOSS": False,
}  # fmt: skip


def source(name: str, element: torch.dtype, constants: dict[str, Any], warps: int) -> Any:
    """A kernel as it is launched, with tensors of the types that most calls have."""
    from interlace.nn.cross_entropy.launch import KERNELS, source_of

    types = dict.fromkeys(("logits", "grad"), element)
    types |= dict.fromkeys(("target", "sizes", "word"), torch.int64)
    names = KERNELS[name].arg_names
    numbers = {"rows", "number", "numel"}
    count = next(index for index, argument in enumerate(names) if argument in numbers)
    dtypes = tuple(types.get(argument, torch.float32) for argument in names[:count])
    return source_of(name, dtypes, tuple(constants.items()), warps)


def ptx_of(name: str, element: torch.dtype, constants: dict[str, Any], warps: int) -> str:
    """The PTX of a kernel for Hopper, which spills no registers."""
    compiled = source(name, element, constants, warps).compile()
    assert not spills(compiled)
    return compiled.asm["ptx"]


OPTIONS = [
    {},
    {"EVEN": False},
    {"SMOOTH": True, "ZLOSS": True},
    {"SMOOTH": True, "WEIGHTED": True},
    {"RANK": 2, "WORLD": 4, "MEASURED": True, "DIMS": 2},
]


@pytest.mark.kernels
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["stats_kernel", "grad_kernel"])
def test_loads_of_16_bytes_and_no_spills(
    name: str, element: torch.dtype, options: dict[str, Any]
) -> None:
    """Each thread has its loads of 16 bytes under way together, also in rows of odd length."""
    from interlace.nn.cross_entropy.layout import UNROLL, WARPS

    forward, loads = name == "stats_kernel", UNROLL
    cut = {"U": loads, "LANES": 32 * WARPS, "VEC": 16 // element.itemsize}
    # fmt: off
    own: dict[str, Any] = (
        {"FINISH": True} if forward
        else {"ALIKE": True, "PER_ROW": False, "DIVIDED": True, "SCALED": True}
    )
    # fmt: on
    ptx = ptx_of(name, element, {**FLAGS, **cut, **own, **options}, WARPS)
    of_weights = cut["VEC"] // 4 * loads if options.get("WEIGHTED") else 0
    wide = len(re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", ptx))
    if options.get("SMOOTH") and options.get("WEIGHTED"):
        assert loads <= wide <= loads + of_weights
    else:
        assert wide == loads
        exponentials = len(re.findall(r"ex2\.approx", ptx))
        assert exponentials >= loads * cut["VEC"]
    if not forward:
        assert len(re.findall(r"st\.global(?:\.\w+)*\.v4\.b32", ptx)) == loads


@pytest.mark.kernels
@pytest.mark.parametrize("picks", [True, False])
def test_the_small_kernels_compile(picks: bool) -> None:
    flags = {k: v for k, v in FLAGS.items() if k != "EVEN"}
    constants = {**flags, "PICK": picks, "FINISH": not picks, "BLOCK": 128, "SMOOTH": True}
    assert ptx_of("merge_kernel", torch.bfloat16, constants, 4)
    total = {"MEAN": True, "WEIGHTED": picks, "FIGURE": 3, "GIVEN": False, "BLOCK": 4096}
    assert ptx_of("total_kernel", torch.bfloat16, total, 16)
    count = {"RANK": 1, "WORLD": 2, "MEASURED": picks, "BLOCK": 1024}
    assert ptx_of("count_kernel", torch.bfloat16, count, 4)


@pytest.mark.kernels
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("element", [torch.bfloat16, torch.float32], ids=str)
def test_scaling_by_one_moves_nothing(element: torch.dtype, count: int) -> None:
    """The kernel leaves before its first access that is wide: only the factor is read."""
    from interlace.nn.cross_entropy.launch import SCALED, source_of

    dtypes = *(element if index < count else None for index in range(3)), torch.float32
    constants = ("COUNT", count), ("BLOCK", SCALED)
    ptx = source_of("scale_kernel", dtypes, constants, 4).compile().asm["ptx"]
    wide = re.search(r"ld\.global(?:\.\w+)*\.v4\.b32", ptx)
    leaves = re.search(r"setp\.(?:n?eq?u?|neu)\.f32[^;]*;.*?@%p\d+ bra", ptx, re.DOTALL)
    assert wide is not None
    assert leaves is not None
    assert leaves.end() < wide.start()


@pytest.mark.kernels
@pytest.mark.parametrize("rows", [3, 5000])
@pytest.mark.parametrize("weighted", [False, True])
def test_kernels_are_given_what_they_name(
    rows: int, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not compiled anew at the second call; what is not used is null, not some other argument."""
    from interlace.kernels import launch as launcher
    from interlace.nn.cross_entropy import launch

    programs: dict[str, list[Launched]] = {}

    def made(source: Any, device: torch.device) -> Launched:
        programs.setdefault(source.kernel.__name__, []).append(Launched(source, device))
        return programs[source.kernel.__name__][-1]

    monkeypatch.setattr(launcher, "LoadedKernel", made)
    monkeypatch.setattr(Launched, "aligned", False)
    monkeypatch.setattr(launch, "stream_of", lambda device: 7)
    launcher.kernel_of.cache_clear()
    x, y = torch.zeros(2 * rows, 4097)[:, 1:], torch.zeros(2 * rows, dtype=torch.int64)
    weight = torch.ones(4096) if weighted else None
    for start in (0, rows):
        at = slice(start, start + rows)
        problem = Problem(x[at], y[at], weight, Terms(), Shards.alone(4096), new_word("cpu"), start)
        losses, kept = launch.alone(problem)
        loss, divisor = launch.total(losses, kept, weighted, True, None)
        grad = launch.gradient(problem, kept, loss, divisor)
        launch.scale([kept[0], losses[:0], grad], loss)
    launcher.kernel_of.cache_clear()
    assert all(len(of_kernel) == 1 for of_kernel in programs.values())
    stream, grid, columns, given = programs["grad_kernel"][0].launches[1]
    assert (stream, grid, columns) == (7, rows, 1)
    assert given["out"] is kept
    assert given["grad"] is grad
    assert given["divisor"] is divisor
    assert given["sizes"] is None
    assert given["weight"] is weight
    assert given["local"] == given["g_row"] == 4096
    assert (given["step"], given["skew"], given["first_row"]) == (4097, (1 + rows) % 4, rows)
    assert given["logits"].data_ptr() % 16 == 0
    _, grid, columns, given = programs["stats_kernel"][0].launches[1]
    assert (grid, columns > 1) == (rows, rows == 3)
    assert (given["losses"] is None) == (rows == 3)
    assert ("merge_kernel" in programs) == (rows == 3)
    assert programs["total_kernel"][0].launches[1][3]["rows"] == rows
    _, grid, columns, given = programs["scale_kernel"][0].launches[1]
    assert (grid, columns) == (min(launch.SCALERS, 2 * rows), 2)
    assert given["second"] is grad
    assert given["third"] is None
    assert given["by"] is loss
    assert (given["numel"], given["numel_2"], given["numel_3"]) == (rows, 4096 * rows, 0)


@pytest.mark.kernels
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
        ((64, 2, 3, 1, 4), lambda x: x.movedim(0, -1), 1, True),
    ],
)
def test_rows_are_found_without_a_copy(
    shape: tuple[int, ...], view: Any, dims: int, even: bool
) -> None:
    from interlace.nn.cross_entropy.layout import KernelRows

    x = view(torch.zeros(shape, dtype=torch.bfloat16))
    y = torch.zeros(x.shape[:-1], dtype=torch.int64)
    problem = Problem(x, y, None, Terms(), Shards.alone(x.shape[-1]), new_word("cpu"))
    layout = KernelRows(problem)
    assert (layout.cut.dims, dict(layout.cut.variant)["EVEN"]) == (dims, even)
    copied = layout.logits.data_ptr() != x.data_ptr()
    assert copied == (len(shape) > 4), "only what two strides do not describe is copied"
