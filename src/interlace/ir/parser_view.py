"""Parsing views and arguments.

full[tp.rank + 1][:, 0:8]      a view
(1, 2.5, x.permute(1, 0))      an argument
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from interlace.ir.ops import Arg, Name
from interlace.ir.parser_expr import DTYPES, ExprParser
from interlace.ir.parser_source import Arguments, Signature
from interlace.ir.spelling import did_you_mean
from interlace.ir.types import RankIndex
from interlace.ir.view import View

VIEW_STEPS = {
    "chunk": Signature(("index", "parts", "dim"), (), ("index", "parts")),
    "slice": Signature(("dim", "start", "stop"), (), ("dim", "start", "stop")),
    "select": Signature(("dim", "index"), (), ("dim", "index")),
    "permute": Signature(rest=True),
    "view": Signature(rest=True),
    "expand": Signature(rest=True),
    "cast": Signature(("dtype",), (), ("dtype",)),
    "as_strided": Signature(("sizes", "strides", "offset"), (), ("sizes", "strides")),
}
_COMPLEX = Signature(("real", "imag"), (), ("real", "imag"))


class ViewParser(ExprParser):
    """Parses views, and arguments, which may be views."""

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
        signature = VIEW_STEPS.get(func.attr)
        if signature is None:
            fix = did_you_mean(func.attr, VIEW_STEPS, "steps are")
            raise self.fail(func, f"a view has no step {func.attr!r}", fix)
        args = Arguments(self.source, node, func.attr, signature)
        match func.attr:
            case "chunk":
                dim = self.integer(args["dim"]) if args.given("dim") else 0
                return view.chunk(self.index(args["index"]), self.parts(args["parts"]), dim)
            case "slice":
                start, stop = self.dim(args["start"]), self.dim(args["stop"])
                return view.slice(self.integer(args["dim"]), start, stop)
            case "select":
                return view.select(self.integer(args["dim"]), self.integer(args["index"]))
            case "cast":
                return view.cast(self.dtype(args["dtype"]))
            case "as_strided":
                offset = self.integer(args["offset"]) if args.given("offset") else 0
                sizes, strides = self.integers(args["sizes"]), self.integers(args["strides"])
                return view.as_strided(sizes, strides, offset)
            case _:
                step: Callable[..., View] = getattr(view, func.attr)  # permute, view, expand
                return step(*map(self.integer, args.rest))

    def parts(self, node: ast.expr) -> int | str:
        """A number of even parts, or the table of the parts' sizes."""
        if isinstance(node, ast.Name | ast.Subscript) or _is_string(node):
            return self.name(node)
        return self.integer(node)

    def arg(self, node: ast.expr) -> Arg:
        """An argument of a call, or a result."""
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(map(self.arg, node.elts))
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
            return Name(node.id) if self.in_region else View(node.id)
        inner = self.accessed(node)
        if inner is not None and inner[0] == "value":
            return Name(inner[1])
        return self.view(node)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
