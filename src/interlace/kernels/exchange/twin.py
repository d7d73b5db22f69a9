"""What an exchange must give, in plain torch, from the sources of all ranks at once.

    >>> exchange_twin("all_reduce", [torch.ones(2), torch.ones(2)], (2,))
    [tensor([2., 2.]), tensor([2., 2.])]

Reductions go in rank order and accumulate in fp32 (in the type itself where that is wider, or is an
integer), rounded once: the kernel gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from interlace.kernels.exchange.reduce import sum_slots


def _reduced(parts: Sequence[torch.Tensor], reduce: str) -> torch.Tensor:
    dtype = parts[0].dtype
    if reduce == "sum":
        return sum_slots(torch.stack(list(parts)))
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        match reduce:
            case "avg":
                total = total + part
            case "prod":
                total = total * part
            case "min":
                total = torch.minimum(total, part.to(wide))
            case _:
                total = torch.maximum(total, part.to(wide))
    return (total / len(parts) if reduce == "avg" else total).to(dtype)


def exchange_twin(
    kind: str,
    sources: Sequence[torch.Tensor],
    parts: Sequence[int],
    *,
    reduce: str = "sum",
    root: int = 0,
    merges: bool = False,
) -> list[torch.Tensor]:
    """Each rank's destination, flat; empty where a rank gets nothing."""
    size = len(sources)
    flat = [source.reshape(-1) for source in sources]
    nothing = flat[0].new_empty(0)

    def cut(source: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return list(source.split(list(sizes)))

    match kind:
        case "all_gather":
            return [torch.cat(flat)] * size
        case "gather":
            return [torch.cat(flat) if rank == root else nothing for rank in range(size)]
        case "broadcast":
            return [flat[root]] * size
        case "scatter":
            return cut(flat[root], parts)
        case "all_to_all":
            sizes = [[parts[rank]] * size if merges else parts for rank in range(size)]
            pieces = [cut(flat[rank], sizes[rank]) for rank in range(size)]
            return [torch.cat([pieces[s][rank] for s in range(size)]) for rank in range(size)]
        case "reduce_scatter":
            return cut(_reduced(flat, reduce), parts)
        case "reduce":
            total = _reduced(flat, reduce)
            return [total if rank == root else nothing for rank in range(size)]
        case "all_reduce":
            return [_reduced(flat, reduce)] * size
        case _:
            return [nothing] * size
