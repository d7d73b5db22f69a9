"""Updates the parameters of one bucket while a backward goes on.

update = BucketUpdate(optimizer, grads, sources)
update()                         # of what is owned and trained, by the bucket's main gradients
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from interlace.optim.grad_reducer import lent


class BucketUpdate:
    """Updates what this rank owns of one bucket, by a part of the optimizer with the same state.

    `grads` are by what the optimizer updates; `sources` has the Parameter of the module for each.
    While it runs, a backward goes on, which sets `.grad` of other Parameters for moments: the part
    has none of them, nor have optimizers that the optimizer holds.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        grads: Mapping[nn.Parameter, Tensor],
        sources: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self._grads, self._sources = grads, sources
        self._groups: dict[int, dict[str, Any]] = {}
        self._parts: list[tuple[Optimizer, Optimizer]] = []
        self._part: Optimizer = self._of(optimizer)

    def _of(self, value: Any) -> Any:
        """An optimizer's part; what holds optimizers with their parts; other values as they are."""
        if isinstance(value, list | tuple) and any(isinstance(v, Optimizer) for v in value):
            return [self._of(each) for each in value]
        if not isinstance(value, Optimizer):
            return value
        part: Optimizer = object.__new__(type(value))
        kept = {n: v for n, v in value.__dict__.items() if n != "step"}  # a scheduler's, for that
        groups = [self._group(group) for group in value.param_groups]
        part.__dict__.update({name: self._of(each) for name, each in kept.items()})
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            part.__dict__[hooks] = OrderedDict()  # step() calls those of the whole
        part.param_groups = groups
        self._parts.append((part, value))
        return part

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        params = [param for param in group["params"] if param in self._grads]
        return self._groups.setdefault(id(group), {**group, "params": params})

    @torch.no_grad()
    def __call__(self) -> None:
        trained = {p: grad for p, grad in self._grads.items() if self._sources[p].requires_grad}
        if not trained:
            return
        for part, whole in self._parts:
            part.state = whole.state
            for group, now in zip(part.param_groups, whole.param_groups, strict=True):
                group.update({name: value for name, value in now.items() if name != "params"})
        with lent(trained):
            self._part.step()
