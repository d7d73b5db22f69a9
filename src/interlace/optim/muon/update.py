"""One step of a group of parameters by Muon, and into which matrices a parameter is cut.

Matrices of equal shapes are stacked and go through one iteration; `batched=False` takes them one
by one. A matrix that is taken alone, without the kernel of symmetric products, has the
arithmetic of torch.optim.Muon, operator by operator.

Note [A copy]
    torch.optim.Muon, up to torch 2.13, casts the momentum buffer itself where nesterov=False; a
    bfloat16 buffer is then normalised in place, and momentum is lost. Here the cast is a copy.

Note [DTensors]
    Momentum is sharded as the gradient is. Where a shard has whole matrices (experts, or heads of
    `head_dim`), it is updated by itself. Other shards are LayerWise's, which brings whole matrices
    to one rank each. At a learning rate of 0 their momentum is averaged here, and no more: by such
    a step torch.distributed.checkpoint makes states.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard

from interlace.errors import OptimizerError
from interlace.kernels.gemm.support import ALIGNMENT, LIMIT
from interlace.optim.adam.state import local
from interlace.optim.grad_accumulator import placed_grad
from interlace.optim.loading import Group, State
from interlace.optim.muon.newton_schulz import coefficients, orthogonalize, reads_columns, runs_on
from interlace.torch_private import (
    foreach_add_,
    foreach_copy_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
)

Adjustment = Literal["original", "match_rms_adamw", "spectral_unclamped"]
ADJUSTMENTS = (None, *get_args(Adjustment))
MOST_BYTES = 1 << 27
"""Most bytes of a stack of matrices: larger batches are no faster."""
LARGE = 1 << 20
"""Elements of a matrix from which a kernel launch of its own takes less time than it saves."""
Matrices = Sequence[Tensor]


def adjusted_lr(group: Group, rows: int, columns: int) -> float:
    """The learning rate of a matrix of that size; see `Muon`."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    elif group["adjust_lr_fn"] == "spectral_unclamped":
        ratio = math.sqrt(rows / columns)
    else:
        ratio = math.sqrt(max(1, rows / columns))
    return float(group["lr"] * ratio)  # a tensor's arithmetic is fp32, as in torch.optim


def cuts(size: int, group: Group) -> list[int]:
    """The rows of each matrix that so many rows are cut into."""
    if group["head_dim"]:
        return [group["head_dim"]] * (size // group["head_dim"])
    return list(group["split_sizes"] or (size,))


def matrices(tensor: Tensor, group: Group) -> list[Tensor]:
    """Views of the matrices that a parameter, or what is shaped as it, is cut into."""
    parts = cuts(tensor.shape[-2], group)
    whole = [tensor]
    while whole[0].ndim > 2:  # views, whatever the strides
        whole = [each for several in whole for each in several.unbind()]
    return [part for each in whole for part in (each.split(parts) if parts[1:] else (each,))]


def check_cut(shape: torch.Size, group: Group) -> None:
    """Raises OptimizerError where a parameter of that shape cannot be cut as its group says."""
    if len(shape) < 2:
        raise OptimizerError(
            f"a parameter of shape {tuple(shape)} in a group of Muon, which updates matrices: put "
            "it in a group with use_muon=False (interlace.optim.muon_groups(model) makes groups)"
        )
    size, sizes, head = shape[-2], group["split_sizes"], group["head_dim"]
    for part in sizes or (size,):
        if part < 1 or (head and part % head):
            raise OptimizerError(
                f"{part} rows of a parameter of shape {tuple(shape)} are not heads of "
                f"head_dim={head}: give such parameters a group of their own"
            )
    if sizes and sum(sizes) != size:
        raise OptimizerError(
            f"split_sizes={tuple(sizes)} add up to {sum(sizes)}, and the matrices of a parameter "
            f"of shape {tuple(shape)} have {size} rows"
        )


def step_group(group: Group, states: MutableMapping[Tensor, State]) -> None:
    """Updates the parameters of the group that have gradients."""
    params = [param for param in group["params"] if param.grad is not None and param.numel()]
    if not params:
        return
    parts = {param for param in params if is_part(param, group)}
    if parts and float(group["lr"]):
        raise OptimizerError(
            f"a parameter of shape {tuple(min(p.shape for p in parts))} is sharded in parts of "
            "matrices, and Muon needs whole ones. fix: interlace.optim.LayerWise(optimizer, "
            "module, mesh), over the data-parallel mesh, where one rank has each; or a group with "
            "use_muon=False"
        )
    grads, moments = grads_and_moments(params, group, states)
    alike: defaultdict[tuple[Any, ...], list[tuple[Tensor, ...]]] = defaultdict(list)
    for param, grad, moment in zip(params, grads, moments, strict=True):
        if param in parts:
            average([grad], [moment], group)
            continue
        held = [local(t.detach()) for t in (param, grad, moment)]
        if not held[0].numel():
            continue
        for entry in zip(*(matrices(part, group) for part in held), strict=True):
            key = param.device, param.dtype, grad.dtype, entry[0].shape
            alike[key].append(entry)
    for entries in alike.values():
        targets, slopes, buffers = zip(*entries, strict=True)
        for few in batches(targets, group["batched"]):
            update_stack(targets[few], slopes[few], buffers[few], group)


def update_stack(targets: Matrices, grads: Matrices, moments: Matrices, group: Group) -> None:
    """Updates matrices of one shape. Large ones, on a GPU, in one pass over memory before the
    iteration and one after it.
    """
    alpha = -adjusted_lr(group, *targets[0].shape)
    if all(passes_once(tensors, group) for tensors in (targets, grads, moments)):
        from interlace.optim.muon.launch import descend, stack  # imports Triton

        options = {name: group[name] for name in ("momentum", "nesterov")}
        made = orthogonal_stack(*stack(grads, moments, **options), group)
        descend(targets, made.contiguous(), factor=decay_factor(group), alpha=alpha)
        increment_version((*targets, *moments))
        return
    average(grads, moments, group)
    decay(targets, group)
    if group["nesterov"]:
        moments = foreach_lerp([*grads], [*moments], group["momentum"])
    made = orthogonal(moments, group)
    if made.ndim == 2:
        targets[0].add_(made, alpha=alpha)
    else:  # in the parameters' dtype and layout, so that few launches add all of them
        made = made.to(targets[0].dtype).contiguous()
        foreach_add_([*targets], [*made], alpha=alpha)


def passes_once(tensors: Matrices, group: Group) -> bool:
    """True if the elementwise kernels take these, and a launch for each is worth it."""
    return (
        LARGE <= tensors[0].numel() < LIMIT
        and tensors[0].numel() % ALIGNMENT == 0
        and tensors[0].dtype in (torch.bfloat16, torch.float16, torch.float32)
        and group["symmetric"]
        and runs_on(tensors[0].device)
        and all(t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 for t in tensors)
    )


def is_part(param: Tensor, group: Group) -> bool:
    """True for a shard that is a part of a matrix; see Note [DTensors]."""
    if not isinstance(param, DTensor):
        return False
    cut = any(  # by its placements alone, which all ranks see alike: one may hold all of the rows
        not placement.is_replicate() and param.device_mesh.size(axis) > 1
        for axis, placement in enumerate(param.placements)
    )
    return cut and not in_whole_matrices(param, group)


def in_whole_matrices(param: DTensor, group: Group) -> bool:
    """True if each shard consists of whole matrices; see Note [DTensors]."""
    rows, head = param.ndim - 2, group["head_dim"]
    for axis, placement in enumerate(param.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard:
            return False
        dim, parts = placement.dim % param.ndim, param.device_mesh.size(axis)
        cut = head and dim == rows and param.placements.count(placement) == 1
        if dim >= rows and not (cut and -(-param.shape[dim] // parts) % head == 0):
            return False
    return True


def grads_and_moments(
    params: Sequence[Tensor], group: Group, states: MutableMapping[Tensor, State]
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients, in the momentum's dtype, and the momentum."""
    grads = [*map(checked_grad, params)]
    moments = [*map(momentum_of, params, grads, map(states.__getitem__, params))]
    return [grad.to(moment.dtype) for grad, moment in zip(grads, moments, strict=True)], moments


def average(grads: Matrices, moments: Matrices, group: Group) -> None:
    """Averages momentum with the gradients, in place."""
    foreach_lerp_([*map(local, moments)], [*map(local, grads)], 1 - group["momentum"])


def decay_factor(group: Group) -> float:
    """Factor by which weight decay multiplies weights."""
    return float(1 - group["lr"] * group["weight_decay"])


def decay(tensors: Matrices, group: Group) -> None:
    """Decays weights, in few launches on a GPU. On CPUs foreach rounds the factor to bfloat16."""
    factor = decay_factor(group)
    if tensors[0].is_cuda:
        foreach_mul_([*tensors], factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def checked_grad(param: Tensor) -> Tensor:
    """The gradient, sharded as its parameter is. Raises OptimizerError for one of another kind."""
    grad = param.grad
    assert grad is not None
    if grad.layout != torch.strided or not grad.is_floating_point():
        raise OptimizerError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is {grad.dtype} with "
            f"layout {grad.layout}: Muon takes dense real ones; use a group with use_muon=False"
        )
    return placed_grad(param)


def momentum_of(param: Tensor, grad: Tensor, state: State) -> Tensor:
    """The buffer, made where there is none. Raises OptimizerError for one of another shape."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
    moment = state["momentum_buffer"]
    if moment.shape != param.shape or isinstance(moment, DTensor) != isinstance(param, DTensor):
        raise OptimizerError(
            f"the momentum_buffer of a parameter of shape {tuple(param.shape)} is a "
            f"{type(moment).__name__} of shape {tuple(moment.shape)}: was it saved from another "
            "model, or with the parameters in another order?"
        )
    return moment


def batches(targets: Matrices, batched: bool) -> Iterator[slice]:
    """Slices of matrices of one shape, each to be stacked."""
    most = max(1, MOST_BYTES // (2 * targets[0].numel())) if batched else 1
    return (slice(at, at + most) for at in range(0, len(targets), most))


def orthogonal(updates: Matrices, group: Group) -> Tensor:
    """The updates, of one shape, made orthogonal: one matrix or a stack of them, bfloat16."""
    squares: Tensor | None = None
    kernel = group["symmetric"] and runs_on(updates[0].device)
    if passes_once(updates, group):
        from interlace.optim.muon.launch import stack  # imports Triton

        x, squares = stack(updates)
    elif len(updates) > 1 or kernel:
        shape = len(updates), *updates[0].shape
        x = torch.empty(shape, dtype=torch.bfloat16, device=updates[0].device)
        foreach_copy_([*x], [*updates])
    else:
        x = updates[0].to(torch.bfloat16, copy=True)[None]  # see Note [A copy]
    return orthogonal_stack(x, squares, group)


def orthogonal_stack(x: Tensor, squares: Tensor | None, group: Group) -> Tensor:
    """The same of a stack of matrices, bfloat16, which may be overwritten; `squares` of their norms
    where they are known.
    """
    count, rows, columns = x.shape
    x = x if count > 1 else x[0]
    tall = rows > columns
    if tall:
        x = x.mT if reads_columns(count, rows) else x.mT.contiguous()
    steps = coefficients(group["ns_coefficients"], group["ns_steps"])
    x = orthogonalize(
        x,
        steps,
        eps=group["eps"],
        gram_variant=group["gram_variant"],
        symmetric=group["symmetric"],
        squares=squares,
    )
    return x.mT if tall else x
