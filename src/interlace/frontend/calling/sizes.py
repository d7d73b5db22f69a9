"""DTensor arguments of other sizes than a graph was compiled for, told at once.

TorchDynamo guards what a rank holds of a DTensor, not the whole: where 8 rows become 7, the rank
that holds 4 of either does not compile anew, while its peers do. This tells the two apart:

    compiled = with_sizes(traced, labels, state, compiled)

`traced` has the arguments as they were traced: a size that is a symbol there may change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from interlace.errors import UnsupportedError


def with_sizes(
    traced: Sequence[Any],
    labels: Sequence[str],
    state: Collection[int],
    compiled: Callable[..., Any],
) -> Callable[..., Any]:
    """`compiled`, refusing DTensors of other sizes; `state` has the positions that keep theirs."""
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
