"""Programs with anything in them that the dataclasses can hold, whether or not it makes sense.

Names with blanks and quotes, empty tuples, infinities, ops that refer to nothing: the text must
carry all of it. For Programs that make sense see `tests/fuzzing/draw.py`.

A dataclass is drawn by the types of its fields, so that a new op or field takes part by itself;
`special` has the fields that hold less than their type does, or hold each other.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any, TypeVar

from interlace.ir import (
    KINDS,
    Arg,
    Buffer,
    Call,
    Dim,
    DType,
    Expect,
    Fused,
    Group,
    Index,
    Loc,
    Name,
    Node,
    Notify,
    Op,
    Others,
    Program,
    RankIndex,
    Record,
    Recv,
    Region,
    Remark,
    Send,
    Site,
    Table,
    TableEntry,
    Team,
    View,
    Wait,
    ops,
)
from interlace.ir.view import Step

T = TypeVar("T")
NAMES = ("x", "y", "full", "t0", "tp", "dp", "rows", "e1", "main", "comm", "out", "copy", "Team")
ODD = ("", "a b", "layers.0.x", 'say "hi"', "it's", "f32", "inf", "buffer", "for", "é", "\n", "\\")
ODD += ("_", "match", "value", "team", "None", "__debug__", "\ud800", "x'\"y", "0", "@device", "ﬁ")
FLOATS = (0.0, -0.0, 1.5, -2.41, 1e-300, 1e22, math.inf, -math.inf, math.nan)
FUNCTIONS = ("aten.mm.out", "aten.mul.Tensor", "region_0", "a b", "call", "aten.for.x", "")
WORDS = ("alpha", "dim", "dtype", "out", "site", "kwargs", "fn", "for", "a b", "type")
OPS = [op for op in Op.__subclasses__() if getattr(ops, op.__name__, None) is op]
STEPS: tuple[type[Any], ...] = Step.__args__


class Arbitrary:
    """Draws one thing of each type."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        choice = rng.choice
        plain = (View, Node, Region, Site, Remark, Table)
        self.types: dict[str, Callable[[], Any]] = {
            **{cls.__name__: lambda cls=cls: self.of(cls) for cls in plain},
            "str": self.name,
            "int": self.integer,
            "Int": self.integer,
            "bool": self.flag,
            "float": lambda: choice(FLOATS[:-1]),
            "DType": lambda: choice(tuple(DType)),
            "Index": self.index,
            "Index | Others": lambda: Others(self.team()) if self.flag() else self.index(),
            "Dim": self.dim,
            "Step": lambda: self.of(choice(STEPS)),
            "Arg": self.arg,
            "Team": self.some_team,
            "Op": self.op,
            "Buffer": self.buffer,
        }
        self.special: dict[str, Callable[[], Any]] = {
            "fn": lambda: choice(FUNCTIONS),
            "Node.fn": lambda: choice(FUNCTIONS[:3]),
            "kwargs": lambda: self.some(lambda: (choice(WORDS), self.arg())),
            "team": self.team,
            "stream": lambda: "main" if rng.random() < 0.6 else self.name(),
            "loc": lambda: self.of(Loc, text=None),
            "Team.name": self.team,
            "RankIndex.offset": lambda: rng.randint(-3, 3),
            "Chunk.parts": lambda: choice((2, 3, 4, -1, self.name())),
            "Chunk.dim": lambda: rng.randint(-1, 2),
            "Slice.dim": lambda: rng.randint(-1, 5),
            "Collective.kind": lambda: choice((*KINDS,)),
            "Free.buffer": self.name,
            "Program.params": lambda: self.some(lambda: self.buffer("input", "output")),
        }

    def of(self, cls: type[T], **given: Any) -> T:
        """A dataclass, all of whose fields are drawn but those given; defaults are common."""
        for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
            has_default = field.default is not dataclasses.MISSING
            if field.init and field.name not in given and not (has_default and self.flag()):
                special = self.special.get(f"{cls.__name__}.{field.name}")
                special = special or self.special.get(field.name)
                given[field.name] = special() if special else self.typed(str(field.type))
        return cls(**given)

    def typed(self, text: str) -> Any:
        text = text.removesuffix(" | None")
        if text.startswith("tuple["):
            item = text.removeprefix("tuple[").removesuffix(", ...]")
            return self.some(lambda: self.typed(item))
        return self.types[text]()

    def some(self, make: Callable[[], T], most: int = 3) -> tuple[T, ...]:
        return tuple(make() for _ in range(self.rng.randint(0, most)))

    def name(self) -> str:
        return self.rng.choice(NAMES if self.rng.random() < 0.8 else ODD)

    def team(self) -> str:
        return self.rng.choice(("tp", "dp", "a b", "team"))

    def integer(self) -> int:
        return self.rng.choice((0, 1, 2, 3, 4, 8, -1, -7, 2**63 - 1))

    def flag(self) -> bool:
        return self.rng.random() < 0.3

    def index(self) -> Index:
        return self.integer() if self.flag() else self.of(RankIndex)

    def dim(self) -> Dim:
        return self.of(TableEntry) if self.flag() else self.integer()

    def arg(self, depth: int = 0) -> Arg:
        rng = self.rng
        args: list[Callable[[], Arg]] = [
            *(self.types[kind] for kind in ("View", "DType", "int", "bool", "str")),
            lambda: Name(self.name()),
            lambda: rng.choice(FLOATS),
            lambda: complex(rng.choice(FLOATS[:-1]), rng.choice(FLOATS[:-1])),
            lambda: None,
        ]
        if depth < 3:
            args += [lambda: self.some(lambda: self.arg(depth + 1))] * 2
        return rng.choice(args)()

    def buffer(self, *kinds: str) -> Buffer:
        kind = self.rng.choice(kinds or ("local", "symmetric", "fresh"))
        shared = kind == "symmetric"
        placed = {} if not kinds else {"storage": None, "offset": 0}
        return self.of(Buffer, kind=kind, team=self.team() if shared else None, **placed)

    def common(self) -> dict[str, Any]:
        """Fields of an op, which the members of a Group or Fused share."""
        return {"stream": self.special["stream"](), "loc": self.special["loc"]()}

    def op(self) -> Op:
        cls, inner = self.rng.choice(OPS), self.common()
        common = inner if self.flag() else {**self.common(), "stream": inner["stream"]}
        if cls is Group:
            members = self.some(lambda: self.of(self.rng.choice((Send, Recv)), **inner))
            return Group(ops=members, **common)
        if cls is Fused:
            parts = self.some(lambda: self.some(lambda: self.member(inner)))
            return Fused(parts=parts, **common)
        if cls is Call:
            fresh = self.some(lambda: self.buffer("fresh"))
            plain = tuple(View(buffer.name) for buffer in fresh)
            outs = plain if self.rng.random() < 0.6 else self.typed("tuple[View, ...]")
            more = self.some(self.types["View"], 1)
            return self.of(Call, fresh=fresh, outs=(*outs, *more), **common)
        return self.of(cls, **common)

    def member(self, common: dict[str, Any]) -> Any:
        """Draws an op that is valid in a part of a Fused."""
        cls = self.rng.choice((Call, Record, Wait, Notify, Expect))
        plain = {"fresh": (), "mutates": False, "rng": False} if cls is Call else {}
        return self.of(cls, **plain, **common)

    def some_team(self) -> Team:
        size = self.rng.randint(1, 4)
        groups = (tuple(range(size)),) * self.rng.randint(1, 2) if self.flag() else None
        return Team(self.team(), size, groups)

    def program(self) -> Program:
        ops = self.some(self.op, 12)
        return self.of(Program, ops=ops, sizes=Program().sizes)
