"""Parsing the types of parameters and buffers.

bf16[rows[tp.rank], 8].strides(8, 1)      a buffer type
bf16[2048, 8192].registered(tp)           of a parameter that peers reach where it lies
Team[4]     Team[[0, 1], [2, 3]]          a team: a mesh axis, or groups of global ranks
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interlace.ir.parser_expr import ExprParser
from interlace.ir.parser_source import Arguments, Signature, Source
from interlace.ir.spelling import did_you_mean
from interlace.ir.types import MAX_RANKS, Buffer, Dim, DType, Team

MODIFIERS = {
    "strides": Signature(rest=True),
    "kind": Signature(("kind",), (), ("kind",)),
    "team": Signature(("team",), (), ("team",)),
    "registered": Signature(("team",), (), ("team",)),
    "storage": Signature(("storage", "offset"), (), ("storage",)),
    "named": Signature(("name",), (), ("name",)),
}
TEAM_MODIFIERS = {"over": Signature(rest=True), "named": MODIFIERS["named"]}


@dataclass(frozen=True, slots=True)
class Declared:
    """A buffer type with what its modifiers say; its place in the text gives the rest."""

    dtype: DType
    shape: tuple[Dim, ...]
    strides: tuple[int, ...] | None = None
    changes: tuple[tuple[str, object], ...] = ()

    def with_changes(self, changes: Mapping[str, object]) -> Declared:
        """This type with other modifiers."""
        return Declared(self.dtype, self.shape, self.strides, tuple(changes.items()))

    def buffer(self, name: str, kind: str, team: str | None = None) -> Buffer:
        """The buffer that a place in the text declares as `name` of `kind`."""
        fields: dict[str, object] = {"name": name, "kind": kind, "team": team}
        fields.update(self.changes)
        return Buffer(dtype=self.dtype, shape=self.shape, strides=self.strides, **fields)  # pyright: ignore[reportArgumentType]


class TypeParser(ExprParser):
    """Parses buffer types."""

    def declared(self, node: ast.expr) -> Declared:
        """A buffer type: `f32[8, 4]` and its modifiers."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self.modified(self.declared(node.func.value), node.func, node)
        if not isinstance(node, ast.Subscript):
            raise self.fail(
                node, "expected a buffer type", "write element type and sizes, such as bf16[8, 4]"
            )
        sizes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return Declared(self.dtype(node.value), tuple(map(self.dim, sizes)))

    def modified(self, base: Declared, func: ast.Attribute, node: ast.Call) -> Declared:
        """A buffer type with one more modifier."""
        signature = MODIFIERS.get(func.attr)
        if signature is None:
            fix = did_you_mean(func.attr, MODIFIERS, "modifiers are")
            raise self.fail(func, f"a buffer type has no modifier {func.attr!r}", fix)
        args = Arguments(self.source, node, func.attr, signature)
        if func.attr == "strides":
            strides = tuple(map(self.integer, args.rest))
            return Declared(base.dtype, base.shape, strides, base.changes)
        changes = dict(base.changes)
        if func.attr in ("team", "registered"):
            team = args.get("team")
            changes["team"] = None if team is None else self.name(team)
        elif func.attr == "storage":
            storage = args.get("storage")
            changes["storage"] = None if storage is None else self.string(storage)
            changes["offset"] = self.integer(args["offset"]) if args.given("offset") else 0
        else:
            key = "kind" if func.attr == "kind" else "name"
            changes[key] = self.string(args[key])
        return base.with_changes(changes)


def is_team(arg: ast.arg) -> bool:
    """Whether a parameter is a team."""
    node = arg.annotation
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    word = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(word, ast.Name) and word.id == "Team"


def parse_teams(source: Source, args: Sequence[ast.arg]) -> tuple[Team, ...]:
    """The teams that parameters declare; together they span no more ranks than a world may have."""
    found: list[Team] = []
    world = 1
    for arg in args:
        if not is_team(arg):
            continue
        team = parse_team(source, arg)
        found.append(team)
        count = team.size if team.groups is None else sum(map(len, team.groups))
        world *= abs(team.size) if team.groups is None else 1
        if max(world, count) > MAX_RANKS:
            what = f"a world of {max(world, count)} ranks"
            raise source.error(arg, what, f"give it {MAX_RANKS} ranks at most")
    return tuple(found)


def parse_team(source: Source, arg: ast.arg) -> Team:
    """The team that a parameter declares."""
    expr = TypeParser(source, ())
    node, name = arg.annotation, arg.arg
    over: Arguments | None = None
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        word = node.func.attr
        if word not in TEAM_MODIFIERS:
            fix = did_you_mean(word, TEAM_MODIFIERS, "modifiers are")
            raise source.error(node.func, f"a team has no modifier {word!r}", fix)
        bound = Arguments(source, node, word, TEAM_MODIFIERS[word])
        if word == "named":
            name = expr.string(bound["name"])
        else:
            over = bound
        node = node.func.value
    if not isinstance(node, ast.Subscript):
        fix = "write Team[4] for a mesh axis, or Team[[0, 1], [2, 3]]"
        raise source.error(arg, "a team without a size", fix)
    if over is not None:
        groups = tuple(map(expr.integers, over.rest))
        return Team(name, expr.integer(node.slice), groups)
    listed = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if not isinstance(listed[0] if listed else None, ast.List):
        return Team(name, expr.integer(node.slice))
    groups = tuple(map(expr.integers, listed))
    if len({len(group) for group in groups}) != 1:
        fix = "every instance of a team has as many ranks"
        raise source.error(node, "groups of different sizes", fix)
    return Team(name, len(groups[0]), groups)
