"""Which sizes belong together in a collective and in a matmul, as tables of rules.

>>> collective_mismatch("all_gather", src, dst, index=0, size=4, splits=None)  # None: it fits
"""

from __future__ import annotations

from collections.abc import Callable

from interlace.ir.box import Box
from interlace.ir.operators import matmul_of
from interlace.ir.ops import KINDS, Call
from interlace.ir.view import View


def collective_mismatch(
    kind: str, src: Box, dst: Box, index: int, size: int, splits: tuple[int, ...] | None
) -> str | None:
    """Why `src` and `dst` of member `index` do not fit the kind; None if they do."""
    if src.dtype != dst.dtype:
        return "the element types differ"
    scales = KINDS[kind].scales
    if splits is None and not scales:
        if src.sizes != dst.sizes:
            return "the sizes differ"
        if kind == "all_to_all" and (not src.sizes or src.sizes[0] % size):
            return f"dimension 0 does not divide into {size} parts"
        return None
    if not src.sizes or not dst.sizes or src.sizes[1:] != dst.sizes[1:]:
        return "the sizes after dimension 0 differ"
    rows = (src.sizes[0], dst.sizes[0])
    if scales:
        part, whole = rows if scales == "gather" else rows[::-1]
        own = part if splits is None else splits[index]
        total = size * part if splits is None else sum(splits)
        if (part, whole) != (own, total):
            return f"the whole has {whole} rows, and this rank's part {part}: {own} of {total}"
        return None
    if splits is not None and kind == "all_to_all":
        total, even = sum(splits), size * splits[index]
        if rows not in ((total, even), (even, total)):
            return f"one has {total} rows (one part a rank), the other {even} (this rank's parts)"
        return None
    return "this kind takes no splits"


def matmul_mismatch(op: Call, boxes: Callable[[View], tuple[Box, ...]]) -> str | None:
    """Why the views of a matmul do not fit together; None if they do, or if it is no matmul."""
    matmul = matmul_of(op.fn)
    if matmul is None or matmul.scaled or len(op.args) < matmul.lhs + 2:
        return None
    a, b = op.args[matmul.lhs : matmul.lhs + 2]
    outs = (*op.outs, *(View(buffer.name) for buffer in op.fresh))
    if not (isinstance(a, View) and isinstance(b, View)) or len(outs) != 1:
        return None
    for left, right, out in zip(boxes(a), boxes(b), boxes(outs[0]), strict=True):
        rank = 3 if matmul.batched else 2
        if not len(left.sizes) == len(right.sizes) == len(out.sizes) == rank:
            return f"{op.fn} takes views of {rank} dimensions: {_sizes(left, right, out)}"
        (m, k), (k2, n) = left.sizes[-2:], right.sizes[-2:]
        batches = {left.sizes[:-2], right.sizes[:-2], out.sizes[:-2]}
        if k != k2 or out.sizes[-2:] != (m, n) or len(batches) != 1:
            return f"{op.fn} of sizes that do not fit: {_sizes(left, right, out)}"
        if not left.dtype == right.dtype == out.dtype:
            return f"{op.fn} of {left.dtype} and {right.dtype} into {out.dtype}"
    return None


def _sizes(left: Box, right: Box, out: Box) -> str:
    return f"{left.sizes} times {right.sizes} into {out.sizes}"
