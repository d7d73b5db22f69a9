"""What is handed to a kernel at a launch: the right argument in the right place, and no work twice.

No GPU: the compiled kernel and the tensor maps are stand-ins that write down what they get.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from tests.support.launched import Launched

pytest.importorskip("triton")

from interlace.float8.data import TAIL
from interlace.kernels.gemm import matmul
from interlace.kernels.gemm.support import PACKED

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")


class Made:
    """What was made: the programs in their order, and how many tensor maps."""

    def __init__(self) -> None:
        self.programs: list[Launched] = []
        self.maps = 0

    def kernel_of(self, device: torch.device, source: Any, *given: Any, **facts: Any) -> Launched:
        self.programs.append(Launched(source(*given, **facts), device))
        return self.programs[-1]

    def matrix(
        self, program: Launched, index: int, address: int, shape: tuple[int, int], pitch: int = 0
    ) -> tuple[Any, ...]:
        """Stands in for a tensor map."""
        kernel = program.source.kernel
        assert kernel.arg_names[index].endswith("_desc")
        self.maps += 1
        return (f"map of {address}", *shape, pitch or shape[1], 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    stand_ins = Made()
    monkeypatch.setattr(matmul, "kernel_of", stand_ins.kernel_of)
    monkeypatch.setattr(matmul, "matrix", stand_ins.matrix)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return stand_ins


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def map_of(tensor: torch.Tensor, rows: int, columns: int) -> tuple[Any, ...]:
    return (f"map of {tensor.data_ptr()}", rows, columns, columns, 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_gather_is_given_what_it_names(made: Made, transposed: bool) -> None:
    kernel = matmul.GatherMatmul(
        rows=32, inner=64, columns=128, size=4, rank=2, dtype=torch.bfloat16, device=CPU,
        transposed=transposed, bias=True,
    )  # fmt: skip
    x, slots, y, bias = zeros(32, 64), zeros(128, 64), zeros(128, 128), zeros(128)
    w = zeros(128, 64).t() if transposed else zeros(64, 128)
    kernel.launch(7, x, w, slots, y, bias, 4096, (1 << 32) + 5)
    (program,) = made.programs
    got = program.launches[-1][3]
    assert program.launches[-1][0] == 7
    assert got["x_desc"] == map_of(x, 32, 64)
    assert got["slots_desc"] == map_of(slots, 128, 64)
    weight = (128, 64) if transposed else (64, 128)
    assert got["w_desc"] == got["w_half_desc"] == map_of(w, *weight)
    assert got["y_desc"] == got["y_half_desc"] == map_of(y, 128, 128)
    assert (got["y"], got["bias"]) == (y.data_ptr(), bias.data_ptr())
    assert (got["gates"], got["expected"]) == (4096, 5)
    assert (got["rows"], got["columns"], got["inner"], got["rank"]) == (32, 128, 64, 2)


def test_packed_rows_are_described_without_their_scales(made: Made) -> None:
    """Tiles end with the numbers of a row; where scales lie is told by addresses and `inner`."""
    kinds = torch.float8_e5m2, torch.float8_e4m3fn
    kernel = matmul.GatherMatmul(
        rows=128, inner=208, columns=256, size=2, rank=1, dtype=torch.bfloat16, device=CPU,
        transposed=True, packed=kinds,
    )  # fmt: skip
    assert kernel.config is PACKED
    x, slots, w = (
        torch.zeros(rows, 208 + TAIL, dtype=kind)
        for rows, kind in ((128, kinds[0]), (256, kinds[0]), (256, kinds[1]))
    )
    y = zeros(256, 256)
    kernel.launch(7, x, w.t(), slots, y, None, 4096, 5)
    (program,) = made.programs
    got = program.launches[-1][3]
    for name, tensor in (("x", x), ("slots", slots), ("w", w)):
        address = tensor.data_ptr()
        assert got[f"{name}_desc"] == (f"map of {address}", len(tensor), 208, 208 + TAIL, 1)
        assert got[name] == address
        assert program.source.types[name] == "*fp32"
    assert got["y_desc"] == map_of(y, 256, 256)
    assert got["inner"] == 208
    assert program.source.constants["TAIL"] == TAIL
    types = [program.source.types[f"{name}_desc"] for name in ("x", "slots", "w", "y")]
    assert [kind[11:].split("[")[0] for kind in types] == ["fp8e5", "fp8e5", "fp8e4nv", "bf16"]


def test_scatter_is_given_what_it_names(made: Made) -> None:
    kernel = matmul.ScatterMatmul(
        rows=64, inner=72, columns=128, size=3, rank=1, dtype=torch.bfloat16, device=CPU, subs=2
    )
    x, w, stage, own = zeros(192, 72), zeros(72, 128), zeros(192, 128), zeros(64, 128)
    kernel.launch(9, x, w, stage, own, None, 8192)
    (program,) = made.programs
    got = program.launches[-1][3]
    assert got["x_desc"] == map_of(x, 192, 72)
    assert got["w_desc"] == map_of(w, 72, 128)
    assert got["stage_desc"] == map_of(stage, 192, 128)
    assert got["own_desc"] == map_of(own, 64, 128)
    places = [got[name] for name in ("stage", "own", "bias", "counters")]
    assert places == [stage.data_ptr(), own.data_ptr(), 0, 8192]
    assert [got[n] for n in ("rows", "columns", "inner")] == [64, 128, 72]


@pytest.mark.usefixtures("made")
def test_ranges_of_a_chunk_cover_its_rows_once() -> None:
    for rows, subs in ((1024, 4), (1000, 2), (384, 2), (64, 3), (200, 5)):
        kernel = matmul.ScatterMatmul(
            rows=rows, inner=512, columns=4096, size=4, rank=0, dtype=torch.float16, device=CPU,
            subs=subs,
        )  # fmt: skip
        assert 1 <= kernel.subs <= subs
        spans = [kernel.sub_rows(s) for s in range(kernel.subs)]
        assert [row for span in spans for row in span] == list(range(rows))
        each = -(-rows // kernel.config.bm) * -(-4096 // kernel.config.bn)
        each *= 2 if kernel.config.specialized else 1
        assert kernel.raised * kernel.subs == each


def test_maps_are_made_once_for_an_address(made: Made) -> None:
    kernel = matmul.GatherMatmul(
        rows=32, inner=64, columns=128, size=1, rank=0, dtype=torch.bfloat16, device=CPU
    )
    x, w, y = zeros(32, 64), zeros(64, 128), zeros(32, 128)
    kernel.launch(0, x, w, None, y, None, 0, 0)
    before = made.maps
    for _ in range(3):
        kernel.launch(0, x, w, None, y, None, 0, 0)
    assert made.maps == before
    kernel.launch(0, x.clone(), w, None, y, None, 0, 0)
    assert made.maps > before
