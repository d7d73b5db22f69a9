"""What a run gives back: read from the per-run table, or fixed by the Program.

read = reader_of(program.returned(), plan, values)
read()                   # once the run is issued: a tuple
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from interlace.errors import ProgramError
from interlace.ir import Arg, View
from interlace.runtime.calling.operators import decode
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.values import Values, derive

Results = Callable[[], tuple[Any, ...]]


def reader_of(returned: Sequence[Arg], plan: Plan, values: Values) -> Results:
    """A function that reads the results of the run under way."""
    parts = [_part(arg, plan, values) for arg in returned]
    items = values.items
    places = [part for part in parts if isinstance(part, int)]
    if len(places) < len(parts):
        return lambda: tuple([_read(part, items) for part in parts])
    if len(places) == 1:
        (place,) = places
        return lambda: (items[place],)
    if not places:
        return lambda: ()
    getter = itemgetter(*places)
    return lambda: getter(items)


Part = int | tuple["Part", ...] | list[Any] | Callable[[], torch.Tensor]
"""A place in the table, several of them, (in a list) a value that never changes, or what makes a
view of a registered tensor."""


def _part(arg: Arg, plan: Plan, values: Values) -> Part:
    if isinstance(arg, View):
        kind = plan.buffers[arg.buffer].kind
        if kind not in ("input", "output", "fresh"):
            raise ProgramError(
                f"{plan.program.name} returns the {kind} buffer {arg.buffer!r}, whose storage "
                "the next run reuses: return a fresh buffer or an output"
            )
        registered = values.callers(arg)
        if registered is None:
            return values.own(arg)
        tensor, box = registered
        return [tensor] if box is None else lambda: derive(tensor, box)
    if isinstance(arg, tuple):
        return tuple(_part(item, plan, values) for item in arg)
    return [decode(arg, values.device)]


def _read(part: Part, items: list[Any]) -> Any:
    if isinstance(part, int):
        return items[part]
    if isinstance(part, tuple):
        return tuple([_read(item, items) for item in part])
    return part[0] if isinstance(part, list) else part()
