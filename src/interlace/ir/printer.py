"""The printer: a Program as text that the parser reads back to an equal Program.

    >>> print(program)
    def ring(tp: Team[4], x: f32[8, 4], y: out[f32[8, 4]]):
        main: copy(x, y)

Only what differs from its default is written, so the text of a schedule stays short; line and file
of an op are not (the parser sets them to the text's own), unless the op has a module path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from interlace.ir.layout import Block, Item, layout
from interlace.ir.ops import Arg, Op
from interlace.ir.printer_ops import OpPrinter
from interlace.ir.program import Program, Region, Remark, Site
from interlace.ir.spelling import accessor, name_or_string, plain, quote, scalar
from interlace.ir.types import Buffer, Team
from interlace.ir.view import View

Tag = tuple[str, int]
"""What a line stands for: a family, and the place in the Program's tuple of that family."""


@dataclass(frozen=True, slots=True)
class Line:
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
    head, item = OpPrinter(program.teams).statement(op)
    return head + (item if isinstance(item, str) else item.flat)


def print_view(view: View, program: Program | None = None) -> str:
    """A view as the text writes it, such as `full[tp.rank + 1]`."""
    return OpPrinter(program.teams if program else ()).view(view)


def print_lines(program: Program) -> list[Line]:
    """The lines of a Program's text, each with what it stands for."""
    return _ProgramPrinter(program).lines()


class _ProgramPrinter(OpPrinter):
    def __init__(self, program: Program) -> None:
        super().__init__(program.teams)
        self.program = program
        self.out: list[Line] = []

    def lines(self) -> list[Line]:
        program = self.program
        self.header()
        start = len(self.out)
        if program.ranks is not None:
            self.call("ranks", map(str, program.ranks), ("ranks", 0))
        if program.rank is not None:
            self.call("rank", [str(program.rank)], ("ranks", 0))
        for i, table in enumerate(program.tables):
            target = accessor("table", table.name)
            values = [name_or_string(table.team), *map(str, table.values)]
            self.call(f"{target} = table", values, ("table", i))
        for i, site in enumerate(program.sites):
            self.call("site", self.site(site), ("site", i))
        for i, remark in enumerate(program.remarks):
            self.call("remark", self.remark(remark), ("remark", i))
        for i, region in enumerate(program.regions):
            self.region(region, ("region", i))
        for i, op in enumerate(program.ops):
            head, item = self.statement(op)
            self.emit(Block(head + item.head, item.items, item.tail), ("op", i))
        if program.results is not None:
            self.emit(self.returned(program.results), ("results", 0))
        if len(self.out) == start:
            self.emit("pass", ("pass", 0))
        return self.out

    def emit(self, item: Item, tag: Tag, indent: int = 4) -> None:
        self.out += [Line(text, tag) for text in layout(item, indent)]

    def call(self, name: str, items: Iterable[Item], tag: Tag) -> None:
        self.emit(Block(f"{name}(", list(items), ")"), tag)

    def header(self) -> None:
        name = self.program.name
        if not plain(name):
            self.emit(f"@named({quote(name)})", ("header", 0), indent=0)
        items = [self.team_parameter(i, team) for i, team in enumerate(self.program.teams)]
        items += [self.parameter(i, buffer) for i, buffer in enumerate(self.program.params)]
        head = f"def {name if plain(name) else 'program'}("
        self.emit(Block(head, list(items), "):"), ("header", 0), indent=0)

    def team_parameter(self, i: int, team: Team) -> str:
        name, suffix = (team.name, "") if plain(team.name) else (f"team_{i}", named(team.name))
        groups = team.groups
        if groups is None:
            kind = f"Team[{team.size}]"
        elif groups and all(len(group) == team.size for group in groups):
            kind = f"Team[{', '.join(str(list(group)) for group in groups)}]"
        else:
            kind = f"Team[{team.size}].over({', '.join(str(list(group)) for group in groups)})"
        return f"{name}: {kind}{suffix}"

    def parameter(self, i: int, buffer: Buffer) -> str:
        name = buffer.name if plain(buffer.name) else f"param_{i}"
        if buffer.kind == "output":
            return f"{name}: out[{self.buffer_type(buffer, 'output', name)}]"
        return f"{name}: {self.buffer_type(buffer, 'input', name)}"

    def site(self, site: Site) -> list[Item]:
        items: list[Item] = [str(site.id), quote(site.kind)]
        if site.module:
            items.append(quote(site.module))
        items.append(f"strategy={quote(site.strategy)}")
        if site.protocol is not None:
            items.append(f"protocol={quote(site.protocol)}")
        if site.chunks is not None:
            items.append(f"chunks={site.chunks}")
        if site.reason:
            items.append(f"reason={quote(site.reason)}")
        if site.serial_ms is not None:
            items.append(f"serial_ms={scalar(site.serial_ms)}")
        if site.predicted_ms is not None:
            items.append(f"predicted_ms={scalar(site.predicted_ms)}")
        return items

    def remark(self, remark: Remark) -> list[Item]:
        items: list[Item] = [quote(remark.pass_name), quote(remark.text)]
        return items if remark.site is None else [*items, f"site={remark.site}"]

    def returned(self, results: tuple[Arg, ...]) -> Item:
        items = [self.arg(result) for result in results]
        if not items:
            return "return ()"
        if len(items) == 1:
            lone = isinstance(results[0], tuple)
            return Block("return (", items, ")", lone_comma=True) if lone else _prefixed(items[0])
        bare = ", ".join(item if isinstance(item, str) else item.flat for item in items)
        return f"return {bare}" if len(bare) < 100 else Block("return (", items, ")")

    def region(self, region: Region, tag: Tag) -> None:
        name = region.name
        self.emit("@region" if plain(name) else f"@region({quote(name)})", tag)
        inputs: list[Item] = [
            value if plain(value) else f"input_{i}: {quote(value)}"
            for i, value in enumerate(region.inputs)
        ]
        head = f"def {name if plain(name) else 'region'}("
        self.emit(Block(head, inputs, "):"), tag)
        body = OpPrinter(self.teams, in_region=True)
        for node in region.body:
            targets = ", ".join(accessor("value", out) for out in node.outs)
            head = f"{targets} = " if targets else ""
            self.emit(body.node(node, head), tag, indent=8)
        outputs = [accessor("value", value) for value in region.outputs]
        self.emit(f"return {', '.join(outputs) or '()'}", tag, indent=8)


def _prefixed(item: Item) -> Item:
    if isinstance(item, str):
        return f"return {item}"
    return Block(f"return {item.head}", item.items, item.tail, item.lone_comma)


def named(name: str) -> str:
    """The real name of what the text can only give an identifier."""
    return f".named({quote(name)})"
