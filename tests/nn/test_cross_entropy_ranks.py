"""The cross-entropy over a vocabulary cut over 1 to 4 real processes, evenly and not."""

from __future__ import annotations

import math
import random
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.nn.cross_entropy_cases import Case, arbitrary, far, laid_out, reference
from tests.support.pool import Pool

from interlace.errors import AgreementError, InputError, TargetError
from interlace.nn.cross_entropy import vocabulary
from interlace.nn.functional import cross_entropy, linear_cross_entropy, raise_pending

SIZES = {
    1: [(37,)],
    2: [(32, 32), (5, 60), (64, 0)],
    3: [(16, 16, 16), (1, 40, 7), (0, 30, 3)],
    4: [(64, 64, 64, 64), (3, 3, 3, 1), (40, 0, 1, 9)],
}
"""How many classes each rank has: as many, uneven, and with ranks that have none."""


def check(case: Case) -> tuple[list[str], bytes]:
    """What is wrong with this rank's loss and part of the gradient; the bits of the loss."""
    rank, wrong = dist.get_rank(), []
    x, y, weight, up = case.draw()
    start = sum(case.sizes[:rank])
    own = slice(start, start + case.sizes[rank])
    local = laid_out(x[..., own], case.layout).requires_grad_()
    before = local.detach().clone()
    part = None if weight is None else weight[own]
    loss = cross_entropy(local, y, part, group=dist.group.WORLD, **case.options())
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


def check_all(cases: list[Case]) -> tuple[list[str], list[bytes]]:
    results = [check(case) for case in cases]
    return [what for wrong, _ in results for what in wrong], [bits for _, bits in results]


def verify(pool: Pool, cases: list[Case], world: int) -> None:
    found = pool(world).run(check_all, cases, timeout_s=100)
    assert not any(wrong for wrong, _ in found), found
    for rank, (_, bits) in enumerate(found):
        assert bits == found[0][1], f"the losses of rank {rank} are not the bits of rank 0"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_grid(pool: Pool, world: int, seed: int) -> None:
    draw = random.Random(seed)
    cases = [
        arbitrary(draw, sizes=sizes, dtype=dtype, reduction=reduction, smoothing=smoothing)
        for sizes in SIZES[world]
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        for reduction in ("none", "mean", "sum")
        for smoothing in (0.0, 0.1)
    ]
    verify(pool, cases, world)


@pytest.mark.parametrize("world", [2, 4])
def test_128256_classes(pool: Pool, world: int, seed: int) -> None:
    for sizes in ((128256 // world,) * world, (100_000, *(28256 // (world - 1),) * (world - 1))):
        case = Case(seed=seed, batch=(2,), sizes=sizes, dtype=torch.bfloat16, ignored=0.0,
                    smoothing=0.1, weighted=True, z_loss=1e-4)  # fmt: skip
        verify(pool, [case], world)


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


def count_collectives() -> int:
    """How many gathers a call takes, forward and backward."""
    with mock.patch.object(vocabulary, "start_gather", wraps=vocabulary.start_gather) as gather:
        x, y = torch.randn(3, 4, requires_grad=True), torch.tensor([1, 2, 3])
        cross_entropy(x, y, group=dist.group.WORLD).backward()
    return gather.call_count


def test_collectives_of_a_call(pool: Pool) -> None:
    assert pool(2).run(count_collectives) == [2, 2]


def targets_of_all_ranks() -> None:
    x, group = torch.randn(3, 4), dist.group.WORLD
    assert cross_entropy(x, torch.tensor([8, 0, 7]), group=group).isnan()
    with pytest.raises(TargetError, match="row 0 is 8, where there are classes 0 to 7"):
        raise_pending()
    assert cross_entropy(x, torch.tensor([7, 0, 7]), group=group).isfinite()


def test_targets_of_all_ranks(pool: Pool) -> None:
    pool(2).run(targets_of_all_ranks)


DIFFER: dict[str, tuple[str, Any, Any]] = {
    "reduction": ("reduction='none'=1, and rank 1 reduction='none'=0", "none", "mean"),
    "label_smoothing": ("label_smoothing=0, and rank 1 label_smoothing=1", 0.0, 0.1),
    "z_loss": ("z_loss=1, and rank 1 z_loss=0", 0.1, 0.0),
    "chunk_size": ("chunk_size=0, and rank 1 chunk_size=2", None, 2),
    "overlap": ("overlap=1, and rank 1 overlap=0", True, False),
    "class_weight": ("class weights=1, and rank 1 class weights=0", torch.ones(4), None),
    "rows": ("rows=3, and rank 1 rows=2", 3, 2),
    "requires_grad": ("requires_grad of hidden=0, and rank 1 requires_grad", False, True),
    "dtype": ("dtype=2, and rank 1 dtype=0", torch.float32, torch.bfloat16),
}
"""Arguments of two ranks, and what is said of them."""


def looked_at_once(name: str) -> int:
    """The looks of calls by a host that looks at unknown arguments alone, as on CUDA: three that
    agree, two that differ and raise on both ranks, and again three."""
    looks: list[bool] = []

    def may_look(device: torch.device, known: bool) -> bool:
        looks.append(not known)
        return not known

    hidden, weight, target = torch.ones(3, 2), torch.ones(4, 2), torch.tensor([0, 5, 7])
    group: Any = dist.new_group()
    told, *values = DIFFER[name]
    with mock.patch.object(vocabulary, "may_look", may_look):
        for _ in range(3):
            linear_cross_entropy(hidden, weight, target, group=group)
        for _ in range(2):
            other: dict[str, Any] = {"z_loss": 0.2, name: values[dist.get_rank()]}
            with pytest.raises(AgreementError, match=re.escape(told)):
                linear_cross_entropy(hidden, weight, target, group=group, **other)
        for _ in range(3):
            linear_cross_entropy(hidden, weight, target, group=group)
    dist.destroy_process_group(group)
    return sum(looks)


def test_arguments_are_known_only_once_they_were_alike(pool: Pool) -> None:
    assert pool(2).run(looked_at_once, "label_smoothing") == [3, 3]


def different(name: str) -> None:
    """What a call of each loss raises; after it the ranks agree, and are right."""
    told, *values = DIFFER[name]
    given = {name: values[dist.get_rank()]}
    rows, dtype = given.pop("rows", 3), given.pop("dtype", torch.float32)
    hidden = torch.ones(3, 2, dtype=dtype)[:rows].requires_grad_(given.pop("requires_grad", False))
    weight, target = torch.ones(4, 2, dtype=dtype), torch.tensor([0, 5, 7])[:rows]
    for _ in range(2):  # also where this rank had no peer with the same arguments
        with pytest.raises(AgreementError, match=re.escape(told)):
            linear_cross_entropy(hidden, weight, target, group=dist.group.WORLD, **given)
    if name not in ("chunk_size", "overlap", "requires_grad"):
        if "class_weight" in given:
            given["weight"] = given.pop("class_weight")
        with pytest.raises(AgreementError, match=re.escape(told)):
            cross_entropy(hidden @ weight.t(), target, group=dist.group.WORLD, **given)
    loss = linear_cross_entropy(
        torch.ones(3, 2), torch.ones(4, 2), torch.tensor([0, 5, 7]), group=dist.group.WORLD
    )
    assert loss.item() == pytest.approx(math.log(8))


@pytest.mark.parametrize("name", DIFFER)
def test_ranks_with_different_arguments_raise_alike(pool: Pool, name: str) -> None:
    pool(2).run(different, name)


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
