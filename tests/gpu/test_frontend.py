"""What torch.compile hands over on a GPU: one rank alone, forward and backward beside eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.cases import on_a_gpu
from tests.support.captured import capture
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.frontend import backend

pytestmark = on_a_gpu(200)

Make = Callable[[], tuple[Callable[..., Tensor], list[Tensor]]]


def leaf(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(sizes, device="cuda", dtype=dtype, requires_grad=True)


def attention(p: float) -> Make:
    def make() -> tuple[Callable[..., Tensor], list[Tensor]]:
        def fn(x: Tensor, w: Tensor) -> Tensor:
            q, k, v = (x @ w).view(2, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
            return y.transpose(1, 2).reshape(2, 128, 256)

        return fn, [leaf(2, 128, 256), leaf(256, 768)]

    return make


def efficient() -> tuple[Callable[..., Tensor], list[Tensor]]:
    """In fp32, where torch keeps the seed of the dropout on the CPU."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    return fn, [leaf(2, 4, 64, 32, dtype=torch.float32) for _ in range(3)]


def recomputed() -> tuple[Callable[..., Tensor], list[Tensor]]:
    def inner(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(torch.tanh(x @ w), 0.5)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = checkpoint(inner, x, w, use_reentrant=False)
        assert isinstance(y, Tensor)
        return F.dropout(y, 0.1) @ w

    return fn, [leaf(32, 64), leaf(64, 64)]


def autocast() -> tuple[Callable[..., Tensor], list[Tensor]]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.gelu(F.linear(x, w)).sum(-1)

    return fn, [leaf(32, 64, dtype=torch.float32), leaf(48, 64, dtype=torch.float32)]


def scalar() -> tuple[Callable[..., Tensor], list[Tensor]]:
    def fn(x: Tensor, s: Tensor) -> Tensor:
        return torch.tanh(x * s) + s

    return fn, [leaf(32, 64), torch.tensor(0.75)]


def masked() -> tuple[Callable[..., Tensor], list[Tensor]]:
    mask = torch.rand(4, 8, device="cuda") < 0.5

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        y = x * 2
        y[mask, :] = 0.0
        return y.sigmoid()

    return fn, [leaf(4, 8, 16), mask]


def normalised() -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Several results, and a parameter in another layout."""

    def fn(x: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(F.linear(x, w.t()), (48,), g, b)

    return fn, [leaf(32, 64), leaf(64, 48), leaf(48), leaf(48)]


CASES: dict[str, Make] = {
    "attention": attention(0.0),
    "attention-dropout": attention(0.25),
    "attention-fp32-dropout": efficient,
    "recomputed-dropout": recomputed,
    "autocast": autocast,
    "cpu-scalar": scalar,
    "mask": masked,
    "layer-norm": normalised,
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(call: Callable[..., Tensor], inputs: list[Tensor], seed: int) -> list[Tensor]:
    """The result and the gradients of one step with a generator seeded alike."""
    torch.manual_seed(seed)
    y = call(*inputs)
    wanted = [x for x in inputs if x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted)]


@pytest.mark.parametrize("regions", ["eager", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_eager(name: str, regions: str, seed: int) -> None:
    torch.manual_seed(seed)
    fn, inputs = CASES[name]()
    compiled = torch.compile(fn, backend=backend, options={"regions": regions})
    for number in range(3):
        found, right = (step(call, inputs, seed + number) for call in (compiled, fn))
        interlace.synchronize()
        for mine, theirs in zip(found, right, strict=True):
            scale = theirs.float().abs().max().clamp(min=1e-3)
            error = (mine.float() - theirs.float()).abs().max() / scale
            exact = mine.dtype == torch.float32 and name != "autocast"
            assert error < (1e-4 if exact else 4e-2), float(error)


def test_a_captured_graph_sees_new_inputs_and_says_where_there_is_none(seed: int) -> None:
    torch.manual_seed(seed)
    fn, (x, w) = normalised()[0], [leaf(32, 64), leaf(64, 48)]
    g, b = leaf(48), leaf(48)
    with capture() as captured, torch.no_grad():
        compiled = torch.compile(fn, backend=backend, options={"graph": True})
        for _ in range(6):
            x = torch.randn_like(x)
            torch.testing.assert_close(compiled(x, w, g, b), fn(x, w, g, b), rtol=4e-2, atol=4e-2)
        fn, (x, s) = scalar()
        compiled = torch.compile(fn, backend=backend, options={"graph": True})
        for number in range(4):
            s = torch.tensor(float(number))
            torch.testing.assert_close(compiled(x, s), fn(x, s), rtol=4e-2, atol=4e-2)
    assert "not captured in CUDA graphs" in captured.explain()
    assert captured.bound[0].executor.options.graph


@pytest.mark.parametrize("graph", [False, True])
def test_a_cache_is_written_in_place(graph: bool, seed: int) -> None:
    """Also the second one, which lies where the graphs do not look for it."""
    torch.manual_seed(seed)
    caches = [torch.zeros(64, 32, device="cuda") for _ in range(2)]

    def fn(cache: Tensor, row: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, row)
        return cache.sum(0)

    compiled = torch.compile(fn, backend=backend, options={"graph": graph})
    wanted, starts = [c.clone() for c in caches], [c.data_ptr() for c in caches]
    with torch.no_grad():
        for number in range(9):
            row, at = torch.randn(1, 32, device="cuda"), torch.tensor([number], device="cuda")
            cache, right = caches[number // 2 % 2], wanted[number // 2 % 2]
            torch.testing.assert_close(compiled(cache, row, at), fn(right, row, at))
    assert [cache.data_ptr() for cache in caches] == starts
    for cache, right in zip(caches, wanted, strict=True):
        assert torch.equal(cache, right)
