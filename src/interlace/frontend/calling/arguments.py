"""Arguments that AOTAutograd or TorchDynamo would take for what they are not.

DTensor hands out `AsyncCollectiveTensor`s, which wait when they are first used. AOTAutograd takes
them for a subclass of its own kind and loses their gradient's way back, so they become plain
tensors first, with their gradient passed through:

    example_inputs, wrap = without_waiting(example_inputs)
    compiled = wrap(compile(gm, example_inputs))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Wait(torch.autograd.Function):
    """The tensor that the collective gives; its gradient goes to what was waited for."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> torch.Tensor:  # pyright: ignore
        return x.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return gradient


def without_waiting(example_inputs: Sequence[Any]) -> tuple[list[Any], Wrap]:
    """The examples as plain tensors, and what makes a function of plain tensors take the others."""
    positions = [i for i, x in enumerate(example_inputs) if isinstance(x, AsyncCollectiveTensor)]
    plain = list(example_inputs)
    for i in positions:
        waiting = plain[i]
        plain[i] = waiting.elem.detach().requires_grad_(waiting.requires_grad)

    def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
        if not positions:
            return compiled

        def call(*args: Any) -> Any:
            given = list(args)
            for i in positions:
                if isinstance(given[i], AsyncCollectiveTensor):
                    given[i] = _Wait.apply(given[i])
            return compiled(*given)

        return torch.compiler.disable(call)

    return plain, wrap
