"""The kernels of grouped linear layers: their arithmetic interpreted, their code for sm_90 read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.launched import Launched
from tests.support.resources import spills

pytest.importorskip("triton")

from interlace.kernels import launch as launcher
from interlace.nn.grouped import launch
from interlace.nn.grouped import products as grouped
from interlace.nn.grouped.products import ROWS, SUMS, TILE

pytestmark = pytest.mark.kernels

BF16 = torch.bfloat16


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("out", [torch.float32, BF16], ids=str)
def test_wgrad_is_pipelined_and_spills_nothing(out: torch.dtype, accumulate: bool) -> None:
    compiled = launch.wgrad_source(out, accumulate, (False, True, True, True)).compile()
    assert not spills(compiled)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert ptx.count("cp.async.bulk.tensor") >= 4, "tiles come by TMA, some ahead of their use"
    assert "st.global.v4" in ptx
    assert compiled.metadata.shared <= 227 * 1024


def test_wgrad_into_fp64_adds_in_fp64() -> None:
    ptx = launch.wgrad_source(torch.float64, True, (False, True, True, True)).compile().asm["ptx"]
    assert "add.rn.f64" in ptx or "add.f64" in ptx
    assert "cvt.rn.f32.f64" not in ptx


@pytest.mark.parametrize("bias", [True, False])
def test_the_others_use_wide_accesses(bias: bool) -> None:
    rows = launch.rows_source(bias, (False, False, True, True)).compile()
    assert "st.global.v4" in rows.asm["ptx"]
    sums = launch.sums_source((False, True)).compile()
    assert "ld.global.v4" in sums.asm["ptx"]
    assert not spills(rows)
    assert not spills(sums)


@pytest.mark.parametrize("aligned", [True, False])
def test_wide_accesses_only_where_the_address_allows_them(aligned: bool) -> None:
    """A main gradient may begin anywhere in its bucket, and a bias in what it was cut from."""
    whole = True, True, True, aligned
    stores = re.findall(
        r"st\.global(\.v\d)?\.b32",
        launch.wgrad_source(torch.float32, False, whole).compile().asm["ptx"],
    )
    assert stores
    assert set(stores) == ({".v4"} if aligned else {""})
    ptx = launch.rows_source(True, whole).compile().asm["ptx"]
    assert ("ld.global.b16" in ptx) == (not aligned)


@pytest.mark.parametrize("sizes", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("block", [32, 4096])
def test_sums_of_sizes_compile(sizes: torch.dtype, block: int) -> None:
    compiled = launch.ends_source(sizes, block).compile()
    assert not spills(compiled)
    assert "ld.global.v" not in compiled.asm["ptx"], "sizes may lie anywhere"


# -- launches -------------------------------------------------------------------------------------


class Mapped:
    """Stands in for tensor maps."""

    made = 0

    @staticmethod
    def matrix(_: Launched, index: int, address: int, shape: tuple[int, int]) -> tuple[Any, ...]:
        Mapped.made += 1
        return (f"{('dy', 'x')[index]} at {address}", *shape, shape[1], 1)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    made: list[Launched] = []

    def program(source: Any, device: torch.device) -> Launched:
        made.append(Launched(source, device))
        return made[-1]

    def forget() -> None:
        launch.kernel_of.cache_clear()
        launch.wgrad_operands.cache_clear()

    monkeypatch.setattr(launcher, "LoadedKernel", program)
    monkeypatch.setattr(launch, "matrix", Mapped.matrix)
    monkeypatch.setattr(launch, "stream_of", lambda device: 7)
    forget()
    yield made
    forget()


def zeros(*shape: int, at: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor whose address is `at` elements above a multiple of 16 bytes."""
    numel = torch.Size(shape).numel()
    memory = torch.zeros(numel + at + 16, dtype=dtype)
    skip = -memory.data_ptr() // dtype.itemsize % (16 // dtype.itemsize) + at
    return memory[skip : skip + numel].view(shape)


def test_wgrad_is_given_what_it_names(programs: list[Launched]) -> None:
    dy, x, ends = zeros(48, 320), zeros(48, 64), zeros(3, dtype=torch.int32)
    out = zeros(3, 320, 64, dtype=torch.float32)
    launch.weight_gradient(dy, x, ends, out, True)
    stream, grid, columns, given = programs[0].launches[0]
    assert (stream, grid, columns) == (7, 3 * -(-320 // TILE["BM"]) * -(-64 // TILE["BN"]), 1)
    assert given["dy_desc"] == (f"dy at {dy.data_ptr()}", 48, 320, 320, 1)
    assert given["x_desc"] == (f"x at {x.data_ptr()}", 48, 64, 64, 1)
    addresses = [given[name] for name in ("dy", "x", "ends", "out")]
    assert addresses == [tensor.data_ptr() for tensor in (dy, x, ends, out)]
    assert (given["tokens"], given["rows"], given["columns"]) == (48, 320, 64)


def test_what_decides_the_code_makes_another_kernel(programs: list[Launched]) -> None:
    """An odd address, another type or option, and sizes that are no multiples of 16; no more."""

    def run(tokens: int = 48, at: int = 0, kind: torch.dtype = BF16, add: bool = True) -> int:
        out = zeros(2, 32, 64, at=at, dtype=kind)
        ends = zeros(2, dtype=torch.int32)
        launch.weight_gradient(zeros(tokens, 32), zeros(tokens, 64), ends, out, add)
        return len(programs)

    assert [run(), run(), run(tokens=96)] == [1, 1, 1]
    assert run(tokens=50) == 2
    assert [run(at=1), run(at=3)] == [3, 3]
    assert run(kind=torch.float32) == 4
    assert run(add=False) == 5
    assert run() == 5


def test_maps_are_made_once_for_addresses_and_shapes(programs: list[Launched]) -> None:
    dy, x, ends = zeros(48, 32), zeros(48, 64), zeros(2, dtype=torch.int32)
    out = zeros(2, 32, 64)
    for _ in range(3):
        before = Mapped.made
        launch.weight_gradient(dy, x, ends, out, True)
    assert Mapped.made == before
    launch.weight_gradient(dy[:32], x[:32], ends, out, True)
    assert Mapped.made == before + 2
    assert programs[0].launches[-1][3]["dy_desc"][1:] == (32, 32, 32, 1)


@pytest.mark.parametrize("at", [None, 0, 1])
def test_rows_and_sums_are_given_what_they_name(at: int | None, programs: list[Launched]) -> None:
    y, ends = zeros(50, 264), zeros(3, dtype=torch.int32)
    bias = None if at is None else zeros(3, 264, at=at)
    launch.finish_rows(y, bias, ends)
    stream, grid, columns, given = programs[0].launches[0]
    assert (stream, grid, columns) == (7, -(-50 // ROWS["BK"]), -(-264 // ROWS["BN"]))
    assert given["bias"] == (0 if bias is None else bias.data_ptr())
    assert programs[0].source.constants["BIAS"] == (bias is not None)
    assert [given[n] for n in ("groups", "tokens", "columns")] == [3, 50, 264]
    out = zeros(3, 264)
    launch.row_sums(y, ends, out)
    _, grid, columns, given = programs[1].launches[0]
    assert (grid, columns) == (3 * -(-264 // SUMS["BN"]), 1)
    found = [given[name] for name in ("dy", "ends", "out", "tokens", "columns")]
    assert found == [y.data_ptr(), ends.data_ptr(), out.data_ptr(), 50, 264]


def test_sizes_are_added_up_by_one_block(programs: list[Launched]) -> None:
    sizes = torch.zeros(40, 2, dtype=torch.int64)[:, 1]
    ends = launch.group_ends(sizes, 99)
    assert (ends.dtype, ends.shape) == (torch.int32, (40,))
    stream, grid, columns, given = programs[0].launches[0]
    assert (stream, grid, columns) == (7, 1, 1)
    assert programs[0].source.constants == {"BLOCK": 64}
    found = [given[name] for name in ("sizes", "ends", "groups", "stride", "tokens")]
    assert found == [sizes.data_ptr(), ends.data_ptr(), 40, 2, 99]
    many = torch.ones(launch.MOST_GROUPS + 1, dtype=torch.int32)
    assert launch.group_ends(many, 9)[-1] == 9
    assert len(programs) == 1, "by torch"


def test_a_bias_is_read_row_by_row_however_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel counts elements from the first; a transposed Parameter has others there."""
    given: list[Any] = []
    monkeypatch.setattr(launch, "finish_rows", lambda y, bias, ends: given.append(bias))
    monkeypatch.setattr(grouped, "grouped_mm", lambda x, weight, offs: x @ weight[0])
    ends = torch.tensor([2, 3], dtype=torch.int32)
    groups = grouped.Groups(2, 3, None, ends, False)
    bias = torch.arange(8.0).view(4, 2).t()
    grouped.multiply(torch.ones(3, 4), torch.ones(2, 4, 4), bias, groups)
    (read,) = given
    assert read.is_contiguous()
    assert torch.equal(read, bias)
