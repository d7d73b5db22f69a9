"""Sums over the ranks that update the rows of one matrix together.

sums = SliceSums(group, {4096}, device, options, made)      # of two ranks, until `made` is closed
gram = sums(x @ x.mT)                                       # of all columns, on both ranks

A group's ranks are cut into sub-groups of `width` that follow one another. Each sum is a Program,
an all-reduce in fp32 (in fp64 of norms).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from interlace.optim.bucket_runs import all_reduced, beside, prepared
from interlace.optim.layer_wise.sharded_parameters import ParameterPart
from interlace.optim.muon.optimizer import Muon
from interlace.optim.muon.update import RowSlices
from interlace.options import Options
from interlace.runtime import Executor


def sum_slices(
    optimizer: Optimizer,
    parts: Sequence[ParameterPart],
    acting: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    device: torch.device,
    options: Options,
    made: contextlib.ExitStack,
) -> SliceSums | None:
    """Gives Muon sums for those parts of which several ranks update one matrix, if there are any,
    until `made` is closed; `acting` has what it updates in their places.

    Every rank of the job asks, also those without such parts.
    """
    together = {p: part for part, p in zip(parts, acting, strict=True) if part.together}
    width = next((part.count for part in together.values()), 1)
    first = group.rank() // width * width
    ranks = dist.get_process_group_ranks(group)[first : first + width] if together else []
    apart = made.enter_context(beside(ranks, device))
    if apart is None:
        return None
    sums = SliceSums(apart, {p.shape[1] for p in together}, device, options, made)
    muon = cast("Muon", optimizer)
    muon.take_slices(dict.fromkeys(together, RowSlices(width, sums)))
    made.callback(muon.take_slices, {})
    return sums


class SliceSums:
    """Sums of square matrices of some sides, and of single numbers."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        sides: Collection[int],
        device: torch.device,
        options: Options,
        made: contextlib.ExitStack,
    ) -> None:
        self._runs: dict[tuple[int, ...], tuple[Executor, Tensor]] = {}
        for shape in [(1,), *((side, side) for side in sorted(sides))]:
            kind = torch.float64 if len(shape) == 1 else torch.float32
            flat = torch.zeros(shape, dtype=kind, device=device).flatten()
            name = f"sum_{'_'.join(map(str, shape))}"
            write = partial(all_reduced, name, flat, "sum", team="slices")
            self._runs[shape] = prepared(write, group, [flat], options, made), flat

    def __call__(self, value: Tensor) -> Tensor:
        """The sum over the ranks, in the value's shape and dtype. Collective."""
        executor, flat = self._runs[tuple(value.shape)]
        flat.copy_(value.flatten())
        executor.run([flat])
        return flat.view(value.shape).to(value.dtype, copy=True)

    @property
    def executors(self) -> list[Executor]:
        return [executor for executor, _ in self._runs.values()]

    def reset(self) -> None:
        """After a failure, every rank."""
        self.executors[0].reset()  # which resets the team of all
