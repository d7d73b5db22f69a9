"""Adam and AdamW with states in the dtype you choose, all parameters in one launch.

It is a torch.optim.Optimizer: groups, closures, hooks, schedulers, GradScaler, checkpoints and
DTensor parameters (FSDP2) work as they do there, and torch.optim.AdamW loads its state and it
theirs. What differs is said in the classes.

Note [Bytes]
    For a bf16 parameter, beside the gradient: fp32 master and moments 14 bytes an element;
    remainders and fp32 moments 12; bf16 moments and fp32 master 10; bf16 moments and remainders 8,
    which hold the same master bit for bit; bf16 moments alone 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from interlace.errors import OptimizerError
from interlace.optim.adam.plan import StepPlan, arrived
from interlace.optim.adam.state import KEPT, MASTERS, STATE_DTYPES, check_param, fit, master_of
from interlace.optim.loading import Group, KeepsStates, ParamGroup
from interlace.optim.untraced import eager


class Adam(KeepsStates):
    """Adam (Kingma and Ba, arXiv:1412.6980), its weight decay an L2 penalty on the gradient.

    All options but `params` may be set per group. Parameters are float32, bfloat16 or float16,
    dense, on any device; without a gradient they are left alone. Loading keeps this optimizer's own
    storage (dtypes, masters, rounding) and takes everything else from the checkpoint. The host
    counts steps, so no step can be captured in a CUDA graph; a learning rate that is a CUDA tensor
    makes each step wait for the device.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as of torch.optim.Adam.
        amsgrad, foreach, capturable, differentiable: torch's too, and cannot be asked for. Neither
            can `decoupled_weight_decay`, which is `AdamW`.
        fused: is allowed and changes nothing.
        exp_avg_dtype, exp_avg_sq_dtype: float32 or bfloat16, what the moments are stored in. All
            arithmetic is fp32.
        master_weights: for bf16 and fp16 parameters, None, "fp32" (a float32 master beside each;
            what else writes the parameter is undone by the next step) or "remainder" (16 bits
            beside a bf16 parameter that make it the exact master, rounded to nearest; what else
            writes the parameter stays, to within half a step of bf16).
        stochastic_rounding: rounds what is stored in bf16 with loss (moments, and parameters
            without masters) up or down at random, so that the mean is right. Rounded to nearest, a
            bf16 second moment never decays at beta2=0.999, and updates below half a step of the
            parameter are lost. fp16 parameters are always rounded to nearest.
        seed: of that rounding. The random bits depend on it, on the parameter's place in the
            groups, on its step and on the element, so replicas round alike and a resumed run goes
            on bit for bit, also on another number of ranks if parameters are sharded by rows.

    Raises:
        OptimizerError: a ValueError, for an argument or a parameter that it cannot take.

    Examples:
        >>> optimizer = Adam(model.parameters(), lr=3e-4, exp_avg_sq_dtype=torch.bfloat16)
        >>> model(tokens).square().mean().backward()
        >>> optimizer.step()
    """

    kept = KEPT
    coupled = True
    """True if weight decay goes through the gradient."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: str | None = None,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        self._forget()
        defaults = own_options(locals())
        check_group(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group as torch.optim does: `param_group` is a dict of `params` and options.

        Raises:
            OptimizerError: Adam cannot serve it; nothing is added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            self._check_decay(group)
            for param in group["params"]:
                check_param(param)
                master_of(param, group)
        except OptimizerError:
            self.param_groups.pop()
            raise

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
        params = [param for group in self.param_groups for param in group["params"]]
        grads = arrived(params)
        if all(grad is None for grad in grads):  # to look at Parameters may wait for their gathers
            return loss
        if self._plan is None or not self._plan.holds(self, params, grads):
            self._forget()
            self._plan = StepPlan(self, params, grads)
        self._plan.run()
        return loss

    def _check_loaded(self, own: Group, group: Group) -> None:
        self._check_decay(group)
        refuse_amsgrad(group)

    def _check_decay(self, group: Group) -> None:
        """The class says how weights decay; torch.optim.Adam has an option for it, in groups."""
        if bool(group.get("decoupled_weight_decay", not self.coupled)) == self.coupled:
            raise OptimizerError(
                f"decoupled_weight_decay={group['decoupled_weight_decay']} in a group of "
                f"{type(self).__name__}: use {'AdamW' if self.coupled else 'Adam'}, which decays so"
            )

    def _fit(self, name: str, value: Any, param: Tensor, group: Group) -> Any:
        return fit(name, value, param, group)

    def _forget(self) -> None:
        """Nothing is known of where tensors lie."""
        self._plan: StepPlan | None = None


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101): parameters decay apart from the gradient.

    Args:
        params, lr, betas, eps, amsgrad, maximize, foreach, capturable, differentiable, fused: as of
            `Adam`.
        weight_decay: as of torch.optim.AdamW.
        exp_avg_dtype, exp_avg_sq_dtype, master_weights, stochastic_rounding, seed: as of `Adam`.

    Raises:
        OptimizerError: as `Adam`.
    """

    coupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: str | None = None,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(params, **own_options(locals()))


def own_options(variables: Group) -> ParamGroup:
    """The options among the local variables of a constructor."""
    return {n: v for n, v in variables.items() if n not in ("self", "params", "__class__")}


def refuse_amsgrad(group: Group) -> None:
    """Raises OptimizerError for a group, or that of a checkpoint, that keeps greatest moments."""
    if group.get("amsgrad"):
        raise OptimizerError(
            "amsgrad=True: Adam and AdamW keep no greatest second moments any more. fix: "
            "torch.optim's, with amsgrad=True"
        )


def check_group(group: Group) -> None:
    """Raises OptimizerError for options that cannot be."""
    refuse_amsgrad(group)
    lr, betas = group["lr"], tuple(group["betas"])
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptimizerError(f"lr is a tensor of {lr.numel()} elements: give it one")
    if isinstance(lr, Tensor) or lr >= 0:
        lr = 0.0
    for name, value in (("lr", lr), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if not value >= 0:
            raise OptimizerError(f"{name}={value}: it cannot be negative")
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise OptimizerError(f"betas={group['betas']}: two numbers from 0 up to, but not, 1")
    if group["foreach"] or group["capturable"] or group["differentiable"]:
        raise OptimizerError(
            "foreach=True, capturable=True and differentiable=True are torch.optim's own ways to "
            "run: there is one implementation here, which needs no foreach, counts steps on the "
            "host and is not differentiated through. fix: leave them out, or use torch.optim's"
        )
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if group[name] not in STATE_DTYPES:
            raise OptimizerError(
                f"{name}={group[name]}: torch.float32 or torch.bfloat16 (float16 has too few "
                "exponents for squared gradients)"
            )
    if group["master_weights"] not in MASTERS:
        raise OptimizerError(f"master_weights={group['master_weights']!r}: one of {MASTERS}")
    if not isinstance(group["seed"], int):
        raise OptimizerError(f"seed={group['seed']!r}: an integer")
