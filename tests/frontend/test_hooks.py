"""Collectives that write into a tensor, as models' own hooks call them, in interlace.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.frontend.models import Function
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.errors import UnsupportedError
from interlace.ir import Program


class Summed(torch.autograd.Function):
    """Sums in forward, and hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return grad, None


class SummedGradient(torch.autograd.Function):
    """Hands the input on, and sums its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Block(nn.Module):
    """A column-parallel and a row-parallel linear on what this rank holds of their weights."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16 // group.size()), nn.Linear(16 // group.size(), 8)

        def before(_: nn.Module, args: tuple[Tensor]) -> Any:
            return SummedGradient.apply(args[0], group)

        def after(_: nn.Module, args: Any, out: Tensor) -> Any:
            if out.requires_grad:
                return Summed.apply(out, group)
            dist.all_reduce(out, group=group)
            return out

        self.up.register_forward_pre_hook(before)
        self.down.register_forward_hook(after)

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        return self.down(self.up(x).relu()) + x


def kinds(program: Program) -> list[str]:
    """The collectives of a Program."""
    return [site.kind for site in program.sites]


def trained(seed: int) -> tuple[list[list[str]], list[float]]:
    """What a block with such hooks communicates, and how far it is from eager."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    block, x = Block(mesh.get_group("tp")), torch.randn(4, 8)
    compiled = interlace.compile(block, mesh=mesh)
    results: list[list[Tensor]] = []
    programs: list[Program] = []
    for run in (compiled, block):  # eager again after what was traced
        leaf = x.clone().requires_grad_()
        block.zero_grad()
        y = run(leaf)
        y.square().sum().backward()
        if run is compiled:
            programs += compiled.programs
        with torch.no_grad():
            inferred = run(x)
        assert leaf.grad is not None
        gradients = [p.grad.clone() for p in block.parameters() if p.grad is not None]
        assert len(gradients) == 4
        results.append([y.detach(), inferred, leaf.grad, *gradients])
    programs += compiled.programs
    found = [kinds(program) for program in programs]
    compiled.close()
    return found, [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


def test_a_models_hooks_reduce_in_place(pool: Pool, seed: int) -> None:
    """As Hugging Face's plan does, in forward, in backward and in inference."""
    for found, far in pool(2).run(trained, seed):
        assert found == [["matmul_all_reduce"]] * 3  # forward, backward, inference
        assert max(far) <= 1e-5, far


def all_in_place(x: Tensor) -> list[Tensor]:
    """Every collective that TorchDynamo knows, and a broadcast, into tensors that were there."""
    world = dist.get_world_size()
    total, most, root = x * 2, x + 1, x - 1
    assert dist.all_reduce(total) is None
    pending = dist.all_reduce(most, op=dist.ReduceOp.MAX, async_op=True)
    assert pending is not None
    pending.wait()
    if torch.__version__ >= "2.12":  # before, it is refused: no mode can see it
        dist.broadcast(root, src=1)
    gathered, parts = x.new_zeros(world * len(x), 3), [torch.zeros_like(x) for _ in range(world)]
    dist.all_gather_into_tensor(gathered, x)
    dist.all_gather(parts, x * 3)
    share, dealt = x.new_zeros(len(x) // world, 3), torch.zeros_like(x)
    dist.reduce_scatter_tensor(share, x, op=dist.ReduceOp.SUM)
    dist.all_to_all_single(dealt, x)
    return [total, most, root, gathered, *parts, share, dealt]


def named_alone() -> Callable[[Tensor], Tensor]:
    """A function that was imported by its name, and writes its own argument."""
    from torch.distributed import all_reduce

    def fn(x: Tensor) -> Tensor:
        all_reduce(x)
        return x + 1

    return fn


def in_place() -> tuple[list[bool], list[str]]:
    """Whether they give eager's bits, and what is refused."""
    rank = dist.get_rank()
    x = torch.arange(12.0).view(4, 3) + 100 * rank
    same: list[bool] = []
    for fn in (all_in_place, named_alone()):
        mine, theirs = x.clone(), x.clone()
        compiled = interlace.compile(Function(fn))
        wanted, found = fn(theirs), compiled(mine)
        pairs = zip([*wanted, theirs], [*found, mine], strict=True)
        same += [torch.equal(a, b) for a, b in pairs]
        compiled.close()
    told: list[str] = []
    ops: list[Any] = [dist.ReduceOp.BXOR, dist._make_nccl_premul_sum(2.0)]  # pyright: ignore
    for op in ops:
        try:
            interlace.compile(Function(lambda x, op=op: dist.all_reduce(x, op=op)))(x.clone())
        except UnsupportedError as error:
            told.append(str(error))
    return same, told


def test_collectives_into_tensors(pool: Pool) -> None:
    for same, told in pool(2).run(in_place):
        assert all(same), same
        assert len(told) == 2
        assert "Use one of" in told[0]
        assert "has no functional form" in told[1]
