"""Lengths that change: uneven parts, checkpointing inside, and why a length is bound anew."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from tests.support.pool import Pool
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from interlace.errors import SizeError
from interlace.frontend import capture
from interlace.frontend.importing.symbols import Symbols

WIDTH = 32


def symbols_of(*hints: int) -> tuple[ShapeEnv, list[torch.SymInt]]:
    """Sizes that tracing has symbols for."""
    env = ShapeEnv()
    made: list[torch.SymInt] = []
    for number, hint in enumerate(hints):
        source = ConstantSource(f"n{number}")
        symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
        made.append(env.create_symintnode(symbol, hint=hint, source=source))  # type: ignore[arg-type]
    return env, made


def test_symbols_are_found_in_expressions() -> None:
    env, (rows, padded, batch) = symbols_of(3, 4, 5)
    names = [str(size.node.expr) for size in (rows, padded, batch)]
    with FakeTensorMode(shape_env=env):
        shard = torch.empty_strided((1, rows, 8), (8 * padded, 8, 1))
    symbols = Symbols([8 * padded + rows, shard, batch * (padded + 1)])
    given = [8 * 4 + 3, torch.empty(1, 3, 8), 5 * 5]
    assert symbols.values(given) == dict(zip(names, (3, 4, 5), strict=True))
    with pytest.raises(SizeError, match="no argument tells the size"):
        symbols.values([8 * 4 + 3, torch.empty(1, 3, 8), 24])


def test_what_no_argument_tells_is_a_typed_error() -> None:
    env, (rows, padded) = symbols_of(3, 4)
    with FakeTensorMode(shape_env=env):  # the stride of a dimension of one tells nothing
        shard = torch.empty_strided((1, rows, 8), (8 * padded, 8, 1))
    assert isinstance(padded.node.expr, sympy.Symbol)
    for told in ([shard], [shard, padded // 2], [shard, padded * padded]):
        with pytest.raises(SizeError, match="no argument tells the size"):
            Symbols(told).values([torch.empty(1, 3, 8), 2])


class Attention(nn.Module):
    """A part of a block whose tokens are sharded outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, width]."""
        q = self.q(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        q = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        q = q * torch.arange(q.shape[2])[:, None]
        return x + self.o(q.transpose(1, 2).flatten(2))


def attention() -> tuple[nn.Module, Any]:
    """The layer over a mesh of all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plan = {
        "q": ColwiseParallel(input_layouts=Shard(1)),
        "o": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(Attention(), mesh, plan), mesh


def checkpointed(lengths: list[int]) -> list[float]:
    """How far gradients are from those of eager, of each length."""
    torch.compiler.reset()
    plain, mesh = attention()
    block = checkpoint_wrapper(attention()[0])
    block.compile(backend="interlace", fullgraph=True, options={"timeout_s": 40.0})
    found: list[float] = []
    for length in lengths:
        torch.manual_seed(length)
        local, grads = torch.randn(2, length, WIDTH), list[torch.Tensor]()
        for module in (block, plain):
            x = DTensor.from_local(local, mesh, [Shard(1)], run_check=False).requires_grad_()
            module(x).to_local().square().mean().backward()
            assert isinstance(x.grad, DTensor)
            grads.append(x.grad.to_local())
        found.append((grads[0] - grads[1]).abs().max().item())
    return found


def test_checkpointing_inside_a_block_of_changing_lengths(pool: Pool) -> None:
    for far in pool(2).run(checkpointed, [16, 24, 20], timeout_s=240):
        assert max(far) < 1e-5


def generated(first: int, steps: int) -> list[float]:
    """How far a sequence that grows by one token is from eager: its parts are uneven."""
    torch.compiler.reset()
    layer, mesh = attention()
    table = nn.Embedding(16, WIDTH)
    style = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
    )
    table = parallelize_module(table, mesh, style)
    options: Any = {"timeout_s": 40.0}
    call = torch.compile(layer, backend="interlace", dynamic=True, options=options)
    found: list[float] = []
    with torch.no_grad():
        for length in range(first, first + steps):
            x = table(torch.arange(length)[None] % 16)
            found.append((call(x).to_local() - layer(x).to_local()).abs().max().item())
    return found


def test_a_sequence_grows_by_one_token(pool: Pool) -> None:
    for far in pool(2).run(generated, 7, 3, timeout_s=240):
        assert max(far) < 1e-5


def summed(lengths: list[int]) -> list[float]:
    """Sums over uneven shards: a Program that names this rank's own rows alone."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))

    def total(x: Any) -> torch.Tensor:
        return (x * 2).sum(0).redistribute(mesh, [Replicate()]).to_local()

    options: Any = {"timeout_s": 40.0}
    call: Any = torch.compile(total, backend="interlace", dynamic=True, options=options)
    found: list[float] = []
    for length in lengths:
        x = distribute_tensor(torch.ones(length, 4), mesh, [Shard(0)], src_data_rank=None)
        with torch.no_grad():
            found.append(call(x).sum().item() - 8 * length)
    return found


def test_ranks_whose_own_rows_are_as_before_bind_with_the_others(pool: Pool) -> None:
    assert pool(2).run(summed, [7, 8, 9, 10, 9], timeout_s=200) == [[0.0] * 5] * 2


def explained(lengths: list[int], own: bool) -> str:
    """What `explain` says of Programs of these lengths; ranks may have lengths of their own, else
    what they exchange has the length."""
    torch.compiler.reset()
    group: Any = torch.distributed.group.WORLD

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.sum() + all_reduce(w @ w, "sum", group).sum()

    with capture() as captured, torch.no_grad():
        call = torch.compile(fn, backend="interlace", dynamic=True)
        for length in lengths:
            rows = length + own * torch.distributed.get_rank()
            side = 4 if own else length
            call(torch.ones(rows, 4), torch.ones(side, side))
    return captured.explain()


def test_programs_say_for_which_lengths_they_are(pool: Pool) -> None:
    for text in pool(2).run(explained, [20, 24, 40], False, timeout_s=120):
        heads = [line for line in text.splitlines() if "memory" not in line]
        first, second = re.findall(r" where (.*)", "\n".join(heads))  # 20 and 24 are of one class
        assert "<= 31" in first
        assert "<= 63" in second
    for text in pool(2).run(explained, [20, 24], True, timeout_s=120):
        assert text.count("sizes: for these sizes alone: ") == 2, "ranks' Programs differ"
