"""Effects of torch's operators: what each writes in place, draws and leaves unwritten.

    >>> facts_of("aten.add_.Tensor").writes, facts_of("aten.rand.default").draws
    (((0, 'self'),), True)
    >>> facts_of("mylib.fill.default") is None       # not in the table: its library knows
    True

`operators.txt` has a line for each operator with all its overloads, written by
`scripts/operator_table.py` from torch's own schemas and tags, so that nothing here needs torch. A
word is an overload and, after colons, where it differs from what its name says:

    w3=running_mean     writes argument 3, which is called so, in place
    o=values,indices    the keywords of the memory that it fills
    d                   draws random numbers; d4=dropout_p: unless that argument is 0
    u                   leaves the memory of its results unwritten
    s                   of its first argument it takes the shape alone
    m                   changes an argument's shape, strides or memory: no schedule may call it

By its name, an operator that ends in one underscore writes argument 0, `self`, and an overload that
ends in `out` fills the keyword `out`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TABLE = Path(__file__).with_name("operators.txt")
_TEXT = TABLE.read_text()
"""Read when this is imported: later a process may have no file descriptor left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Effects of a call of an operator, beside reading its arguments and making its results."""

    writes: tuple[tuple[int, str], ...] = ()
    """Arguments written in place, by place and name."""
    outs: tuple[str, ...] = ()
    """Keywords of the memory that it fills."""
    draws: bool = False
    unless: tuple[int, str] | None = None
    """An argument that is 0 where nothing is drawn."""
    unwritten: bool = False
    """The memory of its results holds whatever was there before."""
    shape_only: bool = False
    """The elements of its first argument do not matter: it fills it, or takes its shape."""
    remakes: bool = False
    """An argument has another shape, other strides or other memory afterwards."""

    def written(self, args: Sequence[T], kwargs: Sequence[tuple[str, T]]) -> list[T]:
        """The arguments of a call that it writes in place."""
        found = [_argument(each, args, kwargs) for each in self.writes]
        return [arg for arg in found if arg is not None]

    def drawn(self, args: Sequence[object], kwargs: Sequence[tuple[str, object]]) -> bool:
        """True if a call with these arguments draws random numbers."""
        if self.unless is None:
            return self.draws
        return self.draws and bool(_argument(self.unless, args, kwargs))


def _argument(
    which: tuple[int, str], args: Sequence[T], kwargs: Sequence[tuple[str, T]]
) -> T | None:
    place, name = which
    if place < len(args):
        return args[place]
    return next((arg for key, arg in kwargs if key == name), None)


NOTHING = Facts()


def usual(name: str, overload: str) -> Facts:
    """Facts that follow from an operator's name alone."""
    in_place = name.endswith("_") and not name.endswith("__")
    return Facts(
        writes=((0, "self"),) if in_place else (),
        outs=("out",) if overload.endswith("out") else (),
    )


def spelt(name: str, overload: str, facts: Facts) -> str:
    """An overload's word in the table."""
    plain, parts = usual(name, overload), [overload]
    if facts.writes != plain.writes:
        parts.append("w" + ",".join(f"{place}={word}" for place, word in facts.writes))
    if facts.outs != plain.outs:
        parts.append("o=" + ",".join(facts.outs))
    if facts.draws:
        parts.append("d" if facts.unless is None else "d{}={}".format(*facts.unless))
    marks = {"u": facts.unwritten, "s": facts.shape_only, "m": facts.remakes}
    return ":".join([*parts, *(mark for mark, holds in marks.items() if holds)])


def _read(name: str, word: str) -> tuple[str, Facts]:
    overload, *parts = word.split(":")
    facts = usual(name, overload)
    writes, outs, draws, unless, marks = facts.writes, facts.outs, False, None, set[str]()
    for part in parts:
        kind, rest = part[0], part[1:]
        pairs = [item.partition("=") for item in rest.split(",") if item]
        if kind == "w":
            writes = tuple((int(place), word) for place, _, word in pairs)
        elif kind == "o":
            outs = tuple(rest[1:].split(",")) if rest[1:] else ()
        elif kind == "d":
            draws = True
            unless = next(((int(place), word) for place, _, word in pairs), None)
        else:
            marks.add(kind)
    return overload, Facts(
        writes=writes,
        outs=outs,
        draws=draws,
        unless=unless,
        unwritten="u" in marks,
        shape_only="s" in marks,
        remakes="m" in marks,
    )


@cache
def _lines() -> Mapping[str, str]:
    lines = (line.partition(" ") for line in _TEXT.splitlines())
    return {name: words for name, _, words in lines if not name.startswith("#")}


@lru_cache(1024)
def _overloads(name: str) -> Mapping[str, Facts]:
    """The overloads of an operator, by namespace and name."""
    return dict(_read(name, word) for word in _lines().get(name, "").split())


def table() -> dict[str, Facts]:
    """All rows, by full name."""
    return {f"{op}.{over}": row for op in _lines() for over, row in _overloads(op).items()}


@lru_cache(4096)
def facts_of(fn: str) -> Facts | None:
    """The table's facts about the operator of that name; None if it is not in the table."""
    name, _, overload = fn.rpartition(".")
    if "." not in name:  # aten.relu is its default overload
        name, overload = fn, "default"
    return _overloads(name).get(overload)
