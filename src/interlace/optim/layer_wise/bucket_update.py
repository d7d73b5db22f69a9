"""Updates the parameters of buckets by themselves, in an order.

    updates = UpdatesInOrder(optimizer, buckets, owned)
    updates.step(start_gather)        # which is called as each bucket is updated

Note [In order]
    A step updates bucket by bucket, in the order of the gathers, each of which begins as soon as
    its bucket is updated. So the first gather, under which no module can run, is hidden by updates.
    That is the last of the hooks that precede a step of the optimizer itself, without any gradient
    left: hooks of the user run once, and find all gradients, before all updates or after them. An
    optimizer that counts steps in its groups would count too many, and one with random numbers
    would see the order: these update all parameters in one step, and gathers begin after it. So
    does one that holds other optimizers, whose steps are theirs.
    `overlap_param_gather=False` updates in the same way, and so by the same arithmetic: what is
    batched differs with what is updated at once. For that too, what ranks with shards update alike
    goes before matrices that have homes, and never with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from interlace.optim.grad_reducer import Bucket, lent
from interlace.optim.layer_wise.update_plan import is_sharded, rounds_at_random
from interlace.optim.loading import KeepsStates

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
APART = ("param_groups", "step", *HOOKS)
"""Attributes that parts do not have of the whole: `step` is a scheduler's, which counts calls."""


class UpdatesInOrder:
    """The updates of what this rank owns, by bucket; see Note [In order].

    `owned` has the Parameter of the module for each that the optimizer updates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Sequence[Bucket],
        owned: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self._optimizer, self._owned = optimizer, owned
        at_once = any(map(rounds_at_random, optimizer.param_groups)) or _holds_others(optimizer)
        members = [{*bucket.params} for bucket in (() if at_once else buckets)]
        kinds = [
            {p: s for p, s in owned.items() if is_sharded(s) is kind} for kind in (False, True)
        ]
        mine = [[{p: s for p, s in k.items() if s in each} for k in kinds] for each in members]
        self._updates = [[BucketUpdate(optimizer, some) for some in each if some] for each in mine]
        """Empty where only the whole can be updated."""
        self._replicated = BucketUpdate(optimizer, kinds[0] if kinds[1] else {}, places=True)

    def step(self, updated: Callable[[int], None]) -> None:
        """Updates by what is in `.grad`, and tells of each bucket of which nothing is left."""
        taken: dict[nn.Parameter, Tensor] = {}
        by_bucket = partial(self._by_bucket, updated, taken)
        step_between(self._optimizer, by_bucket, partial(give_back, taken))

    def _by_bucket(
        self,
        updated: Callable[[int], None],
        taken: dict[nn.Parameter, Tensor],
    ) -> None:
        """Updates buckets, and moves the gradients that it used from `.grad` to `taken`, with those
        of what others own.
        """
        params = (param for group in self._optimizer.param_groups for param in group["params"])
        left: dict[nn.Parameter, Tensor] = {}
        for param in params:
            if (grad := param.grad) is not None:
                (left if param in self._owned else taken)[param], param.grad = grad, None

        def take(update: BucketUpdate) -> dict[nn.Parameter, Tensor]:
            mine = {p: left.pop(p) for p in update.sources if p in left}
            taken.update(mine)
            return mine

        for index, updates in enumerate(self._updates):
            if not all(update(take(update)) for update in updates):
                self._updates = []
                break
            updated(index)
        self._replicated(take(self._replicated))
        give_back(left)


class BucketUpdate:
    """Updates parameters of one bucket, by a part of the optimizer with the same state.

    The part has no other Parameters, so that what an optimizer plans for its Parameters stays.
    `sources`: what it updates, each with the module's Parameter that is trained by that, or frozen.
    With `places` it has all Parameters, in the places that random bits depend on.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sources: Mapping[nn.Parameter, nn.Parameter],
        *,
        places: bool = False,
    ) -> None:
        self.sources, self._whole = sources, optimizer
        self._seen = _attributes(optimizer)
        """Attributes that the optimizer had when they were copied."""
        self._part: Optimizer = object.__new__(type(optimizer))
        self._part.__dict__.update(self._seen)
        for hooks in HOOKS:
            self._part.__dict__[hooks] = OrderedDict()  # step() calls those of the whole
        self._part.param_groups = [
            {**group, "params": [p for p in group["params"] if places or p in sources]}
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def __call__(self, grads: Mapping[nn.Parameter, Tensor]) -> bool:
        """Updates its parameters by these gradients. False where the optimizer changed options of
        its groups, such as a count of steps: the rest is then for one step of the whole."""
        own = (param for param in grads if param in self.sources)
        trained = {param: grads[param] for param in own if self.sources[param].requires_grad}
        if not trained:
            return True
        now = _attributes(self._whole)
        changed = {
            name: value
            for name, value in now.items()
            if name not in self._seen or self._seen[name] is not value
        }
        self._part.__dict__.update(changed)
        self._seen.update(changed)
        pairs = [*zip(self._part.param_groups, self._whole.param_groups, strict=True)]
        for group, whole in pairs:
            group.update({name: value for name, value in whole.items() if name != "params"})
        with lent(trained):
            self._part.step()
        return all(_is_as(group, whole) for group, whole in pairs)


def step_between(optimizer: Optimizer, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """A step of the optimizer, in which `begin` comes after the hooks of others that precede it,
    and `end` before those that follow. Each comes once: a class whose step calls that of its base
    has hooks called twice.
    """
    left = {"begin": begin, "end": end}

    def call(name: str, *_: object) -> None:
        left.pop(name, lambda: None)()

    hooks = vars(optimizer)["_optimizer_step_post_hooks"]
    before = optimizer.register_step_pre_hook(partial(call, "begin"))
    after = optimizer.register_step_post_hook(partial(call, "end"))
    hooks.move_to_end(after.id, last=False)
    try:
        optimizer.step()
    finally:
        before.remove()
        after.remove()


def give_back(grads: Mapping[nn.Parameter, Tensor]) -> None:
    """Puts gradients into `.grad`."""
    for param, grad in grads.items():
        param.grad = grad


def _holds_others(optimizer: Optimizer) -> bool:
    """True for an optimizer of optimizers; `Muon` makes its AdamW anew for other groups."""
    return not isinstance(optimizer, KeepsStates) and any(
        isinstance(each, Optimizer)
        for value in vars(optimizer).values()
        for each in (value if isinstance(value, list | tuple) else (value,))
    )


def _attributes(optimizer: Optimizer) -> dict[str, object]:
    """The attributes of an optimizer that its parts have too."""
    return {name: value for name, value in vars(optimizer).items() if name not in APART}


def _is_as(group: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """True if both groups have the same options."""
    kept = (now.get(name) for name in group)
    same = all(
        value is other or (not isinstance(value, Tensor) and value == other)
        for (name, value), other in zip(group.items(), kept, strict=True)
        if name != "params"
    )
    return same and group.keys() == now.keys()
