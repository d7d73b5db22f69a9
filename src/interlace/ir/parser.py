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
from dataclasses import replace

from interlace.errors import ParseError
from interlace.ir.ops import Arg, Op
from interlace.ir.parser_ops import FORMS, OpParser
from interlace.ir.parser_regions import decorated, is_doc, parameters, region
from interlace.ir.parser_source import Arguments, Signature, Source
from interlace.ir.parser_types import is_team, parse_teams
from interlace.ir.program import Program, Region, Remark, Site
from interlace.ir.spelling import did_you_mean
from interlace.ir.types import MAX_RANKS, Buffer, Table, Team

_SITE = Signature(
    ("id", "kind", "module"),
    ("strategy", "protocol", "chunks", "reason", "serial_ms", "predicted_ms"),
    ("id", "kind"),
)
_REMARK = Signature(("pass_name", "text"), ("site",), ("pass_name", "text"))
_STATEMENTS = ("ranks", "rank", "site", "remark")
_NESTED = "programs and regions are nested too deeply, or an expression is too long"


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
    source = Source(text, file)
    tree = source.tree()
    try:
        programs = [
            _program(source, node) for i, node in enumerate(tree.body) if not is_doc(i, node)
        ]
    except RecursionError:
        raise source.error(None, _NESTED, "give the text of a schedule") from None
    if not programs:
        fix = "write one as def name(tp: Team[4], x: f32[8]): ..."
        raise source.error(None, "there is no program here", fix)
    return tuple(programs)


def _program(source: Source, node: ast.stmt) -> Program:
    if not isinstance(node, ast.FunctionDef):
        raise source.error(
            node, "expected a program", "write one as def name(tp: Team[4], x: f32[8]): ..."
        )
    name = decorated(source, node, "named")
    teams = parse_teams(source, parameters(source, node))
    return _Body(source, name, teams).parse(node)


class _Body:
    """Collects what a Program's statements say."""

    def __init__(self, source: Source, name: str, teams: tuple[Team, ...]) -> None:
        self.source = source
        self.ops_parser = OpParser(source, teams)
        self.program = Program(name=name, teams=teams)
        self.tables: list[Table] = []
        self.ops: list[Op] = []
        self.regions: list[Region] = []
        self.sites: list[Site] = []
        self.remarks: list[Remark] = []
        self.results: tuple[Arg, ...] | None = None
        self.ranks: tuple[int, ...] | None = None
        self.rank: int | None = None

    def parse(self, node: ast.FunctionDef) -> Program:
        params = [self.parameter(arg) for arg in node.args.args if not is_team(arg)]
        for place, statement in enumerate(node.body):
            if not is_doc(place, statement):
                self.statement(statement)
                if isinstance(statement, ast.Return) and statement is not node.body[-1]:
                    raise self.source.error(
                        node.body[place + 1], "statements after `return`", "put `return` last"
                    )
        return replace(
            self.program,
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

    def parameter(self, arg: ast.arg) -> Buffer:
        node, kind = arg.annotation, "input"
        if node is None:
            fix = "write name: f32[8, 4], out[f32[8, 4]] or Team[4]"
            raise self.source.error(arg, f"parameter {arg.arg!r} has no type", fix)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if node.value.id == "out":
                node, kind = node.slice, "output"
        return self.ops_parser.declared(node).buffer(arg.arg, kind)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.AnnAssign(target=target, annotation=annotation, value=None):
                self.ops.append(self.ops_parser.op(annotation, self.stream(target)))
            case ast.Assign(targets=[target], value=ast.Call(func=ast.Name(id=word)) as call):
                self.assignment(target, word, call)
            case ast.Expr(value=ast.Call(func=ast.Name(id=word)) as call):
                self.directive(node, word, call)
            case ast.FunctionDef():
                self.regions.append(region(self.source, node, self.program.teams))
            case ast.Return(value=value):
                items = self.ops_parser.items(value) if isinstance(value, ast.Tuple) else [value]
                self.results = tuple(self.ops_parser.arg(item) for item in items if item)
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
        if isinstance(node, ast.Name):
            return node.id
        inner = self.ops_parser.accessed(node)
        if inner is not None and inner[0] == "stream":
            return inner[1]
        fix = 'write a name, or stream["any name"]'
        raise self.source.error(node, "expected a stream before the colon", fix)

    def assignment(self, target: ast.expr, word: str, call: ast.Call) -> None:
        """`full = alloc(...)`, `t = empty(...)`, `rows = table(...)`."""
        family = "table" if word == "table" else "buffer"
        inner = self.ops_parser.accessed(target)
        if isinstance(target, ast.Name):
            name = target.id
        elif inner is not None and inner[0] == family:
            name = inner[1]
        else:
            fix = f'write a name, or {family}["any name"]'
            raise self.source.error(target, "expected a name before `=`", fix)
        if word in ("alloc", "empty"):
            self.ops.append(self.ops_parser.declaration(name, call, word))
        elif word == "table":
            signature = Signature(("team",), (), ("team",), rest=True)
            args = Arguments(self.source, call, "table", signature)
            values = tuple(map(self.ops_parser.integer, args.rest))
            self.tables.append(Table(name, self.ops_parser.name(args["team"]), values))
        else:
            if word in FORMS:
                fix = "an op stands after a stream, such as main: copy(x, y)"
            else:
                fix = did_you_mean(word, ("alloc", "empty", "table"), "declarations are")
            raise self.source.error(call.func, f"{word!r} declares nothing", fix)

    def directive(self, node: ast.stmt, word: str, call: ast.Call) -> None:
        """`ranks(...)`, `rank(...)`, `site(...)`, `remark(...)`."""
        expr = self.ops_parser
        match word:
            case "ranks":
                args = Arguments(self.source, call, word, Signature(rest=True))
                self.ranks = tuple(map(expr.integer, args.rest))
                if len(self.ranks) > MAX_RANKS:
                    what = f"a world of {len(self.ranks)} ranks"
                    raise self.source.error(node, what, f"give it {MAX_RANKS} ranks at most")
            case "rank":
                args = Arguments(self.source, call, word, Signature(("rank",), (), ("rank",)))
                self.rank = expr.integer(args["rank"])
            case "site":
                self.sites.append(self.site(Arguments(self.source, call, word, _SITE)))
            case "remark":
                args = Arguments(self.source, call, word, _REMARK)
                site = args.get("site")
                self.remarks.append(
                    Remark(
                        expr.string(args["pass_name"]),
                        expr.string(args["text"]),
                        None if site is None else expr.integer(site),
                    )
                )
            case _:
                if word in FORMS:
                    fix = f"write the stream before it, such as main: {word}(...)"
                elif word in ("alloc", "empty", "table"):
                    fix = f"give it a name: NAME = {word}(...)"
                else:
                    fix = did_you_mean(word, _STATEMENTS, "statements without a stream are")
                raise self.source.error(node, f"{word!r} cannot stand alone", fix)

    def site(self, args: Arguments) -> Site:
        expr = self.ops_parser
        module, strategy, reason = args.get("module"), args.get("strategy"), args.get("reason")
        protocol, chunks = args.get("protocol"), args.get("chunks")
        return Site(
            id=expr.integer(args["id"]),
            kind=expr.string(args["kind"]),
            module="" if module is None else expr.string(module),
            strategy="serial" if strategy is None else expr.string(strategy),
            protocol=None if protocol is None else expr.string(protocol),
            chunks=None if chunks is None else expr.integer(chunks),
            reason="" if reason is None else expr.string(reason),
            serial_ms=expr.optional_real(args.get("serial_ms")),
            predicted_ms=expr.optional_real(args.get("predicted_ms")),
        )
