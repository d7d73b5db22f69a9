"""Linear layers over a group, on 1 to 4 real processes: against F.linear and c10d's collectives."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather as gather_parts
from torch.distributed.nn.functional import reduce_scatter
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.errors import (
    ExecutorError,
    InputError,
    InterlaceError,
    OptionError,
    UnsupportedError,
)
from interlace.nn.functional import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)
from interlace.nn.parallel import programs as kept
from interlace.optim import GradAccumulator

STRATEGIES = ("auto", "pipeline", "ring", "peer")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "copy")
MANY = ("all_gather", "copy")
Tensors = list[torch.Tensor]


def ours(kind: str, x: Any, ws: Any, bs: Any, **options: Any) -> Tensors:
    """A layer's outputs."""
    options = {"group": dist.group.WORLD, **options}
    if kind in MANY:
        call = all_gather_linear if kind == "all_gather" else replicated_linear
        return list(call(x, ws, bs, **options))
    function = linear_reduce_scatter if kind == "reduce_scatter" else linear_all_reduce
    return [function(x, ws[0], bs[0], **options)]


class Same(torch.autograd.Function):
    """Marks what is the same on all ranks: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Sum(torch.autograd.Function):
    """All-reduce, of which everybody's upstream gradient is the same."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def plain(kind: str, x: Any, ws: Any, bs: Any) -> Tensors:
    """The same by F.linear and plain collectives."""
    ranks = dist.get_world_size()
    if kind in MANY:
        full = torch.cat(gather_parts(x)) if kind == "all_gather" else Same.apply(x)
        return [linear(full, w, b) for w, b in zip(ws, bs, strict=True)]
    y = linear(x, ws[0])
    if kind == "all_reduce":
        y = Sum.apply(y)
        return [y if bs[0] is None else y + bs[0].to(y.dtype)]
    parts = [part.contiguous() for part in y.chunk(ranks)]
    y = reduce_scatter(torch.empty_like(parts[0]), parts)
    return [y if bs[0] is None else y + Same.apply(bs[0]).to(y.dtype)]


def drawn(
    kind: str, rows: int, biased: bool, dtype: torch.dtype, seed: int, integers: bool = False
) -> Any:
    """x, weights, biases and upstream gradients of this rank, with leading dimensions; integers so
    small that all sums are exact."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own, same = torch.Generator().manual_seed(seed + rank), torch.Generator().manual_seed(seed)

    def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
        if integers:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    inner, outer = 12, (7, 5) if kind in MANY else (7,)
    given = rows * ranks if kind == "reduce_scatter" else rows
    x = draw(same if kind == "copy" else own, given, 3, inner)
    ws = [draw(own, n, inner) for n in outer]
    bs = [draw(own if kind in MANY else same, n) if biased else None for n in outer]
    height = rows * ranks if kind == "all_gather" else rows
    ups = [draw(same if kind == "all_reduce" else own, height, 3, n) for n in outer]
    return x, ws, bs, ups


def differentiated(call: Callable[..., Tensors], x: Any, ws: Any, bs: Any, ups: Any) -> Tensors:
    """Outputs and gradients of a layer."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *ws, *bs) if t is not None]
    rest = iter(leaves)
    given = [t if t is None else next(rest) for t in (x, *ws, *bs)]
    count = len(ws)
    outputs = call(given[0], given[1 : 1 + count], given[1 + count :])
    torch.autograd.backward(outputs, ups)
    return [
        *(y.detach() for y in outputs),
        *(leaf.grad for leaf in leaves if leaf.grad is not None),
    ]


def far(found: Tensors, expected: Tensors, exact: Tensors, dtype: torch.dtype) -> list[str]:
    """Which outputs or gradients are further from the exact ones than the plain layer's may be."""
    wrong = [] if len(found) == len(expected) else [f"{len(found)} instead of {len(expected)}"]
    for i, (mine, theirs, right) in enumerate(zip(found, expected, exact, strict=True)):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype == dtype
        if mine.numel():
            unit = torch.finfo(dtype).eps * right.abs().max()
            errors = [(t.double() - right).abs().max() for t in (mine, theirs)]
            if errors[0] > errors[1] + 2 * unit:
                wrong.append(f"result {i}: off by {errors[0]}, plain by {errors[1]}")
    return wrong


def options_of(strategy: str) -> dict[str, Any]:
    """Of a test's layer."""
    return {"strategy": strategy, "timeout_s": 30}


Case = tuple[str, str, int, bool, torch.dtype]
"""Kind, strategy, rows, whether there is a bias, dtype."""


def compare(cases: list[Case], seed: int) -> list[str]:
    """What is wrong on this rank."""
    return [f"{case}: {what}" for case in cases for what in compared(*case, seed)]


def compared(
    kind: str, strategy: str, rows: int, biased: bool, dtype: torch.dtype, seed: int
) -> list[str]:
    """A layer beside the serial one, the plain one, and that in fp64; on integers bit for bit."""

    def layer(*given: Any) -> Tensors:
        return ours(kind, *given, options=options_of(strategy))

    def reference(*given: Any) -> Tensors:
        return ours(kind, *given, options={**options_of(strategy), "overlap": False})

    def rival(*given: Any) -> Tensors:
        return plain(kind, *given)

    x, ws, bs, ups = drawn(kind, rows, biased, dtype, seed)
    double = [[None if t is None else t.double() for t in ts] for ts in (ws, bs, ups)]
    expected = differentiated(rival, x, ws, bs, ups)
    exact = differentiated(rival, x.double(), *double)
    wrong = far(differentiated(layer, x, ws, bs, ups), expected, exact, dtype)
    wrong += far(differentiated(reference, x, ws, bs, ups), expected, exact, dtype)
    given = drawn(kind, rows, biased, dtype, seed, integers=True)
    found, serial, expected = (differentiated(call, *given) for call in (layer, reference, rival))
    for i, (mine, same, theirs) in enumerate(zip(found, serial, expected, strict=True)):
        if not (torch.equal(mine, same) and torch.equal(mine, theirs)):
            wrong.append(f"bits of result {i}")
    return wrong


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
@pytest.mark.timeout(110)
def test_like_plain_linear_and_collectives(pool: Pool, world: int, seed: int) -> None:
    rng = random.Random(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    strategies = rng.sample(STRATEGIES, 2 if world == 2 else 1)
    cases = [
        (kind, strategy, rng.choice([1, 5, 8]), rng.random() < 0.5, rng.choice(dtypes))
        for kind in KINDS
        for strategy in strategies
    ]
    cases += [(kind, "auto", rng.choice([0, 7]), True, torch.float32) for kind in KINDS]
    for wrong in pool(world).run(compare, cases, seed, timeout_s=100):
        assert not wrong


def under_way(seed: int) -> bool:
    """Whether what a functional collective still gathers is waited for, forward and backward."""
    torch.manual_seed(seed)
    group: Any = dist.group.WORLD
    part, w = torch.randn(64, 32), torch.randn(16, 32)
    x = all_gather_tensor(part, 0, group)
    y = all_gather_linear(x, w, group=group)
    full = torch.cat(gather_parts(torch.cat(gather_parts(part))))
    return type(x) is AsyncCollectiveTensor and torch.allclose(y, full @ w.t(), atol=1e-4)


def test_what_is_under_way_is_waited_for(pool: Pool, seed: int) -> None:
    assert pool(2).run(under_way, seed) == [True, True]


def vary(sizes: list[int]) -> tuple[list[int], int]:
    """Row counts of which the results are wrong, and how many Programs served them."""
    wrong, ranks, group = [], dist.get_world_size(), c10d._get_default_group()
    before = len(kept.kept(group))
    w = torch.randn(64, 64, requires_grad=True)
    for size in sizes:
        x = torch.full((size, 64), 1.0 + dist.get_rank(), requires_grad=True)
        y = all_gather_linear(x, w, group=group)
        y.sum().backward()
        full = torch.cat([torch.full((size, 64), 1.0 + i) for i in range(ranks)])
        right = y.shape == (ranks * size, 64) and torch.allclose(y, full @ w.T, atol=1e-4)
        if x.grad is None or not right:
            wrong.append(size)
    return wrong, len(kept.kept(group)) - before


def test_row_counts_share_programs(pool: Pool, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(2, 128) for _ in range(40)]
    for wrong, programs in pool(2).run(vary, sizes, replace=True):
        assert not wrong
        assert programs <= 24, "one for each power of two and some, in two directions"


def modes(seed: int) -> None:
    """What a training loop does with layers, on one rank."""
    x, ws, _, ups = drawn("all_gather", 4, False, torch.float32, seed)
    group: Any = dist.group.WORLD
    w, v, up = ws[0].requires_grad_(), ws[1], ups[0]
    layer = functools.partial(all_gather_linear, group=group)
    expected = differentiated(lambda *a: plain("all_gather", *a), x, [w], [None], [up])

    with torch.no_grad():
        assert torch.equal(layer(x, w), expected[0])
        assert not layer(x, w).requires_grad
    with torch.inference_mode():
        assert torch.equal(layer(x, w), expected[0])
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
        layer(forward_ad.make_dual(x, x), w.detach())
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.func.vmap(lambda t: layer(t, w.detach()))(x)

    layer(x, w).backward(up)  # x needs no gradient
    torch.testing.assert_close(w.grad, expected[2])
    leaf = x.clone().requires_grad_()
    layer(leaf, [w.detach(), v])[0].backward(up)  # nor do weights; one output is not used
    torch.testing.assert_close(leaf.grad, expected[1])
    layer(x, w).backward(up)  # micro-batches add up
    torch.testing.assert_close(w.grad, 2 * expected[2])

    w.grad = leaf.grad = None
    y = checkpoint(lambda t: layer(t, w).relu(), leaf, use_reentrant=False)
    y.backward(up)
    plain_leaf, plain_w = (t.detach().clone().requires_grad_() for t in (x, w))
    torch.relu(plain("all_gather", plain_leaf, [plain_w], [None])[0]).backward(up)
    torch.testing.assert_close(leaf.grad, plain_leaf.grad)
    torch.testing.assert_close(w.grad, plain_w.grad)

    w.grad = None
    first, second = layer(x, [w, w])  # one weight, twice
    (first * 2 + second).backward(up)
    torch.testing.assert_close(w.grad, 3 * expected[2])

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    assert torch.equal(layer(x, w, group=mesh["tp"]), expected[0])
    turned = layer(x.transpose(0, 1), w, dim=-2)  # [3, rows, K]
    assert torch.equal(turned, expected[0].transpose(0, 1))
    back = linear_reduce_scatter(turned, torch.ones(2, 7), group=group, dim=1)
    assert back.shape == (3, 4, 2)
    assert linear_all_reduce(x[0, 0], w, group=group).shape == (7,)

    y = layer(leaf, w)
    own: Any = y.grad_fn
    while not hasattr(own, "saved_tensors") or not own.saved_tensors:
        own = own.next_functions[0][0]
    assert sum(t.untyped_storage().nbytes() for t in own.saved_tensors) <= leaf.nbytes + w.nbytes
    (grad,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
        grad.sum().backward()


def test_in_training_loops(pool: Pool, seed: int) -> None:
    pool(2).run(modes, seed)


def under_autocast(kind: str, seed: int) -> list[str]:
    x, ws, bs, ups = drawn(kind, 4, True, torch.float32, seed)

    def cast(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
        def call(*given: Any) -> Tensors:
            with torch.autocast("cpu", torch.bfloat16):
                return function(kind, *given)

        return call

    ups = [up.bfloat16() for up in ups]
    found, expected = (differentiated(cast(f), x, ws, bs, ups) for f in (ours, plain))
    return [
        f"result {i}: {mine} instead of {theirs}"
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True))
        if mine.dtype != theirs.dtype or not torch.allclose(mine, theirs, rtol=0.02, atol=0.3)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_as_for_linear(pool: Pool, kind: str, seed: int) -> None:
    assert pool(2).run(under_autocast, kind, seed) == [[], []]


def accumulated(kind: str, seed: int) -> None:
    """Gradients go into an fp32 main gradient, those of other uses too."""
    x, ws, bs, ups = drawn(kind, 4, True, torch.bfloat16, seed)
    expected = differentiated(lambda *a: plain(kind, *a), x, ws, bs, ups)
    params = [torch.nn.Parameter(w.clone()) for w in ws]
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    ready: list[Any] = []
    made = [GradAccumulator(p, s, on_ready=ready.append) for p, s in zip(params, sums, strict=True)]
    for _ in range(2):
        torch.autograd.backward(ours(kind, x, params, bs), ups)
    first = len(ws) + 1
    for total, param, right in zip(sums, params, expected[first:], strict=False):
        assert param.grad is None
        torch.testing.assert_close(total, 2 * right.float(), rtol=0.02, atol=0.2)
    assert len(ready) == 2 * len(made)
    for each in made:
        each.close()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_into_accumulators(pool: Pool, kind: str, seed: int) -> None:
    pool(2).run(accumulated, kind, seed)


def refused() -> None:
    """Errors name the argument, before anything is communicated."""
    group: Any = dist.group.WORLD
    x, w, b = torch.ones(5, 3), torch.ones(4, 3), torch.ones(4)
    alone: list[Any] = [dist.new_group([rank]) for rank in range(2)]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    replicated = distribute_tensor(w, mesh["a"])
    call, scatter = functools.partial(all_gather_linear, group=group), linear_reduce_scatter
    attempts: list[tuple[Callable[[], Any], str]] = [
        (lambda: call(x, torch.ones(4, 2)), r"`weight` has shape \[4, 2\].*give \[N, 3\]"),
        (lambda: call(x, [w, torch.ones(4)]), r"`weights\[1\]` has shape \[4\]"),
        (lambda: call(x, torch.ones(0, 3)), r"`weight` has shape \[0, 3\].* N > 0"),
        (lambda: call(x, w, torch.ones(3)), r"`bias` has shape \[3\]: give \[4\]"),
        (lambda: call(x, [w, w], [b]), "`weights` are 2, and `biases` 1"),
        (lambda: call(x, []), "`weights` are 0"),
        (lambda: call(x, w.double()), "`weight` is torch.float64, and `x` torch.float32"),
        (lambda: call(x, w.to("meta")), "`weight` is on meta"),
        (lambda: call(x.long(), w.long()), "`x` is torch.int64"),
        (lambda: call(x, replicated), "`weight` is a DTensor"),
        (lambda: call(x[0], w), "`dim` is 0"),
        (lambda: call(x, w, dim=1), "`dim` is 1"),
        (lambda: call(x, w, group=None), "`group` is None"),
        (lambda: call(x, w, group=alone[1 - dist.get_rank()]), "`group` is .*not a process group"),
        (lambda: call(x, w, group=mesh), "mesh of 2 dimensions"),
        (lambda: scatter(x, w, group=group), "`x` has size 5 in dimension 0, .* multiple of 2"),
        (lambda: scatter(x, w, b[:2], group=group), "`bias` has shape"),
    ]
    with pytest.raises(OptionError, match="fix: options="):
        call(x, w, overlap=False)  # pyright: ignore
    for attempt, told in attempts:
        with pytest.raises(InputError, match=told):
            attempt()
    assert torch.equal(all_gather_linear(x, w, b, group=alone[dist.get_rank()]), linear(x, w, b))
    with pytest.raises(InterlaceError, match="rank 0 has rows=5, and rank 1 rows=6"):
        call(torch.ones(5 + dist.get_rank(), 3), w, options=options_of("ring"))
    interlace.reset()
    assert torch.equal(call(x, w), torch.full((10, 4), 3.0))


def test_what_does_not_fit_is_refused(pool: Pool) -> None:
    pool(2).run(refused, replace=True)


def freed() -> tuple[int, int]:
    """How many Programs a group has, and how many groups once it is gone."""
    group: Any = dist.new_group([0, 1])
    before = len(kept._programs)
    all_gather_linear(torch.ones(2, 3), torch.ones(4, 3), group=group)
    (made,) = kept._programs[group].programs.values()
    executor = made.all()[0].executor
    count = len(made.all())
    dist.destroy_process_group(group)
    del group, made
    gc.collect()
    with pytest.raises(ExecutorError, match="closed"):
        executor.run([torch.ones(2, 3), torch.ones(4, 3)])
    return count, len(kept._programs) - before


def test_destroyed_group_frees_programs(pool: Pool) -> None:
    assert pool(2).run(freed, replace=True) == [(1, 0)] * 2
