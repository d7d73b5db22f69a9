"""Spelling of texts, for all who write or read them: names, literals, lines, excerpts, hints.

A name that Python would not take as an identifier (or that the text uses for something else) is
written as a string: `wait("end of step")`, `buffer["layers.0.x"][tp.rank]`.

    >>> plain("full"), plain("layers.0"), quote('say "hi"')
    (True, False, "'say \"hi\"'")
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.errors import nearest
from interlace.ir.ops import Scalar
from interlace.ir.types import DType

RESERVED = frozenset(
    {
        *(str(dtype) for dtype in DType),
        *("inf", "nan", "complex", "__debug__", "match", "case", "type", "_"),
        *("buffer", "value", "stream", "team", "table"),
    }
)
"""Words that mean something of their own where a name may stand."""


WIDEST = 400
"""Characters of a line that an excerpt shows."""
WIDTH = 120
"""Columns of a line of the text."""


@functools.lru_cache(4096)
def plain(name: str) -> bool:
    """True if `name` can stand in the text as it is."""
    return (
        name.isascii()
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and name not in RESERVED
    )


def quote(text: str) -> str:
    """A string literal, in double quotes where that needs no escape."""
    literal = repr(text)
    return f'"{literal[1:-1]}"' if literal[0] == "'" and '"' not in text else literal


def name_or_string(name: str) -> str:
    """A name where only a name may stand: bare, or as a string."""
    return name if plain(name) else quote(name)


def accessor(family: str, name: str) -> str:
    """A name inside an expression: bare, or `buffer["odd name"]`."""
    return name if plain(name) else f"{family}[{quote(name)}]"


def real_name(name: str) -> str:
    """The real name of what the text can only give an identifier."""
    return f".named({quote(name)})"


def usable_keyword(name: str) -> bool:
    """True if a name can stand before `=` in a call."""
    usable = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    return usable and name != "__debug__"


def scalar(value: Scalar) -> str:
    """A literal of an argument; `inf`, `-inf` and `nan` are words of the text."""
    if isinstance(value, DType):
        return value.value
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, complex):
        return f"complex({value.real!r}, {value.imag!r})"
    return repr(value)


def visible(text: str) -> str:
    """The text with control and invisible characters escaped, all but line ends."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def lines_of(text: str) -> list[str]:
    """The lines of a text as Python counts them."""
    return re.split(r"\r\n|\r|\n", text)


def did_you_mean(name: str, known: Iterable[str], what: str = "known") -> str:
    """A hint for a name that is not there: the nearest ones, or the first few that are."""
    names = sorted(set(known))
    if near := nearest(name, names):
        return near
    if not names:
        return f"{what}: none"
    shown = ", ".join(visible(found) for found in names[:12]) + (", ..." if len(names) > 12 else "")
    return f"{what}: {shown}"


def _shown(text: str) -> str:
    """A line of a text with a mark for each control character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c == "\t" else "\ufffd" for c in text)


def excerpt(
    lines: Sequence[str], line: int, column: int | None = None, length: int = 1, context: int = 2
) -> str:
    """Line `line` (from 1) marked among its neighbours, with carets under `column` (from 1)."""
    first, last = max(1, line - context), min(len(lines), line + context)
    width = len(str(max(last, line)))
    shown: list[str] = []
    for at in range(first, last + 1):
        mark = ">" if at == line else " "
        text = _shown(lines[at - 1].rstrip())
        start = column - 1 if at == line and column is not None else 0
        cut = max(0, start - WIDEST // 2) if len(text) > WIDEST else 0
        piece = text[cut : cut + WIDEST]
        shown.append(f"{mark} {at:>{width}} | {piece}".rstrip())
        if at == line and column is not None:
            carets = "^" * max(1, min(length, len(piece) - (start - cut)))
            shown.append(f"  {' ' * width} | {' ' * (start - cut)}{carets}")
    return "\n".join(shown)


@dataclass(slots=True)
class TextBlock:
    """Items between an opening and a closing text, such as a call with its arguments."""

    head: str
    items: list[Item]
    tail: str
    lone_comma: bool = False
    """A comma after a single item, as Python writes a tuple of one."""
    _flat: str | None = None

    @property
    def flat(self) -> str:
        """All on one line."""
        if self._flat is None:
            comma = "," if self.lone_comma and len(self.items) == 1 else ""
            self._flat = f"{self.head}{', '.join(map(flat, self.items))}{comma}{self.tail}"
        return self._flat

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
