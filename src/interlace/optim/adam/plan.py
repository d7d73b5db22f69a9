"""Plan of one step over all parameters, worked out once and used for as long as nothing moves.

Parameters of one kind on one GPU go in one launch (table.py). Others, which is all on a CPU, go
one after another through the reference.

Note [Steps]
    Every parameter has a step of its own, as in torch.optim, which the host counts. Counting
    hundreds of tensors one by one takes longer than all else here, so all steps are views of one
    tensor, the bank.

Note [What is looked at]
    Anything may have moved since the last step: gradients do, states are offloaded, parameters are
    cast or cut. A step therefore compares the addresses of all tensors, and the strides of the
    parameters, with those that the plan was made for. It holds states only through the state's own
    dict, so that offloading frees memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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

from interlace.errors import OptimizerError
from interlace.optim.adam.arithmetic import (
    AdamSpec,
    FlatParam,
    Scalars,
    key_of,
    scalars,
    update_reference,
)
from interlace.optim.adam.state import KEPT, PARAM_DTYPES, check_param, local, master_of, ready
from interlace.optim.grad_accumulator import placed_grad
from interlace.optim.loading import Group, State
from interlace.torch_private.distributed import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from interlace.optim.adam.table import Launch

DECIDING = itemgetter("seed", *KEPT)
"""The options of a group that a plan is made for."""
UNUSED = Scalars(*(0.0,) * len(Scalars._fields))


@dataclass(frozen=True, slots=True)
class ParamEntry:
    """A parameter that has a gradient."""

    param: Tensor
    state: State
    group: int
    spec: AdamSpec
    key: int
    base: int
    """The number, in the whole parameter, of this rank's first element."""
    by_kernel: bool

    def tensors(self) -> tuple[Tensor | None, ...]:
        """This rank's moments, and master or remainder."""
        last = "master" if self.spec.master == "fp32" else "remainder"
        names = ("exp_avg", "exp_avg_sq", last)
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
    check_param(param)
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
        coupled=optimizer.coupled,
        stochastic=lossy and bool(group["stochastic_rounding"]),
    )
    key = key_of(group["seed"], number)
    return ParamEntry(param, state, at, spec, key, first_element(param), served(part.device))


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
    """Dense memory as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient in the memory order of the parameter's states: itself, or a copy."""
    same = all(
        g == p or size == 1
        for g, p, size in zip(grad.stride(), param.stride(), param.shape, strict=True)
    )
    return grad if same else torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def update_singly(entry: ParamEntry, grad: Tensor, row: Scalars) -> None:
    """One step of one parameter; the gradient is laid out as its states."""
    m, v, w = (None if t is None else flatten(t) for t in entry.tensors())
    assert m is not None
    assert v is not None
    if w is not None and entry.spec.master == "remainder":
        w = w.view(torch.int16)
    flat = FlatParam(flatten(local(entry.param).detach()), flatten(grad), m, v, w)
    update_reference(entry.spec, flat, row, key=entry.key, base=entry.base)


def refuse_overlap(entries: Sequence[ParamEntry]) -> None:
    """Raises OptimizerError where two parameters share memory: one launch would write it twice."""
    spans = sorted(
        (str(part.device), part.data_ptr(), part.data_ptr() + part.nbytes, i)
        for i, part in ((i, local(entry.param)) for i, entry in enumerate(entries))
        if part.numel()
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
        self._refuse_capture()
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

    def run(self) -> None:
        """Updates every parameter by the gradients that were taken last, and lets go of them."""
        self._refuse_capture()
        if not self.entries:
            return
        rows, row_of = self._count()
        for launch, members in self.launches:
            with torch.cuda.device(launch.device) if launch.pins else nullcontext():
                addresses = list(map(self._addresses.__getitem__, members))
                launch.run(addresses, rows, [row_of[i] for i in members])
        increment_version(self._written)  # autograd does not see what is written by address
        for i in self.singly:
            update_singly(self.entries[i], self._grads[i], rows[row_of[i]])
        self._grads = []

    def _refuse_capture(self) -> None:
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise OptimizerError(
                "an optimizer step is captured in a CUDA graph, but its steps are counted on the "
                "host, which no replay does. fix: step outside of the graph, or capture "
                "torch.optim's with capturable=True"
            )

    def _bank_steps(self) -> None:
        """See Note [Steps]."""
        counts = [float(entry.state.get("step", 0)) for entry in self.entries]
        self._bank = torch.tensor(counts, dtype=torch.float32, device="cpu")
        for entry, view in zip(self.entries, self._bank.unbind(), strict=True):
            entry.state["step"] = view

    def _launches(self) -> list[tuple[Launch, list[int]]]:
        alike: defaultdict[tuple[torch.device, AdamSpec, bool], list[int]] = defaultdict(list)
        works: dict[int, tuple[int, ...]] = {}
        for i, entry in enumerate(self.entries):
            if entry.by_kernel:
                part = local(entry.param)
                works[i] = tuple(0 if t is None else t.data_ptr() for t in (part, *entry.tensors()))
                aligned = not any(a % 16 for a in (*works[i], self._addresses[i]))
                alike[part.device, entry.spec, aligned].append(i)
        if not alike:
            return []
        from interlace.optim.adam.table import Launch, TableRow

        def work(i: int) -> TableRow:
            entry = self.entries[i]
            count = local(entry.param).numel()
            return TableRow(*works[i], count=count, base=entry.base, key=entry.key)

        return [
            (Launch(device, spec, list(map(work, members)), aligned=aligned), members)
            for (device, spec, aligned), members in alike.items()
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

    def _count(self) -> tuple[list[Scalars], list[int]]:
        """Counts the steps; rows of scalars, and which each entry has."""

        def row(group: Group, step: float) -> Scalars:
            beta1, beta2 = group["betas"]
            return scalars(
                int(step),
                lr=float(group["lr"]),
                betas=(float(beta1), float(beta2)),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
                maximize=bool(group["maximize"]),
                coupled=self._coupled,
            )

        self._bank.add_(1)
        steps = self._bank.tolist()
        if steps.count(steps[0]) == len(steps):
            used = set(self._group_of)
            rows = [
                row(group, steps[0]) if i in used else UNUSED
                for i, group in enumerate(self._groups)
            ]
            return rows, self._group_of
        pairs = zip(self._group_of, steps, strict=True)
        return [row(self._groups[at], step) for at, step in pairs], list(range(len(steps)))


def arrived(params: Sequence[Tensor]) -> list[Tensor | None]:
    """This rank's parts of the gradients, placed as their parameters; it may communicate, so it is
    done once a step on every rank.
    """
    grads = [param.grad for param in params]
    if set(map(type, grads)) <= {Tensor, NoneType}:
        return grads
    for i, (grad, param) in enumerate(zip(grads, params, strict=True)):
        if isinstance(grad, DTensor):
            grads[i] = placed_grad(param)
    return [None if grad is None else local(grad) for grad in grads]
