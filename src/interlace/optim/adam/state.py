"""States that Adam keeps for a parameter: which tensors, of which dtype and layout.

States lie as their parameter does (dense memory in the same order; for a DTensor the same
placements), so a step runs over memory from end to end. What was loaded from elsewhere (fp32
states of torch.optim) is converted when a step first needs it; what already fits is used without a
copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from interlace.errors import OptimizerError
from interlace.optim.loading import Group, State
from interlace.torch_private import is_traceable_wrapper_subclass
from interlace.torch_private.distributed import AsyncCollectiveTensor

STATE_DTYPES = (torch.float32, torch.bfloat16)
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASTERS = (None, "fp32", "remainder")
MASTER_NAMES = ("master", "remainder")
REMAINDER = torch.bfloat16
"""Declared dtype of a remainder's 16 bits. They are an int16, which neither NCCL nor gloo
gathers: no full state dict could be had of sharded ones. Read them as `.view(torch.int16)`."""
KEPT = (
    "exp_avg_dtype", "exp_avg_sq_dtype", "master_weights", "stochastic_rounding",
    "foreach", "fused", "capturable", "differentiable",
)  # fmt: skip
"""A group's options that loading leaves alone: how this optimizer stores and runs, not what it
was trained with (learning rate, betas, seed, ...), which come from the checkpoint."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor itself; arrived, if a collective makes it."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def is_dense(tensor: Tensor) -> bool:
    """True if its elements fill one span of memory, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    at = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != at:
                return False
            at *= size
    return True


def check_param(param: Tensor) -> None:
    """Raises OptimizerError for a parameter that Adam cannot serve."""
    part = local(param)
    if part.layout != torch.strided or part.dtype not in PARAM_DTYPES:
        raise OptimizerError(
            f"a parameter is {part.dtype} with layout {part.layout}: interlace.optim takes dense "
            "float32, bfloat16 and float16; use torch.optim for the others, in a group of its own"
        )
    if is_traceable_wrapper_subclass(part):
        raise OptimizerError(
            f"a parameter is a {type(part).__name__}, which has no memory of its own that Adam "
            "could write: use torch.optim for it, in an optimizer of its own"
        )
    if not is_dense(part):
        raise OptimizerError(
            f"a parameter of shape {tuple(part.shape)} has strides {part.stride()}: Adam takes "
            "memory from end to end. fix: make the Parameter of a contiguous tensor, or of the one "
            "that it was expanded from"
        )


def master_of(param: Tensor, group: Group) -> str | None:
    """Kind of master kept beside this parameter: None, `fp32` or `remainder`."""
    kind = None if param.dtype == torch.float32 else group["master_weights"]
    if kind == "remainder" and param.dtype != torch.bfloat16:
        raise OptimizerError(
            f"master_weights='remainder' with a parameter of {param.dtype}: only bfloat16 is the "
            "upper half of a float32; use master_weights='fp32'"
        )
    return kind


def tensors_of(param: Tensor, group: Group) -> dict[str, torch.dtype]:
    """The names and dtypes of the state tensors that lie like the parameter."""
    names = moments_of(group)
    kind = master_of(param, group)
    if kind is not None:
        names |= {"master": torch.float32} if kind == "fp32" else {"remainder": REMAINDER}
    return names


def moments_of(group: Group) -> dict[str, torch.dtype]:
    """The names and dtypes of the moments."""
    return {"exp_avg": group["exp_avg_dtype"], "exp_avg_sq": group["exp_avg_sq_dtype"]}


def empty_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised, laid out as a state of that parameter is."""
    return torch.empty_like(param.detach(), dtype=dtype)


def conform(name: str, value: Any, param: Tensor, dtype: torch.dtype) -> Tensor:
    """The value as a state of this parameter: itself if it fits, else converted, to nearest."""
    if not isinstance(value, Tensor) or value.shape != param.shape:
        shape = tuple(value.shape) if isinstance(value, Tensor) else value
        raise OptimizerError(
            f"the state {name!r} is {shape}, but its parameter has shape {tuple(param.shape)}: "
            "was it saved from another model, or with the parameters in another order?"
        )
    if isinstance(value, DTensor) != isinstance(param, DTensor):
        raise OptimizerError(
            f"the state {name!r} is a {type(value).__name__} and its parameter a "
            f"{type(param).__name__}: load it with torch.distributed.checkpoint.state_dict"
        )
    mine, its = local(param), local(value)
    if name == "remainder" and its.dtype != REMAINDER:
        raise OptimizerError(
            f"the state 'remainder' is {its.dtype}: its 16 bits are kept as {REMAINDER} and have "
            "been lost in a cast; load the checkpoint without it, and masters start anew"
        )
    layouts = [(t.dtype, t.device, t.shape, t.stride()) for t in (its, mine)]
    if layouts[0] == (dtype, *layouts[1][1:]):
        return value
    return empty_like(param, dtype).copy_(value)


def ready(param: Tensor, group: Group, state: State) -> None:
    """Makes what is missing and converts dtypes; raises OptimizerError for what does not fit."""
    names = tensors_of(param, group)
    for name, kind in (("master", "fp32"), ("remainder", "remainder")):
        if name in state and name not in names and not names.keys().isdisjoint(MASTER_NAMES):
            raise OptimizerError(
                f"the state has a {name!r}, as master_weights={kind!r} keeps it, and this group "
                f"has master_weights={group['master_weights']!r}. fix: load the checkpoint with "
                f"master_weights={kind!r}, or without its {name!r}: masters then start anew"
            )
    for name, dtype in names.items():
        if name in state:
            state[name] = conform(name, state[name], param, dtype)
        elif name == "master":
            state[name] = empty_like(param, dtype).copy_(param.detach())
        else:
            state[name] = empty_like(param, dtype).zero_()
    for name in MASTER_NAMES:
        if name not in names:
            state.pop(name, None)


def fit(name: str, value: Any, param: Tensor, group: Group) -> Any:
    """A loaded value, in the dtype that this optimizer keeps it in and where its parameter lies."""
    if name == "step":
        return torch.as_tensor(value, dtype=torch.float32).clone()  # it is counted in place
    if not isinstance(value, Tensor):
        return value
    return value.to(device=param.device, dtype=moments_of(group).get(name, value.dtype))
