"""Muon for matrices and AdamW for the rest, in one optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from interlace.errors import OptimizerError, refuse_removed
from interlace.optim.adam.state import KEPT, fit
from interlace.optim.adamw import AdamW, own_options
from interlace.optim.loading import Group, KeepsStates, ParamGroup, State
from interlace.optim.muon.newton_schulz import coefficients, flops
from interlace.optim.muon.routing import explain_groups
from interlace.optim.muon.update import (
    ADJUSTMENTS,
    Adjustment,
    check_cut,
    in_whole_matrices,
    matrices,
    step_group,
)
from interlace.optim.untraced import eager

REMOVED = {
    "split_dim": "leave it out: columns are not cut any more, and the matrix is made orthogonal "
    "whole",
}
"""Options of former releases, and what serves instead."""
ELEMENT_FLOPS = 4096.0
"""Cost of an element beside matrix products: the 16 to 28 bytes that move for it take as long
as some 4,000 operations of the matrix units (an H200: 4.2 TB/s beside 700 TFLOP/s)."""


class Muon(KeepsStates):
    """Muon (Keller Jordan, kellerjordan.github.io/posts/muon), and AdamW beside it.

    Momentum is averaged with the gradient, each matrix of the update is made orthogonal by
    Newton-Schulz steps in bfloat16, and is subtracted times an adjusted learning rate. A parameter
    is Muon's unless its group says `use_muon=False`; `muon_groups(model)` makes such groups by
    rules, and `explain` shows them. All options but `params` may be set per group. DTensors whose
    shards are not whole matrices need `interlace.optim.LayerWise`. Loading takes torch.optim.Muon's
    state too.

    With `batched=False` and `symmetric=False`, which may change the order of additions, a step has
    torch.optim.Muon's bits, but in two cases: torch up to 2.13, with `nesterov=False` and bfloat16
    gradients, normalises its own momentum buffer; and its update is 0 where squares are too large
    for fp32.

    Args:
        params, lr, momentum, nesterov, ns_steps: as of torch.optim.Muon.
        weight_decay: as there: decoupled, and not adjusted.
        ns_coefficients: also a sequence of three numbers for each step, the last for all further.
        eps: of the norm that an update is divided by. torch's 1e-7 stops updates whose norm is
            below it, which gradient clipping can bring about; 0 makes updates independent of the
            scale.
        adjust_lr_fn: the factor of the learning rate of an A x B matrix: "original" (None),
            sqrt(max(1, A/B)); "match_rms_adamw", 0.2 sqrt(max(A, B)), which allows AdamW's learning
            rates; "spectral_unclamped", sqrt(A/B).
        split_sizes, head_dim: cut the rows of a parameter's matrices into parts, such as Q, K and
            V, and those into heads of `head_dim`; each is a matrix of its own, also for
            `adjust_lr_fn`. Parameters of 3 and more dimensions, such as experts, are stacks of
            matrices.
        batched: takes matrices of equal shapes through the iteration together.
        symmetric: on NVIDIA GPUs from 9.0, a kernel computes half of each symmetric product.
        gram_variant: iterates on rows x rows matrices where that takes fewer operations. Equal in
            exact arithmetic, **not bit-equal**; in float16.
        adamw: options of the groups with `use_muon=False`, those of `interlace.optim.AdamW`, whose
            defaults they have, and not this class's `lr` and `weight_decay`.

    Raises:
        OptimizerError: a ValueError, for an argument or a parameter that it cannot take.
        OptionError: an argument of a former release.

    Examples:
        >>> muon = Muon(muon_groups(model), lr=0.02, adamw={"lr": 3e-4})
        >>> model(tokens).square().mean().backward()
        >>> muon.step()
    """

    kept = ("use_muon", "why", "batched", "symmetric", *KEPT)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Adjustment | None = None,
        *,
        split_sizes: tuple[int, ...] | None = None,
        head_dim: int | None = None,
        batched: bool = True,
        symmetric: bool = True,
        gram_variant: bool = False,
        adamw: Group | None = None,
        **removed: object,
    ) -> None:
        refuse_removed("Muon", removed, REMOVED)
        defaults = {**own_options(locals()), "use_muon": True}
        del defaults["removed"]
        self._adamw_options = dict(defaults.pop("adamw") or {})
        self._forget()
        check_muon(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group as torch.optim does: `param_group` is a dict of `params` and options.

        Raises:
            OptimizerError: it cannot be served; nothing is added.
        """
        if not param_group.get("use_muon", True):
            for name, value in {**ADAMW_DEFAULTS, **self._adamw_options}.items():
                param_group.setdefault(name, value)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group["use_muon"]:
                check_muon(group)
                for param in group["params"]:
                    check_cut(param.shape, group)
            else:
                AdamW([{**group}])
        except OptimizerError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> State:
        """Returns the state that pickling and copying keep."""
        return {**super().__getstate__(), "_adamw_options": self._adamw_options}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient; returns the loss of a `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        others: list[ParamGroup] = []
        for group in self.param_groups:
            if group["use_muon"]:
                step_group(group, self.state)
            else:
                others.append(group)
        if others:
            self._adamw_of(others).step()
        return loss

    def explain(self) -> str:
        """A line for each parameter: what updates it, its name, its shape, how it is cut, why."""

        def cut(param: Tensor, group: Group) -> str:
            shapes = Counter(tuple(m.shape) for m in _cut(param, group))
            if list(shapes.items()) == [(tuple(param.shape), 1)]:
                return "Muon"
            each = (f"{n} of {'x'.join(map(str, shape))}" for shape, n in shapes.items())
            return "Muon, " + ", ".join(each)

        return explain_groups(self.param_groups, cut)

    def update_cost(self, parameter: Tensor) -> float:
        """FLOPs of a step of a `parameter`, by which `LayerWise` divides the work among owners.

        They are those of its matrix products (half of a symmetric one's with `symmetric`) and
        4,096 an element, for the memory that moves.

        Raises:
            OptimizerError: the parameter is of no group.
        """
        group = self._group_of(parameter)
        total = ELEMENT_FLOPS * parameter.numel()
        options = {name: bool(group.get(name)) for name in ("gram_variant", "symmetric")}
        for matrix in _cut(parameter, group) if group["use_muon"] else ():
            rows, columns = matrix.shape
            total += flops(rows, columns, group["ns_steps"], **options)
        return total

    def needs_whole(self, parameter: DTensor) -> bool:
        """True if shards of a `parameter` are updated by way of the whole, as `LayerWise` asks.

        False for those of AdamW, and for shards of whole matrices.

        Raises:
            OptimizerError: the parameter is of no group.
        """
        group = self._group_of(parameter)
        return group["use_muon"] and not in_whole_matrices(parameter, group)

    def _group_of(self, parameter: Tensor) -> ParamGroup:
        for group in self.param_groups:
            if any(parameter is each for each in group["params"]):
                return group
        raise OptimizerError(
            f"a parameter of shape {tuple(parameter.shape)} is in no group of this optimizer"
        )

    def _adamw_of(self, groups: list[ParamGroup]) -> AdamW:
        """An AdamW that has these very groups, and their states in this optimizer's."""
        held = self._adamw.param_groups if self._adamw is not None else []
        if self._adamw is None or list(map(id, held)) != list(map(id, groups)):
            self._adamw = AdamW(groups)
        self._adamw.state = self.state
        return self._adamw

    def _check_loaded(self, own: Group, group: Group) -> None:
        if group.get("use_muon", own["use_muon"]) != own["use_muon"]:
            raise OptimizerError(
                f"a group has use_muon={own['use_muon']} here and {group['use_muon']} in the "
                "checkpoint: make the groups as they were when it was saved"
            )
        if own["use_muon"]:
            loaded = {**own, **group}
            coefficients(loaded["ns_coefficients"], loaded["ns_steps"])

    def _fit(self, name: str, value: Any, param: Tensor, group: Group) -> Any:
        if not group["use_muon"]:
            return fit(name, value, param, group)
        return value.to(param.device) if isinstance(value, Tensor) else value

    def _forget(self) -> None:
        self._adamw: AdamW | None = None


ADAMW_DEFAULTS: Group = AdamW([torch.empty(0)]).defaults
"""The options of groups with use_muon=False."""


def _cut(param: Tensor, group: Group) -> list[Tensor]:
    """The matrices of a parameter, without memory."""
    return matrices(torch.empty(param.shape, device="meta"), group)


def check_muon(group: Group) -> None:
    """Raises OptimizerError for options that cannot be."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptimizerError(f"lr is a tensor of {lr.numel()} elements: give it one")
    for name in ("lr", "momentum", "weight_decay", "eps"):
        if not float(group[name]) >= 0:
            raise OptimizerError(f"{name}={group[name]}: it cannot be negative")
    if not 0 < group["ns_steps"] < 100:
        raise OptimizerError(f"ns_steps={group['ns_steps']}: from 1 to 99")
    coefficients(group["ns_coefficients"], group["ns_steps"])
    if group["adjust_lr_fn"] not in ADJUSTMENTS:
        raise OptimizerError(f"adjust_lr_fn={group['adjust_lr_fn']!r}: one of {ADJUSTMENTS}")
    if group.get("split_dim"):
        raise OptimizerError(f"split_dim={group['split_dim']}: fix: {REMOVED['split_dim']}")
