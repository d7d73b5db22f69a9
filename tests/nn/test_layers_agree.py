"""Layers whose ranks hold other shards, give other arguments, or go backward in other orders."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.errors import AgreementError
from interlace.nn.functional import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)

OPTIONS = {"timeout_s": 30}
ROWS, INNER = 4, 3


def difference(call: Callable[[], object]) -> tuple[str, float]:
    """The text of the AgreementError that a call raises, and how long it took; then a reset."""
    dist.barrier()
    start = time.monotonic()
    try:
        call()
    except AgreementError as error:
        return str(error), time.monotonic() - start
    finally:
        interlace.reset()
    return "", 0.0


def columns(kind: str, sizes: Sequence[int], fresh: bool) -> bool:
    """Whether a layer of so many rows of the weight on each rank is right, forward and backward;
    its weight a Parameter, or made anew for the call."""
    group, me, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    call: Any = all_gather_linear if kind == "gather" else replicated_linear
    w = torch.full((sizes[me], INNER), 1.0 + me, requires_grad=True)
    x = torch.full((ROWS, INNER), 1.0 + (me if kind == "gather" else 0), requires_grad=True)
    rows = []
    for _ in range(2):
        x.grad = w.grad = None
        y = call(x, w * 1 if fresh else w, group=group, options=OPTIONS)
        y.sum().backward()
        full = [1.0 + i for i in range(ranks)] if kind == "gather" else [1.0]
        want = torch.tensor(full).repeat_interleave(ROWS)[:, None] * INNER * (1.0 + me)
        grad = sum((1.0 + i) * size for i, size in enumerate(sizes))
        assert x.grad is not None
        rows.append(torch.equal(y, want.expand(-1, sizes[me])) and bool((x.grad == grad).all()))
    return all(rows)


def uneven_and_even(kind: str, fresh: bool) -> list[bool]:
    """Shards that a rank has met, and its peer has not."""
    layers = [[3, 2], [3, 3], [2, 3], [2, 2], [3, 2], [5, 3]]
    return [columns(kind, sizes, fresh) for sizes in layers]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("kind", ["gather", "copy"])
def test_uneven_shards_and_even_ones_in_turn(pool: Pool, kind: str, fresh: bool) -> None:
    assert pool(2).run(uneven_and_even, kind, fresh) == [[True] * 6] * 2


def one_sided(what: str) -> list[tuple[str, float]]:
    """Twice what rank 0 alone gives a layer; the second time after a layer that is all right."""
    group, first = dist.group.WORLD, dist.get_rank() == 0
    x, w, b = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)

    def call() -> None:
        if what == "bias":
            linear_all_reduce(x, w, b if first else None, group=group, options=OPTIONS)
        elif what == "second bias":
            biases = [b, b if first else None]
            all_gather_linear(x, [w, w.clone()], biases, group=group, options=OPTIONS)
        elif what == "options":
            own = {**OPTIONS, "strategy": "ring" if first else "pipeline"}
            linear_reduce_scatter(x, w, group=group, options=own)
        elif what == "rows":
            all_gather_linear(x if first else x[:3], w, group=group, options=OPTIONS)
        else:
            weight = w.requires_grad_(first)
            y = linear_reduce_scatter(x.requires_grad_(), weight, group=group, options=OPTIONS)
            y.sum().backward()

    told = [difference(call)]
    linear_all_reduce(x, w, group=group, options=OPTIONS)
    return [*told, difference(call)]


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("bias", ("rank 0 has bias[0]='a tensor'", "rank 1 bias[0]=None")),
        ("second bias", ("rank 0 has bias[1]='a tensor'", "rank 1 bias[1]=None")),
        ("options", ("rank 0 has strategy='ring'", "rank 1 strategy='pipeline'")),
        ("rows", ("rank 0 has rows=4", "rank 1 rows=3")),
        ("gradient", ("rank 0 has gradient of weight[0]=True", "rank 1 gradient of weight[0]=Fal")),
    ],
)
def test_what_one_rank_alone_gives_is_named_on_all(
    pool: Pool, what: str, values: tuple[str, str]
) -> None:
    first, second = pool(2).run(one_sided, what, replace=True)
    for (text, seconds), (same, _) in zip(first, second, strict=True):
        assert text.splitlines()[0] == same.splitlines()[0]
        assert seconds < 5
    assert all(value in first[0][0] for value in values), first
    assert "bias" not in what or "bias[" in first[1][0], first


def backward_in_another_order(kind: str, shared: bool, again: bool) -> tuple[str, float]:
    """Two calls alike, of which rank 1 goes backward in the other order."""
    group, call = dist.group.WORLD, CALLS[kind]
    weights = [torch.full((4, 4), 1.0 + i).requires_grad_() for i in range(2)]
    xs = [torch.ones(4, 4).requires_grad_() for _ in weights]

    def run(x: Tensor, w: Tensor) -> Tensor:
        return call(x, w, group=group, options=OPTIONS)

    def step() -> None:
        ys: list[Any] = []
        for x, w in zip(xs, weights, strict=True):
            given = x, weights[0] if shared else w
            ys.append(checkpoint(run, *given, use_reentrant=False) if again else run(*given))
        for i in (0, 1) if dist.get_rank() == 0 else (1, 0):
            ys[i].sum().backward()

    return difference(step)


CALLS: dict[str, Any] = {
    "gather": all_gather_linear,
    "scatter": linear_reduce_scatter,
    "copy": replicated_linear,
}


@pytest.mark.parametrize(
    ("kind", "shared", "again"),
    [
        ("gather", False, False),
        ("gather", True, False),
        ("gather", False, True),
        ("scatter", False, False),
        ("scatter", True, False),
        ("copy", False, False),
        ("copy", True, False),
    ],
)
def test_equal_layers_that_go_backward_in_another_order_are_an_error(
    pool: Pool, kind: str, shared: bool, again: bool
) -> None:
    for text, seconds in pool(2).run(backward_in_another_order, kind, shared, again):
        assert "ranks call Programs in different order" in text
        assert seconds < 10
