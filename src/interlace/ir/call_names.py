"""Names that a Call may have: operators of PyTorch's dispatcher, and a short table of functions.

A name is data from a file, so it is looked up, never walked. Operators outside PyTorch's own
namespaces are refused unless the caller names them: a schedule from a file is not
trusted, and an operator of another library may read files or foreign memory.

    >>> refusal("operator.call")
    "'operator.call' is no operator: Python's own functions are not reached from a schedule"
    >>> refuse_others(program, allowed={"mylib"})    # a namespace, or the operator's full name
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from interlace.errors import ProgramError
from interlace.ir.operator_facts import facts_of
from interlace.ir.operators import effect
from interlace.ir.ops import Call
from interlace.ir.program import Program, spots

FIX = "name an operator of PyTorch as namespace.operator.overload, such as aten.mm.out, or a region"

FUNCTIONS = ("interlace.sum_slots",)
"""Functions of ours that are no operators of the dispatcher."""

WORDS = (
    *("@device", "@strided", "@contiguous_format", "@preserve_format"),
    *("@channels_last", "@channels_last_3d"),
)
"""Arguments that stand for a value of torch: the device of the run, a layout, a memory format."""

KNOWN_NAMESPACES = ("aten", "prims", "interlace")
"""Namespaces whose operators are meant to touch their arguments and results alone (those known not
to are refused by name). Others, torch's own too, reach files (debugprims), other ranks (c10d) or
foreign memory (inductor)."""

_NO_NAMESPACES = {
    "operator": "Python's own functions are not reached from a schedule",
    "prim": "TorchScript's own functions are not reached from a schedule",
    "higher_order": "an operator that takes functions cannot stand in a schedule",
    **dict.fromkeys(
        ("import_module", "load_library", "loaded_libraries"),
        "libraries are loaded by your own code, never by a schedule",
    ),
}

_REMAKES = "it changes an argument's shape, strides or memory, which views count on"
_PART = r"[A-Za-z_][A-Za-z0-9_]*"
_NAME = re.compile(rf"({_PART})\.({_PART})(?:\.({_PART}))?")
_SPECIAL = frozenset(
    f"__{name}__"
    for word in ("and", "or", "xor", "lshift", "rshift")
    for name in (word, f"i{word}")
)
"""Operators of aten that are named as methods of Python are."""


def split(fn: str) -> tuple[str, str, str] | None:
    """Namespace, operator and overload of a name; None if it has not that form."""
    match = _NAME.fullmatch(fn)
    return None if match is None else (match[1], match[2], match[3] or "default")


def refusal(fn: str) -> str | None:
    """Why a Call may not name this; None if it may."""
    if fn in FUNCTIONS:
        return None
    parts = split(fn)
    if parts is None:
        return f"{fn!r} is no name of an operator"
    space, name, overload = parts
    if space in _NO_NAMESPACES:
        return f"{fn!r} is no operator: {_NO_NAMESPACES[space]}"
    for part in (space, overload, *(() if name in _SPECIAL else (name,))):
        if part.startswith("__"):
            return f"{fn!r} is no operator: {part} is an attribute of Python's"
    facts = facts_of(fn)
    why = _REMAKES if facts is not None and facts.remakes else effect(f"{space}.{name}")
    return f"a schedule may not call {fn!r}: {why}" if why else None


def is_known(fn: str) -> bool:
    """True if an operator is of a namespace that any schedule may call."""
    return fn.partition(".")[0] in KNOWN_NAMESPACES


def called(program: Program) -> Iterator[tuple[str, str]]:
    """Every operator that a Program calls, and where."""
    regions = {region.name for region in program.regions}
    for _, op in spots(program.ops):
        if isinstance(op, Call) and op.fn not in regions:
            yield op.fn, str(op.loc) or program.name
    for region in program.regions:
        for node in region.body:
            yield node.fn, f"region {region.name!r} of {program.name}"


def others(program: Program) -> frozenset[str]:
    """The operators of a Program that are neither PyTorch's own nor Interlace's."""
    return frozenset(fn for fn, _ in called(program) if not is_known(fn))


def refuse_others(program: Program, allowed: Collection[str] = ()) -> None:
    """Raises ProgramError for a call of an operator of others that is not allowed."""
    for fn, place in called(program):
        if not (is_known(fn) or fn in allowed or fn.partition(".")[0] in allowed):
            raise ProgramError(
                f"{place}: a schedule may not call {fn!r}, for it is of none of "
                f"{', '.join(KNOWN_NAMESPACES)}: if you know that it touches its arguments and "
                f"results alone, name it (Executor(..., operators=[{fn!r}]), or "
                f"interlace check --operators {fn})"
            )
