"""The computation behind a reduction that can be cut along its rows: matmuls, what follows them.

Going back from the reduced value, every matmul and every pointwise operator or cast whose row i
needs row i of its operands belongs to the cone; the rest are operands, there beforehand.

    y1 = mm(a, w1); y2 = mm(b, w2); z = y1 + y2; reduce_scatter(z)      # cone: both mm and the add
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

from interlace.errors import ProgramError
from interlace.ir import Arg, Call, View
from interlace.ir.operators import by_data, is_kind, matmul_of
from interlace.ir.sizes import Int
from interlace.passes.sites.rows import Refused
from interlace.passes.sites.values import Dataflow


@dataclass(frozen=True, slots=True)
class Cone:
    """The ops behind `value`, a matrix of `rows` rows of `width` elements."""

    value: str
    rows: Int
    width: Int
    ops: tuple[int, ...]
    used: frozenset[str]
    """Dataflow of the cone that others use as well."""
    transposed: bool
    """True if every matmul contracts over rows, as the gradient of a weight does."""
    stacks: Int = 0
    """Number of stacks of rows, each times a matrix of its own; 0: one matrix for all rows."""


_Shape = tuple[Int, Int]
"""The rows of a matmul, and its stacks (0: one matrix for all rows)."""


def result_of(op: Call) -> View | None:
    """The one whole buffer that a call makes."""
    if not op.draws and not op.written:
        if len(op.fresh) == 1 and not op.outs:
            return View(op.fresh[0].name)
        if len(op.outs) == 1 and not op.fresh and op.outs[0].covers_buffer:
            return op.outs[0]
    return None


def made_by(op: Call) -> View:
    """The buffer that a call of a site makes."""
    found = result_of(op)
    assert found is not None, op
    return found


def cone_of(
    values: Dataflow, value: str, taken: set[int], inside: Iterable[int], batched: bool = False
) -> Cone:
    """The cone behind a value; `inside` are the ops that use it within the site. Or Refused.

    `batched` also takes matmuls of several stacks.
    """
    shape = _find_rows(values, value, taken, set(), batched)
    if shape is None:
        made = values.maker(value)
        call = values.calls.get(made[0]) if made else None
        what = call.fn if call else "no operator of the program"
        if made and made[0] in taken:
            raise Refused("its matmul is overlapped with another communication")
        kind = f"not a matmul{by_data(what)} with pointwise operators after it"
        raise Refused(f"{what}, {kind}, makes its rows")
    kept_out = set(taken)
    while True:
        found: dict[int, Call] = {}
        _collect(values, value, shape, kept_out, found)
        results = {made_by(op).buffer: i for i, op in found.items()}
        needed_whole = {results[name] for name in _needed_whole(values, found) if name in results}
        if not needed_whole:
            break
        kept_out |= needed_whole
    if value not in results:
        raise Refused("its matmuls depend on one another's whole results")
    known = {*found, *inside}
    used = frozenset(
        name
        for name in results
        if values.leaves(name) or not known.issuperset(values.users.get(name, ()))
    )
    lhs = [values.box(lhs_of(op)) for op in found.values() if matmul_of(op.fn)]
    transposed = all(box.strides[-2] == 1 and box.strides[-1] > 1 for box in lhs)
    (rows, stacks), box = shape, values.box(View(value))
    width = box.numel // rows if rows else box.sizes[-1]
    return Cone(value, rows, width, tuple(sorted(found)), used, transposed, stacks)


def lhs_of(op: Call) -> View:
    """The matrix whose rows become the rows of a matmul's result."""
    matmul = matmul_of(op.fn)
    assert matmul is not None, op.fn
    lhs = op.args[matmul.lhs]
    assert isinstance(lhs, View)
    return lhs


def blocks_of(op: Call) -> int:
    """In how many blocks of one scale each the rows of a matmul come; 0: each has its own."""
    matmul = matmul_of(op.fn)
    blocks = op.args[matmul.blocks] if matmul is not None and matmul.blocks is not None else 0
    assert isinstance(blocks, int)
    return blocks


def operands(op: Call) -> tuple[Arg, ...]:
    """The arguments of a pointwise call or a cast, by position and by name."""
    return (*op.args, *(value for _, value in op.kwargs))


def _matmul_shape(values: Dataflow, op: Call) -> _Shape | None:
    """The rows of a call that is a matmul."""
    matmul = matmul_of(op.fn)
    lhs = op.args[matmul.lhs] if matmul is not None else None
    if matmul is None or not isinstance(lhs, View) or blocks_of(op) > 1:
        return None
    sizes = values.box(lhs).sizes
    if len(sizes) != (3 if matmul.batched else 2) or not sizes[-1]:
        return None
    return (sizes[0] * sizes[1], sizes[0]) if matmul.batched else (sizes[0], 0)


def _is_rowwise(values: Dataflow, op: Call, shape: _Shape) -> bool:
    """True if an op is a pointwise call or a cast that can be cut into chunks of such rows."""
    out = made_by(op)
    if not is_kind(op.fn, "pointwise", "cast") or not values.whole(out):
        return False
    sizes = values.box(out).sizes
    views = (arg for arg in operands(op) if isinstance(arg, View))
    return all(operand_kind(values, view, sizes, *shape) is not None for view in views)


def operand_kind(
    values: Dataflow, view: View, sizes: tuple[Int, ...], rows: Int, stacks: Int = 0
) -> str | None:
    """The kind of a pointwise operand of a result of these sizes that is cut into rows, or None.

    `rows` (cut alike), `column` (one element a row), `vector` (the same for every row), `scalar`,
    `stack` (the same for every row of a stack: the bias of an expert).
    """
    box = values.box(view)
    last = sizes[-1] if sizes else 1
    numel = math.prod(sizes)
    if box.sizes == sizes:
        width = numel // rows if rows else last
        return "rows" if _viewable(values, view, (rows, width)) else None
    if box.numel == 1:
        return "scalar"
    padded = (*(1,) * (len(sizes) - len(box.sizes)), *box.sizes)
    if numel == rows * last and len(padded) == len(sizes):
        if all(size == 1 for size in padded[:-1]):
            return "vector"
        if padded[:-1] == sizes[:-1] and padded[-1] == 1:
            return "column" if _viewable(values, view, (rows, 1)) else None
        if len(sizes) == 3 and padded[:2] == (stacks, 1) and padded[2] in (1, last):
            return "stack"
    return None


def _viewable(values: Dataflow, view: View, sizes: tuple[Int, ...]) -> bool:
    try:
        values.box(view.view(*sizes))
    except ProgramError:
        return False
    return True


def _inner(values: Dataflow, op: Call) -> Iterable[View]:
    """The operands of a pointwise call that may themselves belong to the cone."""
    sizes = values.box(made_by(op)).sizes
    for arg in operands(op):
        if isinstance(arg, View) and values.box(arg).sizes == sizes and values.whole(arg):
            yield arg


def _needed_whole(values: Dataflow, found: dict[int, Call]) -> Iterable[str]:
    """The operands of the cone's ops that are not cut along with them."""
    for op in found.values():
        cut = set[View]() if matmul_of(op.fn) else set(_inner(values, op))
        yield from (view.buffer for view in op.views() if view not in cut)


def _made(values: Dataflow, name: str, taken: Container[int]) -> tuple[int, Call] | None:
    """The call that makes all of a value, and nothing else, unless it is taken."""
    index, _ = values.maker(name) or (-1, None)
    call = values.calls.get(index) if index not in taken else None
    return None if call is None or result_of(call) is None else (index, call)


def _find_rows(
    values: Dataflow, name: str, taken: set[int], seen: set[str], batched: bool
) -> _Shape | None:
    """The rows of the first matmul behind a value."""
    made = _made(values, name, taken)
    if made is None or name in seen:
        return None
    seen.add(name)
    _, op = made
    shape = _matmul_shape(values, op)
    if shape is not None:
        return shape if batched or not shape[1] else None
    for view in _inner(values, op) if is_kind(op.fn, "pointwise", "cast") else ():
        shape = _find_rows(values, view.buffer, taken, seen, batched)
        if shape is not None and _is_rowwise(values, op, shape):
            return shape
    return None


def _collect(
    values: Dataflow, name: str, shape: _Shape, taken: set[int], found: dict[int, Call]
) -> None:
    """Adds the calls behind a value that have the same rows."""
    made = _made(values, name, taken)
    if made is None or made[0] in found:
        return
    index, op = made
    if _matmul_shape(values, op) == shape:
        found[index] = op
    elif _is_rowwise(values, op, shape):
        found[index] = op
        for view in _inner(values, op):
            _collect(values, view.buffer, shape, taken, found)
