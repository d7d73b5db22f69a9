"""Form of a dataclass as a call, from its fields: one table for text, builder and checks.

    class Notify(Op):                                           notify(ready, to=tp.rank + 1)
        signal: str = field(metadata=NAME)
        peer: Index | Others = field(metadata=written(named=True, keyword="to"))

A field's *role* says what its value is (a view, a peer, a name); its type or its metadata gives it.
The printer, the parser, the builder and the checks have a row for each role, so that a new op or
step of a view needs its dataclass alone.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import TypedDict, Unpack

ROLES: Mapping[str, str] = {
    "str": "string",
    "int": "integer",
    "bool": "flag",
    "float": "real",
    "DType": "dtype",
    "View": "view",
    "Index": "index",
    "Index | Others": "peer",
    "Dim": "dim",
    "Int": "size",
    "int | str": "parts",
    "Arg": "arg",
    "tuple[int, ...]": "integers",
    "tuple[Int, ...]": "sizes",
}
"""The role of a type, as the field's annotation writes it (`X | None`: that of X)."""
NAMES = ("name", "table", "team")
"""Roles of strings that are names."""
SEVERAL = ("keywords", "outs", "fresh", "declaration", "member", "part", "kernel")
"""Roles of fields that are several arguments, none, or a call."""


@dataclass(frozen=True, slots=True)
class Written:
    """Details of how a field is written, beyond its type and default."""

    role: str = ""
    keyword: str = ""
    """Its keyword, where that is not the field's name."""
    positional: bool = False
    """It may be given by position though it has a default."""
    named: bool = False
    """The printer writes its keyword though it may be given by position."""
    always: bool = False
    """The printer writes it though it has its default."""
    rest: bool = False
    """It is a tuple that takes all further positional arguments."""
    words: Collection[str] = ()
    """Values that are the call's own word, as in `all_gather(x, y)`."""
    holds: UnionType | None = None
    """Which ops it holds."""
    holding: str = ""
    """The same in words, for errors."""


class _How(TypedDict, total=False):
    keyword: str
    positional: bool
    named: bool
    always: bool
    rest: bool
    words: Collection[str]
    holds: UnionType
    holding: str


def written(role: str = "", **how: Unpack[_How]) -> dict[str, Written]:
    """Metadata for a field: see `Written`."""
    return {"written": Written(role, **how)}


NAME = written("name")
"""A name: of an event, a signal, a buffer."""
TEAM = written("team")
"""The name of a team: that of the op's peer, or the only one, where a text gives none."""
COMMON = written("common")
"""A field that every op has."""


@dataclass(frozen=True, slots=True)
class FieldForm:
    """One field of a dataclass as an argument of a call."""

    name: str
    role: str
    keyword: str
    default: object
    optional: bool
    """It may be None."""
    positional: bool
    """It may be given by position."""
    required: bool
    prefix: str
    """Text that the printer writes before its value, such as `to=`; empty for none."""
    implied_by: str
    """For a team: the field with the peer, whose team it is where a text gives none."""
    how: Written


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """A dataclass as a call: its word, and its arguments in the order in which they are written."""

    kind: type
    word: str
    fields: tuple[FieldForm, ...]
    common: tuple[str, ...] = ()
    """The fields that every op has."""
    fixed: tuple[tuple[str, str], ...] = ()
    """A field that the word itself gives."""
    worded: str = ""
    """The field whose value may be the word."""
    words: Mapping[str, Form] = dataclasses.field(default_factory=dict[str, "Form"])
    """The forms with such a word."""

    def of(self, thing: object) -> Form:
        """The form of one instance."""
        return self.words.get(getattr(thing, self.worded), self) if self.worded else self


@functools.cache
def form_of(kind: type) -> Form:
    """The form of a dataclass."""
    word = getattr(kind, "WORD", "") or re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
    fields: list[FieldForm] = []
    common: list[str] = []
    for field in dataclasses.fields(kind):
        how: Written = field.metadata.get("written", Written())
        if how.role == "common":
            common.append(field.name)
        else:
            fields.append(_field_form(kind, field, how, fields))
    form = Form(kind, word, tuple(fields), tuple(common))
    worded = next((each for each in fields if each.how.words), None)
    return form if worded is None else _worded(form, worded)


def _worded(form: Form, field: FieldForm) -> Form:
    """The form with a form for each value of a field that is a word of its own."""
    others = tuple(other for other in form.fields if other is not field)
    words = {
        word: dataclasses.replace(form, word=word, fields=others, fixed=((field.name, word),))
        for word in field.how.words
    }
    return dataclasses.replace(form, worded=field.name, words=words)


def _field_form(
    kind: type, field: dataclasses.Field[object], how: Written, before: Sequence[FieldForm]
) -> FieldForm:
    annotation = str(field.type)
    inner = annotation.removesuffix(" | None")
    if how.rest:
        inner = inner.removeprefix("tuple[").removesuffix(", ...]")
    role = how.role or ROLES.get(inner, "")
    if role not in {*ROLES.values(), *NAMES, *SEVERAL}:
        raise TypeError(f"{kind.__name__}.{field.name} has no role: give its type {inner} one")
    required = field.default is dataclasses.MISSING and role != "team" and not how.rest
    positional = how.positional or (required and all(each.required for each in before))
    peers = [each.name for each in before if each.role in ("index", "peer") and each.required]
    keyword = how.keyword or field.name
    return FieldForm(
        name=field.name,
        role=role,
        keyword=keyword,
        default=field.default,
        optional=annotation.endswith(" | None"),
        positional=positional,
        required=required,
        prefix=f"{keyword}=" if how.named or not positional else "",
        implied_by=peers[0] if role == "team" and peers else "",
        how=how,
    )
