"""Whose graph it is: the modules and functions in whose calls TorchDynamo compiled it.

origin = GraphOrigin.of(gm)          # by the backend, while it is called
origin.is_of({id(model)})
origin.ended                    # "torch._dynamo.graph_break() at train.py:31", or nothing
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

_HOLDERS = {"torch._dynamo.eval_frame": "fn", "torch.nn.modules.module": "self"}
"""torch's own short frames around a call of a function or a module, and what they call it."""


@dataclass(frozen=True, slots=True)
class GraphOrigin:
    """Where a graph of TorchDynamo comes from."""

    callers: tuple[weakref.ref[Any], ...]
    """The modules and functions that were being called, the innermost first."""
    ended: str
    """Reason and place of the break that ends the graph; empty: it ends with its function."""

    @classmethod
    def of(cls, gm: fx.GraphModule) -> GraphOrigin:
        """Origin of the graph that the backend is called for now."""
        reason: Any = getattr(gm, "compile_subgraph_reason", None)
        ended = ""
        if reason is not None and reason.graph_break:
            ended = reason.reason.strip().partition("\n")[0]
            if reason.user_stack:
                ended += f" at {reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}"
        return cls(tuple({id(ref()): ref for ref in _callers()}.values()), ended)

    def is_of(self, wanted: Collection[int]) -> bool:
        """Returns True if one of the callers has one of these ids."""
        return any(id(caller) in wanted for caller in self._alive())

    @property
    def first(self) -> Any:
        """The innermost caller, if it is still there."""
        return next(self._alive(), None)

    @property
    def name(self) -> str:
        """Name of its code, with the graph break that ends it, if any."""
        ended = f", which a graph break ends: {self.ended}" if self.ended else ""
        return f"{name_of(self.first)}{ended}"

    def _alive(self) -> Iterator[Any]:
        return (caller for ref in self.callers if (caller := ref()) is not None)


def name_of(what: Any) -> str:
    """Qualified name of a function; for a module, the name of its class."""
    return getattr(what, "__qualname__", type(what).__name__)


def _callers() -> Iterator[weakref.ref[Any]]:
    """Only torch's frames are asked for their locals: a user's would keep theirs alive longer."""
    frame = sys._getframe(1)
    while frame is not None:
        name = _HOLDERS.get(frame.f_globals.get("__name__", ""))
        found = frame.f_locals.get(name) if name else None
        found = getattr(found, "__self__", found)
        inner = getattr(found, "__wrapped__", None)  # as torch has it for modules of its own
        found = inner if isinstance(inner, nn.Module) else found
        found = getattr(found, "_orig_mod", found)  # of what torch.compile gave
        if found is not None:
            with contextlib.suppress(TypeError):  # what takes no weak references
                yield weakref.ref(found)
        frame = frame.f_back
