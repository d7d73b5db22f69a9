"""The cross-entropies on GPUs: kernels against fp64, no synchronisation, memory, several ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.nn.cross_entropy_cases import Case, arbitrary, far, laid_out, reference
from tests.support.pool import Ranks

from interlace.errors import TargetError
from interlace.nn.cross_entropy.loss import Reduction
from interlace.nn.functional import cross_entropy, linear_cross_entropy, raise_pending

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


def check(case: Case, device: torch.device, rank: int = 0) -> list[str]:
    """What is wrong with this rank's loss and gradients."""
    x, y, weight, up = case.draw()
    own = slice(sum(case.sizes[:rank]), sum(case.sizes[: rank + 1]))
    local = laid_out(x[..., own].to(device), case.layout).requires_grad_()
    part = None if weight is None else weight[own].to(device)
    several = len(case.sizes) > 1
    group = dist.group.WORLD if several else None
    loss = cross_entropy(local, y.to(device), part, group=group, **case.options())
    wanted, gradient, room, slack = reference(case)
    before = local.detach().clone()
    wrong = [what for what in [far(loss, wanted, room)] if what]
    for _ in range(2):
        local.grad = None
        loss.backward(up.to(loss), retain_graph=True)
        assert local.grad is not None
        slack_here = slack[..., own] if slack.shape[-1] > 1 else slack
        wrong += [what for what in [far(local.grad, gradient[..., own], slack_here)] if what]
    if not torch.equal(local.detach(), before):
        wrong.append("the logits were written to")
    torch.cuda.synchronize()
    try:
        raise_pending()
        told_so = False
    except TargetError:
        told_so = True
    if told_so != case.bad:
        wrong.append(f"an error was told: {told_so}")
    if several:
        mine = loss.detach().nan_to_num(nan=-1.0).contiguous()
        every = [torch.empty_like(mine) for _ in case.sizes]
        dist.all_gather(every, mine)
        if any(not torch.equal(theirs, mine) for theirs in every):
            wrong.append("ranks have other bits")
    return [f"{what}; {case}" for what in wrong]


def test_arbitrary(device: torch.device, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        case = arbitrary(draw, sizes=(draw.choice([1, 37, 256, 50257, 32000]),))
        assert not (wrong := check(case, device)), wrong


@pytest.mark.parametrize("rows", [1, 40, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_128256_classes(device: torch.device, dtype: torch.dtype, rows: int, seed: int) -> None:
    """One row in parts; many in one program each (against torch's, in fp64, by blocks)."""
    classes = 128256
    torch.manual_seed(seed)
    x = (3 * torch.randn(rows, classes, device=device)).to(dtype).requires_grad_()
    y = torch.randint(0, classes, (rows,), device=device)
    up = torch.randn(rows, device=device)
    loss = cross_entropy(x, y, reduction="none", label_smoothing=0.1)
    loss.backward(up)
    assert x.grad is not None
    eps = torch.finfo(dtype).eps / 2
    for start in range(0, rows, 100):
        at = slice(start, start + 100)
        leaf = x.detach()[at].double().requires_grad_()
        wanted = torch.nn.functional.cross_entropy(
            leaf, y[at], reduction="none", label_smoothing=0.1
        )
        wanted.backward(up[at].double())
        assert leaf.grad is not None
        torch.testing.assert_close(loss[at].double(), wanted, rtol=1e-6, atol=1e-5)
        slack = leaf.grad.abs() * eps + 2.0**-24 * 1000 * up[at].double().abs()[:, None] * (
            torch.softmax(leaf.detach(), -1) + 0.1 / classes
        )
        slack = slack.scatter_add(1, y[at, None], up[at, None].double().abs() * 2.0**-20)
        assert not (wrong := far(x.grad[at], leaf.grad.cpu(), slack.cpu())), wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_class_weights_of_any_layout(device: torch.device, dtype: torch.dtype) -> None:
    """Strided, expanded, and from an address that is no multiple of 16; some 50 roundings."""
    x = torch.randn(40, 4096, device=device)
    y = torch.randint(0, 4096, (40,), device=device)
    table = (torch.rand(4097, 2, device=device) + 0.5).to(dtype)
    for weight in (table[1:, 1], table[:1, 0].expand(4096), table.t().contiguous()[0, 1:]):
        wanted = torch.nn.functional.cross_entropy(
            x.double(), y, weight.double(), label_smoothing=0.1
        )
        loss = cross_entropy(x, y, weight, label_smoothing=0.1)
        torch.testing.assert_close(loss.double(), wanted, rtol=50 * 2.0**-24, atol=0.0)


def test_nothing_waits_and_one_gradient_is_held(device: torch.device) -> None:
    rows, classes = 2048, 32000
    x = torch.randn(rows, classes, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = torch.randint(0, classes, (rows,), device=device)
    by = torch.tensor(rows, device=device)
    calls: list[dict[str, Any]] = [
        {},
        {"denominator": by},
        {"label_smoothing": 0.1, "z_loss": 1e-4},
    ]
    for options in calls:
        cross_entropy(x, y, **options).backward()  # compiles
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in calls:
            x.grad = None
            cross_entropy(x, y, **options).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - held <= x.nbytes + (1 << 20)


def test_in_a_graph(device: torch.device) -> None:
    x = torch.randn(64, 1000, device=device, requires_grad=True)
    y = torch.randint(0, 1000, (64,), device=device)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.autograd.grad(cross_entropy(x, y), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = cross_entropy(x, y)
        (grad,) = torch.autograd.grad(loss, x)
    with torch.no_grad():
        x.normal_()
    y.random_(0, 1000)
    graph.replay()
    torch.cuda.synchronize()
    again = cross_entropy(x, y)
    assert torch.equal(loss, again)
    assert torch.equal(grad, torch.autograd.grad(again, x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("accumulate", [None, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_linear(
    device: torch.device,
    reduction: Reduction,
    accumulate: torch.dtype | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """As exact as torch's unfused, at a peak of a few chunks above what it returns."""
    torch.manual_seed(seed)
    rows, inner, classes = 4096, 256, 32000
    hidden = torch.randn(rows, inner, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, inner, device=device) / 16).to(dtype).requires_grad_()
    y = torch.randint(0, classes, (rows,), device=device)
    up = torch.rand(rows if reduction == "none" else (), device=device) + 1.0
    found, losses = [], []
    for which in ("ours", "theirs", "exact"):
        h, w = (t.detach().clone().requires_grad_() for t in (hidden, weight))
        if which == "exact":
            h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        if which == "ours":
            loss = linear_cross_entropy(
                h, w, y, reduction=reduction, chunk_size=256, accumulate_dtype=accumulate
            )
        else:
            logits = torch.nn.functional.linear(h, w)
            logits = logits.float() if which == "theirs" else logits
            loss = torch.nn.functional.cross_entropy(logits, y, reduction=reduction)
        loss.backward(up.to(loss))
        peak = torch.cuda.max_memory_allocated() - held
        if which == "ours":
            gradients = 2 * (h.nbytes + 3 * w.nbytes)
            assert peak <= gradients + 3 * 256 * classes * 2 + (64 << 20)
        losses.append(loss.detach().double())
        found.append([t.grad.double() for t in (h, w) if t.grad is not None])
    torch.testing.assert_close(losses[0], losses[2], rtol=2e-3, atol=2e-2)
    for ours, theirs, exact in zip(*found, strict=True):
        error = (ours - exact).norm() / exact.norm()
        assert error <= 1.5 * (theirs - exact).norm() / exact.norm() + 2.0**-8


def several_ranks(seed: int) -> list[str]:
    draw, world = random.Random(seed), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device())
    wrong: list[str] = []
    for _ in range(40):
        sizes = (*draw.choices([64, 1000, 37, 0, 8064], k=world - 1), 64)
        wrong += check(arbitrary(draw, sizes=sizes), device, dist.get_rank())
    return wrong


def test_several_ranks(gpus: Ranks, seed: int) -> None:
    found = gpus.run(several_ranks, seed, timeout_s=200)
    assert not any(found), found


def several_ranks_linear(seed: int) -> list[str]:
    """Overlapped is in order, bit for bit; both are near what one rank computes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1000, 256, generator=generator).bfloat16().cuda()
    weight = (torch.randn(1000 * world, 256, generator=generator) / 16).bfloat16().cuda()
    y = torch.randint(0, 1000 * world, (1000,), generator=generator).cuda()
    own = slice(1000 * rank, 1000 * (rank + 1))
    wrong: list[str] = []
    for reduction in ("mean", "none"):
        results = []
        for overlap in (True, False, None):
            h = hidden.clone().requires_grad_()
            w = (weight if overlap is None else weight[own]).clone().requires_grad_()
            group = None if overlap is None else dist.group.WORLD
            loss = linear_cross_entropy(h, w, y, reduction=reduction, group=group, chunk_size=128,
                                        overlap=bool(overlap))  # fmt: skip
            loss.sum().backward()
            assert h.grad is not None
            assert w.grad is not None
            results.append((loss.detach(), h.grad, w.grad[own] if overlap is None else w.grad))
        for a, b, c in zip(*results, strict=True):
            if not torch.equal(a, b):
                wrong.append(f"{reduction}: overlapped is not in order")
            if not (a.double() - c.double()).norm() <= 2.0**-6 * c.double().norm():
                wrong.append(f"{reduction}: not what one rank computes")
    return wrong


def test_several_ranks_linear(gpus: Ranks, seed: int) -> None:
    found = gpus.run(several_ranks_linear, seed, timeout_s=120)
    assert not any(found), found
