"""Output and endings of commands: tables, text, JSON, one block for an error, an exit code.

There is no box and no line folding, and off a terminal and under NO_COLOR no colour, so that the
output can be compared and cut (help and errors of usage are typer's own: on a terminal they are in
boxes). What a terminal would obey is written as an escape. A command ends with one of these codes:

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
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import ParamSpec

import typer

from interlace.errors import InterlaceError, SoundnessError

P = ParamSpec("P")

UNSOUND = 1
FAILED = 2
INTERNAL = 70
INTERRUPTED = 130


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
            tell_error(error, bool(kwargs.get("json")))
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
                tell_error(error, json=True)
            what = "this is a fault of Interlace; report it in an issue, with what you gave and"
            typer.echo(f"internal error: {what}\n{visible(traceback.format_exc())}", err=True)
            raise typer.Exit(INTERNAL) from None

    return run


def tell_error(error: Exception, json: bool = False) -> None:
    """Says what an error is: on stderr, or as JSON where a script reads stdout."""
    if json:
        print_json(error_json(error))
    else:
        typer.echo(f"error: {type(error).__name__}: {visible(str(error))}", err=True)


def error_json(error: Exception) -> dict[str, object]:
    """The error as JSON."""
    return {"schema": 1, "error": {"type": type(error).__name__, "message": str(error)}}


def visible(text: str) -> str:
    """The text with what a terminal would obey, such as colours in a name, as escapes."""
    from interlace.ir.text import spelling

    return spelling.visible(text)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Rows in columns, as aligned plain text."""
    from interlace.trace.figures import text_table

    if title:
        say(f"{title}:")
    typer.echo(text_table(headings, [tuple(map(visible, row)) for row in rows]))


def code(text: str) -> None:
    """The text of a Program (or a diff), coloured on a terminal that shows colours."""
    from rich.console import Console
    from rich.syntax import Syntax

    out, text = Console(highlight=False, markup=False, emoji=False), visible(text)
    if not out.is_terminal or out.no_color:
        typer.echo(text)
        return
    lexer = "diff" if text.startswith("---") else "python"
    out.print(Syntax(text, lexer, theme="ansi_dark", background_color="default", word_wrap=True))


def say(text: str) -> None:
    """Lines of plain text."""
    typer.echo(visible(text))


def print_json(value: object) -> None:
    """A value as JSON, for scripts."""
    typer.echo(json.dumps(value, indent=2))
