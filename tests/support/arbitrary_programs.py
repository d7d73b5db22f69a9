"""Programs with anything in them that the dataclasses can hold, whether or not it makes sense.

Names with blanks and quotes, empty tuples, infinities, ops that refer to nothing: the text must
carry all of it. For Programs that make sense see `tests/fuzzing/draw.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, TypeVar

from interlace.ir import (
    KINDS,
    Alloc,
    Arg,
    AsStrided,
    Buffer,
    Call,
    Cast,
    Chunk,
    Collective,
    Copy,
    Dim,
    DType,
    Expand,
    Expect,
    Free,
    Fused,
    FusedMember,
    Get,
    Group,
    HostSync,
    Index,
    Loc,
    Name,
    Node,
    Notify,
    Op,
    Others,
    Permute,
    Program,
    Put,
    RankIndex,
    Record,
    Recv,
    Region,
    Remark,
    Reshape,
    Select,
    Send,
    Site,
    Slice,
    Step,
    Table,
    TableEntry,
    Team,
    View,
    Wait,
)

T = TypeVar("T")
NAMES = ("x", "y", "full", "t0", "tp", "dp", "rows", "e1", "main", "comm", "out", "copy", "Team")
ODD = ("", "a b", "layers.0.x", 'say "hi"', "it's", "f32", "inf", "buffer", "for", "é", "\n", "\\")
ODD += ("_", "match", "value", "team", "None", "__debug__", "\ud800", "x'\"y", "0", "@device", "ﬁ")
TEAMS = ("tp", "dp", "a b", "team")
FLOATS = (0.0, -0.0, 1.5, -2.41, 1e-300, 1e22, math.inf, -math.inf, math.nan)
DTYPES = tuple(DType)


class Arbitrary:
    """Draws one thing of each type."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def some(self, make: Callable[[], T], most: int = 3) -> tuple[T, ...]:
        return tuple(make() for _ in range(self.rng.randint(0, most)))

    def maybe(self, make: Callable[[], T]) -> T | None:
        return make() if self.rng.random() < 0.5 else None

    def name(self) -> str:
        return self.rng.choice(NAMES if self.rng.random() < 0.8 else ODD)

    def team_name(self) -> str:
        return self.rng.choice(TEAMS)

    def integer(self) -> int:
        return self.rng.choice((0, 1, 2, 3, 4, 8, -1, -7, 2**63 - 1))

    def flag(self) -> bool:
        return self.rng.random() < 0.3

    def index(self) -> Index:
        if self.flag():
            return self.integer()
        return RankIndex(self.team_name(), self.rng.randint(-3, 3))

    def peer(self) -> Index | Others:
        return Others(self.team_name()) if self.flag() else self.index()

    def dim(self) -> Dim:
        return TableEntry(self.name(), self.index()) if self.flag() else self.integer()

    def integers(self) -> tuple[int, ...]:
        return self.some(self.integer)

    def step(self) -> Step:
        rng = self.rng
        steps: tuple[Callable[[], Step], ...] = (
            lambda: Chunk(self.index(), rng.choice((2, 3, 4, -1, self.name())), rng.randint(-1, 2)),
            lambda: Slice(rng.randint(-1, 5), self.dim(), self.dim()),
            lambda: Select(self.integer(), self.integer()),
            lambda: Permute(self.integers()),
            lambda: Reshape(self.integers()),
            lambda: Expand(self.integers()),
            lambda: Cast(rng.choice(DTYPES)),
            lambda: AsStrided(self.integers(), self.integers(), self.integer()),
        )
        return rng.choice(steps)()

    def view(self) -> View:
        return View(self.name(), self.some(self.step))

    def arg(self, depth: int = 0) -> Arg:
        rng = self.rng
        args: list[Callable[[], Arg]] = [
            self.view,
            lambda: Name(self.name()),
            lambda: rng.choice(DTYPES),
            self.integer,
            self.flag,
            self.name,
            lambda: rng.choice(FLOATS),
            lambda: complex(rng.choice(FLOATS[:-1]), rng.choice(FLOATS[:-1])),
            lambda: None,
        ]
        if depth < 3:
            args += [lambda: self.some(lambda: self.arg(depth + 1))] * 2
        return rng.choice(args)()

    def kwargs(self) -> tuple[tuple[str, Arg], ...]:
        words = ("alpha", "dim", "dtype", "out", "site", "kwargs", "fn", "for", "a b", "type")
        return self.some(lambda: (self.rng.choice(words), self.arg()))

    def fn(self) -> str:
        known = ("aten.mm.out", "aten.mul.Tensor", "region_0", "a b", "call", "aten.for.x", "")
        return self.rng.choice(known)

    def buffer(self, kinds: tuple[str, ...] = ("local", "symmetric", "fresh")) -> Buffer:
        rng = self.rng
        usual = rng.random() < 0.8
        kind = rng.choice(kinds) if usual else rng.choice(("input", "output", "odd kind", "local"))
        return Buffer(
            name=self.name(),
            dtype=rng.choice(DTYPES),
            shape=self.some(self.dim),
            kind=kind,
            team=self.team_name() if kind == "symmetric" or self.flag() else None,
            strides=self.maybe(self.integers) if self.flag() else None,
            storage=self.name() if self.flag() else None,
            offset=self.integer() if self.flag() else 0,
        )

    def loc(self) -> Loc:
        module = self.name() if self.flag() else ""
        return Loc(module, self.name(), self.integer()) if self.flag() else Loc(module)

    def transfer(self, **common: Any) -> Send | Recv:
        make = self.rng.choice((Send, Recv))
        view = {"src" if make is Send else "dst": self.view()}
        peer = {"peer": self.index(), "team": self.team_name(), "backend": self.maybe(self.name)}
        return make(**view, **peer, **common)

    def member(self, **common: Any) -> FusedMember:
        """Draws an op that is valid in a part of a Fused."""
        if self.flag():
            return self.rng.choice((Record, Wait))(event=self.name(), **common)
        if self.flag():
            make = self.rng.choice((Notify, Expect))
            peer = {"peer": self.peer(), "team": self.team_name()}
            return make(signal=self.name(), value=self.integer(), **peer, **common)
        outs = self.some(self.view, 2)
        return Call(
            fn=self.fn(), args=self.some(self.arg), kwargs=self.kwargs(), outs=outs, **common
        )

    def op(self) -> Op:
        rng = self.rng
        common = self.common()
        remote = {"peer": self.index(), "team": self.team_name()}
        match rng.randrange(15):
            case 0 | 1:
                fresh = self.some(lambda: self.buffer(("fresh",)))
                plain = tuple(View(buffer.name) for buffer in fresh)
                outs = plain if rng.random() < 0.6 else self.some(self.view)
                return Call(
                    fn=self.fn(),
                    args=self.some(self.arg),
                    kwargs=self.kwargs(),
                    outs=(*outs, *self.some(self.view, 1)),
                    fresh=fresh,
                    mutates=self.flag(),
                    rng=self.flag(),
                    **common,
                )
            case 2:
                return Copy(src=self.view(), dst=self.view(), **common)
            case 3:
                return Alloc(buffer=self.buffer(), **common)
            case 4:
                return Free(buffer=self.name(), **common)
            case 5:
                return rng.choice((Record, Wait))(event=self.name(), **common)
            case 6:
                return HostSync(**common)
            case 7 | 8:
                return Collective(
                    kind=rng.choice((*KINDS, "odd kind", "copy")),
                    team=self.team_name(),
                    src=self.maybe(self.view),
                    dst=self.maybe(self.view),
                    reduce=self.maybe(self.name),
                    root=self.maybe(self.index),
                    splits=self.maybe(self.name),
                    backend=self.maybe(self.name),
                    **common,
                )
            case 9:
                return self.transfer(**common)
            case 10:
                inner = common if self.flag() else self.common()
                return Group(ops=self.some(lambda: self.transfer(**inner)), **common)
            case 11:
                inner = common if self.flag() else self.common()
                part = lambda: self.some(lambda: self.member(**inner))  # noqa: E731
                return Fused(parts=self.some(part), **common)
            case 12:
                return Put(src=self.view(), dst=self.view(), **remote, **common)
            case 13:
                return Get(src=self.view(), dst=self.maybe(self.view), **remote, **common)
            case _:
                make = rng.choice((Notify, Expect))
                peer = {"peer": self.peer(), "team": self.team_name()}
                return make(signal=self.name(), value=self.integer(), **peer, **common)

    def common(self) -> dict[str, Any]:
        stream = "main" if self.rng.random() < 0.6 else self.name()
        return {"stream": stream, "site": self.maybe(self.integer), "loc": self.loc()}

    def team(self) -> Team:
        return Team(self.team_name(), self.rng.randint(0, 4), self.maybe(lambda: self.groups()))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        size = self.rng.randint(0, 3)
        return self.some(lambda: tuple(range(size)) if self.rng.random() < 0.8 else self.integers())

    def region(self) -> Region:
        def node() -> Node:
            return Node(self.some(self.name), self.fn(), self.some(self.arg), self.kwargs())

        return Region(self.name(), self.some(self.name), self.some(node), self.some(self.name))

    def site(self) -> Site:
        return Site(
            id=self.integer(),
            kind=self.name(),
            module=self.name() if self.flag() else "",
            strategy=self.name(),
            protocol=self.maybe(self.name),
            chunks=self.maybe(self.integer),
            reason=self.name() if self.flag() else "",
            serial_ms=self.maybe(lambda: self.rng.choice(FLOATS[:-1])),
            predicted_ms=self.maybe(lambda: self.rng.choice(FLOATS[:-1])),
        )

    def program(self) -> Program:
        return Program(
            name=self.name(),
            teams=self.some(self.team),
            tables=self.some(lambda: Table(self.name(), self.team_name(), self.integers())),
            params=self.some(lambda: self.buffer(("input", "output"))),
            ops=self.some(self.op, 12),
            results=self.maybe(lambda: self.some(self.arg)),
            regions=self.some(self.region, 2),
            sites=self.some(self.site, 2),
            remarks=self.some(
                lambda: Remark(self.name(), self.name(), self.maybe(self.integer)), 2
            ),
            ranks=self.maybe(self.integers),
            rank=self.maybe(self.integer),
        )
