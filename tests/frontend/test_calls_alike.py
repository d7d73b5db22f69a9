"""Which calls share a compiled graph: a graph must not serve a call that it was not made for."""

from __future__ import annotations

import gc
import weakref
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Function
from tests.support.pool import Pool
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh

import interlace
from interlace.comm import team_of
from interlace.errors import ExecutorError
from interlace.frontend import backend


def write_then_read(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a * b


def arguments(how: str) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.arange(8.0)
    return {
        "apart": (whole[:4], torch.arange(4.0)),
        "the same": (whole[:4],) * 2,
        "overlapping": (whole[:4], whole[2:6]),
    }[how]


@pytest.mark.parametrize("order", list(permutations(("apart", "the same", "overlapping"))), ids=str)
def test_arguments_that_share_memory_are_told_apart(order: tuple[str, ...]) -> None:
    compiled = interlace.compile(Function(write_then_read))
    for how in order:
        wanted, given = arguments(how), arguments(how)
        result = write_then_read(*wanted)
        assert torch.equal(compiled(*given), result), how
        assert all(map(torch.equal, given, wanted)), how


@pytest.mark.parametrize("kind", ["plain", "conjugated", "negated", "expanded"])
def test_what_torch_conjugates_only_when_it_reads_is_so_in_the_graph(kind: str) -> None:
    """Executors refuse it, since its memory holds other numbers: it comes to them as a copy."""
    z = torch.randn(3, 4, dtype=torch.complex64)
    given = {"plain": z, "conjugated": z.conj(), "negated": z.conj().imag}
    given["expanded"] = z.conj()[:1].imag.expand(3, 4)
    w = torch.randn(3, 4, dtype=given[kind].dtype, requires_grad=True)

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).abs().sum()

    torch.compiler.reset()
    call = torch.compile(product, backend=backend, dynamic=False)
    mine, theirs = call(given[kind], w), product(given[kind], w)
    assert torch.equal(mine, theirs)
    (one,), (other,) = torch.autograd.grad(mine, w), torch.autograd.grad(theirs, w)
    assert torch.equal(one, other)


def destroyed() -> list[Any]:
    """A group's team, whether it lives, and bound graphs, before and after it is destroyed."""
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    name = group.group_name
    compiled = interlace.compile(Function(lambda x: all_reduce(x, "sum", name) * 2))
    compiled(torch.ones(4))
    team, executor = weakref.ref(team_of(group, "tp")), compiled.bound[0].executor
    gc.collect()
    found = [team() is not None, len(compiled.bound)]
    dist.barrier()
    dist.destroy_process_group(group)
    del group, mesh
    gc.collect()
    with pytest.raises(ExecutorError, match="closed"):
        executor.run([torch.ones(4)])
    return [*found, team() is not None, len(compiled.bound)]


def test_destroying_a_group_frees_what_stands_on_it(pool: Pool) -> None:
    assert pool(2).run(destroyed) == [[True, 1, False, 0]] * 2
