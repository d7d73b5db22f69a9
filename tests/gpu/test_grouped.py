"""GroupedLinear by kernel, and main gradients reduced over NCCL.

    python -m pytest tests/gpu/test_grouped.py -q

Whole numbers that neither products nor sums round must give the bits of a loop of Linears through
cuBLAS; others must be within the rounding of the types. The grouped GEMM adds in another order than
cuBLAS, so that more cannot be asked of it.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import on_a_gpu
from tests.optim.reducing import is_reduced, main_grads
from tests.support.pool import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from interlace.nn import GroupedLinear
from interlace.nn.grouped import products as grouped
from interlace.nn.grouped.products import Groups
from interlace.optim import GradAccumulator, LayerWise
from interlace.options import Options

pytestmark = on_a_gpu(300)

BF16 = torch.bfloat16
ROUND = 2.0**-8
"""The largest relative error of rounding to bfloat16."""
STEP = 2.0**-24
"""Of one fp32 addition. Tensor cores may cut off instead of rounding: twice that."""

CASES = {
    "mixed": ([5, 0, 200, 64, 131], 400, 192, 320),
    "padded": ([5, 0, 200, 64, 131], 450, 256, 136),
    "first and last empty": ([0, 1, 255, 0], 256, 64, 64),
    "all empty": ([0, 0, 0], 32, 64, 128),
    "many groups": ([3] * 64, 200, 128, 128),
    "large": ([1000, 0, 3000, 96], 4096, 1024, 2048),
}


def whole(*shape: int) -> torch.Tensor:
    """-1, 0 and 1: sums of up to 256 products are exact in bfloat16."""
    return torch.randint(-1, 2, shape, device="cuda").to(BF16)


def sparse(*shape: int) -> torch.Tensor:
    """The same with few that are not 0, for long sums."""
    return whole(*shape) * (torch.rand(shape, device="cuda") < 0.05)


def layer_of(sizes: list[int], inner: int, outer: int, bias: bool = True) -> Any:
    return GroupedLinear(len(sizes), inner, outer, bias, device="cuda", dtype=BF16)


def own(param: torch.Tensor, group: int) -> Any:
    """A leaf with one group's values."""
    return param.detach()[group].clone().requires_grad_()


def sizes_on(sizes: list[int], kind: str) -> object:
    return sizes if kind == "list" else torch.tensor(sizes, device="cuda", dtype=torch.int64)


@pytest.mark.parametrize("kind", ["list", "device"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_exact_sums_have_the_bits_of_a_loop_of_linears(case: str, bias: bool, kind: str) -> None:
    sizes, tokens, inner, outer = CASES[case]
    layer = layer_of(sizes, inner, outer, bias)
    layer.weight.data.copy_(sparse(*layer.weight.shape))
    if bias:
        layer.bias.data.copy_(whole(*layer.bias.shape))
    total = sum(sizes)
    x: Any = sparse(tokens, inner)
    x[total:] = float("nan")
    x.requires_grad_()
    assert layer.explain(x) == "by kernel"
    y = layer(x, sizes_on(sizes, kind))
    dy = sparse(tokens, outer)
    dy[total:] = float("nan")
    y.backward(dy)
    assert not y[total:].any()
    assert x.grad is not None
    assert not x.grad[total:].any()
    start = 0
    for group, size in enumerate(sizes):
        part = slice(start, start + size)
        rows: Any = x.detach()[part].clone().requires_grad_()
        weight: Any = layer.weight.detach()[group].clone().requires_grad_()
        offset = own(layer.bias, group) if bias else None
        wanted: Any = nn.functional.linear(rows, weight, offset)
        wanted.backward(dy[part])
        assert torch.equal(y[part], wanted), group
        assert torch.equal(x.grad[part], rows.grad), group
        assert torch.equal(layer.weight.grad[group], weight.grad), group
        if offset is not None:
            assert torch.equal(layer.bias.grad[group], offset.grad), group
        start += size


@pytest.mark.parametrize("case", CASES)
def test_is_within_the_rounding_of_its_types(case: str, seed: int) -> None:
    sizes, tokens, inner, outer = CASES[case]
    torch.manual_seed(seed)
    layer = layer_of(sizes, inner, outer)
    x: Any = torch.randn(tokens, inner, device="cuda", dtype=BF16, requires_grad=True)
    main = torch.zeros(layer.weight.shape, device="cuda")
    _held = GradAccumulator(layer.weight, main)
    y = layer(x, sizes_on(sizes, "device"))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert layer.weight.grad is None
    start = 0
    for group, size in enumerate(sizes):
        part = slice(start, start + size)
        a, w, g = (
            x.detach()[part].double(),
            layer.weight.detach()[group].double(),
            dy[part].double(),
        )
        b = layer.bias.detach()[group].double()
        made, most = a @ w.t(), a.abs() @ w.abs().t()
        slack = 2 * inner * STEP * most + ROUND * made.abs() + ROUND * (made + b).abs()
        assert ((y[part].double() - made - b).abs() <= 1.02 * slack).all(), group
        made, most = g @ w, g.abs() @ w.abs()
        slack = 2 * outer * STEP * most + ROUND * made.abs()
        assert ((x.grad[part].double() - made).abs() <= 1.02 * slack).all(), group
        made, most = g.t() @ a, g.abs().t() @ a.abs()
        assert ((main[group].double() - made).abs() <= 2 * (size + 1) * STEP * most).all(), group
        start += size


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, BF16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_accumulating_is_one_exact_addition(case: str, kind: torch.dtype, seed: int) -> None:
    """What is added is what the kernel makes on its own: main = main + product, rounded once."""
    sizes, tokens, inner, outer = CASES[case]
    torch.manual_seed(seed)
    groups = Groups.of(
        sizes, num_groups=len(sizes), tokens=tokens, device=torch.device("cuda"), by_kernel=True
    )
    shape = len(sizes), outer, inner
    main = torch.randn(shape, device="cuda").to(kind)
    before = main.clone()
    wanted = main.clone()
    for _ in range(3):
        x = torch.randn(tokens, inner, device="cuda", dtype=BF16)
        dy = torch.randn(tokens, outer, device="cuda", dtype=BF16)
        made = torch.full(shape, float("nan"), device="cuda", dtype=kind)
        grouped.weight_gradient(dy, x, groups, out=made, accumulate=False)
        again = torch.full(shape, float("nan"), device="cuda", dtype=kind)
        grouped.weight_gradient(dy, x, groups, out=again, accumulate=False)
        assert torch.equal(made, again), "the same bits in every run"
        wanted += made
        grouped.weight_gradient(dy, x, groups, out=main, accumulate=True)
    assert torch.equal(main, wanted)
    for group, size in enumerate(sizes):
        assert size or torch.equal(main[group], before[group])


def test_the_host_waits_for_nothing_and_nothing_is_in_between() -> None:
    sizes = torch.tensor([64, 0, 128, 32, 0, 0, 16, 16], device="cuda")
    layer = GroupedLinear(8, 2048, 2048, device="cuda", dtype=BF16)
    main = torch.zeros(layer.weight.shape, device="cuda")
    _held = GradAccumulator(layer.weight, main)
    x = torch.randn(256, 2048, device="cuda", dtype=BF16, requires_grad=True)
    for _ in range(2):  # the first one compiles
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x, sizes).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    used = torch.cuda.max_memory_allocated() - before
    assert main.any()
    assert used < layer.weight.numel() * 2 / 4, "no temporary of the weight's size"


def test_a_layer_on_another_stream_is_waited_for() -> None:
    """The weight's node runs on the first stream, and the layer's backward on a slow one."""
    layer = GroupedLinear(2, 256, 256, False, device="cuda", dtype=BF16)
    main = torch.zeros(layer.weight.shape, device="cuda")
    _held = GradAccumulator(layer.weight, main)
    x = whole(64, 256)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = layer(x, [32, 32])
        torch.cuda._sleep(200_000_000)
        loss.sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    layer(x, [32, 32]).sum().backward()
    wanted = torch.stack([part.float().sum(0).expand(256, 256) for part in x.split(32)])
    assert torch.equal(main, 2 * wanted)


def test_who_is_told_that_the_sum_is_ready_sees_a_slow_stream() -> None:
    """The weight's node belongs to the current stream, its only layer's backward to a slow one."""
    layer = GroupedLinear(2, 256, 256, False, device="cuda", dtype=BF16)
    main, seen = torch.zeros(layer.weight.shape, device="cuda"), []
    _held = GradAccumulator(layer.weight, main, on_ready=lambda _: seen.append(main.clone()))
    x = whole(64, 256)
    layer(x, [32, 32]).sum().backward()  # compiles
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = layer(x, [32, 32])
        y.register_hook(lambda _: torch.cuda._sleep(200_000_000))
    torch.cuda.current_stream().wait_stream(side)
    y.sum().backward()
    wanted = torch.stack([part.float().sum(0).expand(256, 256) for part in x.split(32)])
    assert torch.equal(seen[0], wanted)
    assert torch.equal(seen[1], 2 * wanted)


def test_a_single_row_of_odd_stride() -> None:
    """To torch it is contiguous; descriptors and the grouped GEMM look at its stride."""
    layer = layer_of([1, 0], 64, 128, False)
    layer.weight.data.copy_(sparse(*layer.weight.shape))
    x: Any = whole(1, 101)[:, :64]
    assert x.is_contiguous()
    assert layer.explain(x) == "by kernel"
    dy = whole(1, 131)[:, :128]
    y = layer(x, [0, 1])
    y.backward(dy)
    assert torch.equal(y, x @ layer.weight[1].t())
    assert torch.equal(layer.weight.grad[1], dy.t() @ x)
    assert not layer.weight.grad[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_types_go_by_loop_and_say_so(dtype: torch.dtype) -> None:
    layer: Any = GroupedLinear(2, 64, 32, device="cuda", dtype=dtype)
    x = torch.randn(9, 64, device="cuda", dtype=dtype)
    assert "by loop: elements are" in layer.explain(x)
    y = layer(x, torch.tensor([4, 3], device="cuda"))
    rounding = STEP if dtype.itemsize == 4 else 2.0**-11
    for group, part in enumerate((slice(0, 4), slice(4, 7))):
        a, w = x[part].double(), layer.weight[group].double()
        wanted, most = a @ w.t() + layer.bias[group].double(), a.abs() @ w.abs().t()
        slack = 1.02 * (2 * 65 * STEP * (most + layer.bias[group].abs()) + rounding * wanted.abs())
        assert ((y[part].double() - wanted).abs() <= slack).all(), group
    assert not y[7:].any()


def test_runs_inside_a_compiled_function(seed: int) -> None:
    """There it is torch's own grouped GEMM, in one graph."""
    torch.manual_seed(seed)
    layer = layer_of([1] * 4, 128, 64)
    sizes = torch.tensor([5, 0, 40, 3], device="cuda")
    x = torch.randn(64, 128, device="cuda", dtype=BF16)
    run = torch.compile(lambda x, sizes: layer(x, sizes) * 2, backend="aot_eager", fullgraph=True)
    found, wanted = run(x, sizes), layer(x, sizes) * 2
    assert torch.equal(found, wanted)
    found.sum().backward()
    first = layer.weight.grad.clone()
    layer.weight.grad = None
    wanted.sum().backward()
    torch.testing.assert_close(first, layer.weight.grad, rtol=2 * ROUND, atol=1e-3)


# -- several GPUs ---------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Two layers of experts between dense ones, all sums exact."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = GroupedLinear(4, 64, 128, False, device="cuda", dtype=BF16)
        self.down = GroupedLinear(4, 128, 64, False, device="cuda", dtype=BF16)
        for param in self.parameters():
            param.data.copy_(sparse(*param.shape))

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x, sizes), sizes)


SIZES = ([16, 0, 40, 8], [64, 0, 0, 0], [0, 32, 0, 32], [1, 2, 3, 58])


def given(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's micro-batch: few rows that are not 0, so that main gradients stay exact."""
    draw = torch.Generator("cuda").manual_seed(100 * number + rank)
    x = torch.randint(-1, 2, (64, 64), generator=draw, device="cuda")
    keep = torch.rand((64, 64), generator=draw, device="cuda") < 0.05
    return (x * keep).to(BF16), torch.tensor(SIZES[(rank + number) % 4], device="cuda")


def wanted_of(model: Mixture, numbers: range) -> list[torch.Tensor]:
    """The sum of all ranks' gradients, one after another in one process."""
    twin = Mixture(0)
    twin.load_state_dict(model.state_dict())
    total = [torch.zeros(p.shape, device="cuda") for p in twin.parameters()]
    for number in numbers:
        for rank in range(dist.get_world_size()):
            grads = torch.autograd.grad(twin(*given(number, rank)).sum(), list(twin.parameters()))
            for into, grad in zip(total, grads, strict=True):
                into += grad
    return total


def layer_wise(model: nn.Module, **facts: Any) -> LayerWise:
    """Buckets of one layer each, and an optimizer that leaves weights alone."""
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    facts = {"bucket_bytes": 1 << 16, "options": Options(timeout_s=30), **facts}
    return LayerWise(sgd, model, mesh, **facts)


def by_reducer(seed: int) -> list[str]:
    """Steps of three micro-batches; what differs."""
    model, wrong = Mixture(seed), []
    with layer_wise(model, op="sum") as made:
        for step in range(4):
            numbers = range(3 * step, 3 * step + 3)
            for number in numbers:
                with nullcontext() if number == numbers[-1] else made.no_sync():
                    model(*given(number, dist.get_rank())).sum().backward()
            found = main_grads(made)
            wanted = wanted_of(model, numbers)
            for (name, _), total in zip(model.named_parameters(), wanted, strict=True):
                if off := (found[name].to(total.device) - total).abs().max().item():
                    wrong.append(f"step {step}, {name}: off by {off:g}")
            made.zero_grad()
    return wrong


@pytest.mark.nccl
def test_main_gradients_over_nccl_are_exact(gpus: Ranks, seed: int) -> None:
    assert gpus.run(by_reducer, seed, timeout_s=120) == [[]] * gpus.world


def by_ddp(seed: int) -> list[str]:
    """The same under torch's DDP, into its buckets, with sums that bfloat16 holds."""
    model, wrong = Mixture(seed), []
    _held = [GradAccumulator(layer.weight) for layer in (model.up, model.down)]
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    world = dist.get_world_size()
    for step in range(3):
        parallel.zero_grad(set_to_none=False)
        numbers = range(3 * step, 3 * step + 3)
        for number in numbers:
            with nullcontext() if number == numbers[-1] else parallel.no_sync():
                parallel(*given(number, dist.get_rank())).sum().backward()
        for (name, param), total in zip(
            model.named_parameters(), wanted_of(model, numbers), strict=True
        ):
            assert param.grad is not None
            found, mean = param.grad.float(), total / world
            slack = (3 + world) * ROUND * mean.abs().max()  # each sum may round once
            if not ((found - mean).abs() <= slack).all() or not found.any():
                wrong.append(f"step {step}, {name}: off by {(found - mean).abs().max():g}")
    return wrong


@pytest.mark.nccl
def test_under_ddp_over_nccl(gpus: Ranks, seed: int) -> None:
    assert gpus.run(by_ddp, seed, timeout_s=120) == [[]] * gpus.world


def overlaps(seed: int) -> list[bool]:
    """By step: whether the first bucket was over while the backward's stream was still busy."""
    model, seen = Mixture(seed), []
    with layer_wise(model) as made:
        for step in range(3):
            x, sizes = given(step, dist.get_rank())
            hidden = model.up(x, sizes)
            busy = torch.cuda.Event()

            def look(_: object, busy: torch.cuda.Event = busy) -> None:
                torch.cuda._sleep(3_000_000_000)  # more than a second, behind the second layer
                busy.record()
                deadline = time.monotonic() + 20
                while not is_reduced(made, 0) and time.monotonic() < deadline:
                    time.sleep(0.0005)
                seen.append(is_reduced(made, 0) and not busy.query())

            hidden.register_hook(look)
            model.down(hidden, sizes).sum().backward()
            torch.cuda.synchronize()
            assert main_grads(made)["up.weight"].isfinite().all()
            made.zero_grad()
    return seen


@pytest.mark.nccl
def test_reduction_runs_beside_the_backward(gpus: Ranks, seed: int) -> None:
    assert gpus.run(overlaps, seed, timeout_s=120) == [[True] * 3] * gpus.world
