"""Functional collectives: what each gives on every rank, against plain tensor arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
import torch.distributed.tensor
from tests.support.interpreter import run_ranks
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from interlace.errors import UnsupportedError
from interlace.frontend import Teams, import_graph
from interlace.ir import Collective, Program, parse, print_program, validate
from interlace.verify import check

c10d: Any = torch.ops._c10d_functional
dtensor: Any = torch.ops._dtensor
WORLD = 3
GROUPS = {"g": ("tp", (tuple(range(WORLD)),))}
Tensors = Sequence[torch.Tensor]


def wait(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(x)


def total(xs: Tensors) -> torch.Tensor:
    return torch.stack(list(xs)).sum(0)


def part(x: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    return x.chunk(WORLD, dim)[rank]


def coalesced(op: Callable[..., Any], *args: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: [wait(y) for y in op([x, x.t().contiguous()], *args)]


CASES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Tensors, int], Any]]] = {
    "all_gather": (
        lambda x: wait(c10d.all_gather_into_tensor(x, WORLD, "g")),
        lambda xs, r: torch.cat(list(xs)),
    ),
    "all_gather_of_a_transpose": (
        lambda x: wait(c10d.all_gather_into_tensor(x.t(), WORLD, "g")),
        lambda xs, r: torch.cat([x.t() for x in xs]),
    ),
    "all_gather_of_a_scalar": (
        lambda x: wait(c10d.all_gather_into_tensor(x.sum(), WORLD, "g")),
        lambda xs, r: torch.stack([x.sum() for x in xs]),
    ),
    "reduce_scatter": (
        lambda x: wait(c10d.reduce_scatter_tensor(x, "sum", WORLD, "g")),
        lambda xs, r: part(total(xs), r),
    ),
    "reduce_scatter_avg": (
        lambda x: wait(c10d.reduce_scatter_tensor(x, "avg", WORLD, "g")),
        lambda xs, r: part(total(xs) / WORLD, r),
    ),
    "all_reduce": (
        lambda x: wait(c10d.all_reduce(x * 2, "sum", "g")) + x,
        lambda xs, r: total(xs) * 2 + xs[r],
    ),
    "all_reduce_max": (
        lambda x: wait(c10d.all_reduce(x, "max", "g")),
        lambda xs, r: torch.stack(list(xs)).amax(0),
    ),
    "all_reduce_product": (
        lambda x: wait(c10d.all_reduce(x, "product", "g")),
        lambda xs, r: torch.stack(list(xs)).prod(0),
    ),
    "all_reduce_coalesced": (
        coalesced(c10d.all_reduce_coalesced, "sum", "g"),
        lambda xs, r: [total(xs), total(xs).t()],
    ),
    "all_gather_coalesced": (
        coalesced(c10d.all_gather_into_tensor_coalesced, WORLD, "g"),
        lambda xs, r: [torch.cat(list(xs)), torch.cat([x.t() for x in xs])],
    ),
    "reduce_scatter_coalesced": (
        coalesced(c10d.reduce_scatter_tensor_coalesced, "sum", WORLD, "g"),
        lambda xs, r: [part(total(xs), r), part(total(xs).t(), r)],
    ),
    "broadcast": (lambda x: wait(c10d.broadcast(x, 1, "g")) * x, lambda xs, r: xs[1] * xs[r]),
    "all_to_all": (
        lambda x: wait(c10d.all_to_all_single(x, [2] * WORLD, [2] * WORLD, "g")),
        lambda xs, r: torch.cat([part(x, r) for x in xs]),
    ),
}


def inputs() -> list[torch.Tensor]:
    """One matrix of small integers for each rank."""
    return [torch.randint(-4, 5, (6, 9)).float() for _ in range(WORLD)]


def programs(fn: Callable[[torch.Tensor], Any]) -> list[Program]:
    """The Program that each rank imports."""
    gm = make_fx(fn, tracing_mode="fake")(torch.ones(6, 9))
    return [import_graph(gm, teams=Teams.of(GROUPS, rank)).program for rank in range(WORLD)]


def shard_dim_program(gather_dim: int, shard_dim: int) -> Program:
    """The Program of `shard_dim_alltoall`, which can only be traced where its group exists."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    op = dtensor.shard_dim_alltoall.default
    y = graph.call_function(op, (x, gather_dim, shard_dim, "g"))
    graph.output(y)
    sizes = [6, 9]
    sizes[gather_dim] *= WORLD
    sizes[shard_dim] //= WORLD
    x.meta["val"], y.meta["val"] = torch.empty(6, 9), torch.empty(sizes)
    return import_graph(fx.GraphModule({}, graph), teams=Teams.of(GROUPS)).program


@pytest.mark.parametrize(("gather_dim", "shard_dim"), [(0, 1), (1, 0)])
def test_shard_dim_all_to_all(gather_dim: int, shard_dim: int) -> None:
    program = shard_dim_program(gather_dim, shard_dim)
    check(program).raise_if_unsound()
    xs = inputs()
    whole = torch.cat(xs, gather_dim)
    for rank, (result,) in enumerate(run_ranks(program, [[x] for x in xs], seed=rank_seed())):
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result, part(whole, rank, shard_dim))


@pytest.mark.parametrize("name", CASES)
def test_collective(name: str) -> None:
    fn, expected = CASES[name]
    program, *others = programs(fn)
    assert all(other == program for other in others), "the text depends on the rank"
    validate(program)
    assert parse(print_program(program)) == program
    check(program).raise_if_unsound()
    xs = inputs()
    for rank, results in enumerate(run_ranks(program, [[x] for x in xs], seed=rank_seed())):
        want = expected(xs, rank)
        for mine, theirs in zip(results, want if isinstance(want, list) else [want], strict=True):
            assert isinstance(mine, torch.Tensor)
            assert torch.equal(mine, theirs), program


def rank_seed() -> int:
    """An interleaving, another in every run."""
    return int(torch.randint(1 << 30, ()))


def test_team_of_one_communicates_nothing() -> None:
    gm = make_fx(lambda x: wait(c10d.all_reduce(x, "sum", "g")), tracing_mode="fake")(torch.ones(2))
    imported = import_graph(gm, teams=Teams.of({"g": ("tp", ((0,),))}))
    assert not any(isinstance(op, Collective) for op in imported.program.ops)
    assert imported.program.teams == ()
    x = torch.randn(2)
    ((result,),) = run_ranks(imported.program, [[x]])
    assert isinstance(result, torch.Tensor)
    assert torch.equal(result, x)
    assert result.data_ptr() != x.data_ptr()


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "in place": (lambda x: c10d.all_reduce_(x * 2, "sum", "g"), "writes its argument.*functional"),
    "reduction": (lambda x: c10d.all_reduce(x, "band", "g"), "reduction 'band'.*Use one of"),
    "parts": (
        lambda x: c10d.all_to_all_single(x, [1, 2, 3], [2, 2, 2], "g"),
        "its parts are uneven.*Pad",
    ),
    "rows": (
        lambda x: c10d.reduce_scatter_tensor(x[:5], "sum", WORLD, "g"),
        "dimension 0 of 5 does not divide among the 3 ranks of tp.*Pad",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_says_what_and_how_to_mend_it(name: str) -> None:
    fn, message = REFUSED[name]
    gm = make_fx(fn, tracing_mode="fake")(torch.ones(6, 9))
    with pytest.raises(UnsupportedError, match=message):
        import_graph(gm, teams=Teams.of(GROUPS))
