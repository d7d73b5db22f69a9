"""Sizes that change: one graph of TorchDynamo, one Program for a class of sizes."""

from __future__ import annotations

import ctypes
import gc
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.frontend.models import feed_forward, world_mesh, wrong_steps
from tests.runtime.programs import world_group
from tests.support.captured import capture
from tests.support.pool import Pool
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from interlace.frontend import backend
from interlace.runtime.calling import regions

WIDTH, HEADS = 64, 4
PAGE = 4096


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Chain(nn.Module):
    """Pointwise operators that Inductor makes one kernel of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.tanh() * 0.5 + x) * 2.0


def train(lengths: list[int], options: dict[str, Any], chain: bool = False) -> dict[str, Any]:
    """Steps with these lengths through one compiled model, each compared with eager."""
    torch.compiler.reset()
    model = feed_forward(WIDTH, Shard(0), Shard(0))
    if chain:
        model = nn.Sequential(Chain(), model)
    with capture() as captured:
        call = torch.compile(model, backend=backend, dynamic=True, options=options)
        wrong = wrong_steps(model, call, [torch.randn(length, WIDTH) for length in lengths])
    return {"wrong": wrong, "classes": [str(bound.executor.sizes) for bound in captured.bound]}


def test_lengths_share_programs(pool: Pool, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [1, 2, 3, *(rng.randrange(16, 64) for _ in range(8))]
    for told in pool(2).run(train, lengths, {"timeout_s": 60.0}, timeout_s=110):
        assert told["wrong"] == []
        assert len(told["classes"]) < len(lengths), told["classes"]
        assert any("<=" in each for each in told["classes"])


def train_by_inductor(lengths: list[int]) -> tuple[list[str], int]:
    """What differs from eager where Inductor compiles regions, and how many kernels it made."""
    regions.forget()
    made: list[object] = []
    compiled = regions._compiled_by_inductor
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            regions, "_compiled_by_inductor", lambda *given: made.append(0) or compiled(*given)
        )
        told = train(lengths, {"timeout_s": 100.0, "regions": "inductor"}, chain=True)
    return told["wrong"], len(made)


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler here")
@pytest.mark.timeout(240)
def test_inductor_compiles_the_regions_of_a_class_once(pool: Pool, seed: int) -> None:
    rng = random.Random(seed)
    few, many = [[2 * rng.randrange(16, 32) for _ in range(count)] for count in (1, 6)]
    for (wrong, one), (more, all_) in zip(
        *(pool(2).run(train_by_inductor, each, timeout_s=110) for each in (few, many)), strict=True
    ):
        assert (wrong, more) == ([], [])
        assert 0 < all_ == one


class Scaled(nn.Module):
    """A linear map with a number of its own beside the one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(8, 8), 0.25

    def forward(self, x: torch.Tensor, given: float) -> torch.Tensor:
        return self.linear(x) * self.own + given


def test_numbers_of_a_module_are_constants_and_others_are_not() -> None:
    """A tensor on the CPU for each, as torch has it, would keep a GPU's regions from Inductor and
    the graph from CUDA graphs."""
    torch.compiler.reset()
    model = Scaled()
    with capture() as captured:
        call = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
        for own, given, rows in ((0.25, 1.5, 4), (0.25, 2.5, 5), (0.5, 3.5, 6), (0.25, 4.5, 7)):
            model.own = own
            x = torch.randn(rows, 8)
            torch.testing.assert_close(call(x, given), model(x, given))
    forwards = [graph for graph in captured.graphs if graph.kind == "forward"]
    assert len(forwards) == 2, "one for each value of the module's number"


def growth(which: Any, lengths: list[int]) -> int:
    """Bytes that this process grows by over steps of these lengths, after the first twenty."""
    torch.compiler.reset()
    model, trim = feed_forward(WIDTH, Shard(0), Shard(0)), ctypes.CDLL("libc.so.6").malloc_trim
    call = torch.compile(model, backend=which, dynamic=True)
    before = 0
    for number, length in enumerate(lengths):
        call(torch.randn(length, WIDTH).requires_grad_()).square().sum().backward()
        model.zero_grad()
        if number in (20, len(lengths) - 1):
            gc.collect()
            trim(0)
            before, now = resident_bytes(), before
    return before - now


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_200_lengths_leave_no_memory_behind(pool: Pool, seed: int) -> None:
    """torch itself keeps something of each size: what it keeps without Interlace is the measure."""
    rng = random.Random(seed)
    lengths = [rng.randrange(64, 256) for _ in range(220)]
    own, others = [
        pool(2).run(growth, which, lengths, timeout_s=290, replace=True)  # in new processes
        for which in (backend, "aot_eager")
    ]
    for mine, theirs in zip(own, others, strict=True):
        assert mine < theirs + (5 << 20), (mine >> 10, theirs >> 10)


def numbers_beside(calls: list[int]) -> bool:
    """Whether a function is that of eager where a number beside the tensor only steers it."""
    torch.compiler.reset()

    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * (n % 2) + min(n, 5) + x.shape[0] + (2 if n > -2 else 1)

    call, equal = torch.compile(fn, backend=backend, dynamic=True), True
    for rows in (4, 6):
        for n in calls:
            equal &= torch.equal(call(torch.ones(rows), n), fn(torch.ones(rows), n))
    return equal


def test_numbers_that_no_tensor_tells(pool: Pool) -> None:
    assert pool(2).run(numbers_beside, [7, 8, 10, 3, 9, -3, -2, -1, 0]) == [True, True]


class Decoder(nn.Module):
    """Attention with a cache that grows by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values by head."""
        cut = [layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q, self.k, self.v)]
        return [part.transpose(1, 2) for part in cut]

    def forward(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.heads(x)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        y = F.scaled_dot_product_attention(q, keys, values, is_causal=x.shape[1] > 1)
        return self.o(y.transpose(1, 2).flatten(2)), keys, values


def sharded(model: nn.Module) -> nn.Module:
    """The model with its heads shared among the ranks."""
    torch.compiler.reset()
    torch.manual_seed(0)
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in "qkv"}
    plan["o"] = RowwiseParallel()
    return parallelize_module(model.eval(), world_mesh(), plan)


def decode(tokens: int) -> tuple[bool, int]:
    """Whether tokens one by one are those of eager, and the Programs that were made."""
    model = sharded(Decoder())
    with capture() as captured, torch.no_grad():
        call = torch.compile(model, backend=backend, dynamic=True)
        empty = torch.zeros(1, HEADS // dist.get_world_size(), 0, WIDTH // HEADS)
        caches = [(empty, empty), (empty, empty)]
        x, equal = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(1)), True
        for _ in range(tokens):
            pairs = zip((call, model), caches, strict=True)
            outputs = [chosen(x, *cache) for chosen, cache in pairs]
            caches = [(keys, values) for _, keys, values in outputs]
            equal &= torch.allclose(outputs[0][0], outputs[1][0], atol=1e-5)
            x = outputs[1][0][:, -1:].tanh()
    return equal, len(captured.bound)


def test_a_cache_that_grows(pool: Pool) -> None:
    for equal, programs in pool(2).run(decode, 24, timeout_s=110):
        assert equal
        assert programs < 12


class InPlace(Decoder):
    """Attention with a cache that is written in place, of the tokens up to now."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: torch.Tensor, cache: torch.Tensor, start: int
    ) -> torch.Tensor:
        stop = start + x.shape[1]
        q, k, v = self.heads(x)
        at = torch.arange(start, stop)
        seen = cache[:, :, :, :stop]
        for part, new in zip(seen, (k, v), strict=True):
            part.index_copy_(2, at, new)
        mask = torch.arange(stop)[None, :] <= at[:, None]
        y = F.scaled_dot_product_attention(q, seen[0], seen[1], attn_mask=mask)
        return self.o(y.transpose(1, 2).flatten(2)) / stop


def decode_in_place(tokens: int) -> tuple[bool, bool, int]:
    """Whether tokens and caches are those of eager, and the Programs that were made."""
    model = sharded(InPlace())
    with capture() as captured, torch.no_grad():
        call = torch.compile(model, backend=backend, dynamic=True)
        heads = HEADS // dist.get_world_size()
        mine, eager = torch.zeros(2, 2, 1, heads, 64, WIDTH // HEADS)
        x, equal, start = torch.randn(1, 5, WIDTH), True, 0
        dist.broadcast(x, 0)
        for _ in range(tokens):
            found, expected = call(x, mine, start), model(x, eager, start)
            equal &= torch.allclose(found, expected, atol=1e-5)
            start += x.shape[1]
            x = expected[:, -1:].tanh()
    return equal, torch.allclose(mine, eager, atol=1e-5), len(captured.bound)


def test_a_cache_that_is_written_in_place(pool: Pool) -> None:
    for equal, cache, programs in pool(2).run(decode_in_place, 20, timeout_s=110):
        assert equal
        assert cache
        assert programs < 16


def scalars(lengths: list[tuple[int, int]]) -> list[str]:
    """Sizes that are numbers of a graph: scales, `arange`, masks; batch and length at once."""
    torch.compiler.reset()
    model = feed_forward(WIDTH, Shard(0), Shard(0))

    def fn(x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        places = torch.arange(length).float() / (length - 1)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (x @ x.transpose(1, 2)) * length**-0.5
        y = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ x + places[:, None] / (batch + 1)
        return model(y.flatten(0, 1)).view(batch, length, -1).sum(1) / (batch * length)

    call, wrong = torch.compile(fn, backend=backend, dynamic=True), list[str]()
    for batch, length in lengths:
        g = torch.Generator().manual_seed(batch * 64 + length)
        x = torch.randn(batch, length, WIDTH, generator=g)
        found: list[torch.Tensor] = []
        for chosen in (call, fn):
            given = x.clone().requires_grad_()
            out = chosen(given)
            found += [out.detach(), *torch.autograd.grad(out.square().sum(), given)]
        for mine, eager in zip(found[:2], found[2:], strict=True):
            if not torch.allclose(mine, eager, rtol=1e-4, atol=1e-5):
                wrong.append(f"{batch} x {length}: {(mine - eager).abs().max()}")
    return wrong


def test_sizes_that_reach_scalars(pool: Pool, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [(rng.randrange(2, 6), 2 * rng.randrange(4, 16)) for _ in range(3)]
    assert pool(2).run(scalars, sizes, timeout_s=110) == [[], []]


@pytest.mark.timeout(240)
def test_inductor_compiles_what_communicates_nothing() -> None:
    """As it does on a GPU, where regions are its own by default."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU())
    with capture() as captured:
        options: Any = {"regions": "inductor"}
        call = torch.compile(model, backend=backend, dynamic=True, options=options)
        assert not wrong_steps(model, call, [torch.randn(length, 6) for length in (5, 9, 3)])
    assert captured.bound == []
    assert captured.explain().count("compiled by Inductor as a whole") == 2


def own_lengths(steps: list[tuple[int, int]]) -> bool:
    """Whether ranks with batches of other sizes each, as in data parallelism, do as in eager."""
    torch.compiler.reset()
    rank, group = dist.get_rank(), world_group()

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return all_reduce(x.t() @ x, "sum", group), (x @ w).sum(0)

    options: Any = {"timeout_s": 30.0}
    call, equal = torch.compile(fn, backend=backend, options=options), True
    for lengths in steps:
        x, w = torch.randn(lengths[rank], 4), torch.randn(4, 4)
        pairs = zip(call(x, w), fn(x, w), strict=True)
        equal &= all(torch.allclose(mine, eager, atol=1e-5) for mine, eager in pairs)
    return equal


def test_ranks_with_lengths_of_their_own(pool: Pool) -> None:
    steps = [(5, 6), (7, 9), (8, 10), (7, 9)]
    assert pool(2).run(own_lengths, steps, timeout_s=90) == [True, True]
