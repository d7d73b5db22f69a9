"""The printer: a Program as text that the parser reads back to an equal Program.

    >>> print(program)
    def ring(tp: Team[4], x: f32[8, 4], y: out[f32[8, 4]]):
        main: copy(x, y)

Only what differs from its default is written, so the text of a schedule stays short; line and file
of an op are not (the parser sets them to the text's own), unless the op has a module path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.ir.ops import Alloc, Arg, FusedKernel, Loc, Op
from interlace.ir.program import Node, Program, Region, Remark, Site
from interlace.ir.roles import ARG, VIEW, form_of, write_type
from interlace.ir.text.spelling import (
    Item,
    TextBlock,
    accessor,
    flat,
    layout,
    plain,
    prefixed,
    quote,
    real_name,
)
from interlace.ir.types import Buffer, Table, Team, even_parts, team_sizes
from interlace.ir.view import Step, View

Tag = tuple[str, int]
"""Subject of a line: a family, and the place in the Program's tuple of that family."""


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of a Program's text, and what it stands for."""

    text: str
    tag: Tag


def print_program(program: Program) -> str:
    """The text of a Program. `parse(print_program(p)) == p`."""
    return "\n".join(line.text for line in print_lines(program))


def print_behavior(program: Program, printed: dict[int, str]) -> str:
    """A text of all but sites, remarks and where ops come from, by which Programs are compared.

    Each op is one line. `printed` gets those lines by the identity of the op, and spares another
    Program that shares ops to print them again.
    """
    printer = _ProgramPrinter(program.replace(sites=(), remarks=(), ops=()))
    writer = Printer(program.teams, is_bare=True)
    lines = [line.text for line in printer.lines()]
    for op in program.ops:
        line = printed.get(id(op))
        if line is None:
            line = printed[id(op)] = flat(writer.statement(op))
        lines.append(line)
    return "\n".join(lines)


def print_set(programs: Iterable[Program]) -> str:
    """The text of a set of Programs, such as a pipeline's stages: the content of a file."""
    return "\n\n\n".join(map(print_program, programs)) + "\n"


def print_op(op: Op, program: Program) -> str:
    """One op of `program` on one line, as messages and traces show it."""
    return flat(Printer(program.teams).statement(op))


def print_view(view: View, program: Program | None = None) -> str:
    """A view as the text writes it, such as `full[tp.rank + 1]`."""
    return VIEW.write(Printer(program.teams if program else ()), view)


def print_lines(program: Program) -> list[TextLine]:
    """The lines of a Program's text, each with what it stands for."""
    return _ProgramPrinter(program).lines()


class Printer:
    """Writes what stands inside one Program (or, `in_region`, inside a region's body); if
    `is_bare`, without the site and the location of ops."""

    def __init__(
        self, teams: Sequence[Team], in_region: bool = False, is_bare: bool = False
    ) -> None:
        self.in_region, self.is_bare = in_region, is_bare
        self.sizes = team_sizes(teams)
        self.even = even_parts(teams)

    def statement(self, op: Op) -> TextBlock:
        """An op after its stream, or after the name that it declares."""
        if isinstance(op, Alloc):
            return self.alloc(op).after(f"{accessor('buffer', op.buffer.name)} = ")
        return self.op(op).after(f"{accessor('stream', op.stream)}: ")

    def op(self, op: Op, within: Op | None = None) -> TextBlock:
        """An op as a call; inside another, what it shares with that one is left out."""
        word, items = self.call(op)
        return TextBlock(f"{word}(", items + self.common(op, within), ")")

    def call(
        self, thing: Op | Node | Site | Remark | Table | Step | FusedKernel
    ) -> tuple[str, list[Item]]:
        """The word and the arguments that a dataclass is written with."""
        form = form_of(type(thing)).of(thing)
        items: list[Item] = []
        skipped = 0
        for field in form.fields:
            if field.omitted(getattr(thing, field.name)):
                skipped += field.positional
                continue
            if not field.prefix:
                items += ["None"] * skipped
                skipped = 0
            items += field.role.write_field(self, thing, field)
        return form.word, items

    def common(self, op: Op, within: Op | None = None) -> list[Item]:
        """Site and location, where they differ from those of the op around it."""
        items: list[Item] = []
        if self.is_bare:
            return items
        around = within.loc if within is not None else Loc()
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
        _, items = self.call(op)
        if op.stream != "main":
            items.append(f"stream={quote(op.stream)}")
        head = "empty(" if op.buffer.kind == "fresh" else "alloc("
        return TextBlock(head, [*items, *self.common(op)], ")")

    def node(self, node: Node, head: str) -> TextBlock:
        """A call in a region's body, after its targets."""
        _, items = self.call(node)
        return TextBlock(f"{head}{node.fn}(", items, ")")


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
            _, items = self.call(table)
            self.line(f"{accessor('table', table.name)} = table", items, ("table", i))
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
        name, suffix = (team.name, "") if plain(team.name) else (f"team_{i}", real_name(team.name))
        kind = f"Team[{team.size if team.groups is None else _lists(team.groups)}]"
        if team.hosts is not None:
            kind += f".on({_lists(team.hosts)})"
        return f"{name}: {kind}{suffix}"

    def parameter(self, i: int, buffer: Buffer) -> str:
        name = buffer.name if plain(buffer.name) else f"param_{i}"
        if buffer.kind == "output":
            return f"{name}: out[{write_type(self, buffer, name)}]"
        return f"{name}: {write_type(self, buffer, name)}"

    def returned(self, results: tuple[Arg, ...]) -> Item:
        items = [ARG.write(self, result) for result in results]
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


def _lists(groups: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(list(group)) for group in groups)
