"""DTensor arguments of other sizes than a graph was compiled for, told at once.

TorchDynamo guards what a rank holds of a DTensor, not the whole: where 8 rows become 7, the rank
that holds 4 of either does not compile anew, while its peers do. This tells the two apart:

    compiled = with_sizes(example_inputs, labels, state, compiled)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from interlace.errors import UnsupportedError


def with_sizes(
    example_inputs: Sequence[Any],
    labels: Sequence[str],
    state: Collection[int],
    compiled: Callable[..., Any],
) -> Callable[..., Any]:
    """`compiled`, refusing DTensors of other sizes; `state` has the positions that keep theirs."""
    known = [
        (i, x.shape)
        for i, x in enumerate(example_inputs)
        if i not in state and isinstance(x, DTensor) and all(type(n) is int for n in x.shape)
    ]
    if not known:
        return compiled

    def call(*args: Any) -> Any:
        for i, shape in known:
            if args[i].shape != shape:
                name, sizes = labels[i] or i, list(args[i].shape)
                raise UnsupportedError(
                    f"argument {name} is a DTensor of sizes {sizes}, and this "
                    f"graph was compiled for {list(shape)}. This rank holds as much of both, so "
                    "that TorchDynamo does not compile anew here, as it does on other ranks: pad "
                    "to sizes that divide evenly, or use interlace.compile"
                )
        return compiled(*args)

    return call
