"""The steps of the cross-entropy on CUDA (see steps.py): launches of kernel.py, cut by layout.py.

Everything is enqueued on the current stream; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from interlace.kernels.launch import ELEMENTS, KernelSource, kernel_of, on, stream_of
from interlace.nn.cross_entropy import kernel
from interlace.nn.cross_entropy.layout import ALIGNMENT, GRAD_TILES, Constants, KernelRows
from interlace.nn.cross_entropy.steps import Problem

SCALED, SCALERS = 2048, 1056
"""Elements that a program of `scale_kernel` takes at a time, and the programs: 8 a processor."""
MERGED_ROWS = 128
"""Rows that a program of `merge_kernel` joins."""
NARROW = ("rows", "local", "parts", "groups_a_part", "groups_a_program")
"""Counts of 32 bits; all others are of 64."""
FLOATS = ("smoothing", "z_loss", "number")
KERNELS: Mapping[str, Any] = vars(kernel)


def dense(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Class weights as the kernels read them: one after another, from a boundary of 16 bytes."""
    if weight is None:
        return None
    if weight.dtype not in ELEMENTS:
        weight = weight.float()
    weight = weight.contiguous()
    return weight.clone() if weight.data_ptr() % ALIGNMENT else weight


def source_of(name: str, dtypes: tuple[Any, ...], constants: Constants, warps: int) -> KernelSource:
    """A kernel whose first arguments are tensors of these types (None: it is not used)."""
    function = KERNELS[name]
    types = dict.fromkeys(function.arg_names, "i64")
    types |= dict.fromkeys(NARROW, "i32") | dict.fromkeys(FLOATS, "fp32")
    for argument, dtype in zip(function.arg_names, dtypes, strict=False):
        types[argument] = "*" + ELEMENTS.get(dtype, "i8")
    return KernelSource(kernel=function, types=types, constants=dict(constants), num_warps=warps)


def launch(
    name: str, grid: tuple[int, int], tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...], constants: Constants, warps: int = 4,
) -> None:  # fmt: skip
    """Launches a kernel on the current stream of its first tensor's device."""
    assert tensors[0] is not None
    device = tensors[0].device
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    with on(device):
        program = kernel_of(device, source_of, name, dtypes, constants, warps)
        program.launch(stream_of(device), grid[0], (*tensors, *numbers), grid[1])


def stats(problem: Problem) -> torch.Tensor:
    """[parts, K, rows] of this rank's classes, but for the target's logit and weight."""
    layout = KernelRows(problem)
    found = _floats(problem, layout.cut.parts()[0], problem.num_stats, layout.rows)
    _stats(problem, layout, found, None, None)
    return found


def _stats(problem: Problem, layout: KernelRows, found: Any, kept: Any, losses: Any) -> None:
    if not layout.rows:
        return
    terms, (count, each) = problem.terms, layout.cut.parts()
    launch(
        "stats_kernel", (layout.rows, count),
        (layout.logits, problem.target, dense(problem.weight), found, kept, losses, problem.word,
         problem.shards.sizes),
        (*layout.numbers, terms.smoothing, terms.z_loss, each),
        (("FINISH", losses is not None), *layout.cut.variant), layout.cut.warps,
    )  # fmt: skip


def _merge(problem: Problem, found: torch.Tensor, merged: Any, kept: Any, losses: Any,
           picks: bool) -> None:  # fmt: skip
    terms, layout = problem.terms, KernelRows(problem)
    if not layout.rows:
        return
    launch(
        "merge_kernel", (-(-layout.rows // MERGED_ROWS), 1),
        (found, merged, layout.logits, problem.target, dense(problem.weight), kept, losses,
         problem.word, problem.shards.sizes),
        (layout.rows, found.shape[0], *layout.numbers[1:],
         terms.smoothing, terms.z_loss),
        (("PICK", picks), ("FINISH", losses is not None), ("BLOCK", MERGED_ROWS),
         *layout.cut.flags),
    )  # fmt: skip


def pack(problem: Problem, found: torch.Tensor) -> torch.Tensor:
    """[K, rows]: what this rank sends."""
    merged = _floats(problem, *found.shape[1:])
    _merge(problem, found, merged, None, None, picks=True)
    return merged


def losses(
    problem: Problem, found: torch.Tensor, picks: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's loss, and what backward needs of it (`num_kept`)."""
    loss, kept = _results(problem)
    _merge(problem, found, None, kept, loss, picks)
    return loss, kept


def alone(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """`losses` where no other rank has classes: one kernel, unless the rows are few."""
    layout = KernelRows(problem)
    if layout.cut.parts()[0] > 1:
        return losses(problem, stats(problem), picks=True)
    loss, kept = _results(problem)
    _stats(problem, layout, None, kept, loss)
    return loss, kept


def _results(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    target = problem.target
    return _floats(problem, *target.shape), _floats(problem, problem.num_kept, target.numel())


def _floats(problem: Problem, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=problem.logits.device)


def total(
    losses: torch.Tensor,
    kept: torch.Tensor,
    weighted: bool,
    mean: bool,
    denominator: torch.Tensor | float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses over its divisor, and that."""
    loss, divisor = losses.new_empty(()), losses.new_empty(())
    given = denominator if isinstance(denominator, torch.Tensor) else None
    if given is not None and given.device != losses.device:
        given = given.to(losses.device, non_blocking=True)
    if given is not None and given.dtype not in ELEMENTS:
        given = given.float()
    number = float(denominator) if given is None and denominator is not None else 1.0
    rows = losses.numel()
    block = min(4096, max(32, 1 << (rows - 1).bit_length())) if rows else 32
    launch(
        "total_kernel", (1, 1), (losses, kept if mean else None, loss, divisor, given),
        (number, rows),
        (("MEAN", mean and denominator is None), ("WEIGHTED", weighted),
         ("FIGURE", kept.shape[0] - 1 if weighted else 1), ("GIVEN", given is not None),
         ("BLOCK", block)),
        max(1, min(16, block // 128)),
    )  # fmt: skip
    return loss, divisor


def count(problem: Problem) -> torch.Tensor:
    """The number of rows that count, in float32; needs no logits."""
    target, shards = problem.target, problem.shards
    found = torch.empty((), dtype=torch.float32, device=target.device)
    launch(
        "count_kernel", (1, 1), (target, found, shards.sizes),
        (target.numel(), 0, shards.classes, problem.terms.ignore_index),
        (("RANK", shards.rank), ("WORLD", shards.world), ("MEASURED", shards.sizes is not None),
         ("BLOCK", 1024)),
    )  # fmt: skip
    return found


def scale(tensors: Sequence[torch.Tensor], by: torch.Tensor) -> None:
    """Multiplies up to three contiguous tensors of one type by a number of float32, in place."""
    found = [tensor for tensor in tensors if tensor.numel()]
    if not found:
        return
    sizes = [tensor.numel() for tensor in found]
    count, grid = len(found), min(SCALERS, -(-max(sizes) // SCALED))
    assert count <= 3
    first, second, third = [*found, None, None][:3]
    launch(
        "scale_kernel", (grid, count), (first, second, third, by), (*sizes, 0, 0)[:3],
        (("COUNT", count), ("BLOCK", SCALED)),
    )  # fmt: skip


def gradient(
    problem: Problem,
    kept: torch.Tensor,
    upstream: torch.Tensor | None,
    divisor: torch.Tensor | None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the logits; `upstream` is a number, one for each row, or None: 1."""
    logits, terms = problem.logits, problem.terms
    layout = KernelRows(problem)
    if into is None:
        into = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    cut, local = layout.cut, layout.cut.local
    if not layout.rows or not local:
        return into
    each = GRAD_TILES * cut.tile
    count = -(-(-(-local // cut.vec) + 1) // each)
    per_row = upstream is not None and upstream.dim() > 0
    if per_row and upstream is not None:
        upstream = upstream.reshape(-1).contiguous()
    launch(
        "grad_kernel", (layout.rows, count),
        (layout.logits, problem.target, dense(problem.weight), kept, upstream, divisor, into,
         problem.shards.sizes),
        (*layout.numbers, local, terms.smoothing, terms.z_loss, each),
        (("ALIKE", cut.alike), ("PER_ROW", per_row), ("DIVIDED", divisor is not None),
         ("SCALED", upstream is not None), *cut.variant), cut.warps,
    )  # fmt: skip
    return into
