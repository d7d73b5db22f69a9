"""Parsing what stands inside statements: names, integers, sizes and literals.

Nothing is ever evaluated: each form is recognised in the syntax tree, or refused with its place.

    tp.rank + 1          a rank or a chunk
    rows[tp.rank]        a size
    bf16, 2.5, inf       an element type, literals
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from interlace.errors import ParseError
from interlace.ir.ops import Scalar
from interlace.ir.parser_source import Node, Source
from interlace.ir.printer_ops import even_parts, team_sizes
from interlace.ir.spelling import did_you_mean
from interlace.ir.types import Dim, DType, Index, Others, RankIndex, TableEntry, Team

DTYPES = {dtype.value: dtype for dtype in DType}


class ExprParser:
    """Parses expressions of one Program, whose teams it knows."""

    def __init__(self, source: Source, teams: Sequence[Team], in_region: bool = False) -> None:
        self.source = source
        self.in_region = in_region
        self.sizes = team_sizes(teams)
        self.even = even_parts(teams)

    def fail(self, node: Node, what: str, fix: str) -> ParseError:
        """The error to raise for a node."""
        return self.source.error(node, what, fix)

    def integer(self, node: ast.expr) -> int:
        """An integer literal."""
        sign, inner = 1, node
        while isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.USub | ast.UAdd):
            sign = -sign if isinstance(inner.op, ast.USub) else sign
            inner = inner.operand
        if isinstance(inner, ast.Constant) and type(inner.value) is int:
            if inner.value >= 1 << 63:
                raise self.fail(node, "an integer of more than 63 bits", "write a smaller number")
            return sign * inner.value
        raise self.fail(node, "expected an integer", "write a whole number here")

    def integers(self, node: ast.expr) -> tuple[int, ...]:
        """A tuple or list of integers."""
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(map(self.integer, node.elts))
        raise self.fail(node, "expected integers", "write them in brackets, such as (8, 4)")

    def string(self, node: ast.expr) -> str:
        """A string literal."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        raise self.fail(node, "expected a string", 'write it in quotes, such as "peer"')

    def name(self, node: ast.expr) -> str:
        """A name where only a name may stand: bare or as a string."""
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        inner = self.accessed(node)
        if inner is not None:
            return inner[1]
        raise self.fail(node, "expected a name", "write a name, or any name in quotes")

    def accessed(self, node: ast.expr) -> tuple[str, str] | None:
        """Family and name of `buffer["odd name"]` and its like; None for anything else."""
        if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
            return None
        key = node.slice
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            return None
        if node.value.id not in ("buffer", "value", "stream", "team", "table"):
            return None
        return node.value.id, key.value

    def team_of(self, node: ast.expr, attribute: str) -> str | None:
        """The team of `tp.rank` or `tp.others`; None for anything else."""
        if not (isinstance(node, ast.Attribute) and node.attr == attribute):
            return None
        if isinstance(node.value, ast.Name):
            return node.value.id
        inner = self.accessed(node.value)
        return inner[1] if inner is not None and inner[0] == "team" else None

    def index(self, node: ast.expr) -> Index:
        """An integer or `tp.rank + k`."""
        team = self.team_of(node, "rank")
        if team is not None:
            return RankIndex(team)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            left = self.index(node.left)
            if isinstance(left, RankIndex):
                offset = self.integer(node.right)
                return left + offset if isinstance(node.op, ast.Add) else left - offset
        try:
            return self.integer(node)
        except ParseError:
            raise self.fail(
                node, "expected a rank or a chunk", "write an integer, tp.rank or tp.rank + 1"
            ) from None

    def peer(self, node: ast.expr) -> Index | Others:
        """A rank, or `tp.others`."""
        team = self.team_of(node, "others")
        return Others(team) if team is not None else self.index(node)

    def dim(self, node: ast.expr) -> Dim:
        """A size: an integer or an entry of a table, such as `rows[tp.rank]`."""
        if isinstance(node, ast.Subscript) and self.accessed(node) is None:
            return TableEntry(self.table(node.value), self.index(node.slice))
        return self.integer(node)

    def table(self, node: ast.expr) -> str:
        """The name of a table."""
        inner = self.accessed(node)
        if inner is not None and inner[0] == "table":
            return inner[1]
        if isinstance(node, ast.Name):
            return node.id
        raise self.fail(node, "expected a table", "write the name of a table")

    def dtype(self, node: ast.expr) -> DType:
        """An element type."""
        if isinstance(node, ast.Name):
            found = DTYPES.get(node.id)
            if found is not None:
                return found
            fix = did_you_mean(node.id, DTYPES, "element types are")
            raise self.fail(node, f"no element type is named {node.id!r}", fix)
        raise self.fail(node, "expected an element type", "write one such as bf16 or f32")

    def scalar(self, node: ast.expr) -> Scalar:
        """A literal."""
        if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
            return math.inf if node.id == "inf" else math.nan
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            value = self.scalar(node.operand)
            if isinstance(value, int | float | complex) and not isinstance(value, bool):
                if value != value:
                    return math.nan
                return -value if isinstance(node.op, ast.USub) else value
        elif isinstance(node, ast.Constant) and isinstance(
            node.value, int | float | complex | str | None
        ):
            return node.value
        raise self.fail(node, "expected a literal", "write a number, a string, True, False or None")

    def optional_real(self, node: ast.expr | None) -> float | None:
        """A number, or None where it is not given."""
        if node is None:
            return None
        value = self.scalar(node)
        if isinstance(value, int | float):
            return value
        raise self.fail(node, "expected a number", "write a number such as 2.41")
