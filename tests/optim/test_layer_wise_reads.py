"""Weights of a LayerWise that are read between its step and the next forward have arrived."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.optim.layerwise import DIM, OPTIMIZERS, batch, layer_wise, model, slowly
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import get_total_norm, parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from interlace.optim import LayerWise
from interlace.options import Options

Read = Callable[[nn.Module, list[Any]], Any]
"""Reads weights, of a module or of the list of its Parameters that was made at the start."""


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def saved(module: nn.Module, _: object) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert other(torch.ones(2, DIM)).shape == (2, 8)  # hooks do nothing there
    return flat(other)


def reference(module: nn.Module, _: object) -> torch.Tensor:
    other = copy.deepcopy(module)
    assert {type(param) for param in other.parameters()} == {nn.Parameter}
    assert other(torch.ones(2, DIM)).shape == (2, 8)
    return flat(other)


def written(_: object, held: list[Any]) -> torch.Tensor:
    with torch.no_grad():
        for param in held:
            param.mul_(0.5)
    return parameters_to_vector(held).detach().clone()


def loaded(module: nn.Module, _: object) -> torch.Tensor:
    other = model(0)
    with torch.no_grad():
        for own, param in zip(other.parameters(), module.parameters(), strict=True):
            own.copy_(param)
    return flat(other)


READS: dict[str, Read] = {
    "parameters_to_vector": lambda module, _: parameters_to_vector(module.parameters()).detach(),
    "a list that was held": lambda _, held: parameters_to_vector(held).detach().clone(),
    "named_parameters": lambda module, _: [p.tolist() for _, p in module.named_parameters()],
    "an attribute": lambda module, _: module.get_parameter("blocks.1.up.weight").sum().item(),
    "the last alone": lambda _, held: held[-1].data.clone(),
    "foreach": lambda _, held: [norm.item() for norm in torch._foreach_norm(held)],
    "total norm": lambda _, held: get_total_norm([param.detach() for param in held]).item(),
    "numpy": lambda _, held: [np.array(param.detach().numpy()).tolist() for param in held],
    "dlpack": lambda _, held: [torch.from_dlpack(param.detach()).clone() for param in held],
    "an operator": lambda _, held: [torch.ops.aten.clone.default(param.data) for param in held],
    "repr": lambda _, held: repr(held),
    "a Parameter pickled": lambda _, held: [pickle.loads(pickle.dumps(p)).tolist() for p in held],
    "a Parameter copied": lambda _, held: [copy.copy(param).tolist() for param in held],
    "state_dict": lambda module, _: [value.tolist() for value in module.state_dict().values()],
    "another module": loaded,
    "deepcopy": reference,
    "torch.save": saved,
    "written in place": written,
}


def differing(seed: int, overlap: bool) -> list[Any]:
    """What each of the reads gave, after a step of its own."""
    module, found = model(seed), list[Any]()
    held = list(module.parameters())
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    with slowly(seed if overlap else None):
        optimizing = layer_wise(module, "sgd", overlap_param_gather=overlap)
    with optimizing:
        for step, read in enumerate(READS.values()):
            module(batch(seed, step)).square().mean().backward()
            optimizing.step()
            for param in held:  # no reads, which would cost the overlap
                assert param.shape.numel() == param.numel()
                param.grad = None
            assert bool(optimizing._weights.pending) == overlap
            found.append(read(module, held))
            optimizing.zero_grad()
        module(batch(seed, 99)).square().mean().backward()
        optimizing.step()
        average.update_parameters(module)
        found.append(flat(average.module))
        optimizing.step()
        average.update_parameters(module)
        found.append(flat(average.module))
        assert not optimizing._weights.pending
    assert {type(param) for param in held} == {nn.Parameter}
    return found


def reads(seed: int) -> list[str]:
    names = [*READS, "the first average", "the second average"]
    pairs = zip(names, differing(seed, True), differing(seed, False), strict=True)
    return [name for name, one, other in pairs if not _equal(one, other)]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return all(map(_equal, one, other))
    return one == other


def test_reads_wait(pool: Pool, seed: int) -> None:
    assert pool(2).run(reads, seed) == [[]] * 2


class Reader(nn.Module):
    """Reads a matrix of a module inside without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.first(x), self.inner.weight, self.inner.bias)


def read_inside(seed: int, how: str) -> list[float]:
    made = []
    for overlap in (True, False):
        torch._dynamo.reset()
        module = model(seed, lambda: nn.Sequential(Reader(), nn.Linear(DIM, 2)))
        run: Any = module
        facts = {"bucket_bytes": 1, "check_replicas_every": 1, "overlap_param_gather": overlap}
        if how == "compiled, run once before":
            run = torch.compile(module, backend="aot_eager")
            run(batch(seed, 0)).sum()
        with slowly(seed if overlap else None):
            optimizing = layer_wise(module, "sgd", **facts)
        if how == "compiled":
            run = torch.compile(module, backend="aot_eager")
        with optimizing:
            for step in range(5):
                run(batch(seed, step)).square().mean().backward()
                optimizing.step()
                optimizing.zero_grad()
        made.append(flat(module))
    return (made[0] - made[1]).tolist()


@pytest.mark.parametrize("how", ["eager", "compiled", "compiled, run once before"])
def test_a_module_waits_for_what_it_reads_past_the_hooks(pool: Pool, how: str, seed: int) -> None:
    for off in pool(2).run(read_inside, seed, how):
        assert not any(off)


def sharded(seed: int) -> list[float]:
    """Reads of DTensors, which have methods that go past torch's functions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ways: list[Callable[[Any], torch.Tensor]] = [
        lambda param: param.to_local(),
        lambda param: param.full_tensor(),
        lambda param: param._local_tensor,
        lambda param: copy.deepcopy(param).to_local(),
        lambda param: param.redistribute(placements=param.placements).to_local(),
        lambda param: (param * 2).to_local(),
    ]
    made, same = [], torch.ones(4, DIM)
    for overlap in (True, False):
        module = model(seed, lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        inner = OPTIMIZERS["sgd"](module.parameters())
        facts = {"overlap_param_gather": overlap, "options": Options(timeout_s=20)}
        with slowly(seed if overlap else None):
            optimizing = LayerWise(inner, module, mesh["dp"], bucket_bytes=1, **facts)
        read = []
        with optimizing, torch.no_grad():
            for step in range(2 * len(ways)):
                with torch.enable_grad():
                    module(same).sum().backward()
                optimizing.step()
                assert bool(optimizing._weights.pending) == overlap
                way = ways[step % len(ways)]
                read += [way(param).flatten().clone() for param in module.parameters()]
                optimizing.zero_grad()
        made.append(torch.cat(read))
    return (made[0] - made[1]).tolist()


def test_reads_of_sharded_weights_wait(pool: Pool, seed: int) -> None:
    for off in pool(4).run(sharded, seed):
        assert not any(off)
