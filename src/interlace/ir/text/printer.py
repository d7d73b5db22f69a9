"""The printer: a Program as text that the parser reads back to an equal Program.

    >>> print(program)
    def ring(tp: Team[4], x: f32[8, 4], y: out[f32[8, 4]]):
        main: copy(x, y)

Only what differs from its default is written, so the text of a schedule stays short; line and file
of an op are not (the parser sets them to the text's own), unless the op has a module path.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from interlace.ir.fields import FieldForm, form_of
from interlace.ir.ops import Alloc, Arg, Call, FusedKernel, Loc, Name, Op
from interlace.ir.program import Node, Program, Region, Remark, Site
from interlace.ir.sizes import Size
from interlace.ir.text.spelling import accessor, name_or_string, plain, quote, scalar
from interlace.ir.types import (
    Buffer,
    Dim,
    Index,
    Others,
    RankIndex,
    TableEntry,
    Team,
    even_parts,
    team_sizes,
)
from interlace.ir.view import Chunk, Slice, Step, View

Tag = tuple[str, int]
"""Subject of a line: a family, and the place in the Program's tuple of that family."""

CALL_KEYWORDS = frozenset({"fn", "out", "mutates", "rng", "kwargs", "site", "loc", "stream"})
"""Keywords of a Call itself; keyword arguments of these names stand in `kwargs=`."""
NODE_KEYWORDS = frozenset({"fn", "kwargs"})
"""The same for the calls of a region."""
SLICED_DIMS = 4
"""Slices of dimensions below this are written in brackets, others with `.slice(...)`."""
WIDTH = 120
"""Columns of a line of the text."""


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of a Program's text, and what it stands for."""

    text: str
    tag: Tag


def print_program(program: Program) -> str:
    """The text of a Program. `parse(print_program(p)) == p`."""
    return "\n".join(line.text for line in print_lines(program))


def print_set(programs: Iterable[Program]) -> str:
    """The text of a set of Programs, such as a pipeline's stages: the content of a file."""
    return "\n\n\n".join(map(print_program, programs)) + "\n"


def print_op(op: Op, program: Program) -> str:
    """One op of `program` on one line, as messages and traces show it."""
    return flat(Printer(program.teams).statement(op))


def print_view(view: View, program: Program | None = None) -> str:
    """A view as the text writes it, such as `full[tp.rank + 1]`."""
    return Printer(program.teams if program else ()).view(view)


def print_lines(program: Program) -> list[TextLine]:
    """The lines of a Program's text, each with what it stands for."""
    return _ProgramPrinter(program).lines()


class Printer:
    """Writes what stands inside one Program (or, `in_region`, inside a region's body)."""

    def __init__(self, teams: Sequence[Team], in_region: bool = False) -> None:
        self.in_region = in_region
        self.sizes = team_sizes(teams)
        self.even = even_parts(teams)
        self.one: dict[str, Callable[[Any], Item]] = {
            **{"string": quote, "name": name_or_string, "table": name_or_string, "dtype": str},
            **{"integer": str, "integers": str, "flag": str, "real": scalar, "parts": _parts},
            **{"size": str, "sizes": str},
            **{"view": self.view, "index": self.index, "peer": self.peer, "dim": self.dim},
            **{"arg": self.arg, "kernel": self.kernel},
        }
        """Writes the value of a field, by its role."""
        self.several: dict[str, Callable[[Any, FieldForm], Iterable[Item]]] = {
            **{"team": self.team, "member": self.members, "part": self.parts},
            **{"keywords": self.keywords, "outs": self.outs, "fresh": lambda op, field: ()},
        }
        """Writes a field of an op that is no argument, one, or several, by its role."""

    def statement(self, op: Op) -> TextBlock:
        """An op after its stream, or after the name that it declares."""
        if isinstance(op, Alloc):
            return self.alloc(op).after(f"{accessor('buffer', op.buffer.name)} = ")
        return self.op(op).after(f"{accessor('stream', op.stream)}: ")

    def op(self, op: Op, within: Op | None = None) -> TextBlock:
        """An op as a call; inside another, what it shares with that one is left out."""
        word, items = self.call(op)
        return TextBlock(f"{word}(", items + self.common(op, within), ")")

    def call(self, thing: Op | Site | Remark | Step | FusedKernel) -> tuple[str, list[Item]]:
        """The word and the arguments that a dataclass is written with."""
        form = form_of(type(thing)).of(thing)
        items: list[Item] = []
        skipped = 0
        for field in form.fields:
            value = getattr(thing, field.name)
            if not field.required and value == field.default and not field.how.always:
                skipped += field.positional
                continue
            several = self.several.get(field.role)
            if several is not None:
                items += several(thing, field)
                continue
            write = self.one[field.role]
            if field.how.rest:
                items += map(write, value)
            elif field.prefix:
                items.append(prefixed(field.prefix, write(value)))
            else:
                items += ["None"] * skipped
                items.append(write(value))
                skipped = 0
        return form.word, items

    def common(self, op: Op, within: Op | None = None) -> list[Item]:
        """Site and location, and inside another op the stream, where they differ from its own."""
        around = within.loc if within is not None else Loc()
        items: list[Item] = []
        if within is not None and op.stream != within.stream:
            items.append(f"stream={quote(op.stream)}")
        if op.site != (within.site if within else None):
            items.append(f"site={op.site}")
        if (op.loc.module or around.module) and op.loc != around:
            items.append(f"loc={self.loc(op.loc)}")
        return items

    def loc(self, loc: Loc) -> str:
        if not loc.file and not loc.line:
            return quote(loc.module)
        return f"({quote(loc.module)}, {quote(loc.file)}, {loc.line})"

    def alloc(self, op: Alloc) -> TextBlock:
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
        if buffer.offset != 0:
            items.append(f"offset={buffer.offset}")
        if op.stream != "main":
            items.append(f"stream={quote(op.stream)}")
        return TextBlock("empty(" if fresh else "alloc(", [*items, *self.common(op)], ")")

    def team(self, op: Any, field: FieldForm) -> list[Item]:
        """The team, where the op's peer does not name it."""
        team: str = getattr(op, field.name)
        peer: object = getattr(op, field.implied_by) if field.implied_by else None
        implied = isinstance(peer, RankIndex | Others) and peer.team == team
        return [] if implied else [f"team={name_or_string(team)}"]

    def members(self, op: Op, field: FieldForm) -> list[Item]:
        return [self.op(member, op) for member in getattr(op, field.name)]

    def parts(self, op: Op, field: FieldForm) -> list[Item]:
        parts: Iterable[Iterable[Op]] = getattr(op, field.name)
        return [TextBlock("part(", [self.op(member, op) for member in part], ")") for part in parts]

    def kernel(self, kernel: FusedKernel) -> TextBlock:
        word, items = self.call(kernel)
        return TextBlock(f"{word}(", items, ")")

    def outs(self, op: Call, field: FieldForm) -> list[Item]:
        """The views that a call fills and the buffers that it makes, in one `out=`."""
        if len(op.outs) == 1 and not op.fresh:
            return [f"out={self.view(op.outs[0])}"]
        items: list[Item] = [*map(self.view, op.outs), *map(self.declared, op.fresh)]
        return [TextBlock("out=(", items, ")")] if items else []

    def declared(self, buffer: Buffer) -> str:
        name = buffer.name if plain(buffer.name) else "fresh"
        return f"{name} := {self.buffer_type(buffer, 'fresh', name)}"

    def keywords(self, op: Call | Node, field: FieldForm | None = None) -> list[Item]:
        """Keyword arguments, all in one `kwargs=` where one could not stand as a keyword."""
        taken = CALL_KEYWORDS if isinstance(op, Call) else NODE_KEYWORDS
        kwargs = op.kwargs
        names = [key for key, _ in kwargs]
        if len(set(names)) == len(names) and all(_is_keyword(n) and n not in taken for n in names):
            return [prefixed(f"{key}=", self.arg(value)) for key, value in kwargs]
        pairs = [TextBlock("(", [quote(key), self.arg(value)], ")") for key, value in kwargs]
        return [TextBlock("kwargs=(", list(pairs), ")", lone_comma=True)]

    def node(self, node: Node, head: str) -> TextBlock:
        """A call in a region's body, after its targets."""
        dotted = all(plain(part) for part in node.fn.split("."))
        items = [*map(self.arg, node.args), *self.keywords(node)]
        if dotted and node.fn != "call":
            return TextBlock(f"{head}{node.fn}(", items, ")")
        return TextBlock(f"{head}call(", [quote(node.fn), *items], ")")

    def arg(self, value: Arg) -> Item:
        """An argument of a call, or a result."""
        if isinstance(value, View):
            return self.view(value)
        if isinstance(value, Name):
            known = self.in_region and plain(value.name)
            return value.name if known else f"value[{quote(value.name)}]"
        if isinstance(value, tuple):
            return TextBlock("(", [self.arg(item) for item in value], ")", lone_comma=True)
        return str(value) if isinstance(value, Size) else scalar(value)

    def index(self, index: Index) -> str:
        if isinstance(index, RankIndex):
            return str(RankIndex(accessor("team", index.team), index.offset))
        return str(index)

    def peer(self, peer: Index | Others) -> str:
        if isinstance(peer, Others):
            return f"{accessor('team', peer.team)}.others"
        return self.index(peer)

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
        """A step in brackets where it is a chunk or a slice that can be, else as a method."""
        if isinstance(step, Chunk):
            index = step.index
            size = self.sizes.get(index.team) if isinstance(index, RankIndex) else self.even
            if step.dim == 0 and isinstance(step.parts, int) and step.parts == size:
                return f"[{self.index(index)}]"
        elif isinstance(step, Slice) and 0 <= step.dim < SLICED_DIMS:
            return f"[{':, ' * step.dim}{self.dim(step.start)}:{self.dim(step.stop)}]"
        word, items = self.call(step)
        return f".{word}({', '.join(map(flat, items))})"

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
            text += f".strides({', '.join(map(str, buffer.strides))})"
        if buffer.kind != kind:
            text += f".kind({quote(buffer.kind)})"
        if buffer.team != team:
            word = "registered" if buffer.registered else "team"
            text += f".{word}({'None' if buffer.team is None else name_or_string(buffer.team)})"
        if stored and (buffer.storage is not None or buffer.offset != 0):
            storage = "None" if buffer.storage is None else quote(buffer.storage)
            text += f".storage({storage}, {buffer.offset})"
        return text if name is None or buffer.name == name else text + _named(buffer.name)


class _ProgramPrinter(Printer):
    def __init__(self, program: Program) -> None:
        super().__init__(program.teams)
        self.program = program
        self.out: list[TextLine] = []

    def lines(self) -> list[TextLine]:
        program = self.program
        self.header()
        start = len(self.out)
        if program.ranks is not None:
            self.line("ranks", map(str, program.ranks), ("ranks", 0))
        if program.rank is not None:
            self.line("rank", [str(program.rank)], ("ranks", 0))
        if assumed := program.sizes.assumptions():
            self.line("assume", assumed, ("ranks", 0))
        for i, table in enumerate(program.tables):
            target = accessor("table", table.name)
            values = [name_or_string(table.team), *map(str, table.values)]
            self.line(f"{target} = table", values, ("table", i))
        for i, site in enumerate(program.sites):
            self.line(*self.call(site), ("site", i))
        for i, remark in enumerate(program.remarks):
            self.line(*self.call(remark), ("remark", i))
        for i, region in enumerate(program.regions):
            self.region(region, ("region", i))
        for i, op in enumerate(program.ops):
            self.emit(self.statement(op), ("op", i))
        if program.results is not None:
            self.emit(self.returned(program.results), ("results", 0))
        if len(self.out) == start:
            self.emit("pass", ("pass", 0))
        return self.out

    def emit(self, item: Item, tag: Tag, indent: int = 4) -> None:
        self.out += [TextLine(text, tag) for text in layout(item, indent)]

    def line(self, word: str, items: Iterable[Item], tag: Tag) -> None:
        self.emit(TextBlock(f"{word}(", list(items), ")"), tag)

    def header(self) -> None:
        name = self.program.name
        if not plain(name):
            self.emit(f"@named({quote(name)})", ("header", 0), indent=0)
        items = [self.team_parameter(i, team) for i, team in enumerate(self.program.teams)]
        items += [f"{size.name}: Size[{size.value}]" for size in self.program.sizes.sizes]
        items += [self.parameter(i, buffer) for i, buffer in enumerate(self.program.params)]
        head = f"def {name if plain(name) else 'program'}("
        self.emit(TextBlock(head, list(items), "):"), ("header", 0), indent=0)

    def team_parameter(self, i: int, team: Team) -> str:
        name, suffix = (team.name, "") if plain(team.name) else (f"team_{i}", _named(team.name))
        groups = team.groups
        if groups is None:
            kind = f"Team[{team.size}]"
        elif groups and all(len(group) == team.size for group in groups):
            kind = f"Team[{_lists(groups)}]"
        else:
            kind = f"Team[{team.size}].over({_lists(groups)})"
        if team.hosts is not None:
            kind += f".on({_lists(team.hosts)})"
        return f"{name}: {kind}{suffix}"

    def parameter(self, i: int, buffer: Buffer) -> str:
        name = buffer.name if plain(buffer.name) else f"param_{i}"
        if buffer.kind == "output":
            return f"{name}: out[{self.buffer_type(buffer, 'output', name)}]"
        return f"{name}: {self.buffer_type(buffer, 'input', name)}"

    def returned(self, results: tuple[Arg, ...]) -> Item:
        items = [self.arg(result) for result in results]
        if not items:
            return "return ()"
        if len(items) == 1:
            lone = isinstance(results[0], tuple)
            if lone:
                return TextBlock("return (", items, ")", lone_comma=True)
            return prefixed("return ", items[0])
        bare = ", ".join(map(flat, items))
        return f"return {bare}" if len(bare) < 100 else TextBlock("return (", items, ")")

    def region(self, region: Region, tag: Tag) -> None:
        name = region.name
        self.emit("@region" if plain(name) else f"@region({quote(name)})", tag)
        inputs: list[Item] = [
            value if plain(value) else f"input_{i}: {quote(value)}"
            for i, value in enumerate(region.inputs)
        ]
        head = f"def {name if plain(name) else 'region'}("
        self.emit(TextBlock(head, inputs, "):"), tag)
        body = Printer(self.program.teams, in_region=True)
        for node in region.body:
            targets = ", ".join(accessor("value", out) for out in node.outs)
            head = f"{targets} = " if targets else ""
            self.emit(body.node(node, head), tag, indent=8)
        outputs = [accessor("value", value) for value in region.outputs]
        self.emit(f"return {', '.join(outputs) or '()'}", tag, indent=8)


@dataclass(frozen=True)
class TextBlock:
    """Items between an opening and a closing text, such as a call with its arguments."""

    head: str
    items: list[Item]
    tail: str
    lone_comma: bool = False
    """A comma after a single item, as Python writes a tuple of one."""

    @cached_property
    def flat(self) -> str:
        """All on one line."""
        comma = "," if self.lone_comma and len(self.items) == 1 else ""
        return f"{self.head}{', '.join(map(flat, self.items))}{comma}{self.tail}"

    def after(self, prefix: str) -> TextBlock:
        """The same after some text."""
        return TextBlock(prefix + self.head, self.items, self.tail, self.lone_comma)


Item = str | TextBlock


def prefixed(prefix: str, item: Item) -> Item:
    """The item after some text."""
    return prefix + item if isinstance(item, str) else item.after(prefix)


def flat(item: Item) -> str:
    """The item on one line."""
    return item if isinstance(item, str) else item.flat


def layout(item: Item, indent: int) -> list[str]:
    """The item's lines, at most `WIDTH` columns each where its parts allow."""
    pad, text = " " * indent, flat(item)
    if isinstance(item, str) or not item.items or indent + len(text) <= WIDTH:
        return [pad + text]
    lines = [pad + item.head]
    inner, filled = " " * (indent + 4), ""
    for part in item.items:
        words = flat(part) + ","
        if filled and len(inner) + len(filled) + 1 + len(words) <= WIDTH:
            filled += " " + words
            continue
        if filled:
            lines.append(inner + filled)
        filled = words
        if isinstance(part, TextBlock) and len(inner) + len(words) > WIDTH:
            *before, last = layout(part, indent + 4)
            lines += before
            lines.append(last + ",")
            filled = ""
    if filled:
        lines.append(inner + filled)
    return [*lines, pad + item.tail]


def _lists(groups: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(list(group)) for group in groups)


def _named(name: str) -> str:
    """The real name of what the text can only give an identifier."""
    return f".named({quote(name)})"


def _parts(parts: int | str) -> str:
    return name_or_string(parts) if isinstance(parts, str) else str(parts)


def _is_keyword(name: str) -> bool:
    """True if `name` can stand before `=` in a call."""
    usable = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    return usable and name != "__debug__"
