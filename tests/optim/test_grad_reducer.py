"""Main gradients on real processes: exact, and reduced while backward goes on.

What goes wrong is in test_grad_faults.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from tests.optim.reducing import (
    Looped,
    Mixture,
    batch,
    grads_alike,
    is_reduced,
    loss_of,
    main_grads,
    mixture,
    optimizing,
)
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from interlace.ir import parse
from interlace.nn import GroupedLinear
from interlace.optim import LayerWise
from interlace.optim.bucket_runs import all_reduced
from interlace.optim.grad_reducer import laid_out
from interlace.options import Backend, Options

MICRO, STEPS = 3, 4


def backward(made: LayerWise, model: nn.Module, seed: int, step: int) -> None:
    """A step's micro-batches."""
    dtype = next(model.parameters()).dtype
    for micro in range(MICRO):
        with nullcontext() if micro == MICRO - 1 else made.no_sync():
            loss_of(model, *batch(seed, step * MICRO + micro, dtype)).backward()


def train_beside_ddp(seed: int, overlap: bool) -> list[str]:
    """Steps with an optimizer; what differs from a loop of Linears under torch's DDP."""
    model = mixture(seed)
    looped = Looped(model)
    parallel = DistributedDataParallel(looped, gradient_as_bucket_view=True)
    plain = torch.optim.SGD(looped.parameters(), lr=0.5, momentum=0.5)
    wrong: list[str] = []
    options = Options(overlap=overlap, timeout_s=20)
    with optimizing(model, lr=0.5, options=options) as made:
        assert made._reducer is not None
        assert len(made._reducer.buckets) > 3
        for step in range(STEPS):
            backward(made, model, seed, step)
            plain.zero_grad(set_to_none=False)
            for micro in range(MICRO):
                with nullcontext() if micro == MICRO - 1 else parallel.no_sync():
                    loss_of(parallel, *batch(seed, step * MICRO + micro)).backward()
            found = grads_alike(model, looped, main_grads(made))
            wrong += [f"step {step}: {each}" for each in found]
            made.step()
            plain.step()
            wrong += [n for n, p in model.named_parameters() if p.grad is not None]
            made.zero_grad()
    return wrong


@pytest.mark.parametrize("overlap", [True, False])
def test_has_the_bits_of_a_loop_under_ddp(pool: Pool, overlap: bool, seed: int) -> None:
    assert pool(2).run(train_beside_ddp, seed, overlap) == [[], []]


def keep_rows(
    calls: list[tuple[str, torch.Tensor, torch.Tensor]], name: str, x: torch.Tensor
) -> Callable[[torch.Tensor], None]:
    """A hook that notes a layer's rows with the gradient of its result."""
    rows = x.detach().clone()
    return lambda dy: calls.append((name, rows, dy.clone()))


def local_sum(model: Mixture, seed: int, step: int) -> dict[str, torch.Tensor]:
    """This rank's gradients of a step: each micro-batch's, added in fp32 in their order."""
    total = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    dtype = model.inner.weight.dtype
    for micro in range(MICRO):
        calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        keep = partial(keep_rows, calls)
        handles = [
            getattr(model, name).register_forward_hook(
                lambda _, args, y, name=name, keep=keep: void(y.register_hook(keep(name, args[0])))
            )
            for name in ("up", "down")
        ]
        x, sizes = batch(seed, step * MICRO + micro, dtype)
        grads = torch.autograd.grad(loss_of(model, x, sizes), list(model.parameters()))
        for handle in handles:
            handle.remove()
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            if name not in ("up.weight", "down.weight"):
                total[name] += grad  # autograd's own, rounded to the Parameter's type
        for name, rows, dy in calls:
            start = 0
            for group, size in enumerate(sizes.tolist()):
                part = slice(start, start + size)
                if size:  # of the rows as they are, never rounded
                    made = dy[part].float().t() @ rows[part].float()
                    total[f"{name}.weight"][group] += made
                start += size
    return total


def void(_: object) -> None:
    return


def reduced(
    seed: int, dtype: torch.dtype, transport: Backend, op: Literal["mean", "sum"]
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Steps' main gradients, and this rank's own part of them."""
    model = mixture(seed, dtype)
    found, own = [], []
    with optimizing(model, op=op, options=Options(transport=transport, timeout_s=20)) as made:
        for step in range(2):
            backward(made, model, seed, step)
            found.append(main_grads(made))
            made.zero_grad()
    for step in range(2):
        own.append(local_sum(model, seed, step))
    return found, own


@pytest.mark.parametrize(
    ("world", "transport", "op"),
    [(2, "auto", "mean"), (2, "auto", "sum"), (3, "peer", "mean"), (4, "peer", "sum")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_gradients_are_exact(
    pool: Pool, world: int, transport: str, op: str, dtype: torch.dtype, seed: int
) -> None:
    """The fp32 sum of micro-batches in order, then over ranks in order, then divided."""
    ranks = pool(world).run(reduced, seed, dtype, transport, op)
    for step in range(2):
        for name in ranks[0][0][step]:
            wanted = ranks[0][1][step][name].clone()
            for _, own in ranks[1:]:
                wanted += own[step][name]
            if op == "mean":
                wanted /= world
            for found, _ in ranks:
                assert found[step][name].dtype == torch.float32
                assert torch.equal(found[step][name], wanted), (name, step)


# -- overlap --------------------------------------------------------------------------------------


def waits_inside(seed: int, overlap: bool) -> list[bool]:
    """By step: whether the first bucket was reduced before backward came to the first layer.

    Backward stands still there until it is, or the time is over.
    """
    model, seen = mixture(seed), []
    options = Options(overlap=overlap, timeout_s=20, trace=True)
    with optimizing(model, options=options) as made:

        def look(_: object) -> None:
            deadline = time.monotonic() + (15 if overlap else 0.1)
            while not is_reduced(made, 0) and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append(is_reduced(made, 0))

        for step in range(3):
            x, sizes = batch(seed, step)
            hidden = model.inner(x)
            hidden.register_hook(look)
            model.outer(model.down(torch.relu(model.up(hidden, sizes)), sizes)).sum().backward()
            left = time.perf_counter()
            main_grads(made)
            assert made._reducer is not None
            timelines = made.timelines()[: len(made._reducer.buckets)]
            first, last = timelines[0].spans[0], timelines[-1].spans[-1]
            assert (first.end_s < left) == overlap
            assert last.start_s >= first.end_s
            made.zero_grad()
    return seen


def test_is_reduced_while_backward_goes_on(pool: Pool, seed: int) -> None:
    """Backward itself waits to see it."""
    assert pool(2).run(waits_inside, seed, True) == [[True] * 3] * 2


def test_without_overlap_nothing_is(pool: Pool, seed: int) -> None:
    assert pool(2).run(waits_inside, seed, False) == [[False] * 3] * 2


def other_ways_round(seed: int) -> list[str]:
    """Ranks whose backwards complete buckets in opposite orders; what is wrong."""
    torch.manual_seed(seed)
    layers: Any = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
    for layer in layers:
        layer.weight.data.copy_(torch.randint(-2, 3, (8, 8)))
    rank, wrong = dist.get_rank(), []
    order = list(layers) if rank else list(layers)[::-1]
    with optimizing(layers, bucket_bytes=1) as made:
        for step in range(3):
            x = torch.full((2, 8), float(rank + step + 1))
            for layer in order:  # one backward each: the order is this one
                layer(x).sum().backward()
            wanted = torch.full((8, 8), 2.0 * (1.5 + step))
            found = main_grads(made).items()
            wrong += [f"step {step}, {n}" for n, grad in found if not torch.equal(grad, wanted)]
            made.zero_grad()
    return wrong


def test_ranks_may_complete_buckets_in_other_orders(pool: Pool, seed: int) -> None:
    assert pool(2).run(other_ways_round, seed) == [[], []]


# -- courses of a step ----------------------------------------------------------------------------


class Course(nn.Module):
    """Experts used in unusual ways, with whole numbers: sums are exact in any order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.shared, self.rest = GroupedLinear(4, 16, 16), GroupedLinear(4, 16, 16)
        draw = torch.Generator().manual_seed(seed)
        for param in self.parameters():
            param.data.copy_(torch.randint(-2, 3, param.shape, generator=draw))


def course(kind: str, model: Course, x: torch.Tensor, rank: int) -> None:
    """One micro-batch."""
    sizes = [3, 0, 7, 2]
    use = model.shared
    match kind:
        case "tied":
            (use(x, sizes) + use(x + 1, sizes)).sum().backward()
        case "retain_graph":
            loss = use(x, sizes).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        case "checkpoint" | "reentrant checkpoint":
            reentrant = kind == "reentrant checkpoint"
            y = checkpoint(use, x, sizes, use_reentrant=reentrant)
            z = checkpoint(use, x + 1, sizes, use_reentrant=reentrant)
            assert isinstance(y, torch.Tensor)
            assert isinstance(z, torch.Tensor)
            (y + z).sum().backward()
        case "unused by one rank":
            y = use(x, sizes)
            (y + model.rest(x, sizes) if rank == 0 else y).sum().backward()
        case "unused by all":
            use(x, sizes).sum().backward()
        case "frozen":
            (use(x, sizes) + model.rest(x, sizes)).sum().backward()
        case _:
            raise AssertionError(kind)


def run_course(kind: str, seed: int) -> list[str]:
    """What differs from the same courses of all ranks in one process."""
    model, reference = Course(seed), Course(seed)
    if kind == "frozen":
        model.rest.requires_grad_(False)
        reference.rest.requires_grad_(False)
    world, wrong = dist.get_world_size(), []
    draw = torch.Generator().manual_seed(seed)
    overlap = kind not in ("retain_graph", "reentrant checkpoint")  # which bring gradients twice
    with optimizing(model, options=Options(overlap=overlap, timeout_s=20)) as made:
        for step in range(3):
            reference.zero_grad()
            for number in range(2):
                xs = torch.randint(-3, 4, (world, 12, 16), generator=draw).float()
                for rank in range(world):
                    course(kind, reference, xs[rank].clone().requires_grad_(), rank)
                with nullcontext() if number else made.no_sync():
                    rank = dist.get_rank()
                    course(kind, model, xs[rank].clone().requires_grad_(), rank)
            found = main_grads(made)
            for (name, param), other in zip(
                model.named_parameters(), reference.parameters(), strict=True
            ):
                if param.requires_grad:
                    wanted = torch.zeros_like(other) if other.grad is None else other.grad / world
                    if not torch.equal(found[name], wanted):
                        wrong.append(f"step {step}, {name}")
            made.zero_grad()
    return wrong


COURSES = (
    *("tied", "retain_graph", "checkpoint", "reentrant checkpoint", "unused by one rank"),
    *("unused by all", "frozen"),
)


@pytest.mark.parametrize("kind", COURSES)
def test_every_course_of_a_step(pool: Pool, kind: str, seed: int) -> None:
    assert pool(2).run(run_course, kind, seed) == [[], []]


# -- what it is made of ---------------------------------------------------------------------------


def test_views_lie_as_their_parameters_do() -> None:
    plain = nn.Conv2d(4, 8, 3, dtype=torch.bfloat16)
    params = [*plain.to(memory_format=torch.channels_last).parameters()]  # type: ignore[call-overload]
    bucket = laid_out(params, [0, 512], 576, torch.float32)
    for param, view, start in zip(params, bucket.views, (0, 512), strict=True):
        assert (view.dtype, view.shape, view.stride()) == (
            torch.float32,
            param.shape,
            param.stride(),
        )
        assert view.data_ptr() == bucket.flat[start:].data_ptr()
        assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()


def seen_by_an_optimizer(seed: int) -> None:
    """fp32 gradients of bf16 Parameters, within a step alone; hooks and threads go."""
    before = {thread.ident for thread in threading.enumerate()}
    model = mixture(seed, torch.bfloat16)
    seen: list[torch.dtype] = []
    with optimizing(model) as made:
        made.optimizer.register_step_pre_hook(
            lambda *_: seen.extend(p.grad.dtype for p in model.parameters() if p.grad is not None)
        )
        for step in range(2):
            backward(made, model, seed, step)
            made.clip_grad_norm_(1e-3)
            norm = torch.cat([grad.flatten() for grad in main_grads(made).values()]).norm()
            assert norm == pytest.approx(1e-3, rel=1e-3)
            made.step()
            made.zero_grad()
            assert all(p.grad is None and p.grad_dtype == p.dtype for p in model.parameters())
    assert {*seen} == {torch.float32}
    assert {thread.ident for thread in threading.enumerate()} <= before | {None}
    backward(made, model, seed, 2)
    assert model.up.weight.grad is not None
    assert model.outer.weight.grad is not None


def test_an_optimizer_sees_main_gradients(pool: Pool, seed: int) -> None:
    pool(1).run(seen_by_an_optimizer, seed)


def test_a_bucket_is_a_program_with_a_text() -> None:
    program = all_reduced("reduce_bucket_3", torch.zeros(8), "mean", 4, 0)
    assert parse(str(program)) == program
    assert str(program).endswith('all_reduce(flat, flat, reduce="avg", team=dp)')
