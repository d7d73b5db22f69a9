"""Pipelines of passes: their text, how they run, and the one that lowers a serial Program.

    >>> passes = parse_pipeline("decompose{strategy=peer,chunks=4},schedule")
    >>> passes[0].strategy, passes[0].chunks
    ('peer', 4)
    >>> overlapped = run_pipeline(program, passes)

The pass `insert_sync` is the class `InsertSync` of `passes/insert_sync.py`, imported when asked.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from interlace.errors import PassError
from interlace.ir import Expect, Get, Group, Notify, Program, Put, Recv, Remark, Send
from interlace.options import Options
from interlace.passes.base import Pass, add_remarks

PASSES = (
    "find_sites",
    "place_resharding",
    "decompose",
    "form_regions",
    "schedule",
    "plan_memory",
    "insert_sync",
    "take_turns",
    "fuse",
)
"""The passes by name, in the order in which they make sense."""


def pass_class(name: str) -> type[Pass]:
    """The class of the pass called `name`."""
    if name not in PASSES:
        raise PassError(f"no pass named {name!r}: choose from {', '.join(PASSES)}")
    module = importlib.import_module(f"interlace.passes.{name}")
    return cast("type[Pass]", getattr(module, "".join(map(str.capitalize, name.split("_")))))


def parse_pipeline(text: str, machine: object = None) -> tuple[Pass, ...]:
    """The passes that `text` names, such as `find_sites,decompose{strategy=ring}`.

    `machine` (an `interlace.cost.Machine`) goes to every pass that asks the cost model.
    """
    found: list[Pass] = []
    for item in _split(text):
        name, brace, rest = item.partition("{")
        if brace and not rest.endswith("}"):
            raise PassError(f"{item!r}: the options of a pass stand in braces, as in a{{b=1,c=2}}")
        found.append(_make(name.strip(), rest[:-1] if brace else "", machine))
    if not found:
        known = ", ".join(PASSES)
        raise PassError(f"no pass in {text!r}: name some of {known}")
    return tuple(found)


def run_pipeline(
    program: Program,
    passes: Iterable[Pass] | str,
    check: bool = False,
    on_pass: Callable[[Pass, Program], object] | None = None,
) -> Program:
    """`program` after all `passes`.

    `on_pass` sees each pass with the Program it made. With `check`, every Program between is
    validated, and the last one must be sound.
    """
    for item in parse_pipeline(passes) if isinstance(passes, str) else passes:
        program = item.run(program)
        if check:
            importlib.import_module("interlace.ir").validate(program)
        if on_pass is not None:
            on_pass(item, program)
    if check:
        importlib.import_module("interlace.verify").check(program).raise_if_unsound()
    return program


def lowering(options: Options, machine: object = None) -> tuple[Pass, ...]:
    """The passes that lower a serial Program with these options."""
    given = f"strategy={options.strategy},protocol={options.protocol},chunks={options.chunks}"
    regions = "form_regions," if options.regions == "inductor" else ""  # eager ones gain nothing
    fuse = ",fuse" if options.strategy in ("auto", "fused") else ""
    if options.overlap:
        text = (
            f"find_sites,place_resharding{{position={options.resharding}}},"
            f"decompose{{{given}}},{regions}schedule,plan_memory,insert_sync,take_turns{fuse}"
        )
    else:
        text = f"find_sites,decompose{{strategy=serial}},{regions}plan_memory,insert_sync"
    return parse_pipeline(text, machine)


def lower(program: Program, options: Options, machine: object = None) -> Program:
    """The overlapped Program of a serial one (with `overlap=False`, the serial one made ready).

    Where messages, signals or one-sided copies are written by hand, the streams that they are on
    may be what keeps ranks from waiting for each other, or an order what nothing else shows. So
    such a Program is proved once more, and left as it is where passes would make it unsound.
    """
    made = run_pipeline(program, lowering(options, machine))
    by_hand = Send | Recv | Group | Notify | Expect | Put | Get
    if any(isinstance(op, by_hand) for op in program.ops):
        check = importlib.import_module("interlace.verify").check
        if not check(made).sound and check(program).sound:
            return add_remarks(program, [Remark("lower", "left as written: it would be unsound")])
    return made


def _split(text: str) -> Iterator[str]:
    """The items between the commas that stand in no bracket."""
    depth, item = 0, ""
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if depth < 0:
            raise PassError(f"{text!r}: a bracket closes that never opened")
        if char == "," and depth == 0:
            if item.strip():
                yield item.strip()
            item = ""
        else:
            item += char
    if depth:
        raise PassError(f"{text!r}: a bracket never closes")
    if item.strip():
        yield item.strip()


def _make(name: str, options: str, machine: object) -> Pass:
    cls = pass_class(name)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    given: dict[str, Any] = {}
    for option in _split(options):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or key not in fields or not fields[key].metadata.get("text", True):
            known = ", ".join(key for key in fields if fields[key].metadata.get("text", True))
            raise PassError(f"pass {name} has no option {option!r}; known are: {known or 'none'}")
        given[key] = _value(value)
    if machine is not None and "machine" in fields:
        given["machine"] = machine
    return cls(**given)


def _value(text: str) -> object:
    if text.startswith("[") and text.endswith("]"):
        return tuple(map(_value, _split(text[1:-1])))
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text.strip("\"'")
