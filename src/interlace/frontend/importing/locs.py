"""Where an FX node comes from: its module path, and the user's own line.

>>> module_path("L['self'].layers.0.mlp")
'layers.0.mlp'
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from interlace.ir import Loc

MODULE_KEY = "interlace_module"
"""Where `interlace.compile` notes a node's module path, in `meta["custom"]`."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_LOCAL = re.compile(r"^[LG]\['\w+'\]")
_MEMBER = re.compile(r"\.(?:__dict__\[')?(_(?:modules|parameters|buffers))(?:'\])?\['([^']+)'\]")
_ITEM = re.compile(r"\[(?:'([^']+)'|(\d+))\]")
_WRAPPER = re.compile(
    r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)(?:\.|$)"
)
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])


def location(node: fx.Node) -> Loc:
    """The module path, file and line of a node; backward nodes take their forward node's."""
    if not node.meta:  # one that the partitioner made around another
        noted = [user for user in node.users if user.meta]
        return location(noted[0]) if noted else Loc()
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    module = module_path(_innermost(stack)) if stack else ""
    module = module or unwrapped((node.meta.get("custom") or {}).get(MODULE_KEY, ""))
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    mine = [frame for frame in frames if not frame[0].startswith((_TORCH, "<"))]
    if not mine:
        return Loc(module)
    file, line = mine[-1]
    return Loc(module, file, int(line))


def raised_at(error: BaseException) -> str:
    """The line of the user's code that led to an error, as `file:line`; else nothing."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    mine = [frame for frame in frames if not frame[0].startswith((_TORCH, _OWN, "<"))]
    return "{}:{}".format(*mine[-1]) if mine else ""


def _innermost(stack: dict[str, Any]) -> str:
    entry = list(stack.values())[-1]
    return str(entry[0]) if isinstance(entry, tuple) else str(entry)


def module_path(path: str) -> str:
    """A module path as `named_modules` spells it, from what the tracer recorded.

    What `checkpoint_wrapper` and others put around a module has no part in it.
    """
    path = _MEMBER.sub(r".\2", _LOCAL.sub("", path))
    path = _ITEM.sub(lambda found: "." + next(filter(None, found.groups())), path)
    return unwrapped(path.lstrip("."))


def unwrapped(path: str) -> str:
    """A module's or parameter's path without the modules that torch wraps around the user's."""
    return _WRAPPER.sub("", path).rstrip(".")


def parameter_name(node: fx.Node, labels: Sequence[str]) -> str:
    """A name for an argument: the user's own where the tracer says which it is, else the node's.

    `labels` are the names of the arguments that the graph had before AOTAutograd took it apart.
    """
    found = argument(node)
    if isinstance(found, str):
        return found.replace(".", "_")
    if found is not None and found < len(labels):
        return labels[found] or node.name
    return node.name


def argument(node: fx.Node) -> int | str | None:
    """Which argument a placeholder was before AOTAutograd: its position, or a parameter's name."""
    desc: Any = node.meta.get("desc")
    while hasattr(desc, "base"):
        desc = desc.base
    if hasattr(desc, "target"):
        return str(desc.target)
    index = getattr(desc, "idx", None)
    plain = type(desc).__name__ == "PlainAOTInput" and isinstance(index, int)
    return index if plain else None


def is_state(source: str) -> bool:
    """Whether the tracer's name of an argument is that of a module's parameter or buffer."""
    return any(found[1] != "_modules" for found in _MEMBER.finditer(source))


def label(source: str) -> str:
    """An identifier for an argument, from the tracer's name of where it comes from."""
    return re.sub(r"\W+", "_", module_path(source).replace("local_tensor", "")).strip("_")


def describe(node: fx.Node) -> str:
    """A node as errors name it: operator, module and line."""
    place = str(location(node))
    return f"{node.target} in {place}" if place else f"{node.target} (node {node.name})"
