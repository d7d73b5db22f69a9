"""Adam on a GPU: the bits are those of the CPU, nobody waits, and no memory is taken.

How fast it is, `interlace bench kernels --only adam` says.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from tests.gpu.cases import on_a_gpu
from torch import Tensor

from interlace.errors import OptimizerError
from interlace.optim import Adam, AdamW
from interlace.optim.adam.arithmetic import AdamSpec, FlatParam, key_of, scalars, update_reference

pytestmark = on_a_gpu(300)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MOMENTS: dict[str, Any] = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "fp32, bf16 moments": (FP32, MOMENTS),
    "bf16": (BF16, MOMENTS),
    "bf16, nearest": (BF16, {**MOMENTS, "stochastic_rounding": False}),
    "bf16, fp32 moments": (BF16, {}),
    "bf16, remainders": (BF16, {**MOMENTS, "master_weights": "remainder"}),
    "bf16, masters": (BF16, {**MOMENTS, "master_weights": "fp32"}),
    "bf16, masters, fp32 moments": (BF16, {"master_weights": "fp32"}),
    "fp16, masters": (FP16, {"master_weights": "fp32", "exp_avg_sq_dtype": BF16}),
    "bf16, mixed": (BF16, {"exp_avg_dtype": BF16}),
}


def raw(tensor: Tensor) -> Tensor:
    """Bits on the host, every NaN the same."""
    tensor = tensor.detach().cpu()
    word = tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return torch.where(tensor.isnan(), torch.zeros_like(word) - 7, word)


def drawn(dtype: torch.dtype, seed: int, count: int = 6) -> list[Tensor]:
    """Parameters on the host, at odd addresses and of odd sizes among others."""
    draw, made = random.Random(seed), []
    torch.manual_seed(seed)
    for _ in range(count):
        numel = draw.choice([0, 1, 7, 1000, 16384, 70_003, 1 << 18])
        start = draw.choice([0, 0, 1, 3])
        made.append(torch.randn(numel + start).to(dtype)[start:])
    return made


def pair(
    kind: type[Adam], values: list[Tensor], **options: Any
) -> tuple[list[Tensor], list[Tensor], Adam, Adam]:
    """The same parameters on the GPU, at the same odd addresses, and on the host."""
    there = []
    for value in values:
        base = torch.zeros(value.numel() + value.storage_offset(), dtype=value.dtype, device="cuda")
        there.append(base[value.storage_offset() :].copy_(value).requires_grad_())
    here = [value.clone().requires_grad_() for value in values]
    return there, here, kind(there, **options), kind(here, **options)


def same(there: list[Tensor], here: list[Tensor], one: Adam, other: Adam) -> None:
    for number, (p, q) in enumerate(zip(there, here, strict=True)):
        assert torch.equal(raw(p), raw(q)), number
        for name in other.state[q]:
            mine, its = one.state[p][name], other.state[q][name]
            if name == "remainder":
                mine, its = mine.view(torch.int16), its.view(torch.int16)
                assert torch.equal(mine.cpu(), its), (number, name)
            else:
                assert torch.equal(raw(mine), raw(its)), (number, name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("fused", [None, True])
def test_the_bits_are_the_cpus(name: str, kind: type[Adam], fused: bool | None, seed: int) -> None:
    """Kernel and reference on different devices; with NaN, infinities, zeros and tiny numbers."""
    dtype, options = KINDS[name]
    there, here, one, other = pair(
        kind, drawn(dtype, seed), lr=0.01, weight_decay=0.1, seed=seed, fused=fused, **options
    )
    for step in range(4):
        for i, (p, q) in enumerate(zip(there, here, strict=True)):
            grad = torch.randn_like(q) * 10.0 ** random.randint(-6, 2)
            if q.numel() > 20 and step == 2:
                odd = [0.0, -0.0, float("nan"), float("inf"), 1e30, 1e-30, 1e-38]
                grad[: len(odd)] = torch.tensor(odd)
            skipped = step == 1 and i == 0
            q.grad = None if skipped else grad
            p.grad = None if skipped else grad.cuda()
        one.step()
        other.step()
        same(there, here, one, other)


def test_nobody_waits_and_nothing_in_use_is_overwritten(seed: int) -> None:
    """Many steps are under way at once, each with gradients elsewhere, and none is wrong."""
    there, here, one, other = pair(AdamW, drawn(BF16, seed, 40), lr=0.01, **MOMENTS)
    steps = 30
    grads = [[torch.randn_like(q) for q in here] for _ in range(steps)]
    moved = [[g.cuda() for g in step] for step in grads]
    for p, g in zip(there, moved[0], strict=True):
        p.grad = g
    one.step()  # compiles, and makes the states
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        begun = time.perf_counter()
        for step in moved[1:]:
            for p, g in zip(there, step, strict=True):
                p.grad = g
            one.step()
        took = time.perf_counter() - begun
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert took < 0.2, "the GPU sleeps for longer"
    for step in grads:
        for q, g in zip(here, step, strict=True):
            q.grad = g
        other.step()
    same(there, here, one, other)


def test_on_another_stream(seed: int) -> None:
    """Steps on changing streams, while the first one's memory is used anew."""
    there, here, one, other = pair(AdamW, drawn(BF16, seed), lr=0.01, **MOMENTS)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(12):
        stream = streams[step % 3]
        stream.wait_stream(streams[(step - 1) % 3])
        with torch.cuda.stream(stream):
            for p, q in zip(there, here, strict=True):
                q.grad = torch.randn_like(q)
                p.grad = q.grad.cuda()
            one.step()
            one.zero_grad()
        other.step()
        torch.full((1 << 20,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    same(there, here, one, other)


def test_a_step_in_a_graph_is_refused(seed: int) -> None:
    for warm in (False, True):
        there, _, one, _ = pair(AdamW, drawn(BF16, seed))
        for p in there:
            p.grad = torch.ones_like(p)
        if warm:
            one.step()
        torch.cuda.synchronize()
        with (
            pytest.raises(OptimizerError, match="captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            one.step()
        torch.cuda.synchronize()


@pytest.mark.parametrize("name", KINDS)
def test_a_step_takes_no_memory(name: str) -> None:
    """Beyond its tables: no fp32 copy of a state, which others make."""
    dtype, options = KINDS[name]
    params = [torch.zeros(1 << 24, dtype=dtype, device="cuda", requires_grad=True)]
    params[0].grad = torch.ones_like(params[0])
    optimizer = AdamW(params, **options)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1 << 16


def test_more_than_2_to_the_31_elements(seed: int) -> None:
    """Places before, at and after the 2^31st and 2^32nd element, against the reference."""
    count = (1 << 32) + 100_003
    if torch.cuda.mem_get_info()[0] < 9 * count:
        pytest.skip("needs 40 GB")
    param = torch.ones(count, dtype=BF16, device="cuda", requires_grad=True)
    param.grad = torch.full_like(param, 0.3)
    optimizer = AdamW([param], lr=0.01, seed=seed, **MOMENTS)
    optimizer.step()
    spec = AdamSpec(p=BF16, g=BF16, m=BF16, v=BF16, stochastic=True)
    row = scalars(1, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for start in (0, (1 << 31) - 500, (1 << 32) - 500, count - 1000):
        flat = FlatParam(
            *(torch.full((1000,), x, dtype=BF16, device="cuda") for x in (1.0, 0.3, 0.0, 0.0))
        )
        update_reference(spec, flat, row, key=key_of(seed, 0), base=start)
        at, state = slice(start, start + 1000), optimizer.state[param]
        assert torch.equal(param[at], flat.p)
        assert torch.equal(state["exp_avg"][at], flat.m)
        assert torch.equal(state["exp_avg_sq"][at], flat.v)
