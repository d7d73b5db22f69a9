"""What commands print: tables, text, JSON, and one block for an error.

Off a terminal, and under NO_COLOR, there is no colour, no box and no line folding, so that the
output can be compared and cut. Errors of ours (`InterlaceError`) go to stderr in one block and end
the command with code 2.

    @command
    def check(file: Path) -> None: ...
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from interlace.errors import InterlaceError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")

UNSOUND = 1
"""Exit code of a command that found what it was asked to look for."""
FAILED = 2
"""Exit code of a command that could not do its work."""


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Turns our errors into one block on stderr and exit code 2; others keep their traceback."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except InterlaceError as error:
            typer.echo(f"error: {type(error).__name__}: {error}", err=True)
            raise typer.Exit(FAILED) from None
        except BrokenPipeError:  # the reader (`head`, say) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None

    return run


def console() -> Console:
    """A terminal if there is one; else plain text of any width."""
    from rich.console import Console

    found = Console(highlight=False, markup=False, emoji=False)
    return found if found.is_terminal else Console(file=sys.stdout, **PLAIN)


PLAIN: dict[str, Any] = {
    **{"highlight": False, "markup": False, "emoji": False, "no_color": True},
    **{"width": 10_000, "force_terminal": False},
}


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Rows in columns: with rich on a terminal, as aligned plain text elsewhere."""
    out = console()
    if not out.is_terminal:
        from interlace.trace.figures import text_table

        if title:
            typer.echo(f"{title}:")
        typer.echo(text_table(headings, rows))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        last = i == len(headings) - 1
        grid.add_column(heading, overflow="fold", no_wrap=not last and len(headings) < 6)
    for row in rows:
        grid.add_row(*map(Text, row))
    out.print(grid)


def code(text: str) -> None:
    """The text of a Program (or a diff), coloured on a terminal that shows colours."""
    out = console()
    if not out.is_terminal or out.no_color:
        typer.echo(text)
        return
    from rich.syntax import Syntax

    lexer = "diff" if text.startswith("---") else "python"
    out.print(Syntax(text, lexer, theme="ansi_dark", background_color="default", word_wrap=True))


def say(text: str) -> None:
    """A line of plain text."""
    typer.echo(text)


def print_json(value: object) -> None:
    """A value as JSON, for scripts."""
    typer.echo(json.dumps(value, indent=2))
