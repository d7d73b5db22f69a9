"""What commands print, and how they end: tables, text, JSON, one block for an error, an exit code.

Off a terminal, and under NO_COLOR, there is no colour, no box and no line folding, so that the
output can be compared and cut (help and errors of usage are typer's own, and boxed). What a
terminal would obey is written as an escape. A command ends with one of these codes:

    0     it did what it was asked to, and found nothing wrong
    1     what it was asked to judge is bad: a schedule is unsound, a bar is missed, a part broken
    2     the input or the usage is wrong; stderr says how (of the input, with --json, stdout does)
    70    a fault of Interlace, with its traceback
    130   it was interrupted

    @command
    def check(file: Path) -> None: ...
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from interlace.errors import InterlaceError, SoundnessError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")

UNSOUND = 1
FAILED = 2
INTERNAL = 70
INTERRUPTED = 130

LEAST_LAST = 40
"""Columns of a terminal that a table leaves for its last column, whose text is wrapped."""


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Ends a command with the exit code that its outcome has, and says what went wrong."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a terminal may lack a character
                stream.reconfigure(errors="backslashreplace")
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except InterlaceError as error:
            _tell(error, bool(kwargs.get("json")))
            unsound = isinstance(error, SoundnessError)
            raise typer.Exit(UNSOUND if unsound else FAILED) from None
        except MemoryError:
            typer.echo("error: there is too little memory for this", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader (`head`, say) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:
            if kwargs.get("json"):
                _tell(error, json=True)
            what = "this is a fault of Interlace; report it in an issue, with what you gave and"
            typer.echo(f"internal error: {what}\n{visible(traceback.format_exc())}", err=True)
            raise typer.Exit(INTERNAL) from None

    return run


def _tell(error: Exception, json: bool) -> None:
    """Says what an error is: on stderr, or as JSON where a script reads stdout."""
    if json:
        found = {"type": type(error).__name__, "message": str(error)}
        print_json({"schema": 1, "error": found})
    else:
        typer.echo(f"error: {type(error).__name__}: {visible(str(error))}", err=True)


def visible(text: str) -> str:
    """The text with what a terminal would obey, such as colours in a name, as escapes."""
    from interlace.ir.text import spelling

    return spelling.visible(text)


def console() -> Console:
    """A terminal if there is one; else plain text of any width."""
    from rich.console import Console

    found = Console(highlight=False, markup=False, emoji=False)
    return found if found.is_terminal else Console(file=sys.stdout, **PLAIN)


PLAIN: dict[str, Any] = {
    "highlight": False,
    "markup": False,
    "emoji": False,
    "no_color": True,
    "width": 10_000,
    "force_terminal": False,
}


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Rows in columns: with rich on a terminal, as aligned plain text elsewhere.

    On a terminal that is too narrow for the columns each row is a block of `heading value` pairs,
    without those that have no value. A word of the last column that is too long for a line, a path
    perhaps, is a number there and stands below, whole.
    """
    out, title = console(), visible(title)
    cells = [tuple(map(visible, row)) for row in rows]
    if not out.is_terminal:
        from interlace.trace.figures import text_table

        if title:
            typer.echo(f"{title}:")
        typer.echo(text_table(headings, cells))
        return
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    *widths, last = (max(map(cell_len, column)) for column in zip(headings, *cells, strict=True))
    used = sum(widths) + 3 * len(headings)
    narrow = used + min(last, LEAST_LAST) > out.width
    cells, below = _without_long_words(cells, out.width - (4 if narrow else used))
    if narrow:
        _blocks(out, headings, cells, title)
    else:
        grid = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, heading in enumerate(headings):
            grid.add_column(heading, overflow="fold", no_wrap=i < len(widths))
        for row in cells:
            grid.add_row(*map(Text, row))
        out.print(grid)
    for line in below:
        out.print(Text(line), soft_wrap=True)


def _without_long_words(
    rows: Sequence[tuple[str, ...]], room: int
) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rows with numbers for words of the last column that are too long, and these words."""
    found: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return found.setdefault(match[0], f"[{len(found) + 1}]")

    long = re.compile(rf"[^\s(),;]{{{room},}}[^\s(),;:.]")
    short = [(*row[:-1], long.sub(number, row[-1])) for row in rows]
    return short, [f"{mark} {word}" for word, mark in found.items()]


def _blocks(
    out: Console, headings: Sequence[str], rows: Sequence[tuple[str, ...]], title: str
) -> None:
    from rich.padding import Padding
    from rich.text import Text

    if title:
        out.print(Text(title, "italic"))
    for row in rows:
        line, indent = Text(), 0
        for heading, cell in zip(headings, row, strict=True):
            if cell == "-":
                continue
            item = Text.assemble((heading, "bold"), " " if heading else "", cell)
            if line and indent + line.cell_len + 3 + item.cell_len > out.width:
                out.print(Padding(line, (0, 0, 0, indent)))
                line, indent = Text(), 4
            line = Text("   ").join([line, item]) if line else item
        out.print(Padding(line, (0, 0, 0, indent)))


def code(text: str) -> None:
    """The text of a Program (or a diff), coloured on a terminal that shows colours."""
    out, text = console(), visible(text)
    if not out.is_terminal or out.no_color:
        typer.echo(text)
        return
    from rich.syntax import Syntax

    lexer = "diff" if text.startswith("---") else "python"
    out.print(Syntax(text, lexer, theme="ansi_dark", background_color="default", word_wrap=True))


def words(text: str) -> list[str]:
    """The words of an option that takes several, with commas between."""
    return [word.strip() for word in text.split(",") if word.strip()]


def say(text: str) -> None:
    """Lines of plain text."""
    typer.echo(visible(text))


def prose(text: str) -> None:
    """A paragraph, on a terminal folded between words, with the lines after the first indented."""
    out, text = console(), visible(text)
    if out.is_terminal:
        fold = textwrap.TextWrapper(out.width, break_long_words=False, break_on_hyphens=False)
        fold.subsequent_indent = "    "
        text = "\n".join(line for part in text.splitlines() for line in fold.wrap(part) or [""])
    typer.echo(text)


def print_json(value: object) -> None:
    """A value as JSON, for scripts."""
    typer.echo(json.dumps(value, indent=2))
