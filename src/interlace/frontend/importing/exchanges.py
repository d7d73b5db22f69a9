"""Graphs that communicate and run as traced, since sizes of an exchange are data.

The rows that ranks send one another in an `all_to_all_single` may be counts of a router, as those
of a mixture of experts. They are other ones on each rank and in each call, and no rank knows those
of its peers without asking:

    sent = counts.tolist()
    rows = all_to_all_single_autograd(x, received, sent, group)

Note [As traced]: ranks would have to agree on a Program in every step. So such a graph runs as
TorchDynamo traced it, through torch's own collectives, without agreement and proof. The ranks say
once, together, that the sizes of an exchange are data: the first time that they compile it. From
then on what holds its lines of code runs as traced on all of them, whatever its sizes are by chance
and whenever it was compiled, and compiling it asks nobody. That is why one rank may compile alone,
as TorchDynamo has it do where a size is 0 or 1, equals another, or is the same as before on another
rank: its peers, which run what they have, meet it in the same collectives of torch.

Sizes that are all equal on all ranks when they first compile are taken for constants. A rank that
meets the very same again in the next call, where others do not, is told that they compile alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import fx

from interlace.frontend.importing.nodes import group_of, location
from interlace.frontend.teams import consent_of_ranks

DATA = "runs as traced: the sizes of an exchange are data, and no rank knows those of its peers"


@dataclass(slots=True)
class KnownPlaces:
    """Facts of the code that communicates, which the ranks agreed on as they compiled; all drop
    them together, and graphs remember their own."""

    traced: dict[str, str] = field(default_factory=dict[str, str])
    """Places in the user's code whose communication runs as traced, with the reason."""
    decisions: dict[tuple[str, ...], list[bool]] = field(
        default_factory=dict[tuple[str, ...], list[bool]]
    )
    """Joint decisions of the ranks on a graph, by where it communicates."""

    def decided(self, graph: fx.Graph, ask: Callable[[], list[bool]]) -> list[bool]:
        """The ranks' answers, new or of their first compilation: Note [As traced]."""
        own = GraphPlaces(graph, self, "joint")
        if not own.traced or own.places not in self.decisions:
            self.decisions[own.places] = ask()
        return self.decisions[own.places]

    def clear(self) -> None:
        """Forgets them all."""
        self.traced.clear()
        self.decisions.clear()


class GraphPlaces:
    """Places where one graph communicates, and why it runs as traced, if it does."""

    def __init__(self, graph: fx.Graph, known: KnownPlaces, kind: str) -> None:
        self.graph, self._known, self._kind = graph, known, kind
        self.places = tuple(map(_place, communications(graph)))
        self._why = ""

    @property
    def traced(self) -> str:
        """Why the graph runs as traced, by what is known of it or of others of the same code; a
        reason that it has stays."""
        if self._known.traced and not self._why:
            known = self._known.traced
            self._why = next((known[key] for key in self.places if key in known), "")
        return self._why

    def ask(self, timeout_s: float | None) -> None:
        """Has the ranks of all its teams say whether sizes of exchanges are data, if not known."""
        nodes = exchanges(self.graph)
        if not nodes or self.traced:
            return
        data = any(map(_is_uneven, nodes))
        places = [self._kind, *(location(node).module for node in nodes)]
        for group in dict.fromkeys(map(group_of, communications(self.graph))):
            wishes = [(group, not data)]  # what one axis of a mesh says is agreed along the next
            agreed = consent_of_ranks(places, wishes, timeout_s, "whether sizes are data")
            data = not agreed[0]
        if data:
            self._why = DATA
            self._known.traced.update(dict.fromkeys(filter(None, map(_place, nodes)), DATA))


def exchanges(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that exchange rows between ranks by split sizes."""
    return [node for node in graph.nodes if "all_to_all_single" in str(node.target)]


def communications(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that communicate in a process group."""
    return (node for node in graph.nodes if group_of(node) is not None)


def _place(node: fx.Node) -> str:
    """Where a node is in the user's code, with what led there; the same in forward and backward."""
    return node.meta.get("stack_trace") or str(location(node))


def _is_uneven(node: fx.Node) -> bool:
    """Returns True if split sizes differ from each other: they may change in the next call, even
    where TorchDynamo has traced constants."""
    splits = [
        item.meta["val"] if isinstance(item, fx.Node) else item
        for sizes in node.args[1:3]
        for item in sizes  # pyright: ignore
    ]
    return len(set(map(str, splits))) > 1
