"""Steps: what a graph does, one after another, as far as the order and the bytes are concerned.

`walk` makes them of a graph's nodes, and `to_program` a Program of them.

    GraphStep("record", place, "main", event=1)   # streams.record_event(1, <the caller's stream>)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from interlace.ir.view import View
from interlace_check.graphs.reading.tensors import Storage, TensorRef

MAIN = "main"
"""The caller's stream."""

Kind = Literal["compute", "start", "finish", "record", "wait", "wait_stream", "host"]


@dataclass(frozen=True, slots=True)
class Place:
    """A node, in the graph's own words."""

    number: int
    """Its place among all nodes, those of inlined subgraphs included, from 1."""
    name: str
    text: str
    """The node's call, with its arguments."""
    loc: str = ""
    """The source line that it comes from."""


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective, begun on a stream of its own."""

    queue: str
    """The stream that it runs on, which no node is on."""
    kind: str
    group: str


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One thing that the graph does."""

    kind: Kind
    place: Place
    stream: str
    reads: tuple[View, ...] = ()
    writes: tuple[View, ...] = ()
    makes: tuple[Storage, ...] = ()
    after: frozenset[int] = frozenset()
    """Steps that come before in every order that the graph's dependences allow."""
    event: int | None = None
    other: str = ""
    """Stream that a `wait_stream` waits for, or that the host awaits in a `host`."""
    issue: Issue | None = None
    finishes: tuple[int, ...] = ()
    """The steps that began what this one waits for."""


@dataclass(slots=True)
class Trace:
    """All steps of one graph, and what it takes and gives."""

    steps: list[GraphStep] = field(default_factory=list[GraphStep])
    storages: list[Storage] = field(default_factory=list[Storage])
    outputs: list[TensorRef] = field(default_factory=list[TensorRef])
    num_nodes: int = 0
    unowned: list[tuple[Place, int]] = field(default_factory=list[tuple[Place, int]])
    """Waits for events that are recorded nowhere in the graph."""
    early: list[tuple[Place, Place]] = field(default_factory=list[tuple[Place, Place]])
    """Waits for events that the graph records only later, and those records."""
    assumed: str | None = None
    """An index that was taken for the caller's stream, since nothing says which one is."""
    has_control_deps: bool = False
