"""Arguments that AOTAutograd or TorchDynamo would take for what they are not.

DTensor hands out `AsyncCollectiveTensor`s, which wait when they are first used. AOTAutograd takes
them for a subclass of its own kind and loses their gradient's way back, so they become plain
tensors first, with their gradient passed through:

    example_inputs, wrap = without_waiting(example_inputs)
    compiled = wrap(compile(gm, example_inputs))

TorchDynamo guards what a rank holds of a DTensor, not the whole: where 8 rows become 7, the rank
that holds 4 of either does not compile anew, while its peers do. This tells the two apart:

    compiled = with_sizes(traced, labels, state, compiled)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from interlace.errors import UnsupportedError

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


def with_sizes(
    traced: Sequence[Any],
    labels: Sequence[str],
    state: Collection[int],
    compiled: Callable[..., Any],
) -> Callable[..., Any]:
    """`compiled`, refusing DTensors of other sizes than it was compiled for.

    `traced` has the arguments as they were traced: a size that is a symbol there may change.
    `state` has the positions that keep theirs.
    """
    known = [
        (i, [size if type(size) is int else None for size in x.shape])
        for i, x in enumerate(traced)
        if i not in state and isinstance(x, DTensor)
    ]
    known = [(i, sizes) for i, sizes in known if any(size is not None for size in sizes)]
    if not known:
        return compiled

    def call(*args: Any) -> Any:
        for i, sizes in known:
            given = args[i].shape
            for now, size in zip(given, sizes, strict=True):
                if size is not None and now != size:
                    shape = ", ".join("any" if n is None else str(n) for n in sizes)
                    raise UnsupportedError(
                        f"argument {labels[i] or i} is a DTensor of sizes {list(given)}, and this "
                        f"graph was compiled for [{shape}]. This rank holds as much of both, so "
                        "that TorchDynamo does not compile anew here, as it does on other ranks: "
                        "pad to sizes that divide evenly, or use interlace.compile"
                    )
        return compiled(*args)

    return call
