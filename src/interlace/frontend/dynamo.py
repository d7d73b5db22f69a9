"""Questions to TorchDynamo about the compilation under way, and guards that it would not make.

    origin = GraphOrigin.of(gm)     # by the backend, while it is called
    origin.ended                    # "torch._dynamo.graph_break() at train.py:31", or nothing
    guard_sizes(placeholders)
    look_for_lost_interrupts()      # from now on they are raised as TorchDynamo compiles again

Note [Interrupts amid guards]
    Before a compiled call TorchDynamo checks guards, some of which are Python functions, as those
    of DTensors are. Where a signal handler raises in one (Ctrl-C does), torch takes the guard for
    one that does not hold, and drops the exception: this rank would compile anew, alone, for peers
    that wait for it in a run, and nobody would hear of the interrupt. Such a compilation is told by
    guards that hold when they are asked again. It ends at its start, by the interrupt.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from interlace.frontend.importing.nodes import is_state
from interlace.torch_private import TracingContext
from interlace.torch_private.dynamo import (
    AttrSource,
    DeletedGuardManagerWrapper,
    GuardBuilder,
    NNModuleSource,
    TensorProperty,
    TensorPropertySource,
    callback_handler,
    innermost_backend,
)

_HOLDERS = {"torch._dynamo.eval_frame": "fn", "torch.nn.modules.module": "self"}
"""torch's own short frames around a call of a function or a module, and what they call it."""


@dataclass(frozen=True, slots=True)
class GraphOrigin:
    """Where a graph of TorchDynamo comes from."""

    callers: tuple[weakref.ref[object], ...]
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
    def first(self) -> object:
        """The innermost caller, if it is still there."""
        return next(self._alive(), None)

    @property
    def name(self) -> str:
        """Name of its code, with the graph break that ends it, if any."""
        ended = f", which a graph break ends: {self.ended}" if self.ended else ""
        return f"{name_of(self.first)}{ended}"

    def _alive(self) -> Iterator[object]:
        return (caller for ref in self.callers if (caller := ref()) is not None)


def name_of(what: object) -> str:
    """Qualified name of a function; for a module, the name of its class."""
    return getattr(what, "__qualname__", type(what).__name__)


def _callers() -> Iterator[weakref.ref[object]]:
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


# -- arguments and guards -------------------------------------------------------------------------


def source_of(node: fx.Node) -> Any:
    return getattr(node.meta.get("grapharg"), "source", None)


def source_name(node: fx.Node) -> str:
    """The tracer's name of where an argument comes from."""
    source = source_of(node)
    if source is None:
        return ""
    return source.name if isinstance(source.name, str) else source.name()


def guard_sizes(places: Sequence[fx.Node]) -> None:
    """Has TorchDynamo guard the sizes of whole DTensors, too. By itself it guards what this rank
    holds: where 8 rows become 7, a rank with 4 of either would not compile anew as its peers do."""
    context = TracingContext.try_get()
    if context is None:  # TorchDynamo does not call
        return
    for node in places:
        value, source = node.meta.get("example_value"), source_of(node)
        if source is None or is_state(source_name(node)) or not isinstance(value, DTensor):
            continue
        for dim, size in enumerate(value.shape):
            if type(size) is int:
                known = TensorPropertySource(source, TensorProperty.SIZE, dim)
                guard = known.make_guard(GuardBuilder.EQUALS_MATCH)
                context.guards_context.dynamo_guards.add(guard)


def fix_numbers(places: Sequence[fx.Node]) -> None:
    """Has TorchDynamo guard the values of a module's own numbers, such as a norm's `eps`: with
    `dynamic=True` each would be a tensor on the CPU, which no region and no CUDA graph may read."""
    for node in places:
        source = source_of(node)
        if isinstance(source, AttrSource) and isinstance(source.base, NNModuleSource):
            for user in node.users:
                number = user.meta.get("example_value")
                if isinstance(number, torch.SymFloat):
                    float(number)  # the guard


# -- Note [Interrupts amid guards] ----------------------------------------------------------------


def look_for_lost_interrupts() -> None:
    """Has TorchDynamo ask `raise_lost` before it compiles; its reset forgets that."""
    if raise_lost not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(raise_lost)


def raise_lost(_: object) -> None:
    """Raises the interrupt that made TorchDynamo compile what serves, if one did."""
    if threading.current_thread() is not threading.main_thread():
        return  # no signal handler runs here
    asked = _compilation()
    entries: Any = asked.get("cache_entries_for_reasons", ())
    frame: Any = asked.get("frame")
    if not entries or frame is None:
        return
    wanted = innermost_backend(asked["compiler_fn"])
    if any(_serves(entry, wanted, frame.f_locals) for entry in entries):
        raise KeyboardInterrupt("in a guard of torch.compile, which lost it")


def _compilation() -> dict[str, Any]:
    """TorchDynamo's local variables in the compilation that begins: the callback gets none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if "cache_entries_for_reasons" in frame.f_code.co_varnames[: frame.f_code.co_argcount]:
            return frame.f_locals
        frame = frame.f_back
    return {}


def _serves(entry: Any, wanted: object, values: dict[str, Any]) -> bool:
    """Returns True if this backend compiled that entry, and its guards hold."""
    guards = entry.guard_manager
    if isinstance(guards, DeletedGuardManagerWrapper):  # what it stood on is gone
        return False
    return entry.backend is wanted and guards.check(values)
