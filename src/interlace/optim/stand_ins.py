"""What an optimizer updates: Parameters of the module, parts of them, or whole matrices of shards.

    parts = parts_of(params, split_parts, rows_apart(optimizer), shards)
    stand_ins = StandIns(parts, plan, rank, weights, homes)
    stand_ins.enter(optimizer)          # groups have stand-ins; leave(optimizer) undoes that

Note [Parts]
    A Parameter that is a stack of matrices (experts, heads), or whose elements are updated by
    themselves, can be cut along dimension 0 without a change of bits. Its parts are equal, so that
    each owner may have the next ones in order, and lie in a bucket of their own, by owner. Their
    number does not depend on the number of ranks: a checkpoint has the state of each part by its
    rows, and goes to other owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from interlace.optim.adam.state import local
from interlace.optim.grad_reducer import Bucket
from interlace.optim.ownership import ALIGNMENT, Ownership
from interlace.optim.sharded_parameters import is_sharded
from interlace.optim.tensor_homes import TensorHomes

LEAST = 4096
"""Elements that a part has at least."""


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A Parameter, or some rows of what this rank has of it."""

    name: str
    param: nn.Parameter
    rows: tuple[int, int] | None = None
    count: int = 1
    """How many such parts there are."""

    def of(self, tensor: Tensor) -> Tensor:
        """This part of what is shaped as the Parameter here."""
        return tensor if self.rows is None else tensor[slice(*self.rows)]


def parts_of(
    params: Mapping[str, nn.Parameter],
    most: int,
    rows_apart: Callable[[Tensor], int],
    shard: int,
    shards: int,
) -> list[ParameterPart]:
    """Parts of all Parameters, each cut into at most so many where `rows_apart` tells that equal
    runs of rows are updated by themselves. What is sharded otherwise than by rows is left whole.
    """
    found: list[ParameterPart] = []
    for name, param in params.items():
        units, first, here = (
            rows_apart(param) if most > 1 and param.ndim > 1 else 1,
            0,
            local(param),
        )
        if isinstance(param, DTensor) and is_sharded(param):
            by_rows = param.placements[0].is_shard(0) and units % shards == 0
            units = units // shards if by_rows else 1
            first = shard * here.shape[0]
        count = next(n for n in range(min(most, units), 0, -1) if n == 1 or _fits(here, units, n))
        if count == 1:
            found.append(ParameterPart(name, param))
            continue
        rows = here.shape[0] // count
        for start in range(0, here.shape[0], rows):
            at = f"{name}[{first + start}:{first + start + rows}]"
            found.append(ParameterPart(at, param, (start, start + rows), count))
    return found


def _fits(here: Tensor, units: int, count: int) -> bool:
    each = here.numel() // count
    whole = units % count == 0 and here.shape[0] % count == 0
    return whole and here.is_contiguous() and each >= LEAST and each % ALIGNMENT == 0


class StandIns:
    """What stands in an optimizer's groups while a LayerWise is open."""

    def __init__(
        self,
        parts: Sequence[ParameterPart],
        plan: Ownership,
        rank: int,
        weights: Sequence[Bucket],
        homes: TensorHomes | None,
    ) -> None:
        """`weights`: the flat buffers, which Parameters become views of."""
        views = views_of(weights)
        self.acting: list[nn.Parameter] = []
        """For each part what is updated: without memory if that is elsewhere."""
        for part, owner in zip(parts, plan.owners, strict=True):
            param = part.param
            if homes is not None and param in homes.whole:
                self.acting.append(homes.whole[param])
            elif part.rows is None:
                self.acting.append(param)
            else:
                place = part.of(views[param])
                mine = place if owner == rank else torch.empty_like(place, device="meta")
                self.acting.append(nn.Parameter(mine, param.requires_grad))
        self._parts = parts

    def enter(self, optimizer: Optimizer) -> None:
        """Puts them in the places of Parameters in all groups, with what states there are."""
        acting: dict[nn.Parameter, list[nn.Parameter]] = {}
        for part, stands in zip(self._parts, self.acting, strict=True):
            acting.setdefault(part.param, []).append(stands)
            state = optimizer.state.get(part.param)
            if state and stands is not part.param:
                optimizer.state[stands] = {n: _of(part, stands, v) for n, v in state.items()}
        _replace(optimizer, acting)

    def leave(self, optimizer: Optimizer) -> None:
        """Puts the Parameters back, without the states of stand-ins."""
        for part, stands in zip(self._parts, self.acting, strict=True):
            if stands is not part.param:
                optimizer.state.pop(stands, None)
        pairs = zip(self.acting, self._parts, strict=True)
        _replace(optimizer, {stands: [part.param] for stands, part in pairs})


def views_of(buckets: Iterable[Bucket]) -> dict[nn.Parameter, Tensor]:
    return {p: v for bucket in buckets for p, v in zip(bucket.params, bucket.views, strict=True)}


def _replace(optimizer: Optimizer, by: Mapping[nn.Parameter, Sequence[nn.Parameter]]) -> None:
    for group in optimizer.param_groups:
        given = [each for param in group["params"] for each in by.get(param, [param])]
        group["params"][:] = dict.fromkeys(given)


def _of(part: ParameterPart, stands: nn.Parameter, value: object) -> object:
    """A value of a Parameter's state for what stands in its place."""
    if not isinstance(value, Tensor) or value.shape != part.param.shape:
        return value.clone() if isinstance(value, Tensor) else value
    if part.rows is None and isinstance(value, DTensor):
        return value.full_tensor()
    return part.of(local(value)).clone()
