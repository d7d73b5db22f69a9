"""Checks of what calls declare against the table of operators: they may add to it, not deny it."""

from __future__ import annotations

from interlace.ir.checks.context import CheckContext
from interlace.ir.operator_facts import facts_of
from interlace.ir.ops import Call, views_in
from interlace.ir.program import Region


def check_effects(context: CheckContext, op: Call) -> None:
    """Checks the `out=` and `mutates=` of a call against what its operator fills and writes."""
    facts = facts_of(op.fn)
    if facts is None:
        return
    for key, _ in op.kwargs:
        if key in facts.outs:
            raise context.fault(
                f"{op.fn} fills {key!r}, which is given as an argument",
                f"write what it fills in out=, in the order {', '.join(facts.outs)}",
            )
    if facts.outs and not op.outs:
        raise context.fault(
            f"{op.fn} fills memory that it is given ({', '.join(facts.outs)}), and has none",
            "allocate it before the call, and give it in out=",
        )
    if op.mutates:
        written = views_in(tuple(facts.written(op.args, op.kwargs)))
        for view in op.outs:
            if view not in written:
                what = f"{op.fn} does not write {view.buffer!r} in place, as mutates=True says"
                raise context.fault(what, "leave mutates= out: the result is put into out=")


def check_region_effects(context: CheckContext, region: Region) -> None:
    """A region's calls compute values: none writes another, draws, or leaves its own unwritten."""
    for node in region.body:
        facts = facts_of(node.fn)
        if facts is None:
            continue
        what = ""
        if facts.written(node.args, node.kwargs):
            what = "writes an argument in place"
        elif facts.outs:
            what = "fills memory that it is given"
        elif facts.drawn(node.args, node.kwargs):
            what = "draws random numbers"
        elif facts.unwritten:
            what = "leaves its result unwritten"
        if what:
            raise context.fault(
                f"{node.fn} in region {region.name!r} {what}, which a region cannot",
                "call it outside of the region",
            )
