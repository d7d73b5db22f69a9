"""What the kernels of the strategy `fused` can do, as far as a site's own ops show it.

>>> unfit(values, site)
'its element type is f32, and the kernel takes bf16 or f16'
"""

from __future__ import annotations

from interlace.ir import Box, Call, DType, View
from interlace.ir.operators import matmul_of
from interlace.passes.sites.cone import lhs_of, result_of
from interlace.passes.sites.recognise import GatherSite, ScatterSite
from interlace.passes.sites.values import Values

DTYPES = (DType.bf16, DType.f16)
MULTIPLE = 8
"""Elements: rows of the operands begin at multiples of 16 bytes."""


def unfit(values: Values, site: GatherSite | ScatterSite) -> str:
    """Why a site's matmuls cannot run as one kernel each, empty where they can."""
    layout = site.layout
    if layout.batch != 1 or layout.padded or len(set(layout.rows)) > 1:
        return "its rows are not dealt evenly to the ranks, in one stack"
    if not layout.rows[0]:
        return "a rank has no rows"
    if isinstance(site, GatherSite):
        calls = site.matmuls
    else:
        calls = site.cone.ops
        if len(calls) > 1 or site.cone.used:
            return "more than one matmul makes what it reduces, or others use that as well"
    return next(filter(None, (_unfit(values, i) for i in calls)), "")


def _unfit(values: Values, index: int) -> str:
    op = values.program.ops[index]
    spec = matmul_of(op.fn) if isinstance(op, Call) else None
    result = result_of(op)
    if not isinstance(op, Call) or spec is None or not spec.fusable or result is None:
        return "the kernel does mm and addmm only"
    if op.kwargs:
        return f"{op.fn} has arguments that the kernel does not take"
    left, right = values.box(lhs_of(op)), op.args[spec.lhs + 1]
    assert isinstance(right, View)
    boxes = left, values.box(right), values.box(result)
    if any(box.dtype != left.dtype for box in boxes) or left.dtype not in DTYPES:
        return f"its element type is {left.dtype}, and the kernel takes bf16 or f16"
    (_, inner), (_, columns) = left.sizes, boxes[1].sizes
    if inner % MULTIPLE or columns % MULTIPLE:
        return f"its sizes {inner} and {columns} are no multiples of {MULTIPLE}"
    if not boxes[0].contiguous or not boxes[2].contiguous:
        return "the rows of its left operand or its result do not lie one after another"
    if not (boxes[1].contiguous or _transposed(boxes[1]).contiguous):
        return "its right operand is neither row-major nor its transpose"
    bias = op.args[0] if spec.lhs else None
    if isinstance(bias, View) and values.box(bias).sizes != (columns,):
        return "its bias is no row of the result's width"
    if isinstance(bias, View) and not values.box(bias).contiguous:
        return "its bias is not contiguous"
    return ""


def _transposed(box: Box) -> Box:
    return Box(box.offset, box.sizes[::-1], box.strides[::-1], box.dtype)
