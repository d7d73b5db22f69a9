"""The parser: text to Programs, the inverse of the printer.

The text is a subset of Python, read as a syntax tree and never run. A file holds one `def` for each
Program; a set of several (a pipeline's stages) is read by `parse_set`. Parsing checks form alone:
`validate` says whether names, shapes and teams agree.

    >>> program = parse(text, file="ring.ilc")
    >>> parse(str(program)) == program
    True
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from interlace.errors import ParseError
from interlace.ir.fields import FieldForm, Form, form_of
from interlace.ir.ops import Alloc, Arg, FusedKernel, Loc, Op, kinds_of_op
from interlace.ir.program import Node, Program, Region, Remark, Site
from interlace.ir.size_class import Known, NamedSize, SizeClass
from interlace.ir.text.assumptions import assume, assume_whole, parse_sizes
from interlace.ir.text.expressions import Expressions, is_a, parse_teams
from interlace.ir.text.source import Arguments, Signature, SourceText
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import MAX_RANKS, Buffer, Others, RankIndex, Table, Team
from interlace.ir.view import View
from interlace.strategies import REPLACED

_COMMON = ("site", "loc", "stream")
_ALLOC = Signature(("type",), ("symmetric", "storage", "offset", *_COMMON), ("type",))
_PART = Signature(rest=True)
_SITE, _REMARK = form_of(Site), form_of(Remark)
_STATEMENTS = ("ranks", "rank", "assume", "site", "remark")
_NESTED = "programs and regions are nested too deeply, or an expression is too long"


Common = dict[str, Any]
"""Fields of an op beside its arguments: stream, site and loc."""


def op_words() -> dict[str, Form]:
    """The ops that stand after a stream, by the words that the text has for them."""
    forms = [form_of(kind) for kind in kinds_of_op() if kind is not Alloc]
    return {word: form for main in forms for word, form in {main.word: main, **main.words}.items()}


def parse(text: str, *, file: str = "<text>") -> Program:
    """The one Program that a text holds; `file` stands in errors and in the ops' `loc`."""
    programs = parse_set(text, file=file)
    if len(programs) != 1:
        names = ", ".join(program.name for program in programs)
        raise ParseError(
            f"{file} holds {len(programs)} programs ({names}): read a set of them with parse_set"
        )
    return programs[0]


def parse_set(text: str, *, file: str = "<text>") -> tuple[Program, ...]:
    """Every Program that a text holds, in order."""
    source = SourceText(text, file)
    tree = source.tree()
    try:
        programs = [
            _program(source, node) for i, node in enumerate(tree.body) if not _is_doc(i, node)
        ]
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
    teams, sizes = parse_teams(source, parameters), parse_sizes(source, parameters)
    return _ProgramParser(source, name, teams, sizes).parse(node)


class OpParser(Expressions):
    """Parses the ops of one Program, or (`in_region`) the calls of a region."""

    def __init__(
        self,
        source: SourceText,
        teams: Sequence[Team],
        in_region: bool = False,
        named_sizes: Collection[str] = (),
    ) -> None:
        super().__init__(source, teams, in_region, named_sizes)
        self.words = op_words()
        self.several = {
            **{"team": self.team, "flag": self.flag, "member": self.members, "part": self.parts_of},
            **{"keywords": self.keywords, "outs": self.outs, "fresh": self.fresh},
        }
        self.one["kernel"] = self.kernel

    def op(self, node: ast.expr, stream: str, within: Common | None = None) -> Op:
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

    def common(self, args: Arguments, stream: str, within: Common | None = None) -> Common:
        """Stream, site and location of an op."""
        if args.given("stream"):
            stream = self.string(args["stream"])
        site = args.get("site")
        if args.given("site"):
            number = None if site is None else self.integer(site)
        else:
            number = within["site"] if within else None
        loc = self.source.loc(args.call)
        if args.given("loc"):
            loc = replace(self.loc(args["loc"]), text=loc.text)
        elif within and within["loc"].module:
            loc = replace(within["loc"], text=loc.text)
        return {"stream": stream, "site": number, "loc": loc}

    def loc(self, node: ast.expr) -> Loc:
        """A location: a module path, or (module path, file, line)."""
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            module, file, line = node.elts
            return Loc(self.string(module), self.string(file), self.integer(line))
        return Loc(self.string(node))

    def declaration(self, name: str, node: ast.Call, word: str) -> Alloc:
        """`full = alloc(...)` or `t = empty(...)`."""
        args = Arguments(self.source, node, word, _ALLOC)
        kind, team = "fresh" if word == "empty" else "local", None
        symmetric, storage = args.get("symmetric"), args.get("storage")
        if symmetric is not None:
            kind, team = "symmetric", self.name(symmetric)
        changes: dict[str, object] = {}
        if storage is not None:
            changes["storage"] = self.string(storage)
        if args.given("offset"):
            changes["offset"] = self.integer(args["offset"])
        buffer = self.declared(args["type"]).buffer(name, kind, team, **changes)
        return Alloc(buffer=buffer, **self.common(args, "main"))

    def outs(self, args: Arguments, *_: object) -> tuple[View, ...]:
        """The views that a call fills."""
        nodes = self.items(args.bound.get("out"))
        return tuple(self.view(node) for node in nodes if not isinstance(node, ast.NamedExpr))

    def fresh(self, args: Arguments, *_: object) -> tuple[Buffer, ...]:
        """The buffers that a call makes: `t := f32[8, 4]`."""
        return tuple(
            self.declared(node.value).buffer(node.target.id, "fresh")
            for node in self.items(args.bound.get("out"))
            if isinstance(node, ast.NamedExpr)
        )

    def flag(self, args: Arguments, field: FieldForm, _: object) -> bool:
        """A keyword that is True or False."""
        node = args.bound.get(field.keyword)
        if node is None:
            return field.default is True
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            return node.value
        raise self.fail(node, f"{field.keyword} is a flag", f"write {field.keyword}=True")

    def keywords(self, args: Arguments, *_: object) -> tuple[tuple[str, Arg], ...]:
        """Keyword arguments, where they stand as keywords and where they stand in `kwargs=`."""
        found = [(key, self.arg(node)) for key, node in args.others]
        for pair in self.items(args.bound.get("kwargs")):
            if not (isinstance(pair, ast.Tuple) and len(pair.elts) == 2):
                raise self.fail(pair, "expected a pair", 'write kwargs=(("name", value),)')
            found.append((self.string(pair.elts[0]), self.arg(pair.elts[1])))
        return tuple(found)

    def team(self, args: Arguments, field: FieldForm, found: Mapping[str, object]) -> str:
        """The team of an op: as given, or the peer's, or the only one there is."""
        node, peer = args.get(field.keyword), found.get(field.implied_by)
        if node is not None:
            return self.name(node)
        if isinstance(peer, RankIndex | Others):
            return peer.team
        if len(self.sizes) == 1:
            return next(iter(self.sizes))
        raise self.fail(args.call, "it is unclear which team this is for", "add team=NAME")

    def members(self, args: Arguments, field: FieldForm, within: Common) -> tuple[Op, ...]:
        """The ops that stand in another."""
        found: list[Op] = []
        for node in args.rest:
            member = self.op(node, within["stream"], within)
            if field.how.holds is None or not isinstance(member, field.how.holds):
                where = "part" if field.role == "part" else "group"
                what = f"a {where} holds {field.how.holding} only"
                raise self.fail(node, what, "give it a statement of its own")
            found.append(member)
        return tuple(found)

    def parts_of(
        self, args: Arguments, field: FieldForm, within: Common
    ) -> tuple[tuple[Op, ...], ...]:
        """`part(...)` for each part of an op."""
        found: list[tuple[Op, ...]] = []
        for node in args.rest:
            call = node if isinstance(node, ast.Call) else None
            if call is None or not (isinstance(call.func, ast.Name) and call.func.id == "part"):
                raise self.fail(node, "expected a part", "write fused(part(...), part(...))")
            inner = Arguments(self.source, call, "part", _PART)
            found.append(self.members(inner, field, within))
        return tuple(found)

    def kernel(self, node: ast.expr) -> FusedKernel:
        """`gather_matmul()` or `scatter_matmul(pieces=2, own=3)`."""
        call = node if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        word = call.func.id if call is not None and isinstance(call.func, ast.Name) else ""
        words = form_of(FusedKernel).words
        if call is None or word not in words:
            fix = did_you_mean(word, words, "write the call of one, such as gather_matmul(): of")
            raise self.fail(node, "expected a kernel", fix)
        return self.make(words[word], self.arguments(words[word], call))


class _ProgramParser(OpParser):
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
            if not (is_a("Team", arg) or is_a("Size", arg))
        ]
        for place, statement in enumerate(node.body):
            if not _is_doc(place, statement):
                self.statement(statement)
                if isinstance(statement, ast.Return) and statement is not node.body[-1]:
                    raise self.source.error(
                        node.body[place + 1], "statements after `return`", "put `return` last"
                    )
        for divided, quotient in self.quotients:
            assume_whole(self, self.assumed, divided, quotient)
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
        return self.declared(node).buffer(arg.arg, kind)

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
                items = self.items(value) if isinstance(value, ast.Tuple) else [value]
                self.results = tuple(self.arg(item) for item in items if item)
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
            self.ops.append(self.declaration(name, call, word))
        elif word == "table":
            signature = Signature(("team",), (), ("team",), rest=True)
            args = Arguments(self.source, call, "table", signature)
            values = tuple(map(self.size, args.rest))
            self.tables.append(Table(name, self.name(args["team"]), values))
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
                args = Arguments(self.source, call, word, Signature(rest=True))
                self.ranks = tuple(map(self.integer, args.rest))
                if len(self.ranks) > MAX_RANKS:
                    what = f"a world of {len(self.ranks)} ranks"
                    raise self.source.error(node, what, f"give it {MAX_RANKS} ranks at most")
            case "rank":
                args = Arguments(self.source, call, word, Signature(("rank",), (), ("rank",)))
                self.rank = self.integer(args["rank"])
            case "assume":
                args = Arguments(self.source, call, word, Signature(rest=True))
                for fact in args.rest:
                    assume(self, self.assumed, fact)
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


def _is_doc(place: int, node: ast.stmt) -> bool:
    """True if a statement is the text that may stand first in a file, a Program or a region."""
    return (
        place == 0
        and isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


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
        name = OpParser(source, ()).string(args["name"])
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
    expr = OpParser(source, teams, in_region=True)
    inputs = tuple(
        arg.arg if arg.annotation is None else expr.string(arg.annotation)
        for arg in _parameters(source, node)
    )
    body: list[Node] = []
    outputs: tuple[str, ...] | None = None
    for place, statement in enumerate(node.body):
        if _is_doc(place, statement):
            continue
        if outputs is not None:
            raise source.error(statement, "statements after `return`", "put it last")
        if isinstance(statement, ast.Return):
            value = statement.value
            items = expr.items(value) if isinstance(value, ast.Tuple) else [value]
            outputs = tuple(_value(expr, item) for item in items if item)
        else:
            body.append(_node(source, expr, statement))
    if outputs is None:
        raise source.error(node, f"region {name!r} returns nothing", "add return t0, ...")
    return Region(name, inputs, tuple(body), outputs)


def _value(expr: OpParser, node: ast.expr) -> str:
    """The name of a region's value."""
    return expr.named(node, "value", "expected a value of the region", "write its name")


def _node(source: SourceText, expr: OpParser, statement: ast.stmt) -> Node:
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
    outs = tuple(_value(expr, target) for target in targets)
    fn = _dotted(call.func)
    if fn is None:
        fix = 'write aten.mul.Tensor(...), or call("name", ...)'
        raise source.error(call.func, "expected the name of an operator", fix)
    positional = ("fn",) if fn == "call" else ()
    signature = Signature(positional, ("kwargs",), positional, rest=True, any_keyword=True)
    args = Arguments(source, call, fn, signature)
    if fn == "call":
        fn = expr.string(args["fn"])
    return Node(outs, fn, tuple(map(expr.arg, args.rest)), expr.keywords(args))


def _dotted(node: ast.expr) -> str | None:
    """`aten.mul.Tensor` as it is written; None for anything but names and dots."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])
