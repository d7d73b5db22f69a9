"""Losses as modules.

loss = CrossEntropyLoss(label_smoothing=0.1, group=tp)(logits, target)
loss = LinearCrossEntropyLoss(z_loss=1e-4)(hidden, head.weight, target)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from interlace.nn.cross_entropy.loss import Reduction
from interlace.nn.functional import cross_entropy, linear_cross_entropy


class LossOptions(TypedDict, total=False):
    """Options of `interlace.nn.functional.cross_entropy`."""

    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    group: Any
    z_loss: float
    softcap: float | None
    denominator: torch.Tensor | float | None
    check_targets: bool
    shard_sizes: Sequence[int] | None


class LinearLossOptions(LossOptions, total=False):
    """Options of `interlace.nn.functional.linear_cross_entropy`."""

    chunk_size: int | None
    accumulate_dtype: torch.dtype | None
    overlap: bool


class Loss(nn.Module):
    """A loss whose options are set."""

    def __init__(self, kind: type[LossOptions], options: Mapping[str, Any]) -> None:
        super().__init__()
        known = kind.__optional_keys__
        if unknown := sorted(options.keys() - known):
            raise TypeError(
                f"{type(self).__name__} has no option {unknown[0]!r}: fix: take one of "
                f"{', '.join(sorted(known))}"
            )
        self.options = dict(options)

    def with_denominator(self, denominator: torch.Tensor | float | None) -> dict[str, Any]:
        """The options, with this denominator if one is given."""
        return self.options if denominator is None else {**self.options, "denominator": denominator}

    def extra_repr(self) -> str:
        """The options that are not off."""
        on = (item for item in self.options.items() if item[1] is not None and item[1] is not False)
        return ", ".join(f"{name}={value}" for name, value in on)


class CrossEntropyLoss(Loss):
    """`interlace.nn.functional.cross_entropy` with its options set.

    Takes the options of `torch.nn.CrossEntropyLoss` (without the deprecated ones), and those of the
    function. Logits are (..., classes): the classes come last. `weight` is a buffer.

    A target that is no class makes this loss NaN, and a later call raises TargetError;
    `check_targets=True` raises at once, and has the host wait for the device.
    """

    weight: torch.Tensor | None

    def __init__(self, weight: torch.Tensor | None = None, **options: Unpack[LossOptions]) -> None:
        super().__init__(LossOptions, options)
        self.register_buffer("weight", weight)

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        denominator: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """The loss; a `denominator` replaces the option in this call."""
        return cross_entropy(logits, target, self.weight, **self.with_denominator(denominator))


class LinearCrossEntropyLoss(Loss):
    """`interlace.nn.functional.linear_cross_entropy` with its options set.

    The weight and the bias are the caller's: an output layer's, often tied to the embedding's.
    `class_weight` is a buffer. Invalid targets are handled as in `CrossEntropyLoss`.
    """

    class_weight: torch.Tensor | None

    def __init__(
        self, class_weight: torch.Tensor | None = None, **options: Unpack[LinearLossOptions]
    ) -> None:
        super().__init__(LinearLossOptions, options)
        self.register_buffer("class_weight", class_weight)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        denominator: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """The loss; a `denominator` replaces the option in this call."""
        options = {"class_weight": self.class_weight, **self.with_denominator(denominator)}
        return linear_cross_entropy(hidden, weight, target, bias, **options)
