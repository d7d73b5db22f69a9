"""Plan of one step over all parameters, worked out once and used for as long as nothing moves.

Parameters of one kind on one GPU go in one launch (table.py). Others, which is all on a CPU, go
one after another through the twin.

Note [Steps]
    Every parameter has a step of its own, as in torch.optim. Counting hundreds of tensors one by
    one takes longer than all else here, so the steps that the host counts are views of one tensor,
    the bank. Where the device counts (capturable or fused) they stay separate tensors, since a
    captured graph has their addresses.

Note [What is looked at]
    Anything may have moved since the last step: gradients do, states are offloaded, parameters are
    cast or cut. A step therefore compares the addresses of all tensors, and the strides of the
    parameters, with those that the plan was made for. It holds states only through the state's own
    dict, so that offloading frees memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from itertools import chain, pairwise
from operator import eq, itemgetter, or_
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from interlace.errors import OptimizerError
from interlace.optim.adam.arithmetic import (
    AdamSpec,
    FlatParam,
    Hyper,
    Scalars,
    key_of,
    scalars,
    update_twin,
)
from interlace.optim.adam.state import KEPT, PARAM_DTYPES, is_dense, local, master_of, ready

if TYPE_CHECKING:
    from interlace.optim.adam.table import Launch

DECIDING = itemgetter("amsgrad", "seed", *KEPT)
"""The options of a group that a plan is made for."""
UNUSED = Scalars(*(0.0,) * len(Scalars._fields))


@dataclass(frozen=True, slots=True)
class ParamEntry:
    """A parameter that has a gradient."""

    param: Tensor
    state: dict[str, Any]
    group: int
    spec: AdamSpec
    key: int
    base: int
    """The number, in the whole parameter, of this rank's first element."""
    dense: bool
    by_kernel: bool
    counted_there: bool
    """True if its steps are counted on the device."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """This rank's moments, greatest second moment, and master or remainder."""
        last = "master" if self.spec.master == "fp32" else "remainder"
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", last)
        return tuple(None if (t := self.state.get(name)) is None else local(t) for name in names)


def served(device: torch.device) -> bool:
    """Returns True if the kernel runs on the device: an NVIDIA GPU, with Triton installed."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and find_spec("triton") is not None


def make_entry(
    optimizer: Any, at: int, number: int, param: Tensor, grad: Tensor | None
) -> ParamEntry | None:
    """Makes the state ready of parameter `number` of all, in group `at`; None without gradient."""
    if grad is None:
        return None
    group, state, part = optimizer.param_groups[at], optimizer.state[param], local(param)
    check_grad(grad, param)
    ready(param, group, state)
    master = master_of(param, group)
    m, v = group["exp_avg_dtype"], group["exp_avg_sq_dtype"]
    lossy = torch.bfloat16 in (m, v, part.dtype if master is None else m)
    spec = AdamSpec(
        p=part.dtype,
        g=grad.dtype,
        m=m,
        v=v,
        master=master,
        amsgrad=bool(group["amsgrad"]),
        coupled=optimizer.coupled,
        stochastic=lossy and bool(group["stochastic_rounding"]),
    )
    dense = is_dense(part)
    by_kernel = dense and served(part.device)
    there = by_kernel and bool(group["capturable"] or group["fused"])
    if there:
        step = torch.as_tensor(state.get("step", 0), dtype=torch.float32, device=part.device)
        state["step"] = step.view(())
    key = key_of(group["seed"], number)
    return ParamEntry(param, state, at, spec, key, first_element(param), dense, by_kernel, there)


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
    """See `ParamEntry.base`: so rounding is the same however a parameter is sharded by rows."""
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


def update_singly(entry: ParamEntry, grad: Tensor, row: Scalars) -> None:
    """One step of one parameter; the gradient is laid out as its states."""
    param = local(entry.param).detach()
    m, v, vmax, w = (None if t is None else flatten(t) for t in entry.tensors())
    assert m is not None
    assert v is not None
    if w is not None and entry.spec.master == "remainder":
        w = w.view(torch.int16)
    p = flatten(param)
    flat = FlatParam(p, flatten(grad), m, v, vmax, w)
    update_twin(entry.spec, flat, row, key=entry.key, base=entry.base)
    if not entry.dense:
        param.copy_(p.view(param.shape))


def refuse_overlap(entries: Sequence[ParamEntry]) -> None:
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


class StepPlan:
    """The parameters that have gradients, grouped by how they are updated."""

    def __init__(self, optimizer: Any, params: Sequence[Tensor], grads: Sequence[Any]) -> None:
        self._on_gpu = any(p.is_cuda for p in params)
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise OptimizerError(
                "this optimizer step is captured in a CUDA graph, but no step has run before with "
                "the same parameters, gradients and options: run one, on a side stream, first"
            )
        self._groups, self._coupled = optimizer.param_groups, optimizer.coupled
        self._present = [grad is not None for grad in grads]
        group_of = [i for i, group in enumerate(self._groups) for _ in group["params"]]
        made = [
            make_entry(optimizer, at, number, param, grad)
            for number, (at, param, grad) in enumerate(zip(group_of, params, grads, strict=True))
        ]
        self.entries = [entry for entry in made if entry is not None]
        refuse_overlap(self.entries)
        self._bank_steps()
        self._group_of = [entry.group for entry in self.entries]
        self._states = [entry.state for entry in self.entries]
        extra = chain.from_iterable(map(dict.values, self._states))
        self._plain = all(
            isinstance(t, Tensor) and not isinstance(t, DTensor) for t in chain(params, extra)
        )
        self._contiguous = all(local(entry.param).is_contiguous() for entry in self.entries)
        self._take(grads)
        self._kinds = self._kinds_of_grads()
        self.singly = [i for i, entry in enumerate(self.entries) if not entry.by_kernel]
        self.launches = self._launches()
        self._written = [entry.param for entry in self.entries if entry.by_kernel]
        self._seen = list(self._observe(optimizer, params))

    def holds(self, optimizer: Any, params: Sequence[Tensor], grads: Sequence[Any]) -> bool:
        """True if nothing that was planned for has changed; takes the gradients, which may move."""
        if [grad is not None for grad in grads] != self._present:
            return False
        if not all(map(eq, self._seen, self._observe(optimizer, params))):
            return False
        self._take(grads)
        return self._kinds == self._kinds_of_grads()

    def run(self, *, scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Updates every parameter by the gradients that were taken last, and lets go of them."""
        self._check_capture()
        rows, row_of = self._count(scale, found_inf)
        for launch, members in self.launches:
            there = self.entries[members[0]].counted_there
            with torch.cuda.device(launch.device) if launch.pins else nullcontext():
                addresses = list(map(self._addresses.__getitem__, members))
                if there:
                    hypers = [self._hyper_there(group, launch.device) for group in self._groups]
                    groups = [self._group_of[i] for i in members]
                    flags = (
                        None if flag is None else flag.to(launch.device, torch.float32)
                        for flag in (scale, found_inf)
                    )
                    launch.run_counting(addresses, hypers, groups, *flags)
                elif rows:
                    launch.run(addresses, rows, [row_of[i] for i in members])
        increment_version(self._written)  # autograd does not see what is written by address
        if rows:
            for i in self.singly:
                update_singly(self.entries[i], self._grads[i], rows[row_of[i]])
        self._grads = []

    def _check_capture(self) -> None:
        """Raises OptimizerError where a step would be captured that cannot be replayed."""
        for launch, _ in self.launches:
            launch.check()
        if self.singly and self._on_gpu and torch.cuda.is_current_stream_capturing():
            entry = self.entries[self.singly[0]]
            raise OptimizerError(
                f"an optimizer step is captured in a CUDA graph, but the steps of a parameter of "
                f"shape {tuple(entry.param.shape)}, strides {entry.param.stride()} on "
                f"{entry.param.device} are counted on the host, which no replay does: only dense "
                "parameters on NVIDIA GPUs, with Triton installed, can be stepped in a graph"
            )

    def _bank_steps(self) -> None:
        """See Note [Steps]."""
        self._by_host = [i for i, entry in enumerate(self.entries) if not entry.counted_there]
        states = [self.entries[i].state for i in self._by_host]
        counts = [float(state.get("step", 0)) for state in states]
        self._bank = torch.tensor(counts, dtype=torch.float32, device="cpu")
        for state, view in zip(states, self._bank.unbind(), strict=True):
            state["step"] = view

    def _launches(self) -> list[tuple[Launch, list[int]]]:
        alike: defaultdict[tuple[torch.device, AdamSpec, bool, bool], list[int]] = defaultdict(list)
        works: dict[int, tuple[int, ...]] = {}
        for i, entry in enumerate(self.entries):
            if entry.by_kernel:
                part = local(entry.param)
                works[i] = tuple(0 if t is None else t.data_ptr() for t in (part, *entry.tensors()))
                aligned = not any(a % 16 for a in (*works[i], self._addresses[i]))
                alike[part.device, entry.spec, aligned, entry.counted_there].append(i)
        if not alike:
            return []
        from interlace.optim.adam.table import Launch, TableRow

        def work(i: int) -> TableRow:
            entry = self.entries[i]
            step = entry.state["step"].data_ptr() if entry.counted_there else 0
            count = local(entry.param).numel()
            return TableRow(*works[i], count=count, base=entry.base, key=entry.key, step=step)

        return [
            (Launch(device, spec, list(map(work, members)), aligned=aligned, counts=there), members)
            for (device, spec, aligned, there), members in alike.items()
        ]

    def _observe(self, optimizer: Any, params: Sequence[Tensor]) -> Iterator[object]:
        """See Note [What is looked at]. One after another: what differs may be no tensor at all."""
        values = list(chain.from_iterable(map(dict.values, self._states)))
        yield id(optimizer.param_groups)
        yield [(DECIDING(group), len(group["params"])) for group in self._groups]
        yield list(map(id, params))
        yield list(map(id, optimizer.state.values()))
        yield list(map(id, values))
        if not self._plain:
            params = list(map(local, params))
            values = [local(value) for value in values if isinstance(value, Tensor)]
        yield list(map(Tensor.data_ptr, chain(params, values)))
        yield list(map(Tensor.numel, params))
        yield list(map(Tensor.stride, params))

    def _take(self, grads: Sequence[Any]) -> None:
        """Gradients laid out as their states, and their addresses; they have `arrived`."""
        there = [grad for grad in grads if grad is not None]
        if not (self._contiguous and all(map(Tensor.is_contiguous, there))):  # sparse: neither
            for i, (grad, entry) in enumerate(zip(there, self.entries, strict=True)):
                check_grad(grad, entry.param)
                there[i] = laid_out(grad, local(entry.param))
        self._grads = there
        self._addresses = list(map(Tensor.data_ptr, there))

    def _kinds_of_grads(self) -> tuple[list[torch.dtype], list[int]]:
        """Facts of the gradients that decide on the kernel: dtypes, and which are not aligned."""
        odd = reduce(or_, self._addresses, 0) & 15
        places = [i for i, at in enumerate(self._addresses) if at & 15] if odd else []
        return [grad.dtype for grad in self._grads], places

    def _count(
        self, scale: Tensor | None, found_inf: Tensor | None
    ) -> tuple[list[Scalars], list[int]]:
        """Counts the host's steps; rows of scalars, and which each entry has. No rows: skipped."""
        if not self._by_host or (found_inf is not None and float(found_inf)):
            return [], []
        factor = 1.0 if scale is None else float(scale)

        def row(group: Mapping[str, Any], step: float) -> Scalars:
            return scalars(self._hyper(group, float(group["lr"])), int(step), factor)

        self._bank.add_(1)
        steps = self._bank.tolist()
        if steps.count(steps[0]) == len(steps):
            used = set(self._group_of)
            rows = [
                row(group, steps[0]) if i in used else UNUSED
                for i, group in enumerate(self._groups)
            ]
            return rows, self._group_of
        row_of, rows = [0] * len(self.entries), []
        for i, step in zip(self._by_host, steps, strict=True):
            row_of[i] = len(rows)
            rows.append(row(self._groups[self._group_of[i]], step))
        return rows, row_of

    def _hyper(self, group: Mapping[str, Any], lr: float) -> Hyper:
        beta1, beta2 = group["betas"]
        return Hyper(
            lr=lr,
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
            coupled=self._coupled,
        )

    def _hyper_there(
        self, group: Mapping[str, Any], device: torch.device
    ) -> tuple[float | Tensor, Hyper]:
        """For steps counted on the device: a learning rate that lies there is read there."""
        lr = group["lr"]
        there = isinstance(lr, Tensor) and lr.device.type == device.type
        return lr.to(device, torch.float32) if there else float(lr), self._hyper(group, 0.0)


def arrived(params: Sequence[Tensor]) -> list[Tensor | None]:
    """This rank's parts of the gradients, placed as their parameters; it may communicate, so it is
    done once a step on every rank.
    """
    grads = [param.grad for param in params]
    if set(map(type, grads)) <= {Tensor, NoneType}:
        return grads
    for i, (grad, param) in enumerate(zip(grads, params, strict=True)):
        if isinstance(grad, DTensor) and isinstance(param, DTensor):
            if grad.placements != param.placements:
                grads[i] = grad.redistribute(param.device_mesh, param.placements)
    return [None if grad is None else local(grad) for grad in grads]
