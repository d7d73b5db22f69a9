"""Calls without AOTAutograd between: only where it adds nothing, and then with equal results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Block, Function, local, parallelise_block
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import interlace
from interlace.frontend.compile import Compiled


def direct(compiled: Compiled) -> bool:
    """Whether the arguments met last go past AOTAutograd."""
    entry = compiled._entries.all()[-1]
    assert entry.calls > 1, "it has not been observed"
    return entry.direct is not None


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * y


def resized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.t_()
    return x @ y


PLAIN: dict[str, Callable[..., Any]] = {
    "one": lambda x, y: x @ y,
    "several": lambda x, y: {"sum": x + y, "both": [x * y, 3, None]},
    "written": written,
    "two views of one": lambda x, y: (z := x + y, z.view(-1)),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "argument": lambda x, y: (x, x + y),
    "view of an argument": lambda x, y: (x.view(-1), x + y),
    "layout of an argument": resized,
}


def shared(results: Any) -> list[bool]:
    """Which results lie where the first does."""
    leaves = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    return [x.data_ptr() == leaves[0].data_ptr() for x in leaves]


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_equal_to_eager(name: str, mode: Callable[[], Any], seed: int) -> None:
    fn = (PLAIN | OTHERS)[name]
    torch.manual_seed(seed)
    compiled, versions = interlace.compile(Function(fn)), list[list[int]]()
    with mode():
        for _ in range(5):
            args = torch.randn(4, 4), torch.randn(4, 4)
            twins = [x.clone() for x in args]
            want, found = fn(*twins), compiled(*args)
            torch.testing.assert_close([found, args], [want, tuple(twins)])
            own = {id(x): i for i, x in enumerate(args)}
            theirs = {id(x): i for i, x in enumerate(twins)}
            where = [own.get(id(x)) for x in pytree.tree_leaves(found)]
            assert where == [theirs.get(id(x)) for x in pytree.tree_leaves(want)]
            assert shared(found) == shared(want)
            if mode is not torch.inference_mode:
                versions.append([x._version for x in args])
                assert [x > 0 for x in versions[-1]] == [x._version > 0 for x in twins]
    if name in PLAIN:
        assert direct(compiled)
        assert all(found == versions[0] for found in versions), "not as AOTAutograd counts"
    else:
        assert not direct(compiled), "AOTAutograd does more here than to hand things on"


def test_an_argument_wants_a_gradient_that_no_output_has() -> None:
    compiled = interlace.compile(Function(lambda x, w: (x + w).argmax(-1)))
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for _ in range(4):
        found = compiled(x, w)
        assert torch.equal(found, (x + w).argmax(-1))
        assert not found.requires_grad
    assert direct(compiled)


@pytest.mark.parametrize("after", [False, True])
def test_a_gradient_mode_that_is_left_behind(after: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(after)
        return x * 2

    compiled = interlace.compile(Function(fn))
    for _ in range(4):
        with torch.set_grad_enabled(not after):
            compiled(torch.ones(2))
            assert torch.is_grad_enabled() == after


def test_gradients_go_through_autograd() -> None:
    compiled = interlace.compile(Function(lambda x, w: x @ w))
    w = torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        w.grad = None
        compiled(torch.ones(2, 4), w).sum().backward()
        assert torch.equal(w.grad, torch.full((4, 4), 2.0))  # pyright: ignore
    assert not direct(compiled)


def test_an_error_leaves_the_next_call_as_it_was() -> None:
    compiled = interlace.compile(Function(lambda x, i: x[i] + 1))
    with torch.no_grad(), pytest.raises(Exception, match="index 9"):
        compiled(torch.ones(4), torch.tensor([9]))
    with torch.no_grad():
        for _ in range(3):
            assert compiled(torch.ones(4), torch.tensor([1])).tolist() == [2.0]
    assert direct(compiled)


def layer(mode: str) -> tuple[bool, list[str]]:
    """A tensor-parallel block with a cache, and a DTensor in and out."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    block = parallelise_block(Block(16, 4, 32), mesh)
    caches = [[torch.zeros(2, 4 // world, 12, 4) for _ in range(2)] for _ in range(2)]
    compiled = interlace.compile(block, mesh=mesh)
    switch = torch.no_grad if mode == "no_grad" else torch.inference_mode
    with switch():
        for start in (0, 2, 4, 6):
            x = torch.randn(2, 2, 16).chunk(world, 1)[rank].contiguous()
            where = torch.arange(start, start + 2)
            want, found = block(x, tuple(caches[0]), where), compiled(x, tuple(caches[1]), where)
            assert type(found) is type(want)
            torch.testing.assert_close(local(found), local(want), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(caches[1], caches[0], rtol=1e-5, atol=1e-5)
        past = direct(compiled)
        kinds: list[str] = []
        w = distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)])
        again = interlace.compile(Function(lambda x, w: {"y": (x @ w).relu()}), mesh=mesh)
        for placement in (Replicate(), Shard(0)):
            for _ in range(3):
                x = distribute_tensor(torch.randn(4, 16), mesh, [placement])
                y, want = again(x, w)["y"], (x @ w).relu()
                assert isinstance(y, DTensor)
                assert isinstance(want, DTensor)
                assert (y.placements, y.shape, y.stride()) == (
                    *(want.placements, want.shape, want.stride()),
                )
                torch.testing.assert_close(y.full_tensor(), want.full_tensor())
            kinds.append(f"{placement} {direct(again)}")
    return past, kinds


def written_shards() -> tuple[list[int], list[str], bool]:
    """How often a DTensor counts as written; what autograd says of a product with the old one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def fn(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sum()

    compiled = interlace.compile(Function(fn), mesh=mesh)
    versions: list[int] = []
    told: list[str] = []
    for _ in range(4):
        w = nn.Parameter(distribute_tensor(torch.full((2, 8), 3.0), mesh, [Shard(0)]))
        loss = (w * w).sum()
        with torch.no_grad():
            compiled(w)
        versions.append(w._version)
        try:
            loss.backward()
            told.append("a wrong gradient")
        except RuntimeError as error:
            told.append("refused" if "modified by an inplace operation" in str(error) else "?")
    with torch.no_grad():
        compiled(w)  # pyright: ignore[reportPossiblyUnboundVariable]
    return versions, told, direct(compiled)


def test_autograd_hears_of_what_is_written_in_place(pool: Pool) -> None:
    assert pool(2).run(written_shards) == [([1] * 4, ["refused"] * 4, True)] * 2


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_sharded_layer(pool: Pool, mode: str) -> None:
    found = pool(2).run(layer, mode, timeout_s=90)
    assert found == [(True, ["R True", "S(0) True"])] * 2


def test_a_closed_function_compiles_anew() -> None:
    net = nn.Linear(4, 4)
    compiled, x = interlace.compile(net), torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x), net(x))
        compiled.close()
        for _ in range(3):
            assert torch.equal(compiled(x), net(x))
    assert direct(compiled)
