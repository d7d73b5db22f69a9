"""Tests if the kernels of the strategy `fused` can serve a site, and run on a machine's GPUs.

why = unfusable(values, site)            # "" where they can, as far as its own ops show it
runs = has_kernel(values, site, machine)
"""

from __future__ import annotations

from interlace.cost import Machine
from interlace.ir import Call, View
from interlace.ir.kernels import bias_of, ill_scaled, legible, unfit
from interlace.ir.operators import matmul_of
from interlace.passes.sites.cone import lhs_of, result_of
from interlace.passes.sites.recognise import GatherSite, MatmulSite
from interlace.passes.sites.values import Dataflow


def has_kernel(values: Dataflow, site: MatmulSite, machine: Machine) -> bool:
    """True if the machine's GPUs run the kernels of a site, if any can serve it."""
    calls = site.matmuls if isinstance(site, GatherSite) else site.cone.ops
    specs = (matmul_of(op.fn) for i in calls if isinstance(op := values.program.ops[i], Call))
    packed = any(spec is not None and spec.blocks is not None for spec in specs)
    return machine.packed_kernels if packed else machine.kernels


def unfusable(values: Dataflow, site: MatmulSite) -> str:
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
    return next(filter(None, (_matmul(values, site, i) for i in calls)), "")


def _matmul(values: Dataflow, site: MatmulSite, index: int) -> str:
    op = values.program.ops[index]
    spec = matmul_of(op.fn) if isinstance(op, Call) else None
    result = result_of(op)
    if not isinstance(op, Call) or spec is None or not spec.fusable or result is None:
        return "the kernel does mm, addmm and float8_mm only"
    if not legible(op, spec):
        return f"{op.fn} has arguments that the kernel does not take"
    rows = site.layout.rows
    why = ill_scaled(op, isinstance(site, GatherSite), rows[0], len(rows))
    if why:
        return why
    right, bias = op.args[spec.lhs + 1], bias_of(op, spec)
    assert isinstance(right, View)
    added = values.box(bias) if isinstance(bias, View) else None
    factors = values.box(lhs_of(op)), values.box(right)
    return unfit(*factors, values.box(result), added, spec.blocks is not None)
