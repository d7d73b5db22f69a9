"""What ranks choose by is the same on all of them, or one AgreementError names the difference."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tests.support.pool import Pool
from torch import Tensor

import interlace
from interlace.errors import InterlaceError
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor

TIMEOUT_S = 30.0
Told = tuple[str, float]


def gather_linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    group: Any = dist.group.WORLD
    y = funcol.all_reduce(funcol.all_gather_tensor(x, 0, group) @ w, "sum", group)
    return y if bias is None else y + bias


def differing(own: list[dict[str, Any]], biased: list[bool], trains: bool) -> tuple[Told, bool]:
    """What ranks hear that compile with these options, a bias, and how long after the first of them
    the last one did; and whether the same model with no difference is right right after."""
    torch.compiler.reset()
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    x, w, b = torch.ones(4, 8), torch.ones(8, 8).requires_grad_(trains), torch.ones(8)

    def call(options: dict[str, Any], bias: bool) -> Tensor:
        given: Any = {"timeout_s": TIMEOUT_S, **options}
        step = torch.compile(gather_linear, backend="interlace", dynamic=False, options=given)
        y = step(x, w, b if bias else None)
        if trains:
            y.sum().backward()
        return y

    text = ""
    try:
        call(own[rank], biased[rank])
    except InterlaceError as error:
        text = f"{type(error).__name__}: {error}"
    ended = torch.tensor([time.time()], dtype=torch.float64)
    ends = [torch.zeros_like(ended) for _ in range(dist.get_world_size())]
    dist.all_gather(ends, ended)
    interlace.reset()
    torch.compiler.reset()
    y = call({}, True)
    spread = (max(ends) - min(ends)).item()
    return (text, spread), torch.equal(y.detach(), gather_linear(x, w, b).detach())


OPTIONS: list[tuple[Any, Any, str, str]] = [
    ({"strategy": "ring"}, {"strategy": "peer"}, "strategy='ring'", "strategy='peer'"),
    ({}, {"overlap": False}, "overlap=True", "overlap=False"),
    ({"in_order": True}, {}, "in_order=True", "in_order=False"),
    ({"memory": "auto"}, {"memory": 1 << 40}, "memory='auto'", "memory=1099511627776"),
    ({}, {"schedules": "{folder}"}, "schedules=None", "schedules='a folder'"),
]


@pytest.mark.parametrize(("one", "other", "ours", "theirs"), OPTIONS)
def test_options_that_differ_are_named_on_all_ranks(
    pool: Pool, one: Any, other: Any, ours: str, theirs: str, tmp_path: Path
) -> None:
    other = {k: str(tmp_path) if v == "{folder}" else v for k, v in other.items()}
    results = pool(2).run(differing, [one, other], [True, True], "memory" in one)
    first: Any = results[0][0][0]
    assert first.startswith("AgreementError: ranks give "), first
    for (text, spread), right in results:
        assert text == first
        assert f"rank 0 has {ours}, and rank 1 {theirs}" in text
        assert spread < 1
        assert right


@pytest.mark.parametrize("biased", [[True, False, True], [False, True, False]])
def test_an_input_of_one_rank_alone_is_named_on_all_ranks(pool: Pool, biased: list[bool]) -> None:
    results = pool(3).run(differing, [{}] * 3, biased, False)
    first: Any = results[0][0][0]
    here, there = biased.index(True), biased.index(False)
    for (text, spread), right in results:
        assert text == first
        for rank in (here, there):
            kind = "'f32 of 1 dimensions'" if rank == here else "None"
            assert re.search(rf"rank {rank} (has )?\w+={kind}", text), text
        assert spread < 1
        assert right


SUM = """
def total(tp: Team[2], x: f32[2]):
    y = empty(f32[2])
    main: all_reduce(x, y, team=tp, reduce="sum")
    return y
"""


def compile_or_prepare() -> str:
    """What a rank that compiles hears where another prepares a Program by hand."""
    torch.compiler.reset()
    group: Any = dist.group.WORLD
    options, given = Options(timeout_s=TIMEOUT_S), cast(Any, {"timeout_s": TIMEOUT_S})
    step = torch.compile(gather_linear, backend="interlace", options=given)
    try:
        if dist.get_rank() == 0:
            step(torch.ones(4, 8), torch.ones(8, 8), None)
        else:
            Executor(parse(SUM), groups={"tp": group}, options=options).prepare()
    except InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_compiles_and_one_that_prepares_are_told_apart(pool: Pool) -> None:
    first, other = pool(2).run(compile_or_prepare)
    assert first == other
    assert first.startswith("AgreementError: ranks meet to do different things: rank 0 to choose ")
    assert "rank 1 to prepare Program 'total'" in first


class Block(torch.nn.Module):
    """A gather before a matmul, as often compiled as there are layers of it."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((4, 4), scale))

    def forward(self, x: Tensor) -> Tensor:
        group: Any = dist.group.WORLD
        return funcol.all_gather_tensor_autograd(x, 0, group).relu() @ self.w


class Saves(Block):
    """The same, of which backward needs nothing that forward made."""

    def forward(self, x: Tensor) -> Tensor:
        group: Any = dist.group.WORLD
        return funcol.all_gather_tensor_autograd(x @ self.w, 0, group)


def backward_in_another_order(kind: Any, dynamic: bool) -> list[str]:
    """What becomes of steps of two layers: backward in one order, in two, and in one again."""
    torch.compiler.reset()
    torch._dynamo.reset()
    given: Any = {"timeout_s": TIMEOUT_S}
    layers = [
        torch.compile(kind(1.0 + i), backend="interlace", dynamic=dynamic, options=given)
        for i in range(2)
    ]
    told: list[str] = []
    for order in ((0, 1), (0, 1) if dist.get_rank() == 0 else (1, 0), (1, 0)):
        xs = [torch.ones(3, 4, requires_grad=True) for _ in layers]
        try:
            ys = [layer(x) for layer, x in zip(layers, xs, strict=True)]
            for i in order:
                ys[i].sum().backward()
            grads = [x.grad for x in xs]
            right = [torch.full((3, 4), 4.0 * (1 + i) * dist.get_world_size()) for i in range(2)]
            pairs = zip(grads, right, strict=True)
            same = all(grad is not None and torch.equal(grad, want) for grad, want in pairs)
            told.append("right" if same else f"WRONG {grads}")
        except InterlaceError as error:
            told.append(f"{type(error).__name__}: {error}")
            interlace.reset()
    return told


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [Block, Saves])
def test_compiled_layers_that_go_backward_in_another_order_are_an_error(
    pool: Pool, kind: Any, dynamic: bool
) -> None:
    for first, other, last in pool(2).run(backward_in_another_order, kind, dynamic, replace=True):
        assert first == last == "right"
        assert other.startswith("AgreementError: ranks call Programs in different order")
        assert "of forward 3" in other
        assert "of forward 4" in other
