"""Losses as modules.

loss = CrossEntropyLoss(label_smoothing=0.1, group=tp)(logits, target)
loss = LinearCrossEntropyLoss(z_loss=1e-4)(hidden, head.weight, target)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from interlace.nn.cross_entropy.loss import Reduction
from interlace.nn.functional import cross_entropy, linear_cross_entropy


class Loss(nn.Module):
    """A loss whose options are set."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def given(self, denominator: torch.Tensor | float | None) -> dict[str, Any]:
        """The options, with this denominator if one is given."""
        return self.options if denominator is None else {**self.options, "denominator": denominator}

    def extra_repr(self) -> str:
        """The options that are not off."""
        on = (item for item in self.options.items() if item[1] is not None and item[1] is not False)
        return ", ".join(f"{name}={value}" for name, value in on)


class CrossEntropyLoss(Loss):
    """`interlace.nn.functional.cross_entropy` with its options set.

    Takes the arguments of `torch.nn.CrossEntropyLoss` (without the deprecated ones), then those of
    the function. Logits are (..., classes): the classes come last. `weight` is a buffer.

    A target that is no class makes this loss NaN, and a later call raises TargetError;
    `check_targets=True` raises at once, and has the host wait for the device.
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        group: Any = None,
        z_loss: float = 0.0,
        softcap: float | None = None,
        denominator: torch.Tensor | float | None = None,
        check_targets: bool = False,
        shard_sizes: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            group=group,
            z_loss=z_loss,
            softcap=softcap,
            denominator=denominator,
            check_targets=check_targets,
            shard_sizes=shard_sizes,
        )
        self.register_buffer("weight", weight)

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        denominator: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """The loss; a `denominator` replaces the option in this call."""
        return cross_entropy(logits, target, self.weight, **self.given(denominator))


class LinearCrossEntropyLoss(Loss):
    """`interlace.nn.functional.linear_cross_entropy` with its options set.

    The weight and the bias are the caller's: an output layer's, often tied to the embedding's.
    `class_weight` is a buffer. Invalid targets are handled as in `CrossEntropyLoss`.
    """

    class_weight: torch.Tensor | None

    def __init__(
        self,
        class_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        group: Any = None,
        z_loss: float = 0.0,
        softcap: float | None = None,
        denominator: torch.Tensor | float | None = None,
        check_targets: bool = False,
        shard_sizes: Sequence[int] | None = None,
        chunk_size: int | None = None,
        accumulate_dtype: torch.dtype | None = None,
        overlap: bool = True,
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            group=group,
            z_loss=z_loss,
            softcap=softcap,
            denominator=denominator,
            check_targets=check_targets,
            shard_sizes=shard_sizes,
            chunk_size=chunk_size,
            accumulate_dtype=accumulate_dtype,
            overlap=overlap,
        )
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
        options = {"class_weight": self.class_weight, **self.given(denominator)}
        return linear_cross_entropy(hidden, weight, target, bias, **options)
