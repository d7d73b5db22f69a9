"""LayerWise over tensor-parallel and expert Parameters: the bits of an unsharded model's update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.optim import layerwise
from tests.optim.layerwise import (
    DIM,
    OPTIMIZERS,
    Blocks,
    batch,
    differing,
    layer_wise,
    model,
    slowly,
    train,
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

from interlace.errors import OptimizerError, UnsupportedError
from interlace.optim import LayerWise, Muon, clip_grad_norm_
from interlace.options import Options

Tensors = dict[str, torch.Tensor]


class Sharded(Blocks):
    """Blocks whose norms run on sequences' parts where there is tensor parallelism."""

    tp: DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.mixer
        for block in self.blocks:
            rows = x
            if self.tp is not None:
                rows = DTensor.from_local(x, self.tp, [Replicate()]).redistribute(
                    placements=[Shard(0)]
                )
            x = x + block.down(torch.relu(block.up(block.norm(rows))))
        return self.head(x)


def grid(tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


def parallel(seed: int, mesh: DeviceMesh) -> Any:
    """The model, tensor-parallel: matrices by rows and by columns, and norms replicated."""
    module = model(seed, Sharded)
    if mesh["tp"].size() == 1:
        return module
    module.tp = mesh["tp"]
    for block in module.blocks:
        parallelize_module(
            block,
            mesh["tp"],
            {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(),
            },
        )
    return module


def rows_of(mesh: DeviceMesh, seed: int, step: int) -> torch.Tensor:
    """Rows that all shards of a replica have alike."""
    draw = torch.Generator().manual_seed(seed + 1000 * step + mesh["dp"].get_local_rank())
    return torch.randn(layerwise.TOKENS, DIM, generator=draw)


def optimized(module: nn.Module, mesh: DeviceMesh, optimizer: str, **options: Any) -> LayerWise:
    options = {"bucket_bytes": layerwise.SMALL, "options": Options(time_out_s=20), **options}
    return LayerWise(OPTIMIZERS[optimizer](module.parameters()), module, mesh["dp"], **options)


def go(
    optimizing: LayerWise, mesh: DeviceMesh, seed: int, steps: range, clip: float | None = 1.0
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


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights(module: nn.Module) -> Tensors:
    return {name: whole(value) for name, value in module.state_dict().items()}


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


def recorded(seed: int, tp: int, optimizer: str, transport: str) -> tuple[list[Tensors], Tensors]:
    """The gradients that this rank's optimizer saw in each step, and the weights at the end."""
    mesh, seen = grid(tp), []
    module = parallel(seed, mesh)
    options = Options(time_out_s=20, transport=transport)
    with optimized(module, mesh, optimizer, options=options, check_replicas_every=1) as optimizing:
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
        (4, 4, "ours", "auto"),
        (2, 2, "muon", "peer"),
        (4, 2, "adamw", "auto"),
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
