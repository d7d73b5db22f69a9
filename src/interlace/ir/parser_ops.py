"""Parsing ops: each is a call after its stream, such as `comm: get(full[1], peer=1, team=tp)`.

`FORMS` has a row for each: what it takes, and the method that makes the op of it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from interlace.ir.ops import (
    KINDS,
    Alloc,
    Arg,
    Call,
    Collective,
    Copy,
    Expect,
    Free,
    Fused,
    FusedMember,
    Get,
    Group,
    HostSync,
    Loc,
    Notify,
    Op,
    Put,
    Record,
    Recv,
    Send,
    Wait,
)
from interlace.ir.parser_source import Arguments, Node, Signature
from interlace.ir.parser_types import TypeParser
from interlace.ir.parser_view import ViewParser
from interlace.ir.spelling import did_you_mean
from interlace.ir.types import Buffer, Index, Others
from interlace.ir.view import View


class Common(TypedDict):
    """What every op has, as the text gives it."""

    stream: str
    site: int | None
    loc: Loc


class OpParser(ViewParser, TypeParser):
    """Parses the ops of one Program."""

    def op(self, node: ast.expr, stream: str, group: Common | None = None) -> Op:
        """The op that a call is, on `stream`; inside another op it shares what that has."""
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise self.fail(
                node, "expected an op", "write a call such as copy(x, y) after the stream's name"
            )
        name = node.func.id
        form = FORMS.get(name)
        if form is None:
            fix = did_you_mean(name, FORMS, "ops are")
            if name in ("alloc", "empty"):
                fix = f'write NAME = {name}(...); its stream is an argument: stream="comm"'
            raise self.fail(node.func, f"no op is named {name!r}", fix)
        args = Arguments(self.source, node, name, form.signature)
        return form.make(self, args, self.common(args, node, stream, group))

    def common(
        self, args: Arguments, node: Node, stream: str, group: Common | None = None
    ) -> Common:
        """Stream, site and location of an op."""
        if args.given("stream"):
            stream = self.string(args["stream"])
        site = args.get("site")
        if args.given("site"):
            number = None if site is None else self.integer(site)
        else:
            number = group["site"] if group else None
        if args.given("loc"):
            loc = self.loc(args["loc"])
        else:
            loc = group["loc"] if group and group["loc"].module else self.source.loc(node)
        return Common(stream=stream, site=number, loc=loc)

    def loc(self, node: ast.expr) -> Loc:
        """A location: a module path, or (module path, file, line)."""
        if isinstance(node, ast.Tuple) and len(node.elts) == 3:
            module, file, line = node.elts
            return Loc(self.string(module), self.string(file), self.integer(line))
        return Loc(self.string(node))

    def declaration(self, name: str, node: ast.Call, word: str) -> Alloc:
        """`full = alloc(...)` or `t = empty(...)`."""
        args = Arguments(self.source, node, word, ALLOC)
        kind, team = "fresh" if word == "empty" else "local", None
        symmetric = args.get("symmetric")
        if symmetric is not None:
            kind, team = "symmetric", self.name(symmetric)
        declared = self.declared(args["type"])
        changes = dict(declared.changes)
        storage = args.get("storage")
        if storage is not None:
            changes["storage"] = self.string(storage)
        if args.given("offset"):
            changes["offset"] = self.integer(args["offset"])
        buffer = declared.with_changes(changes).buffer(name, kind, team)
        common = self.common(args, node, "main")
        return Alloc(buffer=buffer, **common)

    def call(self, args: Arguments, at: Common) -> Op:
        outs: list[View] = []
        fresh: list[Buffer] = []
        for node in self.items(args.bound.get("out")):
            if isinstance(node, ast.NamedExpr):  # a buffer that the call makes: t := f32[8, 4]
                fresh.append(self.declared(node.value).buffer(node.target.id, "fresh"))
            else:
                outs.append(self.view(node))
        return Call(
            fn=self.string(args["fn"]),
            args=tuple(map(self.arg, args.rest)),
            kwargs=self.kwargs(args),
            outs=tuple(outs),
            fresh=tuple(fresh),
            mutates=self.flag(args, "mutates"),
            rng=self.flag(args, "rng"),
            **at,
        )

    def items(self, node: ast.expr | None) -> list[ast.expr]:
        """The members of a tuple, or the one thing that stands for a tuple of one."""
        if node is None:
            return []
        return list(node.elts) if isinstance(node, ast.Tuple | ast.List) else [node]

    def flag(self, args: Arguments, name: str) -> bool:
        """A keyword that is True or False."""
        node = args.bound.get(name)
        if node is None:
            return False
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            return node.value
        raise self.fail(node, f"{name} is a flag", f"write {name}=True")

    def kwargs(self, args: Arguments) -> tuple[tuple[str, Arg], ...]:
        """Keyword arguments, where they stand as keywords and where they stand in `kwargs=`."""
        found = [(key, self.arg(node)) for key, node in args.others]
        for pair in self.items(args.bound.get("kwargs")):
            if not (isinstance(pair, ast.Tuple) and len(pair.elts) == 2):
                raise self.fail(pair, "expected a pair", 'write kwargs=(("name", value),)')
            found.append((self.string(pair.elts[0]), self.arg(pair.elts[1])))
        return tuple(found)

    def team(self, args: Arguments, peer: Index | Others | None) -> str:
        """The team of an op: as given, or the peer's, or the only one there is."""
        node = args.get("team")
        if node is not None:
            return self.name(node)
        if peer is not None and not isinstance(peer, int):
            return peer.team
        if len(self.sizes) == 1:
            return next(iter(self.sizes))
        raise self.fail(args.call, "it is unclear which team this is for", "add team=NAME")

    def rank_and_team(self, args: Arguments) -> tuple[Index, str]:
        """The peer of a transfer, and its team."""
        peer = self.index(args["peer"])
        return peer, self.team(args, peer)

    def backend(self, args: Arguments) -> str | None:
        """The backend of an op, if it is given."""
        node = args.get("backend")
        return None if node is None else self.string(node)

    def optional_view(self, args: Arguments, name: str) -> View | None:
        """A view that may be None or absent."""
        node = args.get(name)
        return None if node is None else self.view(node)

    def collective(self, args: Arguments, at: Common) -> Op:
        """A collective; its kind is the call's name, or the first argument of `collective(...)`."""
        func = args.call.func
        assert isinstance(func, ast.Name)
        kind = func.id if func.id in KINDS else self.string(args["kind"])
        reduce, root, splits = args.get("reduce"), args.get("root"), args.get("splits")
        return Collective(
            kind=kind,
            src=self.optional_view(args, "src"),
            dst=self.optional_view(args, "dst"),
            reduce=None if reduce is None else self.string(reduce),
            root=None if root is None else self.index(root),
            splits=None if splits is None else self.name(splits),
            team=self.team(args, None),
            backend=self.backend(args),
            **at,
        )

    def copy(self, args: Arguments, at: Common) -> Op:
        src, dst = self.view(args["src"]), self.view(args["dst"])
        return Copy(src=src, dst=dst, **at)

    def free(self, args: Arguments, at: Common) -> Op:
        return Free(buffer=self.name(args["buffer"]), **at)

    def record(self, args: Arguments, at: Common) -> Op:
        return Record(event=self.name(args["event"]), **at)

    def wait(self, args: Arguments, at: Common) -> Op:
        return Wait(event=self.name(args["event"]), **at)

    def host_sync(self, args: Arguments, at: Common) -> Op:
        return HostSync(**at)

    def send(self, args: Arguments, at: Common) -> Op:
        peer, team = self.rank_and_team(args)
        return Send(
            src=self.view(args["src"]),
            peer=peer,
            team=team,
            backend=self.backend(args),
            **at,
        )

    def recv(self, args: Arguments, at: Common) -> Op:
        peer, team = self.rank_and_team(args)
        return Recv(
            dst=self.view(args["dst"]),
            peer=peer,
            team=team,
            backend=self.backend(args),
            **at,
        )

    def group(self, args: Arguments, at: Common) -> Op:
        members: list[Send | Recv] = []
        for node in args.rest:
            member = self.op(node, at["stream"], at)
            if not isinstance(member, Send | Recv):
                raise self.fail(
                    node, "a group holds sends and receives only", "give it a statement of its own"
                )
            members.append(member)
        return Group(ops=tuple(members), **at)

    def fused(self, args: Arguments, at: Common) -> Op:
        return Fused(parts=tuple(self.part(node, at) for node in args.rest), **at)

    def part(self, node: ast.expr, at: Common) -> tuple[FusedMember, ...]:
        call = node if isinstance(node, ast.Call) else None
        if call is None or not (isinstance(call.func, ast.Name) and call.func.id == "part"):
            raise self.fail(node, "expected a part", "write fused(part(...), part(...))")
        members: list[FusedMember] = []
        for item in Arguments(self.source, call, "part", PART).rest:
            member = self.op(item, at["stream"], at)
            if not isinstance(member, FusedMember):
                raise self.fail(
                    item,
                    "a part holds calls, waits, expects, records and notifies only",
                    "give it a statement of its own",
                )
            members.append(member)
        return tuple(members)

    def put(self, args: Arguments, at: Common) -> Op:
        peer, team = self.rank_and_team(args)
        src, dst = self.view(args["src"]), self.view(args["dst"])
        return Put(src=src, dst=dst, peer=peer, team=team, **at)

    def get_(self, args: Arguments, at: Common) -> Op:
        peer, team = self.rank_and_team(args)
        src, dst = self.view(args["src"]), self.optional_view(args, "dst")
        return Get(src=src, dst=dst, peer=peer, team=team, **at)

    def notify(self, args: Arguments, at: Common) -> Op:
        signal, peer, team, value = self.signal(args, "to")
        return Notify(
            signal=signal,
            peer=peer,
            team=team,
            value=value,
            **at,
        )

    def expect(self, args: Arguments, at: Common) -> Op:
        signal, peer, team, value = self.signal(args, "peer")
        return Expect(
            signal=signal,
            peer=peer,
            team=team,
            value=value,
            **at,
        )

    def signal(self, args: Arguments, key: str) -> tuple[str, Index | Others, str, int]:
        """Signal, peer, team and value of a Notify or an Expect."""
        peer = self.peer(args[key])
        value = self.integer(args["value"]) if args.given("value") else 1
        return self.name(args["signal"]), peer, self.team(args, peer), value


@dataclass(frozen=True, slots=True)
class Form:
    """How an op is written, and what makes it."""

    signature: Signature
    make: Callable[[OpParser, Arguments, Common], Op]


_COMMON = ("site", "loc", "stream")
_REMOTE = ("team", *_COMMON)
_COLLECTIVE = ("reduce", "root", "splits", "team", "backend", *_COMMON)
_KIND = ("kind", "src", "dst")

PART = Signature((), (), rest=True)
ALLOC = Signature(("type",), ("symmetric", "storage", "offset", *_COMMON), ("type",))
FORMS: dict[str, Form] = {
    "call": Form(
        Signature(
            ("fn",),
            ("out", "mutates", "rng", "kwargs", *_COMMON),
            ("fn",),
            rest=True,
            any_keyword=True,
        ),
        OpParser.call,
    ),
    "copy": Form(Signature(("src", "dst"), _COMMON, ("src", "dst")), OpParser.copy),
    "free": Form(Signature(("buffer",), _COMMON, ("buffer",)), OpParser.free),
    "record": Form(Signature(("event",), _COMMON, ("event",)), OpParser.record),
    "wait": Form(Signature(("event",), _COMMON, ("event",)), OpParser.wait),
    "host_sync": Form(Signature((), _COMMON), OpParser.host_sync),
    **{kind: Form(Signature(("src", "dst"), _COLLECTIVE), OpParser.collective) for kind in KINDS},
    "collective": Form(Signature(_KIND, _COLLECTIVE, ("kind",)), OpParser.collective),
    "send": Form(Signature(("src", "peer"), ("backend", *_REMOTE), ("src", "peer")), OpParser.send),
    "recv": Form(Signature(("dst", "peer"), ("backend", *_REMOTE), ("dst", "peer")), OpParser.recv),
    "group": Form(Signature((), _COMMON, rest=True), OpParser.group),
    "fused": Form(Signature((), _COMMON, rest=True), OpParser.fused),
    "put": Form(Signature(("src", "dst", "peer"), _REMOTE, ("src", "dst", "peer")), OpParser.put),
    "get": Form(Signature(("src", "dst"), ("peer", *_REMOTE), ("src", "peer")), OpParser.get_),
    "notify": Form(
        Signature(("signal", "to"), ("value", *_REMOTE), ("signal", "to")), OpParser.notify
    ),
    "expect": Form(
        Signature(("signal", "peer"), ("value", *_REMOTE), ("signal", "peer")), OpParser.expect
    ),
}
"""The ops by the name that the text gives them."""
