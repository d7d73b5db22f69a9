"""Losses as modules.

loss = CrossEntropyLoss(label_smoothing=0.1, group=tp)(logits, target)
loss = LinearCrossEntropyLoss(z_loss=1e-4)(hidden, head.weight, target)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from interlace.nn.functional import cross_entropy, linear_cross_entropy


class Loss(nn.Module):
    """The options of a loss function; class weights are a buffer of the name `WEIGHT`."""

    WEIGHT = "weight"
    TAKEN = (
        "ignore_index", "reduction", "label_smoothing",
        "group", "z_loss", "softcap", "denominator", "check_targets", "shard_sizes",
    )  # fmt: skip

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        own = {"ignore_index": ignore_index, "reduction": reduction}
        for name in options:
            if name not in self.TAKEN:
                raise TypeError(f"a loss takes no argument {name!r}; it takes {self.TAKEN}")
        self.options = {**own, "label_smoothing": label_smoothing, **options}
        self.register_buffer(self.WEIGHT, weight)

    def given(self, denominator: torch.Tensor | float | None) -> dict[str, Any]:
        """The options, with this denominator if one is given."""
        return self.options if denominator is None else {**self.options, "denominator": denominator}

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


class CrossEntropyLoss(Loss):
    """`interlace.nn.functional.cross_entropy` with its options set.

    Takes the arguments of `torch.nn.CrossEntropyLoss` (without the deprecated ones), then those of
    the function. Logits are (..., classes): the classes come last. `weight` is a buffer.
    """

    weight: torch.Tensor | None

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
    """

    WEIGHT = "class_weight"
    TAKEN = (*Loss.TAKEN, "chunk_size", "accumulate_dtype", "overlap")
    class_weight: torch.Tensor | None

    def __init__(
        self, class_weight: torch.Tensor | None = None, *args: Any, **options: Any
    ) -> None:
        super().__init__(class_weight, *args, **options)

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
