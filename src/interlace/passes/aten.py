"""What the passes know of aten operators, as tables: matmuls, data movement, reductions of rows.

A row-wise operator can be cut along its rows: row i of the result needs row i of its operands. Each
entry names the overload that writes into given memory, so that chunks land in their place.
Pointwise operators are such too: `ir/pointwise.py`.

    >>> MATMULS["aten.addmm.default"].lhs
    1
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matmul:
    """A matrix product: its overload with `out`, which argument holds the rows of the result."""

    out: str
    lhs: int
    rows: tuple[int, ...] = ()
    """Arguments that may have one row for each row of the result (else they are passed whole)."""
    batched: bool = False
    """Whether each of several stacks of rows is multiplied by a matrix of its own."""


MATMULS = {
    "aten.mm.out": Matmul("aten.mm.out", 0),
    "aten.addmm.out": Matmul("aten.addmm.out", 1, (0,)),
    "aten.mm.default": Matmul("aten.mm.out", 0),
    "aten.addmm.default": Matmul("aten.addmm.out", 1, (0,)),
    "aten._scaled_mm.default": Matmul("aten._scaled_mm.out", 0, (2,)),
}

BATCHED = {
    "aten.bmm.out": Matmul("aten.bmm.out", 0, batched=True),
    "aten.baddbmm.out": Matmul("aten.baddbmm.out", 1, (0,), batched=True),
    "aten.bmm.default": Matmul("aten.bmm.out", 0, batched=True),
    "aten.baddbmm.default": Matmul("aten.baddbmm.out", 1, (0,), batched=True),
}
"""Products of stacks of matrices, such as a rank's experts: overlapped with all-to-alls."""


def matmul_of(fn: str) -> Matmul | None:
    """What is known of a matrix product, of one stack or of several; None for another call."""
    return MATMULS.get(fn) or BATCHED.get(fn)


_PERMUTED = " (it puts rows in an order that is data: no chunk's place is known beforehand)"
BY_DATA = {
    **{f"aten.{name}": _PERMUTED for name in ("index", "gather", "take", "scatter")},
    "aten._grouped_mm": " whose groups have sizes known beforehand",
}
"""What to add to a refusal, by how an operator's name begins, where data decide on its rows."""


def by_data(fn: str) -> str:
    """What to add to the refusal of an operator whose rows are decided by data."""
    return next((why for name, why in BY_DATA.items() if fn.startswith(name)), "")


CASTS = ("aten._to_copy.default", "prims.convert_element_type.default")
"""Element by element into another element type: a Copy does it."""

SAME_ORDER = (
    *("aten.clone.default", "aten.contiguous.default", "aten.alias.default"),
    *("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"),
)
"""The elements of the first argument in the same row-major order."""

ROW_REDUCTIONS = (
    *("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default"),
    *("aten.prod.dim_int", "aten.argmax.default"),
)
"""Over the dimensions of the second argument."""
