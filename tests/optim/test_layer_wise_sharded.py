"""LayerWise over tensor-parallel and expert Parameters: the bits of an unsharded model's update."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.optim import checkpoints, layerwise
from tests.optim.checkpoints import Tensors, weights, whole
from tests.optim.layerwise import (
    DIM,
    OPTIMIZERS,
    Blocks,
    batch,
    differing,
    layer_wise,
    model,
    slowly,
)
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from interlace.errors import ReplicaError, UnsupportedError
from interlace.optim import LayerWise, Muon, clip_grad_norm_
from interlace.options import Backend, Options

NUMBERS = itertools.count()


class Sharded(Blocks):
    """Blocks whose norms run on sequences' parts where there is tensor parallelism."""

    tp: DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.mixer
        block: Any
        for block in self.blocks:
            rows = x
            if self.tp is not None:
                rows = DTensor.from_local(x, self.tp, [Replicate()]).redistribute(
                    placements=[Shard(0)]
                )
            x = x + block.down(torch.relu(block.up(block.norm(rows))))
        return self.head(x)


class Grid(NamedTuple):
    dp: DeviceMesh
    tp: DeviceMesh


def grid(tp: int) -> Grid:
    """Data parallelism over shards. Names differ from call to call: torch keeps meshes of equal
    names in caches, whose groups are gone when the pool's ranks have another default group.
    """
    names = f"dp{next(NUMBERS)}", f"tp{next(NUMBERS)}"
    shape = dist.get_world_size() // tp, tp
    both = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return Grid(both[names[0]], both[names[1]])


def parallel(seed: int, mesh: Grid) -> Any:
    """The model, tensor-parallel: matrices by rows and by columns, and norms replicated."""
    module = model(seed, Sharded)
    if mesh.tp.size() == 1:
        return module
    module.tp = mesh.tp
    for block in module.blocks:
        parallelize_module(
            block,
            mesh.tp,
            {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(),
            },
        )
    return module


def rows_of(mesh: Grid, seed: int, step: int) -> torch.Tensor:
    """Rows that all shards of a replica have alike."""
    draw = torch.Generator().manual_seed(seed + 1000 * step + mesh.dp.get_local_rank())
    return torch.randn(layerwise.TOKENS, DIM, generator=draw)


def optimized(module: nn.Module, mesh: Grid, optimizer: str, **options: Any) -> LayerWise:
    options = {"bucket_bytes": layerwise.SMALL, "options": Options(timeout_s=20), **options}
    return LayerWise(OPTIMIZERS[optimizer](module.parameters()), module, mesh.dp, **options)


def go(
    optimizing: LayerWise, mesh: Grid, seed: int, steps: range, clip: float | None = 1.0
) -> list[float]:
    losses: list[float] = []
    for step in steps:
        loss = optimizing.module(rows_of(mesh, seed, step)).square().mean()
        loss.backward()
        if clip is not None:
            optimizing.clip_grad_norm_(clip)
        optimizing.step()
        optimizing.zero_grad()
        losses.append(loss.item())
    return losses


def named(optimizing: LayerWise) -> dict[torch.Tensor, str]:
    """What the optimizer updates, by the names of the module's Parameters."""
    groups = zip(
        optimizing.optimizer.param_groups, optimizing.state_dict()["param_groups"], strict=True
    )
    return {
        param: name
        for group, named in groups
        for param, name in zip(group["params"], named["params"], strict=True)
    }


def recorded(
    seed: int, tp: int, optimizer: str, transport: Backend
) -> tuple[list[Tensors], Tensors]:
    """The gradients that this rank's optimizer saw in each step, and the weights at the end."""
    mesh, seen = grid(tp), []
    module = parallel(seed, mesh)
    options = Options(timeout_s=20, transport=transport)
    with slowly(seed):
        optimizing = optimized(module, mesh, optimizer, options=options, check_replicas_every=1)
    with optimizing:
        names = named(optimizing)

        def see(inner: Optimizer, *_: Any) -> None:
            seen.append({n: whole(p.grad) for p, n in names.items() if p.grad is not None})

        optimizing.optimizer.register_step_pre_hook(see)
        go(optimizing, mesh, seed, range(5))
        return seen, weights(module)


@pytest.mark.parametrize(
    ("world", "tp", "optimizer", "transport"),
    [
        (4, 2, "muon", "auto"),
        (4, 2, "ours", "peer"),
        pytest.param(4, 2, "adamw", "auto", marks=pytest.mark.slow),
    ],
)
def test_has_the_bits_of_one_process(
    pool: Pool, world: int, tp: int, optimizer: str, transport: str, seed: int
) -> None:
    """Given the gradients that homes and owners saw."""
    ranks = pool(world).run(recorded, seed, tp, optimizer, transport)
    module = model(seed)
    alone = OPTIMIZERS[optimizer](module.parameters())
    for step in range(5):
        grads: Tensors = {}
        for seen, _ in ranks:
            for name in grads.keys() & seen[step].keys():
                assert torch.equal(grads[name], seen[step][name]), name
            grads |= seen[step]
        for name, param in module.named_parameters():
            param.grad = grads[name]
        alone.step()
    for _, found in ranks:
        assert differing(found, dict(module.state_dict())) == []
    if optimizer != "adamw":
        homes = [sum("up.weight" in n or "down.weight" in n for n in s[0]) for s, _ in ranks]
        assert sum(homes) == 6  # each at one home
        assert max(homes) - min(homes) <= 1


class Uneven(nn.Module):
    """Matrices of shapes that three ranks cannot cut evenly, one of them in fewer parts."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        shapes = [((DIM, 7), 1), ((7, 5), 0), ((5, 2), 1), ((2, 4, 5), 2), ((2, 5, 3), 1)]
        made: list[torch.Tensor] = [torch.randn(shape) for shape, _ in shapes]
        if mesh is not None:
            places = [[Shard(dim)] for _, dim in shapes]
            made = [distribute_tensor(m, mesh, at) for m, at in zip(made, places, strict=True)]
        self.matrices = nn.ParameterList(map(nn.Parameter, made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, *stacks = (
            matrix.full_tensor() if isinstance(matrix, DTensor) else matrix
            for matrix in self.matrices
        )
        x = torch.tanh(torch.tanh(x @ first) @ second) @ third
        return x + sum(stack.sum() for stack in stacks)


def uneven(seed: int) -> list[str]:
    """What differs from training the whole matrices in one process, if there is state before."""
    mesh = grid(3)
    module, alone = (model(seed, lambda on=on: Uneven(on)) for on in (mesh.tp, None))
    optimizer = Muon(module.parameters(), lr=0.1, batched=False)
    whole = Muon(alone.parameters(), lr=0.1, batched=False)
    for step in range(3):
        alone(rows_of(mesh, seed, step)).square().mean().backward()
        whole.step()
        whole.zero_grad()
        for ours, param in zip(module.parameters(), alone.parameters(), strict=True):
            if step == 0 and isinstance(ours, DTensor):
                given = param.detach(), whole.state[param]["momentum_buffer"]
                value, moment = (distribute_tensor(t, mesh.tp, ours.placements) for t in given)
                ours.detach().copy_(value)
                optimizer.state[ours]["momentum_buffer"] = moment
    held: list[list[str]] = []
    gather = DTensor.full_tensor

    def gathered(value: DTensor) -> torch.Tensor:
        held.append(["meta" if p.is_meta else type(p.data).__name__ for p in optimizer.state])
        return gather(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", gathered)
        optimizing = LayerWise(optimizer, module, mesh.dp, bucket_bytes=512)
    assert [each.count("DTensor") for each in held] == [4, 3, 2, 1, 0]  # others' are not held twice
    assert not any("meta" in each for each in held)
    with optimizing:
        go(optimizing, mesh, seed, range(1, 3), None)
        return differing(weights(module), weights(alone))


def test_uneven_shards(pool: Pool, seed: int) -> None:
    assert pool(3).run(uneven, seed) == [[]] * 3


def thin(seed: int) -> list[str]:
    """What differs where a rank has nothing to move in a bucket."""
    mesh, ends = grid(2), list[Tensors]()
    torch.manual_seed(seed)
    whole_ones = [torch.randn(rows, DIM) for rows in (9, 1)]
    for tp in (mesh.tp, None):
        given = [m if tp is None else distribute_tensor(m, tp, [Shard(0)]) for m in whole_ones]
        module = nn.Module()
        module.matrices = nn.ParameterList(nn.Parameter(m.clone()) for m in given)
        plain = Muon(module.parameters(), lr=0.1, batched=False)
        optimizing: Any = plain
        if tp is not None:
            facts: Any = {"bucket_bytes": 64, "overlap_param_gather": False}
            optimizing = LayerWise(plain, module, mesh.dp, options=Options(timeout_s=10), **facts)
        for _ in range(3):
            torch.stack([full(m).square().sum() for m in module.parameters()]).sum().backward()
            optimizing.step()
            optimizing.zero_grad()
        ends.append(weights(module))
        if tp is not None:
            optimizing.close()
    return differing(*ends)


def stages(seed: int) -> bool:
    """Stages of a pipeline of which one has homes, and the other has none."""
    pp, tp, dp = (f"{name}{next(NUMBERS)}" for name in ("pp", "tp", "dp"))
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=(pp, tp, dp))
    module, over = model(seed, lambda: nn.Linear(64, 32, bias=False)), mesh[tp]
    if mesh[pp].get_local_rank() == 0:
        whole_one, over = module.weight.detach(), mesh[dp]
        module.weight = nn.Parameter(distribute_tensor(whole_one, mesh[tp], [Shard(0)]))
    optimizer, options = Muon(module.parameters(), lr=0.1), Options(timeout_s=10)
    with LayerWise(optimizer, module, over, options=options) as optimizing:
        return ", home " in optimizing.explain()


def test_stages_that_differ(pool: Pool, seed: int) -> None:
    assert pool(4).run(stages, seed) == [True] * 2 + [False] * 2


def rolled_back(seed: int) -> list[str]:
    """What a state that is loaded amid a step changes: that step is left out."""
    mesh, ends = grid(2), list[Tensors]()
    for loads in (True, False):
        module = parallel(seed, mesh)
        with slowly(seed if loads else None):
            optimizing = optimized(module, mesh, "ours")
        with optimizing:
            go(optimizing, mesh, seed, range(2))
            for step in range(2, 5) if loads else ():
                module(rows_of(mesh, seed, step)).square().mean().backward()
                optimizing.load_state_dict(optimizing.state_dict())
                optimizing.zero_grad()
            go(optimizing, mesh, seed, range(5, 6))
            ends.append(weights(module))
    return differing(*ends)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_a_rank_without_a_part_of_a_bucket(pool: Pool, seed: int) -> None:
    assert pool(2).run(thin, seed) == [[], []]


def test_a_state_loaded_amid_a_step(pool: Pool, seed: int) -> None:
    assert pool(2).run(rolled_back, seed) == [[], []]


class Pairs(nn.Module):
    """Matrices that ranks with shards hold alike, each with a sharded one of its shape."""

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        super().__init__()
        made = [*map(torch.randn, itertools.product((14, 16), range(12, 20)))]
        self.alike = nn.ParameterList(nn.Parameter(each.clone()) for each in made)
        self.sharded = nn.ParameterList(
            nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in made
        )
        self.scale = nn.Parameter(torch.ones(8, dtype=dtype))

    def forward(self, draw: torch.Generator) -> torch.Tensor:
        held = [p.to_local() if isinstance(p, DTensor) else p for p in self.parameters()]
        return torch.stack([(torch.randn(p.shape, generator=draw) * p).sum() for p in held]).sum()


def held_alike(seed: int, dtype: torch.dtype) -> tuple[Tensors, str]:
    """What ranks hold alike after some steps, and what is raised when one has written it."""
    mesh = grid(2)
    module = model(seed, lambda: Pairs(mesh.tp, dtype))
    optimizer = Muon(layerwise.by_dimensions(module.parameters()), lr=0.02)
    draw = torch.Generator().manual_seed(seed)
    with LayerWise(optimizer, module, mesh.dp, check_replicas_every=5) as optimizing:
        for _ in range(40):
            module(draw).backward()
            optimizing.step()
            optimizing.zero_grad()
        optimizing.synchronize()
        found = {name: whole(value) for name, value in module.named_parameters()}
        with torch.no_grad():
            module.alike[3][0, 0] += float(mesh.tp.get_local_rank())
        with pytest.raises(ReplicaError) as caught:
            optimizing.check_replicas()
    return found, str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_with_shards_stay_alike(pool: Pool, dtype: torch.dtype, seed: int) -> None:
    """Also where random rounding, of bfloat16, makes the optimizer update all in one step."""
    (one, told), (other, _) = pool(2).run(held_alike, seed, dtype)
    assert differing(one, other) == []
    assert "alike.3 (this" in told


# -- norms and experts ----------------------------------------------------------------------------


def unlike(seed: int, tp: int) -> list[str]:
    """What differs, beyond rounding, from training without tensor parallelism, clipped."""
    made: list[Tensors] = []
    for size in (tp, 1):
        mesh = grid(size)
        module = parallel(seed, mesh)
        module.double()
        with optimized(module, mesh, "sgd", main_grad_dtype=None, op="sum") as optimizing:
            replica, found = dist.get_rank() // tp, {}
            for step in range(4):
                draw = torch.Generator().manual_seed(seed + 10 * step + replica)
                rows = torch.randn(layerwise.TOKENS, DIM, generator=draw).double()
                module(rows).square().mean().mul(1 if size == tp else 1 / tp).backward()
                found[f"norm {step}"] = optimizing.clip_grad_norm_(0.1)
                optimizing.step()
                optimizing.zero_grad()
            made.append({**weights(module), **found})
    return [name for name, value in made[0].items() if not torch.allclose(value, made[1][name])]


def test_trains_and_clips_as_without_shards(pool: Pool, seed: int) -> None:
    assert pool(4).run(unlike, seed, 2) == [[]] * 4


class Experts(nn.Module):
    """A stack of matrices, of which a rank has some."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, DIM)
        self.experts = nn.Parameter(torch.randn(4, DIM, DIM) / DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine: Any = self.experts
        mine = mine.to_local() if isinstance(mine, DTensor) else mine
        return torch.relu(self.dense(x)) @ mine.sum(0)


def expert_parallel(seed: int) -> tuple[list[str], list[torch.Tensor], Tensors]:
    """Experts are sharded over pairs of ranks, and the other Parameters over none."""
    replicas, ep = grid(2)
    module, told, norms = model(seed, Experts), [], []
    module.experts = nn.Parameter(distribute_tensor(module.experts.detach(), ep, [Shard(0)]))
    facts: Any = {"bucket_bytes": layerwise.SMALL, "options": Options(timeout_s=20)}
    optimizing = [
        LayerWise(Muon([module.experts], lr=0.02), module, replicas, **facts),
        LayerWise(
            Muon(layerwise.by_dimensions(module.dense.parameters()), lr=0.02),
            module,
            layerwise.mesh(),
            **facts,
        ),
    ]
    for step in range(3):
        module(batch(seed, step)).square().sum().backward()
        norms.append(clip_grad_norm_(optimizing, 0.5))
        for each in optimizing:
            each.step()
            each.zero_grad()
    told.append(optimizing[0].explain())
    for each in optimizing:
        each.synchronize()
        each.close()
    return told, norms, {name: whole(value) for name, value in module.state_dict().items()}


def test_experts_beside_dense_parameters(pool: Pool, seed: int) -> None:
    """Shards of whole matrices stay where they are, and one norm clips all gradients."""
    sharded = pool(4).run(expert_parallel, seed)
    for told, norms, found in sharded:
        assert "experts, of rank" in told[0]
        assert "home" not in told[0]
        assert norms == sharded[0][1]
        assert differing(found, sharded[0][2]) == []
    _, norms, _ = sharded[0]
    module = model(seed, Experts)
    # the first norm, of the mean gradients: dense over 4 ranks, experts over 2
    grads: list[Tensors] = []
    for rank in range(4):
        draw = torch.Generator().manual_seed(seed + rank)
        module.zero_grad()
        full = module.experts
        rows = torch.randn(layerwise.TOKENS, DIM, generator=draw)
        mine = full[2 * (rank % 2) : 2 * (rank % 2) + 2]
        (torch.relu(module.dense(rows)) @ mine.sum(0)).square().sum().backward()
        found = {name: param.grad for name, param in module.named_parameters()}
        grads.append({name: grad.clone() for name, grad in found.items() if grad is not None})
    means = {
        name: torch.stack([g[name] for g in grads]).sum(0) / (2 if name == "experts" else 4)
        for name in grads[0]
    }
    total = torch.linalg.vector_norm(torch.cat([mean.flatten() for mean in means.values()]))
    torch.testing.assert_close(norms[0].float(), total)


# -- checkpoints ----------------------------------------------------------------------------------


def through_a_checkpoint(
    seed: int, tp: int, optimizer: str, folder: str, saves: bool
) -> checkpoints.Run:
    mesh = grid(tp)
    optimizing = optimized(parallel(seed if saves else seed + 1, mesh), mesh, optimizer)
    go_on = checkpoints.saved if saves else checkpoints.loaded
    return go_on(optimizing, partial(go, optimizing, mesh, seed), folder)


@pytest.mark.parametrize(
    ("world", "tp", "optimizer"),
    [
        (4, 2, "muon"),
        pytest.param(2, 1, "ours", marks=pytest.mark.slow),
        pytest.param(2, 2, "ours", marks=pytest.mark.slow),
        pytest.param(4, 4, "adamw", marks=pytest.mark.slow),
    ],
)
def test_goes_on_from_a_checkpoint(
    pool: Pool, world: int, tp: int, optimizer: str, seed: int, tmp_path: Path
) -> None:
    """On the same mesh bit for bit; on others, all that was loaded is."""
    before = pool(4).run(through_a_checkpoint, seed, 2, optimizer, str(tmp_path), True)
    after = pool(world).run(through_a_checkpoint, seed, tp, optimizer, str(tmp_path), False)
    checkpoints.check(before, after, same=(world, tp) == (4, 2))


# -- what is said ---------------------------------------------------------------------------------


def told_of(seed: int) -> list[str]:
    told: list[str] = []
    mesh = grid(2)
    module = parallel(seed, mesh)
    groups = [*module.parameters()]
    optimizer = Muon(layerwise.by_dimensions(groups), lr=0.02)
    before = [[*group["params"]] for group in optimizer.param_groups]
    with LayerWise(optimizer, module, mesh.dp, bucket_bytes=layerwise.SMALL) as optimizing:
        told.append(optimizing.explain())
        shapes = {p.shape for group in optimizer.param_groups for p in group["params"]}
        assert torch.Size((layerwise.HIDDEN, DIM)) in shapes
    for group, params in zip(optimizer.param_groups, before, strict=True):
        assert all(p is q for p, q in zip(group["params"], params, strict=True))

    def expect(kind: type[Exception], make: Any) -> None:
        with pytest.raises(kind) as caught:
            make()
        told.append(str(caught.value))

    expect(UnsupportedError, lambda: layer_wise(parallel(seed, mesh), "sgd"))
    both: Any = nn.Module()
    both.one = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh.tp, [Shard(0)]))
    both.other = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh.dp, [Replicate()]))
    params = [*both.parameters()]
    expect(UnsupportedError, lambda: LayerWise(torch.optim.SGD(params), both, mesh.dp))
    wide: Any = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh.tp, [Shard(1)]))
    wide._local_tensor = torch.ones(3, 4).t()
    both.other = wide
    params = [*both.parameters()]
    expect(UnsupportedError, lambda: LayerWise(torch.optim.SGD(params), both, mesh.dp))
    return told


def test_explains_homes_and_refuses_other_meshes(pool: Pool, seed: int) -> None:
    for shown, whole_mesh, replicated, strided in pool(4).run(told_of, seed):
        assert "rank 1, shard 1: cost" in shown
        assert "blocks.0.up.weight, of rank" in shown
        assert "40x24, home" in shown
        assert re.search(r"def weights_to_shards_\d\(tp: Team\[2\]", shown)
        assert "is a DTensor on ranks of the data-parallel mesh" in whole_mesh
        assert "is a DTensor on ranks of the data-parallel mesh" in replicated
        assert "make the Parameter contiguous" in strided
