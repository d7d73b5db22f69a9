"""Losses as modules, whose options are set once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from interlace.errors import refuse_removed
from interlace.nn.cross_entropy.loss import REMOVED
from interlace.nn.functional import cross_entropy, linear_cross_entropy


class Loss(nn.Module):
    """A loss whose options are set: those keyword arguments of `function` that are no tensors."""

    function: ClassVar[Callable[..., torch.Tensor]]

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        params = inspect.signature(self.function).parameters
        tensors = ("weight", "bias", "class_weight")
        self.defaults = {
            name: param.default
            for name, param in params.items()
            if param.default is not param.empty and name not in tensors
        }
        if unknown := sorted(options.keys() - self.defaults.keys() - REMOVED.keys()):
            raise TypeError(
                f"{type(self).__name__} has no option {unknown[0]!r}: fix: take one of "
                f"{', '.join(sorted(self.defaults))}"
            )
        refuse_removed(
            type(self).__name__, {n: options[n] for n in options if n in REMOVED}, REMOVED
        )
        self.options = {**self.defaults, **options}

    def with_denominator(self, denominator: torch.Tensor | float | None) -> dict[str, Any]:
        """The options, with this denominator if one is given."""
        return self.options if denominator is None else {**self.options, "denominator": denominator}

    def extra_repr(self) -> str:
        """The options that are not the defaults."""
        items = self.options.items()
        return ", ".join(f"{n}={value}" for n, value in items if value is not self.defaults[n])


class CrossEntropyLoss(Loss):
    """`interlace.nn.functional.cross_entropy` with its options set.

    Args:
        weight: [classes], the weight of each class; it becomes a buffer.
        options: other options of the function, which has those of `torch.nn.CrossEntropyLoss` that
            are not deprecated.

    Raises:
        OptionError, TypeError: an option is of a former release, or unknown.
    """

    function = staticmethod(cross_entropy)
    weight: torch.Tensor | None

    def __init__(self, weight: torch.Tensor | None = None, **options: Any) -> None:
        super().__init__(options)
        self.register_buffer("weight", weight)

    def forward(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        denominator: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """The loss of logits whose classes come last.

        Args:
            logits: [..., classes].
            target: [...], int64 or int32. One that is no class makes this loss NaN, and a later
                call, or `interlace.nn.functional.raise_pending`, raises TargetError.
            denominator: replaces the option in this call.
        """
        return self.function(logits, target, self.weight, **self.with_denominator(denominator))


class LinearCrossEntropyLoss(Loss):
    """`interlace.nn.functional.linear_cross_entropy` with its options set.

    Args:
        class_weight: [classes], the weight of each class; it becomes a buffer.
        options: other options of the function.

    Raises:
        OptionError, TypeError: an option is of a former release, or unknown.
    """

    function = staticmethod(linear_cross_entropy)
    class_weight: torch.Tensor | None

    def __init__(self, class_weight: torch.Tensor | None = None, **options: Any) -> None:
        super().__init__(options)
        self.register_buffer("class_weight", class_weight)

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        denominator: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """The loss of an output layer's logits, which are never held.

        Args:
            hidden, weight, target, bias: as of the function. Weight and bias are the caller's: an
                output layer's, often tied to the embedding's.
            denominator: replaces the option in this call.
        """
        options = {"class_weight": self.class_weight, **self.with_denominator(denominator)}
        return self.function(hidden, weight, target, bias, **options)
