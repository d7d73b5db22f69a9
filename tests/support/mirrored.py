"""What runs in a mirror team, on a CPU or one GPU: sites by every strategy, and a compiled layer.

Each is compared with the same mirrored Program in order, bit for bit: values differ by strategy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tests.frontend.models import Block, parallelise_block
from tests.gpu.cases import STRATEGIES, Case, program_of, run
from tests.runtime.programs import world_group
from torch.distributed.device_mesh import init_device_mesh

from interlace.frontend import backend
from interlace.options import Options
from interlace.runtime import Executor
from interlace_bench.mirror import mirror

RUNS = 4
WIDTH, ROWS = 256, 64


def executor_of(case: Case, strategy: str, **options: Any) -> Executor:
    """An Executor of a site in the mirror that is there."""
    chosen = Options.from_dict({"timeout_s": 20.0, **STRATEGIES[strategy], **options})
    groups = {"tp": world_group()}
    program = program_of(case, strategy)
    return Executor(program, groups=groups, device=case.device, options=chosen).prepare()


def wrong_sites(case: Case, strategies: list[str], seed: int, **options: Any) -> list[str]:
    """What is wrong with a site by each strategy in a mirror of its ranks: bits that are not those
    of the Program in order, and exact sums that are none a mirror may give."""
    wrong: list[str] = []
    with mirror(case.world):
        for strategy in strategies:
            with (
                executor_of(case, strategy, **options) as executor,
                executor_of(case, strategy, in_order=True) as twin,
            ):
                for number in range(RUNS):  # the slots are used in turn
                    inputs = case.inputs(seed + number, exact=number == 0)
                    found, ordered = run(executor, case, inputs), run(twin, case, inputs)
                    executor.synchronize()
                    twin.synchronize()
                    what = f"{case} {strategy} {options} run {number}"
                    if not torch.equal(found, ordered):
                        wrong.append(f"{what}: not the bits of the Program in order")
                    if number == 0 and not any(torch.equal(found, y) for y in given(case, inputs)):
                        wrong.append(f"{what}: no sum of this rank's own parts")
    return wrong


def given(case: Case, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results that a mirror may give for exact inputs: each peer gives what this rank gives, or
    what it gives the peer on its other side."""
    (x, w), size = (each.double() for each in inputs), case.world
    if case.kind == "all_gather_matmul":
        return [torch.cat([x] * size).mm(w).to(case.type)]
    y = x.mm(w)
    own, others = size * y, y.view(size, -1, y.shape[1]).sum(0)
    if case.kind == "matmul_reduce_scatter":
        return [own.chunk(size)[0].to(case.type), others.to(case.type)]
    by_part = [y.view(cuts, size, -1, y.shape[1]) for cuts in (1, 4)]  # `beside` cuts rows in 4
    sums = [part.sum(1, keepdim=True).expand_as(part).reshape(y.shape) for part in by_part]
    return [each.to(case.type) for each in (own, *sums)]


def layer_results(size: int, device: str, seed: int, **options: Any) -> list[torch.Tensor]:
    """Outputs and gradients of some steps of a transformer layer, compiled by our backend."""
    torch.compiler.reset()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with mirror(size):
        mesh = init_device_mesh(device, (size,), mesh_dim_names=("tp",))
        torch.manual_seed(seed)
        block = Block(WIDTH, 32, 2 * WIDTH).to(device, dtype)
        parallelise_block(block, mesh, src_data_rank=None)
        chosen = {"timeout_s": 20.0, **options}
        model: Any = torch.compile(block, backend=backend, options=chosen)
        found: list[torch.Tensor] = []
        for _ in range(RUNS):
            x = torch.randn(1, ROWS, WIDTH).to(device, dtype).requires_grad_()
            y = model(x)
            local = y.to_local() if hasattr(y, "to_local") else y
            local.float().square().mean().backward()
            found += [local.detach().clone(), x.grad.clone()]  # pyright: ignore
            for parameter in block.parameters():
                grad: Any = parameter.grad
                found.append((grad.to_local() if hasattr(grad, "to_local") else grad).clone())
                parameter.grad = None
        torch.compiler.reset()
    return found


def wrong_layer(size: int, device: str, seed: int, **options: Any) -> list[str]:
    """Which outputs and gradients of the layer have other bits than in order."""
    found = layer_results(size, device, seed, **options)
    ordered = layer_results(size, device, seed, **{**options, "graph": False, "in_order": True})
    pairs = enumerate(zip(found, ordered, strict=True))
    what = f"mirror of {size}, {options}"
    return [f"{what}: result {n}" for n, (a, b) in pairs if not torch.equal(a, b)] + [
        f"{what}: result {n} is not finite" for n, a in enumerate(found) if not a.isfinite().all()
    ]


def on(device: str, kind: str, size: int, dtype: str) -> Case:
    """A site on a device."""
    return dataclasses.replace(Case(kind, size, dtype), device=device)
