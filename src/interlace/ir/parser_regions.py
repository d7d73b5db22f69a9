"""Parsing regions, and what they share with Programs: decorators and parameters.

@region
def region_0(x, y):
    t0 = aten.mul.Tensor(x, y)
    return t0
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from interlace.ir.parser_ops import OpParser
from interlace.ir.parser_source import Arguments, Signature, Source
from interlace.ir.program import Node, Region
from interlace.ir.types import Team


def is_doc(place: int, node: ast.stmt) -> bool:
    """Whether a statement is the text that may stand first in a file, a Program or a region."""
    return (
        place == 0
        and isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def decorated(source: Source, node: ast.FunctionDef, word: str) -> str:
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


def parameters(source: Source, node: ast.FunctionDef) -> list[ast.arg]:
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


def region(source: Source, node: ast.FunctionDef, teams: Sequence[Team]) -> Region:
    """`@region def region_0(x, y): ...`."""
    if len(node.decorator_list) != 1:
        fix = "write @region on the line before it"
        raise source.error(node, "a def inside a program is a region", fix)
    name = decorated(source, node, "region")
    expr = OpParser(source, teams, in_region=True)
    inputs = tuple(
        arg.arg if arg.annotation is None else expr.string(arg.annotation)
        for arg in parameters(source, node)
    )
    body: list[Node] = []
    outputs: tuple[str, ...] | None = None
    for place, statement in enumerate(node.body):
        if is_doc(place, statement):
            continue
        if outputs is not None:
            raise source.error(statement, "statements after `return`", "put it last")
        if isinstance(statement, ast.Return):
            value = statement.value
            items = expr.items(value) if isinstance(value, ast.Tuple) else [value]
            outputs = tuple(_value(source, expr, item) for item in items if item)
        else:
            body.append(_node(source, expr, statement))
    if outputs is None:
        raise source.error(node, f"region {name!r} returns nothing", "add return t0, ...")
    return Region(name, inputs, tuple(body), outputs)


def _value(source: Source, expr: OpParser, node: ast.expr) -> str:
    """The name of a region's value."""
    if isinstance(node, ast.Name):
        return node.id
    inner = expr.accessed(node)
    if inner is not None and inner[0] == "value":
        return inner[1]
    raise source.error(node, "expected a value of the region", "write its name")


def _node(source: Source, expr: OpParser, statement: ast.stmt) -> Node:
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
    outs = tuple(_value(source, expr, target) for target in targets)
    fn = _dotted(call.func)
    if fn is None:
        fix = 'write aten.mul.Tensor(...), or call("name", ...)'
        raise source.error(call.func, "expected the name of an operator", fix)
    positional = ("fn",) if fn == "call" else ()
    signature = Signature(positional, ("kwargs",), positional, rest=True, any_keyword=True)
    args = Arguments(source, call, fn, signature)
    if fn == "call":
        fn = expr.string(args["fn"])
    return Node(outs, fn, tuple(map(expr.arg, args.rest)), expr.kwargs(args))


def _dotted(node: ast.expr) -> str | None:
    """`aten.mul.Tensor` as it is written; None for anything but names and dots."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])
