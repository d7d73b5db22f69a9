"""Muon on a GPU: its kernel beside its reference, with bits that repeat themselves.

How fast it is, `interlace bench kernels --only muon` says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.cases import on_a_gpu
from tests.optim.muon_sets import SETS
from torch import Tensor, nn

pytest.importorskip("triton")

from interlace.optim import Muon
from interlace.optim.muon import launch, update
from interlace.optim.muon.newton_schulz import (
    coefficients,
    orthogonalize,
    polynomial,
    product,
    serves,
)

pytestmark = on_a_gpu(300)

CUDA = torch.device("cuda")
SHAPES = [(256, 256), (128, 512), (512, 128), (256, 256), (8, 40), (264, 1000), (3, 64, 128)]


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Within the rounding of the results, whatever the order of additions."""
    assert found.isfinite().all()
    rounding = torch.finfo(dtype).eps * wanted.abs() + 1e-4 * wanted.abs().max()
    assert ((found.float() - wanted).abs() <= rounding).all()


def whole(shape: Any, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose products and sums are exact."""
    return torch.randint(-2, 3, shape, device=CUDA).to(dtype)


@pytest.mark.parametrize("config", [config for config, _ in launch.CONFIGS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_symmetric_and_right(
    config: Any, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tile shape: sizes that end with a tile and that do not, more tiles than blocks."""
    torch.manual_seed(seed)
    monkeypatch.setattr(launch, "choose", lambda count, rows, processors: config)
    for count, rows, inner in (
        (1, 8, 8),
        (1, 2048, 512),
        (3, 264, 1000),
        (2, 1032, 72),
        (40, 512, 640),
        (3, 264, 896),
    ):
        x = torch.randn(count, rows, inner, device=CUDA).to(dtype)
        x = x[0] if count == 1 else x
        assert serves(x)
        found = product(x, x.mT, kernel=True)
        assert torch.equal(found, found.mT)
        near(found, x.float() @ x.float().mT, dtype)
        g = (found / found.abs().amax()).contiguous()
        made = polynomial(g, 3.0, -4.0, 2.0, kernel=True)
        assert torch.equal(made, made.mT)
        wanted = -4.0 * g.float() + 2.0 * g.float() @ g.float()
        wanted.diagonal(dim1=-2, dim2=-1).add_(3.0)
        near(made, wanted, dtype)
        exact = whole(x.shape, dtype)
        wanted = (exact.float() @ exact.float().mT).to(dtype)
        assert torch.equal(product(exact, exact.mT, kernel=True), wanted)
        columns = exact.mT.contiguous().mT
        if serves(columns):
            assert torch.equal(product(columns, columns.mT, kernel=True), wanted)


def test_runs_are_equal_and_any_a_and_b_give_a_symmetric_result(seed: int) -> None:
    """The same bits every time; the lower triangle decides, on the diagonal's tiles as well."""
    torch.manual_seed(seed)
    a, b = (whole((520, 264), torch.bfloat16) for _ in range(2))
    full = a.float() @ b.float().mT
    wanted = (full.tril() + full.tril(-1).mT).to(torch.bfloat16)
    for _ in range(20):
        assert torch.equal(launch.symmetric_product(a, b), wanted)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("gram_variant", [False, True])
def test_the_iteration_agrees_with_fp64(name: str, gram_variant: bool, seed: int) -> None:
    torch.manual_seed(seed)
    steps = coefficients(*SETS[name])
    given = torch.randn(2, 256, 1024, device=CUDA)
    x = given.double() / torch.linalg.vector_norm(given.double(), dim=(1, 2), keepdim=True)
    for a, b, c in steps:
        g = x @ x.mT
        x = a * x + (b * g + c * g @ g) @ x
    found = orthogonalize(given.to(torch.bfloat16), steps, eps=1e-7, gram_variant=gram_variant)
    assert (found.double() - x).norm() < 0.1 * x.norm()


def test_every_way_agrees_and_repeats_itself(seed: int) -> None:
    """Batched, by the kernel, and by the Gram variant; two runs of each have the same bits."""
    results: list[list[Tensor]] = []
    gram_variant = {"gram_variant": True}
    ways: list[Any] = [{}, {}, gram_variant, gram_variant, {"symmetric": False}]
    for options in ways:
        torch.manual_seed(seed)
        params = [nn.Parameter(torch.randn(shape, device=CUDA)) for shape in SHAPES]
        optimizer = Muon(params, lr=0.1, **options)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        results.append([param.detach() for param in params])
    for one, other in ((0, 1), (2, 3)):
        pairs = zip(results[one], results[other], strict=True)
        assert all(torch.equal(mine, its) for mine, its in pairs)
    for some in results[2:]:
        for mine, its in zip(results[0], some, strict=True):
            assert (mine - its).norm() < 0.02 * mine.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nesterov", [False, True])
def test_elementwise_kernels_have_the_bits_of_foreach(
    dtype: torch.dtype, nesterov: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum and the update; parameters within what norms summed in another order bring about."""
    found: list[tuple[list[Tensor], list[Tensor]]] = []
    for large in (1, 1 << 40):
        monkeypatch.setattr(update, "LARGE", large)
        torch.manual_seed(seed)
        shapes = [(512, 1024), (1024, 512), (1024, 512), (8, 40), (640, 640), (2, 256, 1024)]
        params = [nn.Parameter(torch.randn(shape, device=CUDA).to(dtype)) for shape in shapes]
        optimizer = Muon(params, lr=0.1, nesterov=nesterov)
        version = params[0]._version
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        assert params[0]._version > version, "autograd sees that the parameter was written"
        moments = [optimizer.state[param]["momentum_buffer"] for param in params]
        found.append(([param.detach() for param in params], moments))
    assert all(map(torch.equal, found[0][1], found[1][1]))
    for mine, its in zip(found[0][0], found[1][0], strict=True):
        assert (mine - its).float().norm() < 1e-3 * its.float().norm()


@pytest.mark.parametrize("options", [{}, {"gram_variant": True}, {"symmetric": False}], ids=str)
def test_updates_do_not_depend_on_the_size_of_gradients(options: Any, seed: int) -> None:
    """Powers of two change no bit, where squares of elements are no numbers of fp32 as well."""
    found: list[list[Tensor]] = []
    for power in (0, -95, 66, 110):
        torch.manual_seed(seed)
        shapes = [(1024, 2048), (2048, 1024), (256, 512), (256, 512), (8, 40), (3, 64, 128)]
        params = [nn.Parameter(torch.zeros(shape, device=CUDA)) for shape in shapes]
        optimizer = Muon(params, lr=1.0, eps=0.0, weight_decay=0.0, **options)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn_like(param) * 2.0**power
            optimizer.step()
        found.append([param.detach() for param in params])
    assert all(param.abs().amax() > 0 for param in found[0])
    for some in found[1:]:
        assert all(map(torch.equal, some, found[0]))
