"""What the kernels of the strategy `fused` can do, as far as a site's own ops show it.

>>> unfusable(values, site)
'its element type is f32, and the kernel takes bf16 or f16'
"""

from __future__ import annotations

from interlace.ir import Call, View
from interlace.ir.kernels import unfit
from interlace.ir.operators import matmul_of
from interlace.passes.sites.cone import lhs_of, result_of
from interlace.passes.sites.recognise import GatherSite, ScatterSite
from interlace.passes.sites.values import Values


def unfusable(values: Values, site: GatherSite | ScatterSite) -> str:
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
    return next(filter(None, (_matmul(values, i) for i in calls)), "")


def _matmul(values: Values, index: int) -> str:
    op = values.program.ops[index]
    spec = matmul_of(op.fn) if isinstance(op, Call) else None
    result = result_of(op)
    if not isinstance(op, Call) or spec is None or not spec.fusable or result is None:
        return "the kernel does mm and addmm only"
    if op.kwargs:
        return f"{op.fn} has arguments that the kernel does not take"
    right, bias = op.args[spec.lhs + 1], op.args[0] if spec.lhs else None
    assert isinstance(right, View)
    added = values.box(bias) if isinstance(bias, View) else None
    return unfit(values.box(lhs_of(op)), values.box(right), values.box(result), added)
