"""Schedules from files: `interlace.load("ring.ilc")` gives a validated Program."""

from __future__ import annotations

import os
from pathlib import Path

from interlace.errors import ParseError
from interlace.ir.program import Program
from interlace.ir.text.parser import parse, parse_set
from interlace.ir.validate import validate

LONGEST = 1 << 28
"""Characters of a file, a timeline among them, that is read."""


def load(path: str | os.PathLike[str]) -> Program:
    """Reads the one Program of a file.

    Args:
        path: a file of text, such as `export` writes.

    Returns:
        The Program, validated.

    Raises:
        ParseError: the file cannot be read, or its text is malformed; the message shows the line.
        ProgramError: the Program breaks a structural rule; the message shows the line.
    """
    text = read(path)
    program = parse(text, file=Path(path).name)
    validate(program, text)
    return program


def load_set(path: str | os.PathLike[str]) -> tuple[Program, ...]:
    """Reads every Program of a file, such as a pipeline's stages.

    Args:
        path: as of `load`.

    Returns:
        The Programs in order, each validated.

    Raises:
        ParseError, ProgramError: as of `load`.
    """
    return validated_set(read(path), Path(path).name)


def validated_set(text: str, file: str) -> tuple[Program, ...]:
    """Every Program of a text, validated; `file` stands in errors."""
    programs = parse_set(text, file=file)
    for program in programs:
        validate(program, text)
    return programs


def read(path: str | os.PathLike[str]) -> str:
    """The text of a file. Raises ParseError where it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return bounded(file.read(LONGEST + 1), path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def bounded(text: str, path: str | os.PathLike[str]) -> str:
    """A text of at most `LONGEST` characters. Raises ParseError for a longer one."""
    if len(text) > LONGEST:
        raise ParseError(f"{path} holds more than {LONGEST} characters, so it is no schedule")
    return text


def unreadable(path: str | os.PathLike[str], error: Exception) -> ParseError:
    """The ParseError for a file that cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return ParseError(f"{path} is not UTF-8 text, so it is no schedule: {error}")
    return ParseError(f"cannot read {path}: {getattr(error, 'strerror', error)}")
