"""Parsing what stands inside statements: names, integers, sizes, literals, views and types.

    tp.rank + 1                               a rank or a chunk
    rows[tp.rank]                             a size
    bf16, 2.5, inf                            an element type, literals
    full[tp.rank + 1][:, 0:8]                 a view
    bf16[rows[tp.rank], 8].strides(8, 1)      a buffer type
    Team[4], Team[[0, 1], [2, 3]]             a team: a mesh axis, or groups of global ranks
    Team[4].on([0, 1], [2, 3])                the same, of which ranks are on which host

Nothing is ever evaluated: each form is recognised in the syntax tree, or refused with its place.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from interlace.errors import ParseError
from interlace.ir.fields import FieldForm, Form, form_of
from interlace.ir.ops import Arg, Name, Scalar
from interlace.ir.sizes import Int, Size, divided, named
from interlace.ir.text.source import Arguments, Node, Signature, SourceText, signature_of
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import (
    MAX_RANKS,
    Buffer,
    Dim,
    DType,
    Index,
    Others,
    RankIndex,
    TableEntry,
    Team,
    even_parts,
    team_sizes,
)
from interlace.ir.view import Step, View

DTYPES = {dtype.value: dtype for dtype in DType}
STEPS = {form.word: form for form in map(form_of, get_args(Step))}
"""The steps of a view, by the name of their method."""
MODIFIERS = {
    "strides": Signature(rest=True),
    "kind": Signature(("kind",), (), ("kind",)),
    "team": Signature(("team",), (), ("team",)),
    "registered": Signature(("team",), (), ("team",)),
    "storage": Signature(("storage", "offset"), (), ("storage",)),
    "named": Signature(("name",), (), ("name",)),
}
"""Modifiers that may follow the type of a buffer."""
TEAM_MODIFIERS = {
    **{"over": Signature(rest=True), "on": Signature(rest=True)},
    "named": MODIFIERS["named"],
}
_COMPLEX = Signature(("real", "imag"), (), ("real", "imag"))


@dataclass(frozen=True, slots=True)
class Declared:
    """A buffer type with what its modifiers say; its place in the text gives the rest."""

    dtype: DType
    shape: tuple[Dim, ...]
    changes: dict[str, Any]

    def buffer(self, name: str, kind: str, team: str | None = None, **changes: Any) -> Buffer:
        """The buffer that a place in the text declares as `name` of `kind`."""
        fields: dict[str, Any] = {"name": name, "kind": kind, "team": team}
        return Buffer(dtype=self.dtype, shape=self.shape, **fields | self.changes | changes)


class Expressions:
    """Parses expressions of one Program, whose teams it knows."""

    def __init__(
        self,
        source: SourceText,
        teams: Sequence[Team],
        in_region: bool = False,
        named_sizes: Collection[str] = (),
    ) -> None:
        self.source = source
        self.named_sizes = named_sizes
        self.in_region = in_region
        self.sizes = team_sizes(teams)
        self.even = even_parts(teams)
        self.quotients: list[tuple[ast.expr, Size]] = []
        """Divisions in the text, which leave no remainder for any size of the class."""
        self.one: dict[str, Callable[[ast.expr], object]] = {
            **{"string": self.string, "name": self.name, "table": self.name, "dtype": self.dtype},
            **{"integer": self.integer, "integers": self.integers, "real": self.real},
            **{"size": self.size, "sizes": self.size_list},
            **{"view": self.view, "index": self.index, "peer": self.peer, "dim": self.dim},
            **{"parts": self.parts, "arg": self.arg},
        }
        """Reads the value of a field, by its role."""
        self.several: dict[str, Callable[[Arguments, FieldForm, dict[str, Any]], object]] = {}
        """Reads a field that is no argument, one, or several; takes what was read before."""

    def arguments(self, form: Form, call: ast.Call) -> Arguments:
        """The arguments of a call that writes a dataclass."""
        return Arguments(self.source, call, form.word, signature_of(form))

    def make(self, form: Form, args: Arguments, **found: Any) -> Any:
        """The dataclass that a call writes; `found` are the fields that are not in its form."""
        found.update(form.fixed)
        for field in form.fields:
            several = self.several.get(field.role)
            if several is not None:
                found[field.name] = several(args, field, found)
            elif field.how.rest:
                found[field.name] = tuple(map(self.one[field.role], args.rest))
            else:
                node = args.get(field.keyword) if field.optional else args.bound.get(field.keyword)
                if node is not None:
                    found[field.name] = self.one[field.role](node)
        return form.kind(**found)

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

    def integers(self, node: ast.expr, such: str = "(8, 4)") -> tuple[int, ...]:
        """A tuple or list of integers, such as the error's example."""
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(map(self.integer, node.elts))
        raise self.fail(node, "expected integers", f"write them in brackets, such as {such}")

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

    def named(self, node: ast.expr, family: str, what: str, fix: str) -> str:
        """A name of one family: bare, or `family["any name"]`."""
        if isinstance(node, ast.Name):
            return node.id
        inner = self.accessed(node)
        if inner is not None and inner[0] == family:
            return inner[1]
        raise self.fail(node, what, fix)

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
        return self.size(node)

    def size(self, node: ast.expr) -> Int:
        """An integer, or an expression of named sizes: `2 * S`, `(S - 1) // 2`."""
        match node:
            case ast.Name(id=name) if name in self.named_sizes:
                return named(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.size(operand)
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return self.quotient(node, self.size(left), self.integer(right))
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
                one, other = self.size(left), self.size(right)
                if isinstance(op, ast.Mult):
                    return one * other
                return one + other if isinstance(op, ast.Add) else one - other
            case ast.Name(id=name):
                fix = did_you_mean(name, self.named_sizes, "named sizes are")
                raise self.fail(node, f"no size is named {name!r}", fix)
            case _:
                return self.integer(node)

    def quotient(self, node: ast.expr, value: Int, by: int) -> Int:
        """`value // by`, which has no remainder: of a named size, for all sizes of the class."""
        if by < 1:
            raise self.fail(node, f"a size is divided by {by}", "divide by an integer >= 1")
        if isinstance(value, int) and value % by:
            raise self.fail(node, f"{by} does not divide {value}", "`//` leaves no remainder")
        found = divided(value, by)
        if isinstance(found, Size):
            self.quotients.append((node, found))
        return found

    def is_size(self, node: ast.expr) -> bool:
        """True if an expression contains a named size."""
        names = (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
        return any(name in self.named_sizes for name in names)

    def size_list(self, node: ast.expr) -> tuple[Int, ...]:
        """A tuple or list of sizes."""
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(map(self.size, node.elts))
        raise self.fail(node, "expected integers", "write them in brackets, such as (8, 4)")

    def table(self, node: ast.expr) -> str:
        """The name of a table."""
        return self.named(node, "table", "expected a table", "write the name of a table")

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

    def real(self, node: ast.expr) -> float:
        """A number."""
        value = self.scalar(node)
        if isinstance(value, int | float):
            return value
        raise self.fail(node, "expected a number", "write a number such as 2.41")

    def items(self, node: ast.expr | None) -> list[ast.expr]:
        """The members of a tuple, or the one thing that stands for a tuple of one."""
        if node is None:
            return []
        return list(node.elts) if isinstance(node, ast.Tuple | ast.List) else [node]

    def view(self, node: ast.expr) -> View:
        """A buffer and the steps that lead to the box."""
        inner = self.accessed(node)
        if inner is not None and inner[0] == "buffer":
            return View(inner[1])
        if isinstance(node, ast.Name):
            if node.id in DTYPES or node.id in ("inf", "nan"):
                raise self.fail(
                    node,
                    f"expected a view, not {node.id}",
                    f'write buffer["{node.id}"] if it is one',
                )
            return View(node.id)
        if isinstance(node, ast.Subscript) and inner is None:
            return self.subscript(self.view(node.value), node.slice)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self.method(self.view(node.func.value), node.func, node)
        raise self.fail(
            node,
            "expected a view of a buffer",
            "write one such as x, x[tp.rank] or x.permute(1, 0)",
        )

    def subscript(self, view: View, node: ast.expr) -> View:
        """`view[tp.rank]` is a chunk, `view[0:4]` and `view[:, 0:4]` are slices."""
        if isinstance(node, ast.Slice | ast.Tuple):
            for dim, part in enumerate([node] if isinstance(node, ast.Slice) else node.elts):
                if not isinstance(part, ast.Slice) or part.step is not None:
                    raise self.fail(
                        part,
                        "expected slices start:stop, one for each dimension",
                        "write x[:, 0:4]; for a chunk of another dimension x.chunk(i, 4, dim=1)",
                    )
                if part.upper is None:
                    if part.lower is not None:
                        raise self.fail(part, "a slice without end", "write start:stop")
                    continue
                start = 0 if part.lower is None else self.dim(part.lower)
                view = view.slice(dim, start, self.dim(part.upper))
            return view
        index = self.index(node)
        if isinstance(index, RankIndex):
            size = self.sizes.get(index.team)
            if size is None:
                fix = did_you_mean(index.team, self.sizes, "teams are")
                raise self.fail(node, f"no team is named {index.team!r}", fix)
            return view.chunk(index, size)
        if self.even is None:
            raise self.fail(
                node,
                "[i] is chunk i of as many parts as the team has ranks: it is unclear which team",
                f"write .chunk({index}, parts)",
            )
        return view.chunk(index, self.even)

    def method(self, view: View, func: ast.Attribute, node: ast.Call) -> View:
        """A step written as a method."""
        form = STEPS.get(func.attr)
        if form is None:
            fix = did_you_mean(func.attr, STEPS, "steps are")
            raise self.fail(func, f"a view has no step {func.attr!r}", fix)
        return view.then(self.make(form, self.arguments(form, node)))

    def parts(self, node: ast.expr) -> int | str:
        """A number of even parts, or the table of the parts' sizes."""
        string = isinstance(node, ast.Constant) and isinstance(node.value, str)
        named = string or isinstance(node, ast.Name | ast.Subscript)
        return self.name(node) if named else self.integer(node)

    def arg(self, node: ast.expr) -> Arg:
        """An argument of a call, or a result."""
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(map(self.arg, node.elts))
        if isinstance(node, ast.UnaryOp | ast.BinOp) and self.is_size(node):
            return self.size(node)
        if isinstance(node, ast.Constant | ast.UnaryOp):
            return self.scalar(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id != "complex":
                raise self.fail(
                    node, "a call cannot be an argument", "give it a statement of its own"
                )
            args = Arguments(self.source, node, "complex", _COMPLEX)
            real, imag = self.scalar(args["real"]), self.scalar(args["imag"])
            if not isinstance(real, int | float) or not isinstance(imag, int | float):
                raise self.fail(node, "expected two numbers", "write complex(1.0, 2.0)")
            return complex(real, imag)
        if isinstance(node, ast.Name):
            if node.id in DTYPES:
                return DTYPES[node.id]
            if node.id in ("inf", "nan"):
                return self.scalar(node)
            if node.id in self.named_sizes:
                return named(node.id)
            return Name(node.id) if self.in_region else View(node.id)
        inner = self.accessed(node)
        if inner is not None and inner[0] == "value":
            return Name(inner[1])
        return self.view(node)

    def declared(self, node: ast.expr) -> Declared:
        """A buffer type: `f32[8, 4]` and its modifiers."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self.modified(self.declared(node.func.value), node.func, node)
        if not isinstance(node, ast.Subscript):
            raise self.fail(
                node, "expected a buffer type", "write element type and sizes, such as bf16[8, 4]"
            )
        sizes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return Declared(self.dtype(node.value), tuple(map(self.dim, sizes)), {})

    def modified(self, base: Declared, func: ast.Attribute, node: ast.Call) -> Declared:
        """A buffer type with one more modifier."""
        signature = MODIFIERS.get(func.attr)
        if signature is None:
            fix = did_you_mean(func.attr, MODIFIERS, "modifiers are")
            raise self.fail(func, f"a buffer type has no modifier {func.attr!r}", fix)
        args = Arguments(self.source, node, func.attr, signature)
        return Declared(base.dtype, base.shape, {**base.changes, **self.changes(func.attr, args)})

    def changes(self, word: str, args: Arguments) -> dict[str, object]:
        """The fields of a buffer that a modifier sets, with their values."""
        if word == "strides":
            return {"strides": tuple(map(self.size, args.rest))}
        if word in ("team", "registered"):
            team = args.get("team")
            return {"team": None if team is None else self.name(team)}
        if word == "storage":
            storage = args.get("storage")
            offset = self.integer(args["offset"]) if args.given("offset") else 0
            return {"storage": None if storage is None else self.string(storage), "offset": offset}
        key = "kind" if word == "kind" else "name"
        return {key: self.string(args[key])}


def is_a(word: str, arg: ast.arg) -> bool:
    """True if a parameter's type is `word[...]`: a `Team[...]` or a `Size[...]`."""
    node = arg.annotation
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    head = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(head, ast.Name) and head.id == word


def parse_teams(source: SourceText, args: Sequence[ast.arg]) -> tuple[Team, ...]:
    """The teams that parameters declare; together they span no more ranks than a world may have."""
    found: list[Team] = []
    world = 1
    for arg in args:
        if not is_a("Team", arg):
            continue
        team = parse_team(source, arg)
        found.append(team)
        count = team.size if team.groups is None else sum(map(len, team.groups))
        world *= abs(team.size) if team.groups is None else 1
        if max(world, count) > MAX_RANKS:
            what = f"a world of {max(world, count)} ranks"
            raise source.error(arg, what, f"give it {MAX_RANKS} ranks at most")
    return tuple(found)


def parse_team(source: SourceText, arg: ast.arg) -> Team:
    """The team that a parameter declares."""
    expr = Expressions(source, ())
    node, name = arg.annotation, arg.arg
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        word = node.func.attr
        if word not in TEAM_MODIFIERS:
            fix = did_you_mean(word, TEAM_MODIFIERS, "modifiers are")
            raise source.error(node.func, f"a team has no modifier {word!r}", fix)
        bound = Arguments(source, node, word, TEAM_MODIFIERS[word])
        if word == "named":
            name = expr.string(bound["name"])
        else:
            such = f".{word}([0, 1], [2, 3])"
            found[word] = tuple([expr.integers(part, such) for part in bound.rest])
        node = node.func.value
    if not isinstance(node, ast.Subscript):
        fix = "write Team[4] for a mesh axis, or Team[[0, 1], [2, 3]], on hosts with .on([0], [1])"
        raise source.error(arg, "a team without a size", fix)
    hosts, groups = found.get("on"), found.get("over")
    listed = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if groups is not None or not isinstance(listed[0] if listed else None, ast.List):
        return Team(name, expr.integer(node.slice), groups, hosts)
    groups = tuple(map(expr.integers, listed))
    if len({len(group) for group in groups}) != 1:
        fix = "every instance of a team has as many ranks"
        raise source.error(node, "groups of different sizes", fix)
    return Team(name, len(groups[0]), groups, hosts)
