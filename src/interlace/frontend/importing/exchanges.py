"""Exchanges whose sizes are data, as those of a mixture of experts: their graphs run as traced.

The rows that ranks send one another in an `all_to_all_single` may be counts of a router. They are
other ones on each rank and in each call, and no rank knows those of its peers without asking:

    sent = counts.tolist()
    rows = all_to_all_single_autograd(x, received, sent, group)

Note [Sizes that are data]: ranks would have to agree on a Program in every step. So such a graph
runs as TorchDynamo traced it, through torch's own collectives, without agreement and proof. The
ranks say once, together, that the sizes of an exchange are data: the first time that they compile
it. From then on what holds its line of code runs as traced on all of them, whatever its sizes are
by chance and whenever it was compiled, and compiling it asks nobody. That is why one rank may
compile alone, as TorchDynamo has it do where a size is 0 or 1, or is the same as before on another
rank: its peers, which run what they have, meet it in the same collectives of torch.

Sizes that are all equal on all ranks when they first compile are taken for constants. A rank that
meets the very same again in the next call, where others do not, is told that they compile alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from interlace.frontend.importing.nodes import group_of, location
from interlace.frontend.teams import consent_of_ranks


@dataclass(slots=True)
class KnownExchanges:
    """Facts of exchanges that the ranks agreed on as they compiled; all drop them together, and
    graphs remember their own."""

    data: set[str] = field(default_factory=set[str])
    """Where the exchanges are of which ranks found that their sizes are data."""
    decisions: dict[tuple[str, ...], list[bool]] = field(
        default_factory=dict[tuple[str, ...], list[bool]]
    )
    """Joint decisions of the ranks on a graph with exchanges, by where it communicates."""

    def decided(self, graph: fx.Graph, ask: Callable[[], list[bool]]) -> list[bool]:
        """The ranks' answers, new or of their first compilation: Note [Sizes that are data]."""
        exchange, key = Exchange(graph, self), tuple(map(_place, communications(graph)))
        if not exchange.sizes_are_data or key not in self.decisions:
            self.decisions[key] = ask()
        return self.decisions[key]

    def clear(self) -> None:
        """Forgets them all."""
        self.data.clear()
        self.decisions.clear()


class Exchange:
    """The exchanges of one graph, and whether their sizes are data."""

    def __init__(self, graph: fx.Graph, known: KnownExchanges) -> None:
        self.graph, self._known = graph, known
        self._places = [_place(node) for node in exchanges(graph)]
        self._data = False

    @property
    def sizes_are_data(self) -> bool:
        """True if the sizes are known to be data, from this graph or another of the same code."""
        if not self._data and not self._known.data.isdisjoint(self._places):
            self._data = True
        return self._data

    def ask(self, kind: str, numbers: bool, time_out_s: float | None) -> None:
        """Has the ranks of all its teams say whether they are, where it is not known.

        `numbers` says whether the traced function takes numbers, which may be others in each call:
        then sizes may come from them, although TorchDynamo has traced constants.
        """
        if not self._places or self.sizes_are_data:
            return
        data = any(_is_data(node, numbers) for node in exchanges(self.graph))
        places = [kind, *(location(node).module for node in exchanges(self.graph))]
        for group in dict.fromkeys(map(group_of, communications(self.graph))):
            wishes = [(group, not data)]  # what one axis of a mesh says is told along the next
            told = consent_of_ranks(places, wishes, time_out_s, "whether sizes are data")
            data = not told[0]
        if data:
            self._known.data.update(self._places)


def exchanges(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that exchange rows between ranks by split sizes."""
    return [node for node in graph.nodes if "all_to_all_single" in str(node.target)]


def communications(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that communicate in a process group."""
    return (node for node in graph.nodes if group_of(node) is not None)


def _place(node: fx.Node) -> str:
    """Where a node is in the user's code, with what led there; the same in forward and backward."""
    return node.meta.get("stack_trace") or str(location(node))


def _is_data(node: fx.Node, numbers: bool) -> bool:
    """Returns True if split sizes differ from each other, and may change in the next call."""
    splits = [
        item.meta["val"] if isinstance(item, fx.Node) else item
        for sizes in node.args[1:3]
        for item in sizes  # pyright: ignore
    ]
    symbolic = any(isinstance(size, torch.SymInt) for size in splits)
    return (symbolic or numbers) and len(set(map(str, splits))) > 1
