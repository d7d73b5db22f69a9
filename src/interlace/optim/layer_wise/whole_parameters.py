"""The Parameters that LayerWise takes: whose they are, what they are called, their bits.

for name, param in parameters_of(optimizer, module).items(): hash_of(param)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from interlace.errors import OptimizerError
from interlace.optim.adam.state import local
from interlace.optim.bucket_runs import NAMES


def parameters_of(optimizer: Optimizer, module: nn.Module) -> dict[str, nn.Parameter]:
    """The optimizer's Parameters by name, in the order of the module; raises for others."""
    wanted = {param for group in optimizer.param_groups for param in group["params"]}
    found = {name: param for name, param in named(module).items() if param in wanted}
    if not found or len(found) < len(wanted):
        raise OptimizerError(
            f"{len(wanted) - len(found)} of {len(wanted)} parameters of the optimizer are not in "
            "the module: nothing would gather them. Give the module that holds them all"
        )
    for name, param in found.items():
        if param.dtype not in NAMES or not param.dtype.is_floating_point:
            raise OptimizerError(f"{name} is {param.dtype}: give fp64, fp32, bf16 or fp16")
    devices = {str(param.device) for param in found.values()}
    if len(devices) > 1:
        raise OptimizerError(f"parameters lie on {sorted(devices)}: give those of one device")
    return found


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names that they have without what DDP and torch.compile wrap around."""
    wrapped = uncompiled(module)
    inner = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    return {name.replace("_orig_mod.", ""): param for name, param in inner.named_parameters()}


def rounds_at_random(group: dict[str, Any]) -> bool:
    """Whether interlace's Adam draws random bits for what a group stores."""
    kinds = [group.get("exp_avg_dtype"), group.get("exp_avg_sq_dtype")]
    if not group.get("master_weights"):
        kinds += [param.dtype for param in group["params"]]
    return bool(group.get("stochastic_rounding")) and torch.bfloat16 in kinds


def uncompiled(module: nn.Module) -> nn.Module:
    return getattr(module, "_orig_mod", module)


def hash_of(param: Tensor) -> Tensor:
    """64 bits of a tensor's bits, by their places."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[param.itemsize]
    bits = local(param).detach().flatten().view(words)
    places = torch.arange(bits.numel(), device=param.device) % 65_521 + 1
    return (bits.to(torch.int64) * places).sum()
