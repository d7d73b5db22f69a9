"""What a pass is: a frozen dataclass with a name, whose `run` maps a Program to a Program.

The fields are the options; a pass never changes its argument, and says what it declined to do as a
`Remark` on the Program. A pass that asks the cost model has a field `machine`.

    @dataclass(frozen=True)
    class Reverse:
        name: ClassVar[str] = "reverse"

        def run(self, program: Program) -> Program:
            return program.replace(ops=program.ops[::-1])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

from interlace.ir import Program, Remark


@runtime_checkable
class Pass(Protocol):
    """A frozen dataclass that turns a Program into another."""

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def run(self, program: Program) -> Program:
        """The Program after this pass. Pure: the argument stays as it is."""
        ...


def spell(item: Pass) -> str:
    """The pass as pipeline text: its name, and in braces the options that are not the default."""
    given: list[str] = []
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if value != field.default and field.metadata.get("text", True):
            given.append(f"{field.name}={spell_value(value)}")
    return f"{item.name}{{{','.join(given)}}}" if given else item.name


def spell_value(value: object) -> str:
    """An option's value as pipeline text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        values = cast("tuple[object, ...]", value)
        return f"[{','.join(map(spell_value, values))}]"
    return "none" if value is None else str(value)


def add_remarks(program: Program, remarks: Iterable[Remark]) -> Program:
    """The Program with these remarks added, each of them once."""
    return program.replace(remarks=tuple(dict.fromkeys((*program.remarks, *remarks))))
