"""Experts that drop no token: the bits of eager under all counts, exchanges under matmuls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.captured import capture
from tests.support.pool import Pool
from torch import Tensor, nn

import interlace
from interlace.errors import GroupError, InterlaceError
from interlace.frontend import backend
from interlace.ir import Collective, Program, bindings
from interlace.nn import DroplessExperts, GroupedLinear
from interlace.nn.experts import by_expert

DIM, HIDDEN, TOKENS, CHUNKS = 16, 32, 24, 2


class Chunk(nn.Module):
    """Some experts of a rank: grouped matmuls in bf16."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self.up = GroupedLinear(each, DIM, HIDDEN, bias=False)
        self.down = GroupedLinear(each, HIDDEN, DIM, bias=False)

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return self.down(F.silu(self.up(rows, sizes)), sizes)


class Single(nn.Module):
    """One expert, of plain layers with a bias, in whatever type."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return self.down(F.silu(self.up(rows)))


class Mixture(nn.Module):
    """A router that sends each token to its best two experts."""

    def __init__(self, each: int, plain: bool = False, max_rows: int | None = None) -> None:
        super().__init__()
        experts = [Single() if plain else Chunk(each) for _ in range(CHUNKS)]
        count = dist.get_world_size() * CHUNKS * each
        self.router = nn.Linear(DIM, count, bias=False)
        self.experts = DroplessExperts(experts, count, dist.group.WORLD, max_rows)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = self.experts(x.repeat_interleave(2, 0), chosen.flatten())
        return x + (y.unflatten(0, (-1, 2)) * share.unsqueeze(-1)).sum(1)


def dense(model: Mixture, x: Tensor, expert: Tensor, each: int) -> Tensor:
    """Each row by the weights of its expert, gathered from all ranks."""
    layers = [chunk for chunk in model.experts.chunks if isinstance(chunk, Chunk)]
    mine = torch.stack(
        [torch.cat((c.up.weight.flatten(), c.down.weight.flatten())) for c in layers]
    )
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine.detach())
    out = torch.empty_like(x)
    for row, number in enumerate(expert.tolist()):
        both = found[number // (each * CHUNKS)][number // each % CHUNKS].view(2, each, -1)
        up, down = (
            both[0, number % each].view(HIDDEN, DIM),
            both[1, number % each].view(DIM, HIDDEN),
        )
        out[row] = F.silu(x[row : row + 1] @ up.t()) @ down.t()
    return out


def rows_meet_their_experts(each: int, seed: int) -> list[float]:
    """The largest difference between eager's layer and `dense`, for several routes."""
    torch.manual_seed(seed + dist.get_rank())
    model, count = Mixture(each), dist.get_world_size() * CHUNKS * each
    routes = [
        torch.randint(0, count, (TOKENS,)),
        torch.zeros(TOKENS, dtype=torch.int64),
        torch.full((TOKENS,), count - 1),
        torch.randint(0, count, (TOKENS,)) // 2 * 2,
    ]
    found: list[float] = []
    with torch.no_grad():
        for expert in routes:
            x = torch.randn(TOKENS, DIM)
            found.append(
                (model.experts(x, expert) - dense(model, x, expert, each)).abs().max().item()
            )
    return found


@pytest.mark.parametrize(("world", "each"), [(2, 1), (3, 2)])
def test_every_row_goes_to_its_expert_and_back(
    pool: Pool, world: int, each: int, seed: int
) -> None:
    for errors in pool(world).run(rows_meet_their_experts, each, seed):
        assert max(errors) < 1e-6


def train(each: int, plain: bool, steps: int, folder: str, seed: int) -> dict[str, Any]:
    """Steps of SGD by a compiled model and by eager from the same weights, on other tokens each."""
    torch.compiler.reset()
    rank, kind = dist.get_rank(), torch.float32 if plain else torch.bfloat16
    models: list[Mixture] = []
    for _ in range(2):
        torch.manual_seed(seed + rank)
        models.append(Mixture(each, plain).to(kind))
    wrong: list[int] = []
    with capture() as captured:
        options: Any = {"timeout_s": 20.0}
        calls = [torch.compile(models[0], backend=backend, options=options, fullgraph=True)]
        calls.append(models[1])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
        for step in range(steps):
            torch.manual_seed(seed + 100 * step + rank)
            x, found = torch.randn(TOKENS, DIM, dtype=kind), list[list[Tensor]]()
            if step % 3 == 2:  # all tokens take one way
                x = x[:1].expand(TOKENS, DIM).contiguous()
            for call, model, optimizer in zip(calls, models, optimizers, strict=True):
                given = x.clone().requires_grad_()
                loss = call(given).square().mean()
                loss.backward()
                assert given.grad is not None
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                found.append([loss.detach(), given.grad, *(grad.clone() for grad in grads)])
                optimizer.step()
                optimizer.zero_grad()
            if not all(map(torch.equal, *found)):
                wrong.append(step)
        if rank == 0:
            interlace.export(calls[0], folder)
    bound = sum(len(graph.bound) for graph in captured.graphs)
    return {"wrong": wrong, "bound": bound, "text": captured.explain()}


def hidden(program: Program) -> list[bool]:
    """For each exchange by counts, whether grouped matmuls neither wait for it nor it for them."""
    ops, binds, found = program.ops, bindings(program.ops), list[bool]()
    matmuls = [i for i, call in program.calls().items() if "_grouped_mm" in call.fn]
    before: list[set[int]] = []
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        earlier = {last[op.stream]} if op.stream in last else set[int]()
        earlier |= {binds[i, 0][0]} if (i, 0) in binds else set()
        before.append(earlier.union(*(before[j] for j in earlier)))
        last[op.stream] = i
    for i, op in enumerate(ops):
        if isinstance(op, Collective) and op.sent is not None:
            found.append(any(j not in before[i] and i not in before[j] for j in matmuls))
    return found


@pytest.mark.parametrize("each", [1, 2])
def test_training_equals_eager_under_changing_counts(
    pool: Pool, each: int, tmp_path: Path, seed: int
) -> None:
    """One schedule each way serves all counts, and no exchange but the outer ones stands bare."""
    for told in pool(2).run(train, each, False, 20, str(tmp_path), seed):
        assert told["wrong"] == []
        assert told["bound"] == 2
        assert "5 communications, sound" in told["text"]
        assert "its counts are data: it stays whole, under other compute" in told["text"]
        assert "as traced" not in told["text"]
    schedules = {path.name.split("-")[0]: path for path in tmp_path.glob("*.ilc")}
    for kind in ("forward", "backward"):
        (path,) = (p for p in tmp_path.glob(f"{kind}-*.ilc") if "serial" not in p.name)
        covered = hidden(interlace.load(path))
        assert len(covered) == 2 * CHUNKS, schedules
        assert sum(covered) >= 2, (kind, covered)


def test_one_expert_of_plain_layers_trains_alike(pool: Pool, tmp_path: Path, seed: int) -> None:
    for told in pool(2).run(train, 1, True, 6, str(tmp_path), seed):
        assert told["wrong"] == []
        assert told["bound"] == 2


def overfull(seed: int) -> list[str]:
    """What a compiled and an eager layer say of more rows than there is room for."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    model, found = Mixture(1, plain=True, max_rows=TOKENS).experts, list[str]()
    options: Any = {"timeout_s": 10.0}
    compiled = torch.compile(model, backend=backend, options=options)
    with torch.no_grad():
        fits = torch.arange(TOKENS) % (2 * CHUNKS)
        wanted = model(torch.ones(TOKENS, DIM), fits)
        assert torch.equal(compiled(torch.ones(TOKENS, DIM), fits), wanted)
        for call in (compiled, model):
            try:
                call(torch.ones(TOKENS, DIM), torch.zeros(TOKENS, dtype=torch.int64))
            except InterlaceError as error:
                found.append(str(error))
            interlace.reset()
            assert torch.equal(call(torch.ones(TOKENS, DIM), fits), wanted)
    return found


def test_more_rows_than_there_is_room_for_are_an_error_on_all_ranks(pool: Pool, seed: int) -> None:
    found = pool(2).run(overfull, seed)
    for one in found[0]:
        assert "48 in all, where 24 are the most. fix: declare as many as can come" in one
    assert all(len(each) == 2 for each in found), found


def test_one_rank_alone(seed: int) -> None:
    torch.manual_seed(seed)
    layers = [nn.Linear(DIM, DIM, bias=False) for _ in range(2)]

    class One(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
            assert bool((rows[int(sizes) :] == 0).all())
            return self.layer(rows)

    chunks = [One(layer) for layer in layers]
    mixture = DroplessExperts(chunks, num_experts=2, max_rows=3)
    for tokens in (TOKENS, 1, 0):
        x, expert = torch.randn(tokens, DIM), torch.randint(0, 2, (tokens,))
        wanted = [layers[int(e)](row) for row, e in zip(x, expert, strict=True)]
        torch.testing.assert_close(mixture(x, expert), torch.stack(wanted) if wanted else x)
    for unknown in (-1, 2):
        with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
            mixture(torch.randn(1, DIM), torch.tensor([unknown]))


def test_rows_by_rank_and_by_expert(seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(20):
        counts = torch.randint(0, 4, (3, 4))
        room = int(counts.sum()) + 3
        source, target = by_expert(counts, room)
        experts = torch.arange(4).repeat(3).repeat_interleave(counts.flatten())
        order = torch.sort(experts, stable=True).indices
        assert torch.equal(source[: len(order)], order)
        assert torch.equal(source[target], torch.arange(room))


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(GroupError, match="5 experts do not divide among 1 ranks with 2 chunks"):
        DroplessExperts([nn.Identity(), nn.Identity()], num_experts=5)
