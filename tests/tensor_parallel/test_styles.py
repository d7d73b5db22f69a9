"""Overlapped styles beside torch's own, on 2 and 3 real processes: a block, trained."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from interlace.tensor_parallel import (
    OverlapColwise,
    OverlapColwiseGroup,
    OverlapRowwise,
    parallelize,
)

HEADS, SHARED_HEADS, WIDTH, VOCABULARY = 24, 12, 48, 36


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Heads [batch, length, heads, 2 n] turned by angles [length, n] of complex numbers."""
    pairs = torch.view_as_complex(x.to(rope.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope[:, None]).flatten(-2).type_as(x)


class Attention(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.wq, self.wo = (nn.Linear(WIDTH, WIDTH, biased) for _ in range(2))
        shared = WIDTH // HEADS * SHARED_HEADS
        self.wk, self.wv = (nn.Linear(WIDTH, shared, biased) for _ in range(2))

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, WIDTH // HEADS)
            for layer in (self.wq, self.wk, self.wv)
        )
        q, k = rotated(q, rope), rotated(k, rope)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, biased) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, biased)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Model(nn.Module):
    """One block, as torchtitan writes it."""

    def __init__(self, biased: bool, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(biased), FeedForward(biased)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        angles = torch.arange(tokens.shape[1], dtype=self.norm.weight.dtype)[:, None]
        h = h + self.attention(self.norm(h), torch.polar(torch.ones_like(angles), angles))
        return self.head(h + self.feed_forward(self.norm_2(h)))


def plan_of(kind: str, group: bool = False) -> dict[str, Any]:
    """torch's or ours; of what all ranks have ("all"), or of the sequence cut ("sequence")."""
    colwise, rowwise = (ColwiseParallel, RowwiseParallel)
    ours = not kind.startswith("torch")
    if ours:
        colwise, rowwise = OverlapColwise, OverlapRowwise
    whole = kind.endswith("all")
    rows: Any = Replicate() if whole else Shard(1)
    plan: dict[str, Any] = {
        "embedding": rowwise(input_layouts=Replicate(), output_layouts=rows),
        "head": colwise(input_layouts=rows, output_layouts=Replicate()),
        "attention.wo": rowwise(output_layouts=rows),
        "feed_forward.w2": rowwise(output_layouts=rows),
    }
    if not whole:
        plan |= {"norm": SequenceParallel(), "norm_2": SequenceParallel()}
    for parent, names in (("attention", ("wq", "wk", "wv")), ("feed_forward", ("w1", "w3"))):
        if ours and group:
            plan[parent] = OverlapColwiseGroup(names, input_layouts=rows)
        elif ours and not whole:
            same: Any = Shard(1)
            plan[parent] = prepared(parent, same, same)
            plan |= {f"{parent}.{name}": colwise(input_layouts=rows) for name in names}
        else:
            if not whole:
                cut, full = Shard(1), Replicate()
                plan[parent] = prepared(parent, cut, full)
            plan |= {f"{parent}.{name}": colwise() for name in names}
    return plan


def prepared(parent: str, given: Any, desired: Any) -> PrepareModuleInput:
    """Attention is given angles as well."""
    more = (None,) if parent == "attention" else ()
    return PrepareModuleInput(input_layouts=(given, *more), desired_input_layouts=(desired, *more))


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Logits, gradients and Parameters of steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found: dict[str, Tensor] = {}
    for step, tokens in enumerate(batches):
        logits = model(tokens)
        cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        found[f"{step} logits"] = full(logits)
        found |= {f"{step} grad {name}": full(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"{step} {name}": full(p) for name, p in model.named_parameters()}
    return found


def farther(
    found: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]
) -> list[str]:
    """What is further from the exact values than torch's layers, whose sums have another order, can
    make it: in 240 draws errors beyond 16 units of rounding were no larger than theirs."""
    assert found.keys() == theirs.keys() == exact.keys()
    wrong = []
    for name, right in exact.items():
        unit = torch.finfo(found[name].dtype).eps * max(1, right.norm())
        errors = [(t[name].double() - right).norm() / unit for t in (found, theirs)]
        if errors[0] > 8 * errors[1] + 16:
            wrong.append(f"{name}: off by {errors[0]} units, torch's by {errors[1]}")
    return wrong


def drawn(biased: bool, tied: bool, seed: int) -> tuple[Model, list[Tensor]]:
    torch.manual_seed(seed)
    model = Model(biased, tied)
    length = 4 * dist.get_world_size()
    return model, [torch.randint(VOCABULARY, (2, length)) for _ in range(2)]


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def compared(layout: str, seed: int, dtypes: list[torch.dtype]) -> list[str]:
    """Models on this rank: ours, ours with one gather for several layers, ours of torch's plan."""
    biased, tied = bool(seed % 2), bool(seed // 2 % 2)
    model, batches = drawn(biased, tied, seed)
    mesh, keys, wrong = mesh_of(), list(model.state_dict()), []
    exact = trained(copy.deepcopy(model).double(), batches)
    for dtype in dtypes:
        model = model.to(dtype)
        theirs: Any = parallelize_module(copy.deepcopy(model), mesh, plan_of(f"torch {layout}"))
        if tied:  # which torch's styles have parted
            theirs.head.weight = theirs.embedding.weight
        expected = trained(theirs, batches)
        for plan in (plan_of(layout), plan_of(layout, True), plan_of(f"torch {layout}")):
            ours: Any = copy.deepcopy(model)
            parallelize(ours, mesh, plan)
            assert list(ours.state_dict()) == keys
            assert placements(ours) == placements(theirs)
            assert (ours.head.weight is ours.embedding.weight) == tied
            wrong += farther(trained(ours, batches), expected, exact)
    return wrong


def placements(model: nn.Module) -> dict[str, Any]:
    return {n: p.placements for n, p in model.named_parameters() if isinstance(p, DTensor)}


DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("world", "layout", "count"),
    [
        (2, "sequence", 1),
        *(pytest.param(n, "sequence", 2, marks=pytest.mark.slow) for n in (2, 3, 4)),
        pytest.param(2, "all", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(110)
def test_trains_as_torchs_styles_do(
    pool: Pool, world: int, layout: str, count: int, seed: int
) -> None:
    dtypes = random.Random(seed).sample(DTYPES, count)
    for wrong in pool(world).run(compared, layout, seed, dtypes, timeout_s=100):
        assert not wrong
