"""One parameter as a step sees it: which kernel it takes, its key, and where its elements lie.

entry = make_entry(param, grad, state, group, coupled=False, number=3, at=0)
update_singly(entry, grad, row)         # through the twin, whatever the device and the strides
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from interlace.errors import OptimizerError
from interlace.optim.adam.arithmetic import Flat, Scalars, Spec, key_of, update_twin
from interlace.optim.adam.state import PARAM_DTYPES, is_dense, local, master_of, ready


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter that has a gradient."""

    param: Tensor
    state: dict[str, Any]
    group: int
    spec: Spec
    key: int
    base: int
    """The number, in the whole parameter, of this rank's first element."""
    dense: bool
    by_kernel: bool
    counted_there: bool
    """Whether its steps are counted on the device."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """This rank's moments, greatest second moment, and master or remainder."""
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", self.spec.master_name)
        return tuple(None if (t := self.state.get(name)) is None else local(t) for name in names)


def served(device: torch.device) -> bool:
    """Whether the kernel runs there."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and find_spec("triton") is not None


def make_entry(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    group: Mapping[str, Any],
    *,
    coupled: bool,
    number: int,
    at: int,
) -> Entry:
    """Makes the state ready of parameter `number` of all, which is in the group at index `at`."""
    check_grad(grad, param)
    ready(param, group, state)
    part, master = local(param), master_of(param, group)
    m, v = group["exp_avg_dtype"], group["exp_avg_sq_dtype"]
    lossy = torch.bfloat16 in (m, v, part.dtype if master is None else m)
    spec = Spec(
        p=part.dtype,
        g=grad.dtype,
        m=m,
        v=v,
        master=master,
        amsgrad=bool(group["amsgrad"]),
        coupled=coupled,
        stochastic=lossy and bool(group["stochastic_rounding"]),
    )
    dense = is_dense(part)
    by_kernel = dense and served(part.device)
    there = by_kernel and bool(group["capturable"] or group["fused"])
    step = state.get("step", 0)
    if there:
        state["step"] = torch.as_tensor(step, dtype=torch.float32, device=part.device).view(())
    key = key_of(group["seed"], number)
    return Entry(param, state, at, spec, key, first_element(param), dense, by_kernel, there)


def check_grad(grad: Tensor, param: Tensor) -> None:
    """Raises OptimizerError for a gradient that Adam cannot take."""
    of = f"the gradient of a parameter of shape {tuple(param.shape)}"
    if grad.shape != local(param).shape:
        raise OptimizerError(
            f"{of} has shape {tuple(grad.shape)}: was the parameter's data replaced after "
            "backward? Call zero_grad() and backward anew"
        )
    if grad.layout != torch.strided or grad.dtype not in PARAM_DTYPES:
        raise OptimizerError(
            f"{of} is {grad.dtype} with layout {grad.layout}: Adam takes dense float32, bfloat16 "
            "and float16 (torch.optim.SparseAdam takes sparse ones)"
        )


def first_element(param: Tensor) -> int:
    """See `Entry.base`: so rounding is the same however a parameter is sharded by rows."""
    if not isinstance(param, DTensor):
        return 0
    mesh, placements = param.device_mesh, param.placements
    _, offset = compute_local_shape_and_global_offset(param.shape, mesh, placements)
    number = 0
    for at, size in zip(offset, param.shape, strict=True):
        number = number * size + at
    return number


def flatten(tensor: Tensor) -> Tensor:
    """Dense memory as one dimension; a copy of what is not dense."""
    if is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


def laid_out(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient in the memory order of the parameter's states: itself, or a copy."""
    if not is_dense(param):
        return grad.contiguous()
    same = all(
        g == p or size == 1
        for g, p, size in zip(grad.stride(), param.stride(), param.shape, strict=True)
    )
    return grad if same else torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def update_singly(entry: Entry, grad: Tensor, row: Scalars) -> None:
    """One step of one parameter; the gradient is laid out as its states."""
    param = local(entry.param).detach()
    m, v, vmax, w = (None if t is None else flatten(t) for t in entry.tensors())
    assert m is not None
    assert v is not None
    if w is not None and entry.spec.master == "remainder":
        w = w.view(torch.int16)
    p = flatten(param)
    flat = Flat(p, flatten(grad), m, v, vmax, w)
    update_twin(entry.spec, flat, row, key=entry.key, base=entry.base)
    if not entry.dense:
        param.copy_(p.view(param.shape))


def refuse_overlap(entries: Sequence[Entry]) -> None:
    """Raises OptimizerError where two parameters share memory: one launch would write it twice."""
    spans = sorted(
        (str(part.device), part.data_ptr(), part.data_ptr() + part.nbytes, i)
        for i, part in ((i, local(entry.param)) for i, entry in enumerate(entries))
        if entries[i].dense and part.numel()
    )
    for before, after in pairwise(spans):
        if before[0] == after[0] and after[1] < before[2]:
            shapes = [tuple(entries[span[3]].param.shape) for span in (before, after)]
            raise OptimizerError(
                f"two parameters, of shapes {shapes[0]} and {shapes[1]}, share memory: tie weights "
                "by using one Parameter in both places, and give it to the optimizer once"
            )
