"""Sizes that are data: ranks exchange as many rows as a router counts, other ones in each call."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.frontend.models import Function, gradients
from tests.support.captured import capture
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single,
    all_to_all_single_autograd,
)

import interlace
from interlace.errors import ExecutorError
from interlace.frontend import backend

DIM, HIDDEN, ROWS = 8, 16, 12
Routes = list[list[int]]
"""How many rows each rank sends to each."""

UNEVEN = [[4, 4, 4], [3, 5, 4], [2, 6, 4]]
FIRST_AS_BEFORE = [[4, 4, 4], [3, 2, 7], [2, 8, 2]]
"""The first rank sends and receives as much as by `UNEVEN`, the others do not."""
EVEN = [[4, 4, 4]] * 3
NONE_FOR_ONE = [[4, 0, 8], [6, 0, 6], [12, 0, 0]]
ONES = [[1, 10, 1], [0, 12, 0], [1, 1, 10]]
"""TorchDynamo compiles for 0 and 1 alone, here other ones on each rank."""


class Experts(nn.Module):
    """One expert on each rank; a rank holds a part of the first matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.ranks = dist.distributed_c10d._get_default_group(), dist.get_world_size()
        self.up = nn.Parameter(torch.randn(DIM // self.ranks + 1, HIDDEN))
        self.down = nn.Parameter(torch.randn(HIDDEN, DIM))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort(stable=True)
        counts = torch.zeros(self.ranks, dtype=torch.long, device=x.device)
        counts = counts.scatter_add(0, expert, torch.ones_like(expert))
        theirs = all_to_all_single(counts, None, None, self.group)
        sent, received = counts.tolist(), theirs.tolist()
        up = all_gather_tensor_autograd(self.up, 0, self.group)[:DIM]
        rows = all_to_all_single_autograd(x[order], received, sent, self.group)
        rows = F.silu(rows @ up) @ self.down
        back = all_to_all_single_autograd(rows, sent, received, self.group)
        return x + torch.zeros_like(x).index_copy(0, order, back)


def run(steps: list[Routes], seed: int, grad: bool, whole: bool = False) -> dict[str, Any]:
    """Steps of a compiled model on this rank, each compared with eager.

    `whole` has TorchDynamo trace sizes that it does not know yet, as one graph.
    """
    torch.compiler.reset()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    torch.manual_seed(seed + rank)
    model, wrong, keys = Experts(), [], []
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=whole)
    with capture() as captured, torch.set_grad_enabled(grad), scalars:
        options: Any = {"timeout_s": 20.0}
        call = torch.compile(model, backend=backend, options=options)
        for number, routes in enumerate(steps):
            sent = routes[rank]
            x = torch.randn(sum(sent), DIM)
            expert = torch.arange(len(sent)).repeat_interleave(torch.tensor(sent))
            expert = expert[torch.randperm(len(expert))]
            found: list[list[Tensor]] = []
            for chosen in (call, model):
                given = x.clone().requires_grad_(grad)
                out = chosen(given, expert)
                found.append([out.detach()])
                if grad:
                    out.square().sum().backward()
                    assert given.grad is not None
                    found[-1] += [given.grad, *gradients(model).values()]
                    model.zero_grad()
            if not all(map(torch.equal, *found)):
                wrong.append(number)
            dist.barrier()
            keys.append(store.num_keys())
            dist.barrier()
    traced = [graph for graph in captured.graphs if graph.unscheduled]
    bound = sum(len(graph.bound) for graph in traced)
    return {"wrong": wrong, "keys": keys, "bound": bound, "text": captured.explain()}


def drawn(rng: random.Random, rows: int, ranks: int) -> Routes:
    """Rows sent to ranks by chance."""
    found = [[0] * ranks for _ in range(ranks)]
    for row in found:
        for _ in range(rows):
            row[rng.randrange(ranks)] += 1
    return found


def as_first(first: Routes, routes: Routes) -> bool:
    """Whether a rank sends and receives as many rows of each: it would compile nothing anew."""
    columns = zip(zip(*first, strict=True), zip(*routes, strict=True), strict=True)
    rows = zip(first, routes, strict=True)
    return any(a == b and c == d for (a, b), (c, d) in zip(rows, columns, strict=True))


def check(told: dict[str, Any]) -> None:
    """Every step was that of eager, nothing was prepared, and `explain` says so."""
    assert told["wrong"] == []
    assert told["keys"][2] == told["keys"][-1], told["keys"]
    assert "runs as traced" in told["text"]
    assert "the sizes of an exchange are data" in told["text"]


@pytest.mark.parametrize(
    "first", [UNEVEN, pytest.param(EVEN, marks=pytest.mark.slow)], ids=["uneven", "even"]
)
def test_steps_train_alike(pool: Pool, first: Routes, seed: int) -> None:
    """A rank for which the first sizes come again meets its peers, whatever those were.

    But for the second step after even sizes, which all ranks compile: see Note [Sizes that are
    data].
    """
    rng = random.Random(seed)
    special = [FIRST_AS_BEFORE, NONE_FOR_ONE, ONES, EVEN]
    second = next(r for r in iter(lambda: drawn(rng, ROWS, 3), []) if not as_first(first, r))
    steps = [first, second, *special, *(drawn(rng, ROWS, 3) for _ in range(6))]
    for told in pool(3).run(run, steps, seed, True, timeout_s=110):
        check(told)
        assert told["bound"] == 0 or first is EVEN


def test_sizes_within_a_graph(pool: Pool, seed: int) -> None:
    rng = random.Random(seed)
    steps = [UNEVEN, NONE_FOR_ONE, ONES, *(drawn(rng, ROWS, 3) for _ in range(4))]
    for told in pool(3).run(run, steps, seed, True, True, timeout_s=110):
        check(told)
        assert told["bound"] == 0


def by_constants(splits: Routes, seed: int) -> tuple[list[bool], str]:
    """Whether an exchange of these constant sizes is that of eager, compiled in both ways."""
    torch.compiler.reset()
    rank, group = dist.get_rank(), dist.distributed_c10d._get_default_group()
    sent, received = splits[rank], [row[rank] for row in splits]

    def exchanged(x: Tensor, w: Tensor) -> Tensor:
        return all_to_all_single_autograd(x @ w, received, sent, group).relu() * 2

    torch.manual_seed(seed + rank)
    x, w, found = torch.randn(sum(sent), DIM), torch.randn(DIM, 4), list[list[Tensor]]()
    with capture() as captured:
        ways = torch.compile(exchanged, backend=backend), interlace.compile(Function(exchanged))
        for call in (exchanged, *ways):
            given = x.clone().requires_grad_()
            y = call(given, w)
            y.square().sum().backward()
            assert given.grad is not None
            found.append([y.detach(), given.grad])
    if captured.graphs[-1].unscheduled:
        with pytest.raises(ExecutorError, match="there is no Program: the graph runs as traced"):
            _ = ways[1].program
    return [all(map(torch.equal, found[0], each)) for each in found[1:]], captured.explain()


@pytest.mark.parametrize(
    ("splits", "traced"), [([[2, 2, 2], [2, 1, 3], [2, 3, 1]], True), ([[2, 2, 2]] * 3, False)]
)
def test_sizes_that_are_constants(pool: Pool, splits: Routes, traced: bool, seed: int) -> None:
    """Uneven on one rank, they run as traced on all of them."""
    for equal, text in pool(3).run(by_constants, splits, seed, timeout_s=110):
        assert equal == [True, True]
        assert ("runs as traced" in text) == traced, text


def split_by_counts(counts: list[list[int]]) -> tuple[bool, str]:
    """Whether experts on one rank do as in eager, and what `explain` says of them."""
    torch.compiler.reset()

    def experts(x: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
        parts = zip(torch.split(x, sizes), weights, strict=True)
        return torch.cat([part @ weight for part, weight in parts])

    equal, weights = True, torch.randn(2, DIM, DIM)
    with capture() as captured:
        call = torch.compile(experts, backend=backend)
        for sizes in counts:
            x = torch.randn(sum(sizes), DIM)
            equal &= torch.equal(call(x, weights, sizes), experts(x, weights, sizes))
    return equal, captured.explain()


def test_counts_of_one_rank(pool: Pool) -> None:
    """Sizes that no exchange depends on have one class a graph, without bounds."""
    for equal, text in pool(2).run(split_by_counts, [[3, 5], [10, 7], [20, 9], [0, 4], [6, 6]]):
        assert equal
        bound = [line for line in text.splitlines() if line.startswith("inference: ")]
        assert len(bound) == 3, text  # the first counts, what TorchDynamo then takes for any, a 0
        assert "<= 31" not in text
