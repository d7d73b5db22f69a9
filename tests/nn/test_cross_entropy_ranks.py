"""The cross-entropy over a vocabulary cut over 1 to 4 real processes, evenly and not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.nn.cross_entropy_cases import Case, arbitrary, far, laid_out, reference
from tests.support.pool import Pool

from interlace.errors import InputError, TargetError
from interlace.nn.cross_entropy import vocabulary
from interlace.nn.functional import cross_entropy, linear_cross_entropy, raise_pending

SIZES = {
    1: [(37,)],
    2: [(32, 32), (5, 60), (64, 0)],
    3: [(16, 16, 16), (1, 40, 7), (0, 30, 3)],
    4: [(64, 64, 64, 64), (3, 3, 3, 1), (40, 0, 1, 9)],
}
"""How many classes each rank has: as many, uneven, and with ranks that have none."""


def check(case: Case, told: bool) -> tuple[list[str], bytes]:
    """What is wrong with this rank's loss and part of the gradient; the bits of the loss."""
    rank, wrong = dist.get_rank(), []
    x, y, weight, up = case.draw()
    start = sum(case.sizes[:rank])
    own = slice(start, start + case.sizes[rank])
    local = laid_out(x[..., own], case.layout).requires_grad_()
    before = local.detach().clone()
    options: dict[str, Any] = {"shard_sizes": case.sizes} if told else {}
    part = None if weight is None else weight[own]
    loss = cross_entropy(local, y, part, group=dist.group.WORLD, **case.options(), **options)
    wanted, gradient, room, slack = reference(case)
    up = up.to(loss.dtype)
    for _ in range(2):
        local.grad = None
        loss.backward(up, retain_graph=True)
        assert local.grad is not None
        slack_here = slack[..., own] if slack.shape[-1] > 1 else slack
        wrong += [f"gradient: {what}" for what in [far(local.grad, gradient[..., own], slack_here)]
                  if what]  # fmt: skip
    wrong += [f"loss: {what}" for what in [far(loss, wanted, room)] if what]
    if not torch.equal(local.detach(), before):
        wrong.append("the logits were written to")
    if case.bad:
        try:
            raise_pending()
            wrong.append("no error was told")
        except TargetError:
            pass
    bits = loss.detach().reshape(-1).contiguous().view(torch.uint8)
    return [f"{what}; {case}" for what in wrong], bytes(bits.tolist())


def check_all(cases: list[tuple[Case, bool]]) -> tuple[list[str], list[bytes]]:
    results = [check(case, told) for case, told in cases]
    return [what for wrong, _ in results for what in wrong], [bits for _, bits in results]


def verify(pool: Pool, cases: list[tuple[Case, bool]], world: int) -> None:
    found = pool(world).run(check_all, cases, timeout_s=100)
    assert not any(wrong for wrong, _ in found), found
    for rank, (_, bits) in enumerate(found):
        assert bits == found[0][1], f"the losses of rank {rank} are not the bits of rank 0"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_grid(pool: Pool, world: int, seed: int) -> None:
    draw = random.Random(seed)
    cases = [
        (arbitrary(draw, sizes=sizes, dtype=dtype, reduction=reduction, smoothing=smoothing), told)
        for sizes in SIZES[world]
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        for reduction in ("none", "mean", "sum")
        for smoothing in (0.0, 0.1)
        for told in (False, True)
    ]
    verify(pool, cases, world)


@pytest.mark.parametrize("world", [2, 4])
def test_128256_classes(pool: Pool, world: int, seed: int) -> None:
    for sizes in ((128256 // world,) * world, (100_000, *(28256 // (world - 1),) * (world - 1))):
        case = Case(seed=seed, batch=(2,), sizes=sizes, dtype=torch.bfloat16, ignored=0.0,
                    smoothing=0.1, weighted=True, z_loss=1e-4)  # fmt: skip
        verify(pool, [(case, False)], world)


def special() -> None:
    """No rows, one row, and none that counts."""
    group, rank = dist.group.WORLD, dist.get_rank()
    for batch in ((0,), (2, 0)):
        x = torch.randn(*batch, 4, requires_grad=True)
        y = torch.zeros(batch, dtype=torch.int64)
        assert cross_entropy(x, y, group=group).isnan()
        assert cross_entropy(x, y, group=group, reduction="sum").item() == 0.0
        loss = cross_entropy(x, y, group=group, reduction="none")
        assert loss.shape == batch
        loss.sum().backward()
        assert x.grad is not None
    x = torch.randn(3, 4 + rank, requires_grad=True)
    cross_entropy(x, torch.full((3,), -100), group=group).backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_special(pool: Pool) -> None:
    pool(2).run(special)


def masked(sizes: tuple[int, ...]) -> None:
    """A rank whose classes are all masked, and rows in which every rank's are."""
    rank, start = dist.get_rank(), sum(sizes[: dist.get_rank()])
    full = torch.arange(3.0 * sum(sizes)).view(3, -1).sin()
    full[:, start * 0 : sizes[0]] = -torch.inf
    full[2] = -torch.inf
    y = torch.tensor([sizes[0], 0, sizes[0]])  # the second row's own class is masked
    ours = full[:, start : start + sizes[rank]].clone().requires_grad_()
    theirs = full.double().requires_grad_()
    for smoothing in (0.0, 0.1):
        ours.grad = theirs.grad = None
        loss = cross_entropy(
            ours, y, group=dist.group.WORLD, reduction="none", label_smoothing=smoothing
        )
        wanted = torch.nn.functional.cross_entropy(
            theirs, y, reduction="none", label_smoothing=smoothing
        )
        torch.testing.assert_close(loss.double(), wanted, equal_nan=True, rtol=1e-6, atol=1e-6)
        loss.sum().backward()
        wanted.sum().backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        mine = theirs.grad[:, start : start + sizes[rank]]
        torch.testing.assert_close(ours.grad.double(), mine, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_masked(pool: Pool) -> None:
    pool(2).run(masked, (4, 6))
    pool(3).run(masked, (4, 6, 3))


def count_collectives() -> list[int]:
    """How many collectives a call takes: told nothing, and told the sizes; forward and backward."""
    started: list[int] = []
    real = vocabulary.start_gather

    def counted(*args: Any) -> Any:
        started.append(1)
        return real(*args)

    vocabulary.start_gather = counted
    try:
        found = []
        x, y = torch.randn(3, 4, requires_grad=True), torch.tensor([1, 2, 3])
        for sizes in (None, [4] * dist.get_world_size()):
            started.clear()
            cross_entropy(x, y, group=dist.group.WORLD, shard_sizes=sizes).backward()
            found.append(len(started))
        return found
    finally:
        vocabulary.start_gather = real


def test_collectives_of_a_call(pool: Pool) -> None:
    assert pool(2).run(count_collectives) == [[2, 1]] * 2


def wrong_sizes() -> None:
    x, y = torch.randn(3, 4), torch.tensor([1, 2, 3])
    for sizes in ([4], [3, 5], [4, 4, 4]):
        with pytest.raises(InputError, match="has 4 classes"):
            cross_entropy(x, y, group=dist.group.WORLD, shard_sizes=sizes)
    with pytest.raises(TargetError, match="row 0 is 8, where there are classes 0 to 7"):
        cross_entropy(x, torch.tensor([8, 0, 7]), group=dist.group.WORLD, check_targets=True)
    assert cross_entropy(x, torch.tensor([7, 0, 7]), group=dist.group.WORLD).isfinite()


def test_wrong_sizes(pool: Pool) -> None:
    pool(2).run(wrong_sizes)


def by_dtensor(classes: int) -> None:
    """Logits placed Shard(1) by their local part; DTensors and a large mesh are refused."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (1, world), mesh_dim_names=("rows", "classes"))
    full = torch.linspace(-3, 3, 5 * classes).view(5, classes).cos() * 4
    y = torch.arange(5) % classes
    plain = full.clone().requires_grad_()
    wanted = cross_entropy(plain, y, z_loss=0.01)
    wanted.backward()
    x: Any = distribute_tensor(full, mesh["classes"], [Shard(1)]).requires_grad_()
    loss = cross_entropy(x.to_local(), y, group=mesh["classes"], z_loss=0.01)
    loss.backward()
    assert isinstance(x.grad, DTensor)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    with pytest.raises(InputError, match=r"`logits` is a DTensor.*fix: give logits\.to_local"):
        cross_entropy(x, y)
    with pytest.raises(InputError, match=r"`weight` is a DTensor"):
        linear_cross_entropy(torch.ones(2, 5), x, torch.tensor([0, 1]))
    with pytest.raises(InputError, match="mesh of 2 dimensions"):
        cross_entropy(x.to_local(), y, group=mesh)


def test_dtensor(pool: Pool) -> None:
    """10 classes on 4 ranks are 3, 3, 3, 1."""
    pool(4).run(by_dtensor, 10)


def subgroup() -> float | None:
    """A group of ranks 3 and 1, as a mesh of one dimension."""
    mesh = dist.DeviceMesh("cpu", [1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    x = torch.arange(8.0).view(2, 4)
    own = x[:, :2] if dist.get_rank() == 1 else x[:, 2:]
    return cross_entropy(own, torch.tensor([3, 1]), group=mesh).item()


def test_subgroup(pool: Pool) -> None:
    wanted = torch.nn.functional.cross_entropy(torch.arange(8.0).view(2, 4), torch.tensor([3, 1]))
    _, first, _, second = pool(4).run(subgroup)
    assert first == second == pytest.approx(wanted.item(), rel=1e-6)
