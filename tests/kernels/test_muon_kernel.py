"""Muon's kernel without a GPU: interpreted, its code for sm_90 read, and its launches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.launched import Launched
from tests.support.resources import spills
from torch import nn

pytest.importorskip("triton")

from interlace.kernels import launch as launcher
from interlace.optim import Muon
from interlace.optim.muon import launch, newton_schulz, update
from interlace.optim.muon.kernel import (
    descend_source,
    momentum_source,
    symmetric_kernel,
    symmetric_source,
)

pytestmark = pytest.mark.kernels

BF16 = torch.bfloat16
SHARED = 228 * 1024
"""Bytes of shared memory of a processor, of which each block's first 1024 are the driver's."""


@pytest.mark.parametrize(
    ("at", "add", "tall"),
    [(at, add, tall) for at in range(3) for add, tall in ((True, False), (False, True))]
    + [(0, False, False)],
)
def test_products_are_pipelined_and_spill_nothing(at: int, add: bool, tall: bool) -> None:
    """Tiles come by TMA ahead of their use, and go out 16 bytes at a time."""
    config = launch.CONFIGS[at][0]
    assert config.bm == config.bn
    assert newton_schulz.STEP % config.bk == 0
    dtype = torch.float16 if at else BF16
    compiled = symmetric_source(config, dtype, add, tall).compile()
    assert not spills(compiled)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+1", ptx), "one product behind another"
    assert ptx.count("cp.async.bulk.tensor") >= 2 * config.stages
    assert set(re.findall(r"st\.global\.?(v\d)?", ptx)) == {"v4"}
    assert (compiled.metadata.shared + 1024) * config.blocks <= SHARED


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_elementwise_kernels_move_16_bytes_at_a_time(dtype: torch.dtype) -> None:
    """Of what is widest; and nothing spills."""
    sources = (momentum_source(dtype, True, True), momentum_source(dtype, False, False))
    for source in (*sources, descend_source(dtype)):
        compiled = source.compile()
        assert not spills(compiled)
        ptx = compiled.asm["ptx"]
        assert set(re.findall(r"(?:ld|st)\.global\.?(v\d)?", ptx)) <= {"v4", "v2", ""}
        assert "ld.global.v4.b32" in ptx
        assert len(re.findall(r"\b(?:ld|st)\.global\.b32", ptx)) <= 1, "the sum of a block"


@pytest.mark.parametrize(
    ("count", "rows", "size", "blocks"),
    [(1, 4096, 128, 2), (64, 768, 128, 2), (16, 512, 128, 2), (1, 512, 64, 1), (1, 64, 64, 1)],
)
def test_which_tiles_a_size_gets(count: int, rows: int, size: int, blocks: int) -> None:
    config = launch.choose(count, rows, 132)
    assert (config.bm, config.blocks) == (size, blocks)
    side = -(-rows // size)
    assert launch.tiles(config, rows) == side * (side + 1) // 2


# -- launches ------------------------------------------------------------------------------------


class Computed(Launched):
    """Computes what the kernel of symmetric products does."""

    grids: list[int]
    added: list[bool]

    def launch(self, stream: int, grid: int, args: tuple[Any, ...], columns: int = 1) -> None:
        source, found = self.source, self.named(args)
        if source.kernel is not symmetric_kernel:
            return
        a, b, c = (found[f"{name}_desc"] for name in "abc")
        count, rows, inner = found["count"], found["rows"], found["inner"]
        tall = source.constants["TALL"]
        assert (a[0], b[0], c[0]) == (0, 1, 2)
        assert a[2:4] == b[2:4] == ((count * inner, rows) if tall else (count * rows, inner))
        assert c[2:4] == (count * rows, rows)
        assert rows % 8 == inner % 8 == 0
        assert source.constants["ADD"] == (c[1] != found["y"])
        self.grids.append(grid)
        self.added.append(source.constants["ADD"])
        a, b, c, y = (by_address[at] for at in (a[1], b[1], c[1], found["y"]))
        made = found["alpha"] * (a.float() @ b.float().mT)
        if source.constants["ADD"]:
            made += found["beta"] * c.float()
        made.diagonal(dim1=-2, dim2=-1).add_(found["gamma"])
        y.copy_(made)


by_address: dict[int, torch.Tensor] = {}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Computed]]:
    product = launch.symmetric_product

    def remembered(*given: torch.Tensor, **numbers: Any) -> torch.Tensor:
        by_address.update({tensor.data_ptr(): tensor for tensor in given})
        return product(*given, **numbers)

    empty = torch.empty

    def made(*args: Any, **options: Any) -> torch.Tensor:
        y = empty(*args, **options)
        by_address[y.data_ptr()] = y
        return y

    Computed.grids, Computed.added = [], []
    monkeypatch.setattr(launcher, "LoadedKernel", Computed)
    monkeypatch.setattr(launch, "matrix", lambda program, i, at, shape: (i, at, *shape, 1))
    monkeypatch.setattr(launch, "stream_of", lambda device: 7)
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    monkeypatch.setattr(launch, "symmetric_product", remembered)
    monkeypatch.setattr(launch.torch, "empty", made)
    for module in (newton_schulz, update):
        monkeypatch.setattr(module, "runs_on", lambda device: True)
    launch.kernel_of.cache_clear()
    yield Computed
    launch.kernel_of.cache_clear()
    by_address.clear()


def orthogonal(x: torch.Tensor, **options: Any) -> torch.Tensor:
    steps = newton_schulz.coefficients((3.4445, -4.7750, 2.0315), 5)
    return newton_schulz.orthogonalize(x.clone(), steps, eps=1e-7, **options)


def test_launches_are_given_what_they_name(programs: type[Computed], seed: int) -> None:
    """Two products a step, in the standard iteration; results agree with the reference's."""
    torch.manual_seed(seed)
    for shape in ((16, 48), (3, 24, 40)):
        x = torch.randn(shape).to(BF16)
        for gram_variant in (False, True):
            programs.grids.clear()
            found = orthogonal(x, gram_variant=gram_variant)
            assert len(programs.grids) == (2 + 5 + 3 + 2 * 3 if gram_variant else 10)
            wanted = orthogonal(x, gram_variant=gram_variant, symmetric=False)
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.03)
    programs.grids.clear()
    orthogonal(torch.randn(2, 4096, 4096).to(BF16)[:, :, :256].contiguous()[:, :264])
    assert programs.grids[0] == 2 * 15


def test_squares_are_completed_where_rounding_allows(programs: type[Computed], seed: int) -> None:
    """Either way the factor is the reference's; steep polynomials, and such without c, add g."""
    torch.manual_seed(seed)
    x = torch.randn(2, 24, 40).to(BF16) / 30
    steep = (8.47, -25.1, 18.6), (1.5, -0.5, 0.0), (1.5, 0.0, 0.0)
    for triple in ((3.4445, -4.7750, 2.0315), *steep):
        programs.added.clear()
        found = newton_schulz.factor(x, *triple)
        assert programs.added == [False, triple[0] != 3.4445]
        wanted = newton_schulz.polynomial(x @ x.mT, *triple, kernel=False)
        off = 2**-8 * (abs(triple[0]) + abs(triple[1]))
        torch.testing.assert_close(found, wanted, rtol=0, atol=off)


@pytest.mark.parametrize("size", [0.0, 1e-22])
def test_updates_near_zero_are_divided_by_a_tiny_eps(programs: type[Computed], size: float) -> None:
    """Squares of norms are no numbers of fp32 there."""
    x = torch.full((16, 48), size, dtype=BF16)
    steps = newton_schulz.coefficients((3.4445, -4.7750, 2.0315), 1)
    found = newton_schulz.orthogonalize(x.clone(), steps, eps=1e-21)
    wanted = newton_schulz.orthogonalize(x, steps, eps=1e-21, symmetric=False)
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=1e-3)


def test_what_the_kernel_does_not_serve_goes_by_the_reference(programs: type[Computed]) -> None:
    """Rows or columns that are no multiples of 16 bytes, strided matrices, and empty ones; and
    stacks of transposed ones in which a step along the columns ends in the next matrix.
    """
    ones = torch.ones(16, 16, dtype=BF16)
    for x in (ones[:9], ones[:8, :9].contiguous(), ones[:8, ::2], ones[:0]):
        assert not newton_schulz.serves(x)
    assert not newton_schulz.serves(torch.ones(2, 24, 8, dtype=BF16).mT)
    assert newton_schulz.serves(torch.ones(2, 128, 8, dtype=BF16).mT)
    assert newton_schulz.serves(torch.ones(24, 8, dtype=BF16).mT)
    assert not newton_schulz.serves(torch.ones(8, 16))
    assert newton_schulz.serves(torch.ones(2, 8, 16, dtype=BF16))


def test_a_step_gives_the_kernel_dense_matrices(programs: type[Computed], seed: int) -> None:
    """Tall ones go as they are, or transposed in a stack; a matrix alone is one, too."""
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((48, 16), (16, 48), (48, 16), (8, 8))]
    others = [nn.Parameter(param.detach().clone()) for param in params]
    for mine, its in zip(params, others, strict=True):
        mine.grad = torch.randn_like(mine)
        its.grad = mine.grad.clone()
    Muon(params, lr=0.1).step()
    assert len(programs.grids) == 3 * 10
    Muon(others, lr=0.1, symmetric=False).step()
    for mine, its in zip(params, others, strict=True):
        torch.testing.assert_close(mine, its, rtol=0.05, atol=0.01)
