"""Layout of statements: on one line where they fit, else filled lines between their brackets.

>>> layout(Block("copy(", ["x", "full[tp.rank]"], ")"), indent=4)
['    copy(x, full[tp.rank])']
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

WIDTH = 120


@dataclass(frozen=True)
class Block:
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

    def after(self, prefix: str) -> Block:
        """The same after some text."""
        return Block(prefix + self.head, self.items, self.tail, self.lone_comma)


Item = str | Block


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
        if isinstance(part, Block) and len(inner) + len(words) > WIDTH:
            *before, last = layout(part, indent + 4)
            lines += before
            lines.append(last + ",")
            filled = ""
    if filled:
        lines.append(inner + filled)
    return [*lines, pad + item.tail]
