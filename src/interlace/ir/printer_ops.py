"""How each op, view, buffer type and argument is written; `printer.py` puts them together.

>>> printer = OpPrinter((Team("tp", 4),))
>>> printer.view(View("full").chunk(RankIndex("tp", 1), 4).slice(1, 0, 8))
'full[tp.rank + 1][:, 0:8]'
"""

from __future__ import annotations

import keyword
from collections.abc import Sequence

from interlace.ir.layout import Block, Item
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
    Get,
    Group,
    HostSync,
    Loc,
    Name,
    Notify,
    Op,
    Put,
    Record,
    Recv,
    Send,
    Wait,
)
from interlace.ir.program import Node
from interlace.ir.spelling import accessor, name_or_string, plain, quote, scalar
from interlace.ir.types import Buffer, Dim, Index, Others, RankIndex, TableEntry, Team
from interlace.ir.view import (
    AsStrided,
    Cast,
    Chunk,
    Expand,
    Permute,
    Reshape,
    Select,
    Slice,
    Step,
    View,
)

CALL_KEYWORDS = frozenset({"fn", "out", "mutates", "rng", "kwargs", "site", "loc", "stream"})
"""Keywords of a Call itself; keyword arguments of these names stand in `kwargs=`."""
NODE_KEYWORDS = frozenset({"fn", "kwargs"})
"""The same for the calls of a region."""
SLICED_DIMS = 4
"""Slices of dimensions below this are written in brackets, others with `.slice(...)`."""


class OpPrinter:
    """Writes what stands inside one Program (or, `in_region`, inside a region's body)."""

    def __init__(self, teams: Sequence[Team], in_region: bool = False) -> None:
        self.teams = tuple(teams)
        self.in_region = in_region
        self.sizes = team_sizes(teams)
        self.even = even_parts(teams)

    def statement(self, op: Op) -> tuple[str, Block]:
        """An op's stream (or the name it declares) and the call that follows it."""
        if isinstance(op, Alloc):
            return f"{accessor('buffer', op.buffer.name)} = ", self.alloc(op)
        return f"{accessor('stream', op.stream)}: ", self.op(op, None)

    def op(self, op: Op, group: Group | Fused | None) -> Block:
        """An op as a call; inside another, what it shares with that one is left out."""
        match op:
            case Call():
                name, items = "call", self.call_items(op)
            case Copy(src=src, dst=dst):
                name, items = "copy", [self.view(src), self.view(dst)]
            case Free(buffer=buffer):
                name, items = "free", [name_or_string(buffer)]
            case Record(event=event):
                name, items = "record", [name_or_string(event)]
            case Wait(event=event):
                name, items = "wait", [name_or_string(event)]
            case HostSync():
                name, items = "host_sync", []
            case Collective():
                name, items = self.collective(op)
            case Send(src=src):
                name, items = "send", [self.view(src), *self.peer("peer=", op.peer, op.team)]
                items += self.backend(op.backend)
            case Recv(dst=dst):
                name, items = "recv", [self.view(dst), *self.peer("peer=", op.peer, op.team)]
                items += self.backend(op.backend)
            case Group(ops=members):
                name, items = "group", [self.op(member, op) for member in members]
            case Fused(parts=parts):
                name, items = "fused", [self.part(part, op) for part in parts]
            case Put(src=src, dst=dst):
                name, items = "put", [self.view(src), self.view(dst)]
                items += self.peer("peer=", op.peer, op.team)
            case Get(src=src, dst=dst):
                name, items = "get", [self.view(src)]
                items += [self.view(dst)] if dst is not None else []
                items += self.peer("peer=", op.peer, op.team)
            case Notify(signal=signal):
                name = "notify"
                items = [name_or_string(signal), *self.peer("to=", op.peer, op.team)]
                items += [f"value={op.value}"] if op.value != 1 else []
            case Expect(signal=signal):
                name = "expect"
                items = [name_or_string(signal), *self.peer("", op.peer, op.team)]
                items += [f"value={op.value}"] if op.value != 1 else []
            case _:
                raise TypeError(f"the text has no form for {type(op).__name__}")
        return Block(f"{name}(", [*items, *self.common(op, group)], ")")

    def part(self, part: Sequence[Op], fused: Fused) -> Block:
        return Block("part(", [self.op(member, fused) for member in part], ")")

    def common(self, op: Op, group: Group | Fused | None = None) -> list[Item]:
        """Site and location, and inside another op the stream, where they differ from its own."""
        around = group.loc if group is not None else Loc()
        items: list[Item] = []
        if group is not None and op.stream != group.stream:
            items.append(f"stream={quote(op.stream)}")
        if op.site != (group.site if group else None):
            items.append(f"site={op.site}")
        if (op.loc.module or around.module) and op.loc != around:
            items.append(f"loc={self.loc(op.loc)}")
        return items

    def loc(self, loc: Loc) -> str:
        if not loc.file and not loc.line:
            return quote(loc.module)
        return f"({quote(loc.module)}, {quote(loc.file)}, {loc.line})"

    def alloc(self, op: Alloc) -> Block:
        buffer = op.buffer
        fresh = buffer.kind == "fresh"
        symmetric = buffer.kind == "symmetric" and buffer.team is not None
        default = "fresh" if fresh else "symmetric" if symmetric else "local"
        team = buffer.team if symmetric else None
        items: list[Item] = [self.buffer_type(buffer, default, None, team, stored=False)]
        if team is not None:
            items.append(f"symmetric={name_or_string(team)}")
        if buffer.storage is not None:
            items.append(f"storage={quote(buffer.storage)}")
        if buffer.offset:
            items.append(f"offset={buffer.offset}")
        if op.stream != "main":
            items.append(f"stream={quote(op.stream)}")
        return Block("empty(" if fresh else "alloc(", [*items, *self.common(op)], ")")

    def call_items(self, op: Call) -> list[Item]:
        items: list[Item] = [quote(op.fn), *map(self.arg, op.args)]
        items += self.keywords(op.kwargs, CALL_KEYWORDS)
        outs = [*map(self.view, op.outs), *map(self.declared, op.fresh)]
        if len(outs) == 1 and not op.fresh:
            items.append(f"out={outs[0]}")
        elif outs:
            items.append(Block("out=(", list(outs), ")"))
        items += ["mutates=True"] if op.mutates else []
        items += ["rng=True"] if op.rng else []
        return items

    def declared(self, buffer: Buffer) -> str:
        name = buffer.name if plain(buffer.name) else "fresh"
        return f"{name} := {self.buffer_type(buffer, 'fresh', name)}"

    def keywords(
        self, kwargs: tuple[tuple[str, Arg], ...], taken: frozenset[str] = NODE_KEYWORDS
    ) -> list[Item]:
        """Keyword arguments, all in one `kwargs=` where one could not stand as a keyword."""
        names = [key for key, _ in kwargs]
        if len(set(names)) == len(names) and all(_is_keyword(n) and n not in taken for n in names):
            return [_prefix(f"{key}=", self.arg(value)) for key, value in kwargs]
        pairs = [Block("(", [quote(key), self.arg(value)], ")") for key, value in kwargs]
        return [Block("kwargs=(", list(pairs), ")", lone_comma=True)]

    def collective(self, op: Collective) -> tuple[str, list[Item]]:
        known = op.kind in KINDS
        items: list[Item] = [] if known else [quote(op.kind)]
        if op.src is not None or op.dst is not None:
            items.append("None" if op.src is None else self.view(op.src))
        if op.dst is not None:
            items.append(self.view(op.dst))
        items += [f"reduce={quote(op.reduce)}"] if op.reduce is not None else []
        items += [f"root={self.index(op.root)}"] if op.root is not None else []
        items += [f"splits={name_or_string(op.splits)}"] if op.splits is not None else []
        items.append(f"team={name_or_string(op.team)}")
        return op.kind if known else "collective", [*items, *self.backend(op.backend)]

    def backend(self, backend: str | None) -> list[Item]:
        return [f"backend={quote(backend)}"] if backend is not None else []

    def peer(self, keyword: str, peer: Index | Others, team: str) -> list[Item]:
        """A peer, with the team where the peer does not name it."""
        if isinstance(peer, Others):
            items: list[Item] = [f"{keyword}{accessor('team', peer.team)}.others"]
        else:
            items = [f"{keyword}{self.index(peer)}"]
        named = not isinstance(peer, int) and peer.team == team
        return items if named else [*items, f"team={name_or_string(team)}"]

    def node(self, node: Node, head: str) -> Block:
        """A call in a region's body, after its targets."""
        dotted = all(plain(part) for part in node.fn.split("."))
        items: list[Item] = list(map(self.arg, node.args))
        items += self.keywords(node.kwargs)
        if dotted and node.fn != "call":
            return Block(f"{head}{node.fn}(", items, ")")
        return Block(f"{head}call(", [quote(node.fn), *items], ")")

    def arg(self, value: Arg) -> Item:
        """An argument of a call, or a result."""
        if isinstance(value, View):
            return self.view(value)
        if isinstance(value, Name):
            known = self.in_region and plain(value.name)
            return value.name if known else f"value[{quote(value.name)}]"
        if isinstance(value, tuple):
            return Block("(", [self.arg(item) for item in value], ")", lone_comma=True)
        return scalar(value)

    def index(self, index: Index) -> str:
        if isinstance(index, RankIndex):
            return str(RankIndex(accessor("team", index.team), index.offset))
        return str(index)

    def dim(self, dim: Dim) -> str:
        if isinstance(dim, TableEntry):
            return f"{accessor('table', dim.table)}[{self.index(dim.index)}]"
        return str(dim)

    def view(self, view: View) -> str:
        """A view as the steps that lead to it."""
        bare = plain(view.buffer) and not self.in_region
        root = view.buffer if bare else f"buffer[{quote(view.buffer)}]"
        return root + "".join(map(self.step, view.steps))

    def step(self, step: Step) -> str:
        match step:
            case Chunk(index, parts, dim):
                size = self.sizes.get(index.team) if isinstance(index, RankIndex) else self.even
                if dim == 0 and isinstance(parts, int) and parts == size:
                    return f"[{self.index(index)}]"
                of = name_or_string(parts) if isinstance(parts, str) else str(parts)
                return f".chunk({self.index(index)}, {of}{f', dim={dim}' if dim else ''})"
            case Slice(dim, start, stop):
                if 0 <= dim < SLICED_DIMS:
                    return f"[{':, ' * dim}{self.dim(start)}:{self.dim(stop)}]"
                return f".slice({dim}, {self.dim(start)}, {self.dim(stop)})"
            case Select(dim, index):
                return f".select({dim}, {index})"
            case Permute(dims):
                return f".permute({_listed(dims)})"
            case Reshape(sizes):
                return f".view({_listed(sizes)})"
            case Expand(sizes):
                return f".expand({_listed(sizes)})"
            case Cast(dtype):
                return f".cast({dtype})"
            case AsStrided(sizes, strides, offset):
                return f".as_strided({sizes}, {strides}, {offset})"

    def buffer_type(
        self,
        buffer: Buffer,
        kind: str,
        name: str | None,
        team: str | None = None,
        stored: bool = True,
    ) -> str:
        """Element type and sizes, and what differs from what its place in the text implies."""
        shape = ", ".join(map(self.dim, buffer.shape)) or "()"
        text = f"{buffer.dtype}[{shape}]"
        if buffer.strides is not None:
            text += f".strides({_listed(buffer.strides)})"
        if buffer.kind != kind:
            text += f".kind({quote(buffer.kind)})"
        if buffer.team != team:
            word = "registered" if buffer.registered else "team"
            text += f".{word}({'None' if buffer.team is None else name_or_string(buffer.team)})"
        if stored and (buffer.storage is not None or buffer.offset):
            storage = "None" if buffer.storage is None else quote(buffer.storage)
            text += f".storage({storage}, {buffer.offset})"
        return (
            text if name is None or buffer.name == name else text + f".named({quote(buffer.name)})"
        )


def team_sizes(teams: Sequence[Team]) -> dict[str, int]:
    """Parts that `x[tp.rank]` cuts dimension 0 into, by team."""
    return {team.name: team.size for team in reversed(teams)}


def even_parts(teams: Sequence[Team]) -> int | None:
    """Parts that `x[2]` cuts dimension 0 into: the teams' size, if they all have the same."""
    sizes = {team.size for team in teams}
    return sizes.pop() if len(sizes) == 1 else None


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _is_keyword(name: str) -> bool:
    """Whether `name` can stand before `=` in a call."""
    usable = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    return usable and name != "__debug__"


def _prefix(prefix: str, item: Item) -> Item:
    if isinstance(item, str):
        return prefix + item
    return Block(prefix + item.head, item.items, item.tail, item.lone_comma)
