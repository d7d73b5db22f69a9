"""Parsing which named sizes a Program has, and what it assumes of them.

    def f(tp: Team[2], S: Size[128], x: f32[S, 8]):
        assume(S >= 2, S % 4 == 0)

Bounds and rests of one size narrow its range; what is said of several is a fact of the class.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from interlace.ir.size_class import Fact, Known, NamedSize
from interlace.ir.sizes import Size
from interlace.ir.text.expressions import Expressions, is_a
from interlace.ir.text.source import SourceText

_RELATIONS: dict[type[ast.cmpop], str] = {
    **{ast.Gt: ">", ast.GtE: ">=", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="},
}
_WHOLE = "declare a size that is divided without remainder"
_FIX = "write one such as S >= 8, S <= 512, S % 4 == 0 or B * S - 64 > 0"


def parse_sizes(source: SourceText, args: Sequence[ast.arg]) -> tuple[NamedSize, ...]:
    """The named sizes that parameters declare: `S: Size[128]`."""
    expr = Expressions(source, ())
    found: list[NamedSize] = []
    for arg in args:
        if not is_a("Size", arg):
            continue
        node = arg.annotation
        if not isinstance(node, ast.Subscript):
            fix = f"write {arg.arg}: Size[128], with the value that decisions are made for"
            raise source.error(arg, "a size without a value", fix)
        found.append(NamedSize(arg.arg, expr.integer(node.slice)))
    return tuple(found)


def assume(expressions: Expressions, known: Known, node: ast.expr) -> None:
    """Notes what a text assumes: `S >= 8`, `S % 4 == 0`, `256 * B * S - 512 > 0`."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise expressions.fail(node, "expected what is assumed of named sizes", _FIX)
    left, word = node.left, _RELATIONS.get(type(node.ops[0]))
    bound = expressions.integer(node.comparators[0])
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and word == "==":
        size, modulus = expressions.size(left.left), expressions.integer(left.right)
        if isinstance(size, Size) and modulus > 0 and known.rest(size, modulus) == bound:
            return
    elif word is not None and isinstance(size := expressions.size(left) - bound, Size):
        fact = Fact(-size, "<=") if word == ">=" else Fact(size, word)
        if fact.holds(known.values):
            known.note(fact)
            return
    raise expressions.fail(node, "this does not hold for the sizes in the head", _FIX)


def assume_whole(expressions: Expressions, known: Known, node: ast.expr, quotient: Size) -> None:
    """Notes that a division leaves no remainder: of `S // 2` that `S % 2 == 0`."""
    if known.rest(Size(quotient.terms), quotient.over):
        raise expressions.fail(
            node, f"{quotient} is no whole number for the sizes in the head", _WHOLE
        )
