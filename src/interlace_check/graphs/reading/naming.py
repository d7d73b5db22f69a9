"""Nodes in words: what they call, where their source line is, which stream they are on.

place_of(node, 3, "")     # Place(3, "mul", "aten.mul.Tensor(add, 2)", 'model.py:7: y * 2')
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import fx

from interlace.errors import ProgramError
from interlace_check.graphs.reading.targets import STREAM_OPS, operator_name, overload
from interlace_check.graphs.steps import MAIN, Place

MAX_TEXT = 120
_FRAME = re.compile(r'File "([^"\n]*)", line (\d+), in [^\n]*(?:\n([^\n]*))?')


def place_of(node: fx.Node, number: int, outer: str) -> Place:
    """A node in the graph's own words; `outer` is the node that holds its subgraph."""
    found = overload(node.target)
    called = str(found) if found is not None else operator_name(node.target)
    parts = [_short(arg) for arg in node.args]
    parts += [f"{key}={_short(arg)}" for key, arg in node.kwargs.items()]
    text = f"{called}({', '.join(parts)})" if node.op == "call_function" else node.op
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 3] + "..."
    return Place(number, f"{outer}/{node.name}" if outer else node.name, text, source_line(node))


def _short(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, tuple | list):
        shown = [_short(item) for item in arg[:6]]
        return f"({', '.join([*shown, *(['...'] if len(arg) > 6 else [])])})"
    return (
        repr(arg)[:40] if isinstance(arg, int | float | str | bool | None) else type(arg).__name__
    )


def source_line(node: fx.Node) -> str:
    """The last frame of the node's stack trace outside of torch, as `file:line: code`."""
    trace = node.meta.get("stack_trace")
    if not isinstance(trace, str):
        return ""
    frames = _FRAME.findall(trace[-4000:])
    if not frames:
        return ""
    own = [frame for frame in frames if "/site-packages/torch/" not in frame[0]]
    file, line, code = (own or frames)[-1]
    return f"{file}:{line}" + (f": {code.strip()}" if code.strip() else "")


def annotated_stream(node: fx.Node) -> int | None:
    """The index of the stream that a node is annotated with, if it is."""
    custom = node.meta.get("custom")
    index = custom.get("stream") if isinstance(custom, dict) else None
    if index is None:
        return None
    return stream_index(index, node)


def stream_index(index: Any, node: fx.Node) -> int:
    """An index of a stream or an event, checked."""
    if type(index) is not int or index < 0:
        raise ProgramError(
            f"node {node.name!r} names a stream or an event by {_short(index)}, which is no index; "
            f"fix: streams and events are integers >= 0 in Dynamo's table of objects"
        )
    return index


def stream_names(gm: fx.GraphModule, current: frozenset[int] | None) -> tuple[frozenset[int], int]:
    """The indices that mean the caller's stream, and the one of them that was guessed (or -1).

    Dynamo gives the caller's stream index 0 from torch 2.12 on, and another one as well where a
    function asks for `current_stream()`. Nodes on it are not annotated. So an index that syncs
    name, that no node is annotated with, and that is the only one such (with 0 unused) is it.
    """
    if current is not None:
        return current, -1
    annotated: set[int] = set()
    synced: set[int] = set()
    for node in all_nodes(gm):
        name = operator_name(node.target) if node.op == "call_function" else ""
        if name in STREAM_OPS:
            for place in STREAM_OPS[name]:
                if place < len(node.args) and type(node.args[place]) is int:
                    synced.add(node.args[place])  # pyright: ignore[reportArgumentType]
        else:
            index = annotated_stream(node)
            if index is not None:
                annotated.add(index)
    others = synced - annotated - {0}
    if 0 not in synced | annotated and len(others) == 1:
        guessed = others.pop()
        return frozenset((0, guessed)), guessed
    return frozenset((0,)), -1


def all_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of all subgraphs in it, each once."""
    waiting, seen = [gm], {id(gm)}
    while waiting:
        held = waiting.pop()
        for node in held.graph.nodes:
            yield node
            inner = attribute(held, node) if node.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule) and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(inner)


def attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    """Object that a `get_attr` node names. Raises ProgramError where there is none."""
    held: Any = gm
    for part in str(node.target).split("."):
        if not hasattr(held, part):
            raise ProgramError(
                f"node {node.name!r} names the attribute {node.target!r}, which the module does "
                f"not have; fix: add it, or remove the node"
            )
        held = getattr(held, part)
    return held


def stream_name(index: int, current: frozenset[int]) -> str:
    """A stream's name in a Program."""
    return MAIN if index in current else f"stream{index}"
