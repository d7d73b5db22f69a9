"""Roles: the kinds of value that a field has, each written, read, checked and built in one place.

    class Notify(Op):                                           notify(ready, to=tp.rank + 1)
        signal: str = field(metadata=NAME)
        peer: Index | Others = field(metadata=written(named=True, keyword="to"))

A field's role follows from its type, or its metadata names it. `form_of` gives a dataclass as a
call; printer, parser, checks and builder are loops over the roles of its fields, so that an op or
a step of a view is its dataclass alone.

    tp.rank + 1                               a rank or a chunk
    rows[tp.rank]                             a size
    bf16, 2.5, inf                            an element type, literals
    full[tp.rank + 1][:, 0:8]                 a view
    bf16[rows[tp.rank], 8].strides(8, 1)      a buffer type

Text is never evaluated: each form is recognised in the syntax tree, or refused with its place.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from interlace.errors import ParseError
from interlace.ir.ops import Alloc, Arg, Call, FusedKernel, Name, Op, Scalar, kinds_of_op
from interlace.ir.sizes import Int, Size, divided, named
from interlace.ir.text.spelling import (
    Item,
    TextBlock,
    accessor,
    did_you_mean,
    flat,
    name_or_string,
    plain,
    prefixed,
    quote,
    real_name,
    scalar,
    usable_keyword,
)
from interlace.ir.types import (
    Buffer,
    Dim,
    DType,
    Index,
    Others,
    RankIndex,
    Table,
    TableEntry,
    Written,
)
from interlace.ir.view import Chunk, Slice, Step, View

if TYPE_CHECKING:
    from interlace.ir.build import Builder, Handle
    from interlace.ir.text.parser import Arguments, Reader
    from interlace.ir.text.printer import Printer
    from interlace.ir.validate import Checker

T = TypeVar("T")
DTYPES = {dtype.value: dtype for dtype in DType}
FAMILIES = ("buffer", "value", "stream", "team", "table")
"""Words of `buffer["odd name"]` and its like."""
SLICED_DIMS = 4
"""Slices of dimensions below this are written in brackets, others with `.slice(...)`."""


# Dataclasses as calls


@dataclass(frozen=True)
class Signature:
    """Arguments that a call takes: positional names and keywords, some of them required."""

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    rest: bool = False
    """Takes any number of further positional arguments."""
    any_keyword: bool = False
    """Takes keywords of any name."""

    @cached_property
    def known(self) -> tuple[str, ...]:
        """All names."""
        return (*self.positional, *self.keywords)

    def usage(self, name: str) -> str:
        """The form of a call, for errors: its arguments, without site, loc and stream."""
        keywords = [f"{key}=..." for key in self.keywords if key not in ("site", "loc", "stream")]
        return f"{name}({', '.join([*self.positional, *['...'] * self.rest, *keywords])})"


@dataclass(frozen=True, slots=True)
class FieldForm:
    """One field of a dataclass as an argument of a call."""

    name: str
    role: Role
    keyword: str
    default: object
    optional: bool
    """It may be None."""
    positional: bool
    """It may be given by position."""
    required: bool
    prefix: str
    """Text that the printer writes before its value, such as `to=`; empty for none."""
    implied_by: str
    """For a team: the field with the peer, whose team it is where a text gives none."""
    how: Written

    def omitted(self, value: object) -> bool:
        """True if the printer leaves the value out."""
        return not self.required and value == self.default and not self.how.always


@dataclass(frozen=True, eq=False)
class Form:
    """A dataclass as a call: its word, and its arguments in the order in which they are written."""

    kind: type
    word: str
    fields: tuple[FieldForm, ...]
    common: tuple[str, ...] = ()
    """The fields that every op has as keywords."""
    fixed: tuple[tuple[str, str], ...] = ()
    """A field that the word itself gives."""
    worded: str = ""
    """The field whose value may be the word."""
    words: Mapping[str, Form] = dataclasses.field(default_factory=dict[str, "Form"])
    """The forms with such a word."""

    def of(self, thing: object) -> Form:
        """The form of one instance."""
        return self.words.get(getattr(thing, self.worded), self) if self.worded else self

    @cached_property
    def signature(self) -> Signature:
        """The arguments that the call takes."""
        fields = [field for field in self.fields if not field.how.rest]
        named = dict.fromkeys(field.keyword for field in fields if not field.positional)
        return Signature(
            positional=tuple(field.keyword for field in fields if field.positional),
            keywords=(*named, *self.common),
            required=tuple(field.keyword for field in fields if field.required),
            rest=len(fields) < len(self.fields),
            any_keyword=any(field.role is KEYWORDS for field in fields),
        )


@functools.cache
def form_of(kind: type) -> Form:
    """The form of a dataclass."""
    word = getattr(kind, "WORD", "") or re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    fields: list[FieldForm] = []
    common: list[str] = []
    for field in dataclasses.fields(kind):
        how: Written = field.metadata.get("written", Written())
        if how.role == "common":
            if field.name != "stream":  # it stands before the op
                common.append(field.name)
        else:
            fields.append(_field_form(kind, field, how, fields))
    form = Form(kind, word, tuple(fields), tuple(common))
    worded = next((each for each in fields if each.how.words), None)
    return form if worded is None else _worded(form, worded)


def _worded(form: Form, field: FieldForm) -> Form:
    """The form with a form for each value of a field that is a word of its own."""
    others = tuple(other for other in form.fields if other is not field)
    words = {
        word: dataclasses.replace(form, word=word, fields=others, fixed=((field.name, word),))
        for word in field.how.words
    }
    return dataclasses.replace(form, worded=field.name, words=words)


def _field_form(
    kind: type, field: dataclasses.Field[object], how: Written, before: Sequence[FieldForm]
) -> FieldForm:
    annotation = str(field.type)
    inner = annotation.removesuffix(" | None")
    if how.rest:
        inner = inner.removeprefix("tuple[").removesuffix(", ...]")
    role = ROLES.get(how.role or inner)
    if role is None:
        raise TypeError(f"{kind.__name__}.{field.name} has no role: give its type {inner} one")
    required = field.default is dataclasses.MISSING and role is not TEAM and not how.rest
    positional = how.positional or (required and all(each.required for each in before))
    peers = [each.name for each in before if each.role in (INDEX, PEER) and each.required]
    keyword = how.keyword or field.name
    return FieldForm(
        name=field.name,
        role=role,
        keyword=keyword,
        default=field.default,
        optional=annotation.endswith(" | None"),
        positional=positional,
        required=required,
        prefix=f"{keyword}=" if how.named or not positional else "",
        implied_by=peers[0] if role is TEAM and peers else "",
        how=how,
    )


# Roles


class Role:
    """Role of a field: the four things that are done with its value.

    A role of one value has `write` and `read`; one that is several arguments, or none, has
    `write_field` and `read_field`. Most have no rule of their own, and are built as given.
    """

    def write(self, text: Printer, value: Any) -> Item:
        """The value as text."""
        return str(value)

    def read(self, text: Reader, node: ast.expr) -> Any:
        """The value that an expression of the text stands for."""
        raise NotImplementedError

    def check(self, rules: Checker, op: Any, field: FieldForm, value: Any) -> None:
        """Raises BrokenRule for a value that the op may not have."""

    def build(self, builder: Builder, value: Any, peer: object = None) -> object:
        """The value for what the builder is given; `peer` is the op's."""
        return value

    def write_field(self, text: Printer, thing: Any, field: FieldForm) -> list[Item]:
        """The arguments that stand for a field of an op."""
        value = getattr(thing, field.name)
        if field.how.rest:
            return [self.write(text, each) for each in value]
        return [prefixed(field.prefix, self.write(text, value))]

    def read_field(self, text: Reader, args: Arguments, field: FieldForm, read: Fields) -> object:
        """The field's value from the arguments of a call; `read` are the fields before it."""
        if field.how.rest:
            return tuple([self.read(text, node) for node in args.rest])
        node = args.get(field.keyword) if field.optional else args.bound.get(field.keyword)
        return field.default if node is None else self.read(text, node)


Fields = dict[str, Any]
"""Fields of a dataclass, by name."""


class String(Role):
    """A text in quotes."""

    def write(self, text: Printer, value: str) -> str:
        return quote(value)

    def read(self, text: Reader, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        raise text.fail(node, "expected a string", 'write it in quotes, such as "peer"')


class AnyName(Role):
    """A name where only a name may stand: bare, or as a string."""

    def write(self, text: Printer, value: str) -> str:
        return name_or_string(value)

    def read(self, text: Reader, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        inner = accessed(node)
        if inner is not None:
            return inner[1]
        raise text.fail(node, "expected a name", "write a name, or any name in quotes")


class TableName(AnyName):
    """The name of a table."""

    def check(self, rules: Checker, op: object, field: FieldForm, value: str) -> None:
        if value not in rules.tables:
            raise rules.unknown("table", value, rules.tables)

    def build(self, builder: Builder, value: Table | str | None, peer: object = None) -> str | None:
        return value.name if isinstance(value, Table) else value


class TeamName(AnyName):
    """The name of a team: that of the op's peer, or the only one, where none is given."""

    def check(self, rules: Checker, op: object, field: FieldForm, value: str) -> None:
        rules.team(value)

    def build(self, builder: Builder, value: object, peer: object = None) -> str:
        return builder.team_name(value, peer)

    def write_field(self, text: Printer, thing: object, field: FieldForm) -> list[Item]:
        team: str = getattr(thing, field.name)
        peer: object = getattr(thing, field.implied_by) if field.implied_by else None
        implied = isinstance(peer, RankIndex | Others) and peer.team == team
        return [] if implied else [f"team={name_or_string(team)}"]

    def read_field(self, text: Reader, args: Arguments, field: FieldForm, read: Fields) -> str:
        node, peer = args.get(field.keyword), read.get(field.implied_by)
        if node is not None:
            return self.read(text, node)
        if isinstance(peer, RankIndex | Others):
            return peer.team
        if len(text.sizes) == 1:
            return next(iter(text.sizes))
        raise text.fail(args.call, "it is unclear which team this is for", "add team=NAME")


class Integer(Role):
    """A whole number."""

    def read(self, text: Reader, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1 << 63:
            return node.value  # as most are
        sign, inner = 1, node
        while isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.USub | ast.UAdd):
            sign = -sign if isinstance(inner.op, ast.USub) else sign
            inner = inner.operand
        if isinstance(inner, ast.Constant) and type(inner.value) is int:
            if inner.value >= 1 << 63:
                raise text.fail(node, "an integer of more than 63 bits", "write a smaller number")
            return sign * inner.value
        raise text.fail(node, "expected an integer", "write a whole number here")


class Several(Role, Generic[T]):
    """Numbers in brackets."""

    def __init__(self, item: Callable[[Reader, ast.expr], T]) -> None:
        self.item = item

    def read(self, text: Reader, node: ast.expr, such: str = "(8, 4)") -> tuple[T, ...]:
        if isinstance(node, ast.Tuple | ast.List):
            return tuple([self.item(text, item) for item in node.elts])
        raise text.fail(node, "expected integers", f"write them in brackets, such as {such}")


class Flag(Role):
    """True or False, by keyword."""

    def read_field(self, text: Reader, args: Arguments, field: FieldForm, read: Fields) -> bool:
        node = args.bound.get(field.keyword)
        if node is None:
            return field.default is True
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            return node.value
        raise text.fail(node, f"{field.keyword} is a flag", f"write {field.keyword}=True")


class Literal(Role):
    """A number, a string, True, False or None."""

    def write(self, text: Printer, value: Scalar) -> str:
        return scalar(value)

    def read(self, text: Reader, node: ast.expr) -> Scalar:
        if isinstance(node, ast.Name) and node.id in ("inf", "nan"):
            return math.inf if node.id == "inf" else math.nan
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            value = self.read(text, node.operand)
            if isinstance(value, int | float | complex) and not isinstance(value, bool):
                if value != value:
                    return math.nan
                return -value if isinstance(node.op, ast.USub) else value
        elif isinstance(node, ast.Constant) and isinstance(
            node.value, int | float | complex | str | None
        ):
            if isinstance(node.value, int) and node.value >= 1 << 64:
                raise text.fail(node, "an integer of more than 64 bits", "write a smaller number")
            return node.value
        raise text.fail(node, "expected a literal", "write a number, a string, True, False or None")


class Real(Literal):
    """A number."""

    def read(self, text: Reader, node: ast.expr) -> float:
        value = LITERAL.read(text, node)
        if isinstance(value, int | float):
            return value
        raise text.fail(node, "expected a number", "write a number such as 2.41")


class ElementType(Role):
    """An element type."""

    def read(self, text: Reader, node: ast.expr) -> DType:
        if isinstance(node, ast.Name):
            dtype = DTYPES.get(node.id)
            if dtype is not None:
                return dtype
            fix = did_you_mean(node.id, DTYPES, "element types are")
            raise text.fail(node, f"no element type is named {node.id!r}", fix)
        raise text.fail(node, "expected an element type", "write one such as bf16 or f32")


class RankOrChunk(Role):
    """A rank or a chunk: an integer or `tp.rank + k`."""

    def write(self, text: Printer, value: Index) -> str:
        if isinstance(value, RankIndex):
            return str(RankIndex(accessor("team", value.team), value.offset))
        return str(value)

    def read(self, text: Reader, node: ast.expr) -> Index:
        team = _team_of(node, "rank")
        if team is not None:
            return RankIndex(team)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            left = self.read(text, node.left)
            if isinstance(left, RankIndex):
                offset = INTEGER.read(text, node.right)
                return left + offset if isinstance(node.op, ast.Add) else left - offset
        try:
            return INTEGER.read(text, node)
        except ParseError:
            raise text.fail(
                node, "expected a rank or a chunk", "write an integer, tp.rank or tp.rank + 1"
            ) from None

    def check(self, rules: Checker, op: Any, field: FieldForm, value: Index | Others) -> None:
        """A rank that exists in the op's team, on every rank that runs this."""
        team = op.team
        size = rules.team(team).size
        if isinstance(value, Others):
            if value.team != team:
                raise rules.fault(f"{value} are not of team {team!r}", f"write {team}.others")
            return
        for rank, index in zip(rules.ranks, rules.indices(value), strict=True):
            if not 0 <= index < size:
                raise rules.fault(
                    f"{field.name} {index} of team {team!r} does not exist (on rank {rank})",
                    f"the team's ranks are 0 to {size - 1}; {team}.rank + 1 counts modulo {size}",
                )


class PeerOrOthers(RankOrChunk):
    """A rank, or `tp.others`."""

    def write(self, text: Printer, value: Index | Others) -> str:
        if isinstance(value, Others):
            return f"{accessor('team', value.team)}.others"
        return INDEX.write(text, value)

    def read(self, text: Reader, node: ast.expr) -> Any:
        team = _team_of(node, "others")
        return Others(team) if team is not None else INDEX.read(text, node)


class SizeExpression(Role):
    """An integer, or an expression of named sizes: `2 * S`, `(S - 1) // 2`."""

    def read(self, text: Reader, node: ast.expr) -> Int:
        match node:
            case ast.Constant():
                return INTEGER.read(text, node)
            case ast.Name(id=name) if name in text.named_sizes:
                return named(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.read(text, operand)
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                value = self.read(text, left)
                return self._quotient(text, node, value, INTEGER.read(text, right))
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
                one, other = self.read(text, left), self.read(text, right)
                if isinstance(op, ast.Mult):
                    return one * other
                return one + other if isinstance(op, ast.Add) else one - other
            case ast.Name(id=name):
                fix = did_you_mean(name, text.named_sizes, "named sizes are")
                raise text.fail(node, f"no size is named {name!r}", fix)
            case _:
                return INTEGER.read(text, node)

    def _quotient(self, text: Reader, node: ast.expr, value: Int, by: int) -> Int:
        """`value // by`, which has no remainder: of a named size, for all sizes of the class."""
        if by < 1:
            raise text.fail(node, f"a size is divided by {by}", "divide by an integer >= 1")
        if isinstance(value, int) and value % by:
            raise text.fail(node, f"{by} does not divide {value}", "`//` leaves no remainder")
        quotient = divided(value, by)
        if isinstance(quotient, Size):
            text.quotients.append((node, quotient))
        return quotient

    def is_one(self, text: Reader, node: ast.expr) -> bool:
        """True if an expression contains a named size."""
        names = (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
        return any(name in text.named_sizes for name in names)


class Dimension(Role):
    """A size, or an entry of a table, such as `rows[tp.rank]`."""

    def write(self, text: Printer, value: Dim) -> str:
        if isinstance(value, TableEntry):
            return f"{accessor('table', value.table)}[{INDEX.write(text, value.index)}]"
        return str(value)

    def read(self, text: Reader, node: ast.expr) -> Dim:
        if isinstance(node, ast.Subscript) and accessed(node) is None:
            table = text.named(node.value, "table", "expected a table", "write the name of a table")
            return TableEntry(table, INDEX.read(text, node.slice))
        return SIZE.read(text, node)


class PartsOfChunks(Role):
    """A number of even parts, or the table of the parts' sizes."""

    def write(self, text: Printer, value: int | str) -> str:
        return name_or_string(value) if isinstance(value, str) else str(value)

    def read(self, text: Reader, node: ast.expr) -> int | str:
        string = isinstance(node, ast.Constant) and isinstance(node.value, str)
        named = string or isinstance(node, ast.Name | ast.Subscript)
        return NAME.read(text, node) if named else INTEGER.read(text, node)


class ViewOfBuffer(Role):
    """A view: a buffer, and the steps that lead to a box of it."""

    def build(
        self, builder: Builder, value: Handle | View | None, peer: object = None
    ) -> View | None:
        return builder.view(value)

    def write(self, text: Printer, value: View) -> str:
        bare = plain(value.buffer) and not text.in_region
        root = value.buffer if bare else f"buffer[{quote(value.buffer)}]"
        return root + "".join([self._step(text, step) for step in value.steps])

    def _step(self, text: Printer, step: Step) -> str:
        """A step in brackets where it is a chunk or a slice that can be, else as a method."""
        if isinstance(step, Chunk):
            index = step.index
            size = text.sizes.get(index.team) if isinstance(index, RankIndex) else text.even
            if step.dim == 0 and isinstance(step.parts, int) and step.parts == size:
                return f"[{INDEX.write(text, index)}]"
        elif isinstance(step, Slice) and 0 <= step.dim < SLICED_DIMS:
            start, stop = DIM.write(text, step.start), DIM.write(text, step.stop)
            return f"[{':, ' * step.dim}{start}:{stop}]"
        word, items = text.call(step)
        return f".{word}({', '.join(map(flat, items))})"

    def read(self, text: Reader, node: ast.expr) -> View:
        if isinstance(node, ast.Name):
            if node.id in DTYPES or node.id in ("inf", "nan"):
                raise text.fail(
                    node,
                    f"expected a view, not {node.id}",
                    f'write buffer["{node.id}"] if it is one',
                )
            return View(node.id)
        inner = accessed(node)
        if inner is not None and inner[0] == "buffer":
            return View(inner[1])
        if isinstance(node, ast.Subscript) and inner is None:
            return self._subscript(text, self.read(text, node.value), node.slice)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._method(text, self.read(text, node.func.value), node.func, node)
        raise text.fail(
            node,
            "expected a view of a buffer",
            "write one such as x, x[tp.rank] or x.permute(1, 0)",
        )

    def _subscript(self, text: Reader, view: View, node: ast.expr) -> View:
        """`view[tp.rank]` is a chunk, `view[0:4]` and `view[:, 0:4]` are slices."""
        if isinstance(node, ast.Slice | ast.Tuple):
            for dim, part in enumerate([node] if isinstance(node, ast.Slice) else node.elts):
                if not isinstance(part, ast.Slice) or part.step is not None:
                    raise text.fail(
                        part,
                        "expected slices start:stop, one for each dimension",
                        "write x[:, 0:4]; for a chunk of another dimension x.chunk(i, 4, dim=1)",
                    )
                if part.upper is None:
                    if part.lower is not None:
                        raise text.fail(part, "a slice without end", "write start:stop")
                    continue
                start = 0 if part.lower is None else DIM.read(text, part.lower)
                view = view.slice(dim, start, DIM.read(text, part.upper))
            return view
        index = INDEX.read(text, node)
        if isinstance(index, RankIndex):
            size = text.sizes.get(index.team)
            if size is None:
                fix = did_you_mean(index.team, text.sizes, "teams are")
                raise text.fail(node, f"no team is named {index.team!r}", fix)
            return view.chunk(index, size)
        if text.even is None:
            raise text.fail(
                node,
                "[i] is chunk i of as many parts as the team has ranks: it is unclear which team",
                f"write .chunk({index}, parts)",
            )
        return view.chunk(index, text.even)

    def _method(self, text: Reader, view: View, func: ast.Attribute, node: ast.Call) -> View:
        """A step written as a method."""
        form = steps().get(func.attr)
        if form is None:
            fix = did_you_mean(func.attr, steps(), "steps are")
            raise text.fail(func, f"a view has no step {func.attr!r}", fix)
        return view.then(text.make(form, text.arguments(form, node)))


class Argument(Role):
    """An argument of a call, or a result: a view, a literal, an element type, or a tuple of them.

    In a region's body a name is a value of the region.
    """

    def build(self, builder: Builder, value: object, peer: object = None) -> Arg:
        return builder.arg(value)

    def write(self, text: Printer, value: Arg) -> Item:
        if isinstance(value, View):
            return VIEW.write(text, value)
        if isinstance(value, Name):
            known = text.in_region and plain(value.name)
            return value.name if known else f"value[{quote(value.name)}]"
        if isinstance(value, tuple):
            items = [self.write(text, item) for item in value]
            return TextBlock("(", items, ")", lone_comma=True)
        return str(value) if isinstance(value, Size) else scalar(value)

    def read(self, text: Reader, node: ast.expr) -> Arg:
        if isinstance(node, ast.Name):
            if node.id in DTYPES:
                return DTYPES[node.id]
            if node.id in ("inf", "nan"):
                return LITERAL.read(text, node)
            if node.id in text.named_sizes:
                return named(node.id)
            return Name(node.id) if text.in_region else View(node.id)
        if isinstance(node, ast.Tuple | ast.List):
            return tuple([self.read(text, item) for item in node.elts])
        if isinstance(node, ast.UnaryOp | ast.BinOp) and SIZE.is_one(text, node):
            return SIZE.read(text, node)
        if isinstance(node, ast.Constant | ast.UnaryOp):
            return LITERAL.read(text, node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id != "complex":
                raise text.fail(
                    node, "a call cannot be an argument", "give it a statement of its own"
                )
            args = text.bind(node, "complex", _COMPLEX)
            real, imag = LITERAL.read(text, args["real"]), LITERAL.read(text, args["imag"])
            if not isinstance(real, int | float) or not isinstance(imag, int | float):
                raise text.fail(node, "expected two numbers", "write complex(1.0, 2.0)")
            return complex(real, imag)
        inner = accessed(node)
        if inner is not None and inner[0] == "value":
            return Name(inner[1])
        return VIEW.read(text, node)


class Keywords(Role):
    """Keyword arguments, all in one `kwargs=` where one could not stand as a keyword.

    So it is with names that Python has no identifier for, and with those of the call's own fields.
    """

    def build(
        self, builder: Builder, value: Iterable[tuple[str, object]], peer: object = None
    ) -> tuple[tuple[str, Arg], ...]:
        return tuple([(key, ARG.build(builder, each)) for key, each in value])

    def write_field(self, text: Printer, thing: object, field: FieldForm) -> list[Item]:
        taken = {*form_of(thing.__class__).signature.known} - {"outs"}  # which only a Node has
        kwargs: Sequence[tuple[str, Arg]] = getattr(thing, field.name)
        names = [key for key, _ in kwargs]
        if len(set(names)) == len(names) and all(
            usable_keyword(name) and name not in taken for name in names
        ):
            return [prefixed(f"{key}=", ARG.write(text, value)) for key, value in kwargs]
        pairs = [TextBlock("(", [quote(key), ARG.write(text, arg)], ")") for key, arg in kwargs]
        return [TextBlock("kwargs=(", list(pairs), ")", lone_comma=True)]

    def read_field(
        self, text: Reader, args: Arguments, field: FieldForm, read: Fields
    ) -> tuple[tuple[str, Arg], ...]:
        pairs = [(key, ARG.read(text, node)) for key, node in args.others]
        for pair in items_of(args.bound.get("kwargs")):
            if not (isinstance(pair, ast.Tuple) and len(pair.elts) == 2):
                raise text.fail(pair, "expected a pair", 'write kwargs=(("name", value),)')
            pairs.append((STRING.read(text, pair.elts[0]), ARG.read(text, pair.elts[1])))
        return tuple(pairs)


class Outs(Role):
    """The views that a call fills; its `out=` also has the buffers that it makes."""

    def write_field(self, text: Printer, thing: Call, field: FieldForm) -> list[Item]:
        if len(thing.outs) == 1 and not thing.fresh:
            return [f"out={VIEW.write(text, thing.outs[0])}"]
        items: list[Item] = [VIEW.write(text, view) for view in thing.outs]
        for buffer in thing.fresh:
            name = buffer.name if plain(buffer.name) else "fresh"
            items.append(f"{name} := {write_type(text, buffer, name)}")
        return [TextBlock("out=(", items, ")")] if items else []

    def read_field(
        self, text: Reader, args: Arguments, field: FieldForm, read: Fields
    ) -> tuple[View, ...]:
        nodes = items_of(args.bound.get("out"))
        return tuple([VIEW.read(text, n) for n in nodes if not isinstance(n, ast.NamedExpr)])


class Fresh(Role):
    """The buffers that a call makes: `t := f32[8, 4]` in its `out=`."""

    def write_field(self, text: Printer, thing: object, field: FieldForm) -> list[Item]:
        return []

    def read_field(
        self, text: Reader, args: Arguments, field: FieldForm, read: Fields
    ) -> tuple[Buffer, ...]:
        return tuple(
            read_type(text, node.value).buffer(node.target.id, "fresh")
            for node in items_of(args.bound.get("out"))
            if isinstance(node, ast.NamedExpr)
        )


class Declaration(Role):
    """The buffer of an Alloc, which stands as `full = alloc(...)` or `t = empty(...)`."""

    signature = Signature(
        ("type",), ("symmetric", "storage", "offset", "site", "loc", "stream"), ("type",)
    )

    def write_field(self, text: Printer, thing: object, field: FieldForm) -> list[Item]:
        buffer: Buffer = getattr(thing, field.name)
        items: list[Item] = [write_type(text, buffer)]
        if buffer.team is not None:
            items.append(f"symmetric={name_or_string(buffer.team)}")
        if buffer.storage is not None:
            items.append(f"storage={quote(buffer.storage)}")
        if buffer.offset != 0:
            items.append(f"offset={buffer.offset}")
        return items

    def read_field(self, text: Reader, args: Arguments, field: FieldForm, read: Fields) -> Buffer:
        """The buffer of a statement whose name and kind are in `read`."""
        kind, team = read.pop("kind"), None
        symmetric, storage = args.get("symmetric"), args.get("storage")
        if symmetric is not None:
            kind, team = "symmetric", NAME.read(text, symmetric)
        offset = args.get("offset")
        return read_type(text, args["type"]).buffer(
            read.pop("name"),
            kind,
            team=team,
            storage=None if storage is None else STRING.read(text, storage),
            offset=0 if offset is None else INTEGER.read(text, offset),
        )

    def check(self, rules: Checker, op: object, field: FieldForm, value: Buffer) -> None:
        rules.declare(value, ("local", "symmetric", "fresh"))


class MemberOps(Role):
    """The ops that stand in another, on its stream."""

    def write_field(self, text: Printer, thing: Op, field: FieldForm) -> list[Item]:
        return [text.op(member, thing) for member in getattr(thing, field.name)]

    def read_field(
        self, text: Reader, args: Arguments, field: FieldForm, read: Fields
    ) -> tuple[Op, ...]:
        members: list[Op] = []
        for node in args.rest:
            member = text.op(node, read["stream"], read)
            if field.how.holds is None or not isinstance(member, field.how.holds):
                where = "part" if self is PART else "group"
                what = f"a {where} holds {field.how.holding} only"
                raise text.fail(node, what, "give it a statement of its own")
            members.append(member)
        return tuple(members)

    def check(self, rules: Checker, op: Op, field: FieldForm, value: Sequence[Op]) -> None:
        self._check_members(rules, op, field, value, "group", "group")

    def _check_members(
        self,
        rules: Checker,
        op: Op,
        field: FieldForm,
        members: Sequence[Op],
        what: str,
        inner: str,
    ) -> None:
        if not members:
            fix = f"put {field.how.holding} in it, or leave it out"
            raise rules.fault(f"an empty {inner}", fix)
        for member in members:
            if member.stream != op.stream:
                raise rules.fault(
                    f"a {what} on {op.stream!r} holds an op on {member.stream!r}",
                    f"a {what} and its members share one stream",
                )
            rules.check(member)


class PartsOfOp(MemberOps):
    """`part(...)` for each part of an op."""

    def write_field(self, text: Printer, thing: Op, field: FieldForm) -> list[Item]:
        parts: Iterable[Iterable[Op]] = getattr(thing, field.name)
        return [TextBlock("part(", [text.op(op, thing) for op in part], ")") for part in parts]

    def read_field(self, text: Reader, args: Arguments, field: FieldForm, read: Fields) -> Any:
        parts: list[tuple[Op, ...]] = []
        for node in args.rest:
            call = node if isinstance(node, ast.Call) else None
            if call is None or not (isinstance(call.func, ast.Name) and call.func.id == "part"):
                raise text.fail(node, "expected a part", "write fused(part(...), part(...))")
            inner = text.bind(call, "part", Signature(rest=True))
            parts.append(super().read_field(text, inner, field, read))
        return tuple(parts)

    def check(self, rules: Checker, op: Op, field: FieldForm, value: Any) -> None:
        parts: Sequence[Sequence[Op]] = value or ((),)
        for part in parts:
            self._check_members(rules, op, field, part, "fused op", "part")


class Kernel(Role):
    """A kernel of fused ops: `gather_matmul()` or `scatter_matmul(pieces=2, own=3)`."""

    def write(self, text: Printer, value: FusedKernel) -> TextBlock:
        word, items = text.call(value)
        return TextBlock(f"{word}(", items, ")")

    def read(self, text: Reader, node: ast.expr) -> FusedKernel:
        call = node if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        word = call.func.id if call is not None and isinstance(call.func, ast.Name) else ""
        words = form_of(FusedKernel).words
        if call is None or word not in words:
            fix = did_you_mean(word, words, "write the call of one, such as gather_matmul(): of")
            raise text.fail(node, "expected a kernel", fix)
        return text.make(words[word], text.arguments(words[word], call))


STRING, NAME, TABLE, TEAM = String(), AnyName(), TableName(), TeamName()
INTEGER, FLAG, LITERAL, REAL = Integer(), Flag(), Literal(), Real()
DTYPE, INDEX, PEER = ElementType(), RankOrChunk(), PeerOrOthers()
SIZE, DIM, PARTS = SizeExpression(), Dimension(), PartsOfChunks()
INTEGERS, SIZES = Several(INTEGER.read), Several(SIZE.read)
VIEW, ARG, KEYWORDS = ViewOfBuffer(), Argument(), Keywords()
PART = PartsOfOp()
PLAIN = frozenset({STRING, NAME, TABLE, TEAM, INTEGER, FLAG})
"""Roles of names, numbers and flags: nothing in them depends on the rank or on a size."""

ROLES: Mapping[str, Role] = {
    "str": STRING,
    "int": INTEGER,
    "bool": FLAG,
    "float": REAL,
    "DType": DTYPE,
    "View": VIEW,
    "Index": INDEX,
    "Index | Others": PEER,
    "Dim": DIM,
    "Int": SIZE,
    "int | str": PARTS,
    "Arg": ARG,
    "tuple[int, ...]": INTEGERS,
    "tuple[Int, ...]": SIZES,
    "name": NAME,
    "table": TABLE,
    "team": TEAM,
    "keywords": KEYWORDS,
    "outs": Outs(),
    "fresh": Fresh(),
    "declaration": Declaration(),
    "member": MemberOps(),
    "part": PART,
    "kernel": Kernel(),
}
"""Roles by the type that a field's annotation names (`X | None`: that of X), or by what its
metadata names."""


def op_words() -> dict[str, Form]:
    """The ops that stand after a stream, by the words that the text has for them."""
    forms = [form_of(kind) for kind in kinds_of_op() if kind is not Alloc]
    return {
        word: form for main in forms for word, form in (main.words or {main.word: main}).items()
    }


@functools.cache
def steps() -> Mapping[str, Form]:
    """The steps of a view, by the name of their method."""
    return {form.word: form for form in map(form_of, get_args(Step))}


# What the values share: names, and types of buffers


def accessed(node: ast.expr) -> tuple[str, str] | None:
    """Family and name of `buffer["odd name"]` and its like; None for anything else."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
        return None
    key = node.slice
    if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
        return None
    return (node.value.id, key.value) if node.value.id in FAMILIES else None


def _team_of(node: ast.expr, attribute: str) -> str | None:
    """The team of `tp.rank` or `tp.others`; None for anything else."""
    if not (isinstance(node, ast.Attribute) and node.attr == attribute):
        return None
    if isinstance(node.value, ast.Name):
        return node.value.id
    inner = accessed(node.value)
    return inner[1] if inner is not None and inner[0] == "team" else None


def items_of(node: ast.expr | None) -> list[ast.expr]:
    """The members of a tuple, or the one thing that stands for a tuple of one."""
    if node is None:
        return []
    return list(node.elts) if isinstance(node, ast.Tuple | ast.List) else [node]


MODIFIERS = {
    "strides": Signature(rest=True),
    "named": Signature(("name",), (), ("name",)),
}
"""Modifiers that may follow the type of a buffer."""
GONE = {
    "registered": "copy it from or to a symmetric buffer, which peers reach: alloc(..., "
    "symmetric=tp)"
}
"""Modifiers that went, with what takes their place."""
_COMPLEX = Signature(("real", "imag"), (), ("real", "imag"))


@dataclass(frozen=True, slots=True)
class Declared:
    """A buffer type with what its modifiers say; its place in the text gives the rest."""

    dtype: DType
    shape: tuple[Dim, ...]
    changes: Fields

    def buffer(self, name: str, kind: str, **placed: Any) -> Buffer:
        """The buffer that a place in the text declares as `name` of `kind`."""
        fields: Fields = {"name": name, "kind": kind} | placed
        return Buffer(dtype=self.dtype, shape=self.shape, **fields | self.changes)


def write_type(text: Printer, buffer: Buffer, name: str | None = None) -> str:
    """Element type and sizes, with modifiers; `name` is the one that its place in the text has."""
    shape = ", ".join([DIM.write(text, dim) for dim in buffer.shape]) or "()"
    words = f"{buffer.dtype}[{shape}]"
    if buffer.strides is not None:
        words += f".strides({', '.join(map(str, buffer.strides))})"
    return words if name is None or buffer.name == name else words + real_name(buffer.name)


def read_type(text: Reader, node: ast.expr) -> Declared:
    """A buffer type: `f32[8, 4]` and its modifiers."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _modified(text, read_type(text, node.func.value), node.func, node)
    if not isinstance(node, ast.Subscript):
        raise text.fail(
            node, "expected a buffer type", "write element type and sizes, such as bf16[8, 4]"
        )
    sizes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    dtype = DTYPE.read(text, node.value)
    return Declared(dtype, tuple([DIM.read(text, size) for size in sizes]), {})


def _modified(text: Reader, base: Declared, func: ast.Attribute, node: ast.Call) -> Declared:
    """A buffer type with one more modifier."""
    word, signature = func.attr, MODIFIERS.get(func.attr)
    if signature is None:
        fix = GONE.get(word) or did_you_mean(word, MODIFIERS, "modifiers are")
        raise text.fail(func, f"a buffer type has no modifier {word!r}", fix)
    args = text.bind(node, word, signature)
    if word == "strides":
        changes: Fields = {"strides": tuple([SIZE.read(text, each) for each in args.rest])}
    else:
        changes = {"name": STRING.read(text, args["name"])}
    return Declared(base.dtype, base.shape, {**base.changes, **changes})
