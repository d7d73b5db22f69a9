"""The parser: text to Programs, the inverse of the printer.

The text is a subset of Python, read as a syntax tree and never run. A file holds one `def` for each
Program; a set of several (a pipeline's stages) is read by `parse_set`. Parsing checks form alone:
`validate` says whether names, shapes and teams agree.

    >>> program = parse(text, file="ring.ilc")
    >>> parse(str(program)) == program
    True

In order: the text, with the place of an error; the arguments of a call; what a Reader reads (ops
and their fields, by the roles of roles.py); the statements of a Program; its head, with teams,
sizes and what is assumed of them; its regions.
"""

from __future__ import annotations

import ast
import math
import sys
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from interlace.errors import ParseError
from interlace.ir.ops import Alloc, Arg, Loc, Op
from interlace.ir.program import Node, Program, Region, Remark, Site
from interlace.ir.roles import (
    ARG,
    INTEGER,
    INTEGERS,
    MODIFIERS,
    SIZE,
    STRING,
    Declaration,
    Fields,
    Form,
    Signature,
    accessed,
    form_of,
    items_of,
    op_words,
    read_type,
)
from interlace.ir.sizes import Fact, Known, NamedSize, Size, SizeClass
from interlace.ir.text.spelling import did_you_mean, excerpt, lines_of
from interlace.ir.types import MAX_RANKS, Buffer, Table, Team, even_parts, team_sizes
from interlace.strategies import REPLACED

MAX_TEXT = 1 << 24
"""Characters of a text: some 100,000 ops."""
TEAM_MODIFIERS = {"on": Signature(rest=True), "named": MODIFIERS["named"]}
_SITE, _REMARK, _ALLOC, _NODE, _TABLE = map(form_of, (Site, Remark, Alloc, Node, Table))
_STATEMENTS = ("ranks", "rank", "assume", "site", "remark")
_NESTED = "programs and regions are nested too deeply, or an expression is too long"

Place = ast.expr | ast.stmt | ast.arg | ast.keyword
"""A node of the syntax tree that has a place in the text."""


def parse(text: str, *, file: str = "<text>") -> Program:
    """Parses the one Program of a text. Nothing in it is executed, nor validated.

    Args:
        text: a function of the text format (docs/reference/text.md); `str(program)` writes it.
        file: the name that stands in errors and in the ops' `loc`.

    Returns:
        The Program.

    Raises:
        ParseError: the text is malformed, or holds several Programs.
    """
    programs = parse_set(text, file=file)
    if len(programs) != 1:
        names = ", ".join(program.name for program in programs)
        raise ParseError(
            f"{file} holds {len(programs)} programs ({names}): read a set of them with parse_set"
        )
    return programs[0]


def parse_set(text: str, *, file: str = "<text>") -> tuple[Program, ...]:
    """Parses every Program of a text, as `parse` does one.

    Args:
        text, file: as of `parse`.

    Returns:
        The Programs in order.

    Raises:
        ParseError: the text is malformed, or holds no Program.
    """
    source = SourceText(text, file)
    tree = source.tree()
    try:
        programs = [_program(source, node) for node in _statements(tree.body)]
    except RecursionError:
        raise source.error(None, _NESTED, "give the text of a schedule") from None
    if not programs:
        fix = "write one as def name(tp: Team[4], x: f32[8]): ..."
        raise source.error(None, "there is no program here", fix)
    return tuple(programs)


def _program(source: SourceText, node: ast.stmt) -> Program:
    if not isinstance(node, ast.FunctionDef):
        raise source.error(
            node, "expected a program", "write one as def name(tp: Team[4], x: f32[8]): ..."
        )
    name = _decorated(source, node, "named")
    parameters = _parameters(source, node)
    teams = tuple([_team(source, arg) for arg in parameters if _is_a("Team", arg)])
    sizes = _named_sizes(source, parameters)
    world = math.prod(abs(team.size) for team in teams if team.groups is None)
    if world > MAX_RANKS:
        what = f"a world of {world} ranks"
        raise source.error(node, what, f"give it {MAX_RANKS} ranks at most")
    return _ProgramParser(source, name, teams, sizes).parse(node)


class SourceText:
    """A text with the name of its file."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file

    @cached_property
    def lines(self) -> list[str]:
        """The lines, for errors."""
        return lines_of(self.text)

    def error(self, node: Place | None, what: str, fix: str) -> ParseError:
        """The error to raise for a node."""
        if node is None:
            return self.error_at(1, None, 1, what, fix)
        end = node.end_col_offset if node.end_lineno == node.lineno else None
        column = self.column(node.lineno, node.col_offset)
        length = 1 if end is None else self.column(node.lineno, end) - column
        return self.error_at(node.lineno, column, length, what, fix)

    def error_at(
        self, line: int, column: int | None, length: int, what: str, fix: str
    ) -> ParseError:
        """The error to raise for a place in the text."""
        place = f"{self.file}:{line}" + (f":{column}" if column else "")
        shown = excerpt(self.lines, line, column, length)
        return ParseError(f"{place}: {what}\n{shown}\nfix: {fix}")

    def column(self, line: int, offset: int) -> int:
        """The column (from 1) of a byte offset, which is how `ast` counts."""
        if line > len(self.lines):
            return 1
        return len(self.lines[line - 1].encode()[:offset].decode(errors="replace")) + 1

    def tree(self) -> ast.Module:
        """The text as Python's syntax tree, with the limits kept that every text has."""
        if len(self.text) > MAX_TEXT:
            raise self.error_at(
                1, None, 1, f"more than {MAX_TEXT} characters", "write several files"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as an unknown escape in a string
                return ast.parse(self.text)
        except SyntaxError as error:
            line = min(max(error.lineno or 1, 1), len(self.lines))
            if f"({sys.get_int_max_str_digits()} digits)" in error.msg:  # Python reads no more
                what = "an integer of more than 64 bits"
                raise self.error_at(line, None, 1, what, "write a smaller number") from None
            raise self.error_at(
                line,
                min(error.offset, len(self.lines[line - 1]) + 1) if error.offset else None,
                1,
                f"not the syntax of a schedule: {error.msg}",
                "a schedule is written in Python's syntax: check brackets, commas and indentation",
            ) from None
        except (ValueError, MemoryError, RecursionError) as error:
            what = "nested too deeply" if not isinstance(error, ValueError) else str(error)
            raise self.error_at(
                1, None, 1, f"the text cannot be read: {what}", "give the text of a schedule"
            ) from None


class Arguments:
    """The arguments of one call, bound to a signature; every one is asked for by name."""

    def __init__(self, source: SourceText, call: ast.Call, name: str, signature: Signature) -> None:
        self.call = call
        self.bound: dict[str, ast.expr] = {}
        self.rest: list[ast.expr] = []
        self.others: list[tuple[str, ast.expr]] = []
        names = signature.positional
        for place, node in enumerate(call.args):
            if isinstance(node, ast.Starred):
                raise source.error(node, "'*' has no meaning here", "write the arguments out")
            if place < len(names):
                self.bound[names[place]] = node
            elif signature.rest:
                self.rest.append(node)
            else:
                count = f"{len(names)} positional argument{'s' if len(names) != 1 else ''}"
                fix = f"write {signature.usage(name)}"
                raise source.error(node, f"{name}(...) takes {count}", fix)
        seen = set(self.bound)
        for keyword in call.keywords:
            key = keyword.arg
            if key is None:
                raise source.error(keyword, "'**' has no meaning here", "write the arguments out")
            if key in seen:
                raise source.error(keyword, f"{name}(...) has {key!r} twice", "remove one of them")
            seen.add(key)
            if key in signature.known:
                self.bound[key] = keyword.value
            elif signature.any_keyword:
                self.others.append((key, keyword.value))
            else:
                fix = did_you_mean(key, signature.known, f"{name}(...) takes")
                raise source.error(keyword, f"{name}(...) has no argument {key!r}", fix)
        for key in signature.required:
            if key not in self.bound:
                fix = f"write {signature.usage(name)}"
                raise source.error(call, f"{name}(...) lacks {key!r}", fix)

    def get(self, name: str) -> ast.expr | None:
        """The argument of that name; None if it is not given or is the word None."""
        node = self.bound.get(name)
        return None if isinstance(node, ast.Constant) and node.value is None else node

    def given(self, name: str) -> bool:
        """True if the argument is given, even as None."""
        return name in self.bound

    def __getitem__(self, name: str) -> ast.expr:
        return self.bound[name]


class Reader:
    """Reads what stands inside one Program (or, `in_region`, inside a region's body)."""

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
        self.words = op_words()
        self.quotients: list[tuple[ast.expr, Size]] = []
        """Divisions in the text, which leave no remainder for any size of the class."""

    def fail(self, node: Place, what: str, fix: str) -> ParseError:
        """The error to raise for a node."""
        return self.source.error(node, what, fix)

    def bind(self, call: ast.Call, word: str, signature: Signature) -> Arguments:
        """The arguments of a call."""
        return Arguments(self.source, call, word, signature)

    def arguments(self, form: Form, call: ast.Call) -> Arguments:
        """The arguments of a call that writes a dataclass."""
        return self.bind(call, form.word, form.signature)

    def make(self, form: Form, args: Arguments, **read: Any) -> Any:
        """The dataclass that a call writes; `read` are the fields that are not in its form."""
        read.update(form.fixed)
        for field in form.fields:
            read[field.name] = field.role.read_field(self, args, field, read)
        return form.kind(**read)

    def named(self, node: ast.expr, family: str, what: str, fix: str) -> str:
        """A name of one family: bare, or `family["any name"]`."""
        if isinstance(node, ast.Name):
            return node.id
        inner = accessed(node)
        if inner is not None and inner[0] == family:
            return inner[1]
        raise self.fail(node, what, fix)

    def op(self, node: ast.expr, stream: str, within: Fields | None = None) -> Op:
        """The op that a call is, on `stream`; inside another op it shares what that has."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise self.fail(
                node, "expected an op", "write a call such as copy(x, y) after the stream's name"
            )
        form = self.words.get(node.func.id)
        if form is None:
            name = node.func.id
            fix = did_you_mean(name, self.words, "ops are")
            if name in ("alloc", "empty"):
                fix = f'write NAME = {name}(...); its stream is an argument: stream="comm"'
            raise self.fail(node.func, f"no op is named {name!r}", fix)
        args = self.arguments(form, node)
        return self.make(form, args, **self.common(args, stream, within))

    def common(self, args: Arguments, stream: str, within: Fields | None = None) -> Fields:
        """Stream, site and location of an op."""
        if args.given("stream"):
            stream = STRING.read(self, args["stream"])
        site = args.get("site")
        if args.given("site"):
            number = None if site is None else INTEGER.read(self, site)
        else:
            number = within["site"] if within else None
        place = self.source.file, args.call.lineno
        if args.given("loc"):
            loc = self.loc(args["loc"], place)
        elif within and within["loc"].module:
            loc = replace(within["loc"], text=place)
        else:
            loc = Loc("", *place, place)
        return {"stream": stream, "site": number, "loc": loc}

    def loc(self, node: ast.expr, place: tuple[str, int]) -> Loc:
        """A location: a module path, or (module path, file, line)."""
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            module, file, line = node.elts
            words = STRING.read(self, module), STRING.read(self, file)
            return Loc(*words, INTEGER.read(self, line), place)
        return Loc(STRING.read(self, node), text=place)


class _ProgramParser(Reader):
    """Collects what a Program's statements say."""

    def __init__(
        self, source: SourceText, name: str, teams: tuple[Team, ...], sizes: tuple[NamedSize, ...]
    ) -> None:
        super().__init__(source, teams, named_sizes=[size.name for size in sizes])
        self.program = Program(name=name, teams=teams)
        self.assumed = Known(SizeClass(sizes))
        self.tables: list[Table] = []
        self.ops: list[Op] = []
        self.regions: list[Region] = []
        self.sites: list[Site] = []
        self.remarks: list[Remark] = []
        self.results: tuple[Arg, ...] | None = None
        self.ranks: tuple[int, ...] | None = None
        self.rank: int | None = None

    def parse(self, node: ast.FunctionDef) -> Program:
        params = [
            self.parameter(arg)
            for arg in node.args.args
            if not (_is_a("Team", arg) or _is_a("Size", arg))
        ]
        for statement in _statements(node.body):
            if self.results is not None:
                what = "statements after `return`"
                raise self.source.error(statement, what, "put `return` last")
            self.statement(statement)
        for divided, quotient in self.quotients:
            _assume_whole(self, self.assumed, divided, quotient)
        return replace(
            self.program,
            sizes=self.assumed.size_class(),
            params=tuple(params),
            tables=tuple(self.tables),
            ops=tuple(self.ops),
            regions=tuple(self.regions),
            sites=tuple(self.sites),
            remarks=tuple(self.remarks),
            results=self.results,
            ranks=self.ranks,
            rank=self.rank,
        )

    def site(self, site: Site) -> None:
        """Adds a site; with a strategy that went, it gets the one that stands for it."""
        if name := REPLACED.get(site.strategy):
            text = f"the strategy {site.strategy} went; its site is read as one of {name}"
            self.remarks.append(Remark("parse", text, site.id))
            site = replace(site, strategy=name)
        self.sites.append(site)

    def parameter(self, arg: ast.arg) -> Buffer:
        node, kind = arg.annotation, "input"
        if node is None:
            fix = "write name: f32[8, 4], out[f32[8, 4]] or Team[4]"
            raise self.source.error(arg, f"parameter {arg.arg!r} has no type", fix)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if node.value.id == "out":
                node, kind = node.slice, "output"
        return read_type(self, node).buffer(arg.arg, kind)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.AnnAssign(target=target, annotation=annotation, value=None):
                self.ops.append(self.op(annotation, self.stream(target)))
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=word)) as call):
                self.assignment(target, word, call)
            case ast.Expr(value=ast.Call(func=ast.Name(id=word)) as call):
                self.directive(node, word, call)
            case ast.FunctionDef():
                self.regions.append(_region(self.source, node, self.program.teams))
            case ast.Return(value=value):
                items = items_of(value) if isinstance(value, ast.Tuple) else [value]
                self.results = tuple([ARG.read(self, item) for item in items if item])
            case ast.Pass():
                pass
            case _:
                raise self.source.error(
                    node,
                    "this statement has no meaning in a schedule",
                    "write an op as STREAM: op(...), or NAME = alloc(...), site(...), return ...",
                )

    def stream(self, node: ast.expr) -> str:
        """The stream that stands before the colon."""
        fix = 'write a name, or stream["any name"]'
        return self.named(node, "stream", "expected a stream before the colon", fix)

    def assignment(self, target: ast.expr, word: str, call: ast.Call) -> None:
        """`full = alloc(...)`, `t = empty(...)`, `rows = table(...)`."""
        family = "table" if word == "table" else "buffer"
        fix = f'write a name, or {family}["any name"]'
        name = self.named(target, family, "expected a name before `=`", fix)
        if word in ("alloc", "empty"):
            args = self.bind(call, word, Declaration.signature)
            declared = {"name": name, "kind": "fresh" if word == "empty" else "local"}
            self.ops.append(self.make(_ALLOC, args, **declared, **self.common(args, "main")))
        elif word == "table":
            self.tables.append(self.make(_TABLE, self.arguments(_TABLE, call), name=name))
        else:
            if word in self.words:
                fix = "an op stands after a stream, such as main: copy(x, y)"
            else:
                fix = did_you_mean(word, ("alloc", "empty", "table"), "declarations are")
            raise self.source.error(call.func, f"{word!r} declares nothing", fix)

    def directive(self, node: ast.stmt, word: str, call: ast.Call) -> None:
        """`ranks(...)`, `rank(...)`, `assume(...)`, `site(...)`, `remark(...)`."""
        match word:
            case "ranks":
                args = self.bind(call, word, Signature(rest=True))
                self.ranks = tuple([INTEGER.read(self, each) for each in args.rest])
            case "rank":
                args = self.bind(call, word, Signature(("rank",), (), ("rank",)))
                self.rank = INTEGER.read(self, args["rank"])
            case "assume":
                args = self.bind(call, word, Signature(rest=True))
                for fact in args.rest:
                    _assume(self, self.assumed, fact)
            case "site":
                self.site(self.make(_SITE, self.arguments(_SITE, call)))
            case "remark":
                self.remarks.append(self.make(_REMARK, self.arguments(_REMARK, call)))
            case _:
                if word in self.words:
                    fix = f"write the stream before it, such as main: {word}(...)"
                elif word in ("alloc", "empty", "table"):
                    fix = f"give it a name: NAME = {word}(...)"
                else:
                    fix = did_you_mean(word, _STATEMENTS, "statements without a stream are")
                raise self.source.error(node, f"{word!r} cannot stand alone", fix)


def _is_a(word: str, arg: ast.arg) -> bool:
    """True if a parameter's type is `word[...]`: a `Team[...]` or a `Size[...]`."""
    node = arg.annotation
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    head = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(head, ast.Name) and head.id == word


def _team(source: SourceText, arg: ast.arg) -> Team:
    """The team that a parameter declares."""
    reader = Reader(source, ())
    node, name = arg.annotation, arg.arg
    hosts: tuple[tuple[int, ...], ...] | None = None
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        word = node.func.attr
        if word not in TEAM_MODIFIERS:
            fix = did_you_mean(word, TEAM_MODIFIERS, "modifiers are")
            raise source.error(node.func, f"a team has no modifier {word!r}", fix)
        bound = Arguments(source, node, word, TEAM_MODIFIERS[word])
        if word == "named":
            name = STRING.read(reader, bound["name"])
        else:
            such = ".on([0, 1], [2, 3])"
            hosts = tuple([INTEGERS.read(reader, part, such) for part in bound.rest])
        node = node.func.value
    if not isinstance(node, ast.Subscript):
        fix = "write Team[4] for a mesh axis, or Team[[0, 1], [2, 3]], on hosts with .on([0], [1])"
        raise source.error(arg, "a team without a size", fix)
    listed = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if not isinstance(listed[0] if listed else None, ast.List):
        return Team(name, INTEGER.read(reader, node.slice), hosts=hosts)
    groups = tuple([INTEGERS.read(reader, group) for group in listed])
    return Team(name, len(groups[0]), groups, hosts)


_RELATIONS: dict[type[ast.cmpop], str] = {
    **{ast.Gt: ">", ast.GtE: ">=", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!="},
}
_WHOLE = "declare a size that is divided without remainder"
_FIX = "write one such as S >= 8, S <= 512, S % 4 == 0 or B * S - 64 > 0"


def _named_sizes(source: SourceText, args: Sequence[ast.arg]) -> tuple[NamedSize, ...]:
    """The named sizes that parameters declare: `S: Size[128]`."""
    reader = Reader(source, ())
    found: list[NamedSize] = []
    for arg in args:
        if not _is_a("Size", arg):
            continue
        node = arg.annotation
        if not isinstance(node, ast.Subscript):
            fix = f"write {arg.arg}: Size[128], with the value that decisions are made for"
            raise source.error(arg, "a size without a value", fix)
        found.append(NamedSize(arg.arg, INTEGER.read(reader, node.slice)))
    return tuple(found)


def _assume(reader: Reader, known: Known, node: ast.expr) -> None:
    """Notes what a text assumes: `S >= 8`, `S % 4 == 0`, `256 * B * S - 512 > 0`."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise reader.fail(node, "expected what is assumed of named sizes", _FIX)
    left, word = node.left, _RELATIONS.get(type(node.ops[0]))
    bound = INTEGER.read(reader, node.comparators[0])
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and word == "==":
        size, modulus = SIZE.read(reader, left.left), INTEGER.read(reader, left.right)
        if isinstance(size, Size) and modulus > 0 and known.rest(size, modulus) == bound:
            return
    elif word is not None and isinstance(size := SIZE.read(reader, left) - bound, Size):
        fact = Fact(-size, "<=") if word == ">=" else Fact(size, word)
        if fact.holds(known.values):
            known.note(fact)
            return
    raise reader.fail(node, "this does not hold for the sizes in the head", _FIX)


def _assume_whole(reader: Reader, known: Known, node: ast.expr, quotient: Size) -> None:
    """Notes that a division leaves no remainder: of `S // 2` that `S % 2 == 0`."""
    if known.rest(Size(quotient.terms), quotient.over):
        raise reader.fail(node, f"{quotient} is no whole number for the sizes in the head", _WHOLE)


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements without the text that may stand first in a file, a Program or a region."""
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *rest]:
            return rest
        case _:
            return body


def _decorated(source: SourceText, node: ast.FunctionDef, word: str) -> str:
    """The name of a program or a region: its own, or what its decorator says."""
    name = node.name
    for found in node.decorator_list:
        if isinstance(found, ast.Name) and found.id == word == "region":
            continue
        call = found if isinstance(found, ast.Call) else None
        if call is None or not (isinstance(call.func, ast.Name) and call.func.id == word):
            form = "@region" if word == "region" else '@named("any name")'
            what = "this decorator has no meaning here"
            raise source.error(found, what, f"write {form}, or remove it")
        args = Arguments(source, call, word, Signature(("name",), (), ("name",)))
        name = STRING.read(Reader(source, ()), args["name"])
    return name


def _parameters(source: SourceText, node: ast.FunctionDef) -> list[ast.arg]:
    """The parameters of a program or a region, which has no other kind than plain ones."""
    args = node.args
    extra: list[ast.arg | ast.expr | None] = [args.vararg, args.kwarg, *args.posonlyargs]
    extra += [*args.kwonlyargs, *args.defaults, *args.kw_defaults, node.returns]
    for found in extra:
        if found is not None:
            raise source.error(
                found,
                "a program takes plain parameters only, and says what it returns by `return`",
                "write name: type, with no default, star or slash",
            )
    return args.args


def _region(source: SourceText, node: ast.FunctionDef, teams: Sequence[Team]) -> Region:
    """`@region def region_0(x, y): ...`."""
    if len(node.decorator_list) != 1:
        fix = "write @region on the line before it"
        raise source.error(node, "a def inside a program is a region", fix)
    name = _decorated(source, node, "region")
    reader = Reader(source, teams, in_region=True)
    inputs = tuple(
        arg.arg if arg.annotation is None else STRING.read(reader, arg.annotation)
        for arg in _parameters(source, node)
    )
    body: list[Node] = []
    outputs: tuple[str, ...] | None = None
    for statement in _statements(node.body):
        if outputs is not None:
            raise source.error(statement, "statements after `return`", "put it last")
        if isinstance(statement, ast.Return):
            value = statement.value
            items = items_of(value) if isinstance(value, ast.Tuple) else [value]
            outputs = tuple(_value(reader, item) for item in items if item)
        else:
            body.append(_node(source, reader, statement))
    if outputs is None:
        raise source.error(node, f"region {name!r} returns nothing", "add return t0, ...")
    return Region(name, inputs, tuple(body), outputs)


def _value(reader: Reader, node: ast.expr) -> str:
    """The name of a region's value."""
    return reader.named(node, "value", "expected a value of the region", "write its name")


def _node(source: SourceText, reader: Reader, statement: ast.stmt) -> Node:
    """`t0 = aten.mul.Tensor(x, y)`."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, call = statement.targets[0], statement.value
        targets = list(target.elts) if isinstance(target, ast.Tuple) else [target]
    elif isinstance(statement, ast.Expr):
        targets, call = [], statement.value
    else:
        targets, call = [], None
    if not isinstance(call, ast.Call):
        raise source.error(
            statement,
            "a region holds calls and one return",
            "write t0 = aten.mul.Tensor(x, y), or return t0",
        )
    outs = tuple(_value(reader, target) for target in targets)
    fn = _dotted(call.func)
    if fn is None:
        fix = "write aten.mul.Tensor(...)"
        raise source.error(call.func, "expected the name of an operator", fix)
    signature = Signature(keywords=("kwargs",), rest=True, any_keyword=True)
    args = Arguments(source, call, fn, signature)
    return reader.make(_NODE, args, outs=outs, fn=fn)


def _dotted(node: ast.expr) -> str | None:
    """`aten.mul.Tensor` as it is written; None for anything but names and dots."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])
