"""Updates of inputs put back in place: a KV cache is written, not copied.

AOTAutograd makes a graph functional: `cache[:, 3:5] = k` arrives as a new tensor
(`slice_scatter`), `cache.view(-1, 32)[slots] = k` as a new tensor of a view (`index_put`) and a
view of that, and a `copy_` at the end puts the whole of it into the input. Where nothing reads the
old contents after an update, the new tensor *is* the input, and the update writes only its own box:

    main: copy(k, cache[...])            # at the place of the update
    main: call("aten.index_put_.default", cache.view(160, 32), (slots,), k, False, ...)

Else the update stays functional, and one Copy at the end writes the input.

Note [Numbers of updates]
    The updates of an input are numbered in the order of the graph. A node that is the input, a view
    of it or an update has a place: its box of the input, and the number of the last update that it
    includes. Where a node reads a place after a later update of the same bytes, that update must
    stay functional; then all places are determined anew. A scatter of a part that lies in its place
    already (`slice_scatter(cache, copy(cache[:, 3:5], k), ...)`) writes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from interlace.frontend.importing.nodes import bound, is_view, written_inputs
from interlace.frontend.importing.normalise import NORMALISERS
from interlace.frontend.importing.views import RULES, SPLITS, extend, same_box
from interlace.ir import Box, Call, View

if TYPE_CHECKING:
    from interlace.frontend.importing.importer import Importer

SCATTERS = {
    "aten.slice_scatter.default": "aten.slice.Tensor",
    "aten.select_scatter.default": "aten.select.int",
    "aten.diagonal_scatter.default": "aten.diagonal.default",
}
"""Updates that replace one box of their first argument by their second, and the view that it is."""

UPDATES = {
    f"aten.{name}": f"aten.{name.replace('.', '_.', 1)}"
    for name in (
        *("index_put.default", "index_copy.default", "index_add.default", "masked_scatter.default"),
        *("index_fill.int_Scalar", "index_fill.int_Tensor", "masked_fill.Scalar"),
        *("masked_fill.Tensor", "scatter.src", "scatter.value", "scatter_add.default"),
        *("fill.Scalar", "fill.Tensor", "zero.default"),
    )
}
"""Updates of their first argument, and their form in place."""

WRITERS = {*SCATTERS, *UPDATES, "aten.copy.default"}
"""All of these, and what replaces the whole of its first argument by the second."""


@dataclass(frozen=True, slots=True)
class InputPlace:
    """The box of a written input that a node is."""

    view: View
    number: int
    """The last update that it includes: see Note [Numbers of updates]."""
    part: View | None = None
    """The box that the node writes, if it does."""


class InPlace:
    """Which nodes of a graph are a written input, and which of them write it."""

    def __init__(self, imp: Importer) -> None:
        self.imp = imp
        self._finals = written_inputs(imp.gm.graph)
        self.targets = list(self._finals.values())
        """Inputs that the graph writes."""
        self.places: dict[fx.Node, InputPlace] = {}
        self._chains = {target: _chain(node.args[1]) for node, target in self._finals.items()}
        """Nodes that lead to the last contents of each input: its updates are among them."""
        self.updates: dict[str, list[tuple[fx.Node, Box]]] = {}
        """Updates of each written input, by its buffer, with what they write."""
        self._replaced: set[str] = set()
        """Inputs that a Copy at the end has written."""

    def plan(self) -> None:
        """Determines all places, once the inputs are imported."""
        while (late := self._unseen()) is not None:
            for chain in self._chains.values():
                chain.discard(late)

    def write(self, node: fx.Node) -> View:
        """The box that `node` is, once what it writes is written."""
        place = self.places[node]
        if str(node.target) in UPDATES:
            self._update(node, place.view)
        elif place.part is not None:
            self.imp.copy_into(self.imp.view(node.args[1]), place.part)
        return place.view

    def _unseen(self) -> fx.Node | None:
        """Places every node; returns an update that a later node must not see, if there is one."""
        imp = self.imp
        chains = {imp.view(target).buffer: self._chains[target] for target in self.targets}
        self.places = {target: InputPlace(imp.view(target), 0) for target in self.targets}
        self.updates, self._replaced = {buffer: [] for buffer in chains}, set()
        for node in imp.gm.graph.nodes if self.targets else ():
            base = node.args[0] if node.args else None
            own = self.places.get(base) if isinstance(base, fx.Node) else None
            read = [arg for arg in node.all_input_nodes if arg in self.places]
            place = None
            if node.target is operator.getitem:
                place = self._part(node)
            elif str(node.target) in SPLITS or isinstance(imp.value(node), torch.SymInt):
                continue
            elif node in self._finals:
                read = [arg for arg in read if arg is node.args[1]]
            elif own is not None:
                place = self._place(node, own, chains[own.view.buffer])
            if place is not None:
                read = [arg for arg in read if place.part is not None and arg is not base]
            late = [update for arg in read for update in self._later(self.places[arg])]
            if late:
                return late[0]
            if place is not None:
                self.places[node] = place
                if place.part is not None:
                    self.updates[place.view.buffer].append((node, imp.box(place.part)))
            elif node in self._finals and own is not None:
                last = self.places.get(node.args[1])
                if last is None or not self._same(last.view, own.view):
                    self._replaced.add(own.view.buffer)
        return None

    def _part(self, node: Any) -> InputPlace | None:
        """The place of one of the results of a split."""
        split, index = node.args
        source = self.places.get(split.args[0]) if str(split.target) in SPLITS else None
        return source and InputPlace(self.imp.split(split, source.view)[index], source.number)

    def _place(self, node: Any, own: InputPlace, chain: set[fx.Node]) -> InputPlace | None:
        """The place of a view or an update of what lies at `own`; None: it is new memory."""
        imp, name, args = self.imp, str(node.target), bound(node)
        if name in RULES or (is_view(node) and name not in NORMALISERS):
            view = imp.viewed_by(node, own.view)
            return None if view is None else InputPlace(view, own.number)
        if node not in chain or name not in WRITERS:
            return None
        part, updates = own.view, self.updates[own.view.buffer]
        if name in SCATTERS:
            rule, value = RULES[SCATTERS[name]], imp.value(args[1])
            steps = rule([None, *map(imp.arg, args[2:])], imp.box(own.view), value)
            part = extend(own.view, imp.buffers[own.view.buffer], steps, value, strides=False)
        if part is None:
            return None
        source = None if name in UPDATES else self.places.get(args[1])
        if source is not None and own.number <= source.number and self._same(source.view, part):
            if all(self._within(node, part) for node, _ in updates[own.number : source.number]):
                return InputPlace(own.view, source.number)
        if imp.box(part).overlaps_itself or any(self._later(own)):
            return None
        return InputPlace(own.view, len(updates) + 1, part)

    def _later(self, place: InputPlace) -> Iterator[fx.Node]:
        """Updates that stand where `place` does, and that it does not include."""
        updates, box = self.updates[place.view.buffer], self.imp.box(place.view)
        if place.number and place.view.buffer in self._replaced:
            yield updates[place.number - 1][0]
        yield from (node for node, part in updates[place.number :] if part.overlaps(box))

    def _within(self, node: Any, part: View) -> bool:
        """Returns True if an update surely writes nothing but `part`, as part of which it began."""
        written = self.places[node].part
        if written is not None and self._same(written, part):
            return True
        while node in self.places:
            if self._same(self.places[node].view, part):
                return True
            if node.op == "placeholder" or (is_view(node) and str(node.target) not in RULES):
                return False
            node = node.args[0].args[0] if node.target is operator.getitem else node.args[0]
        return False

    def _same(self, one: View, other: View) -> bool:
        """Returns True if two views are the same box, for all sizes of the class."""
        return one.buffer == other.buffer and same_box(self.imp.box(one), self.imp.box(other))

    def _update(self, node: fx.Node, target: View) -> None:
        imp = self.imp

        def unshared(arg: object) -> Any:
            """An argument that shares no memory with what is written."""
            if isinstance(arg, View) and arg.buffer == target.buffer:
                return imp.copied(arg)
            return tuple(map(unshared, arg)) if isinstance(arg, tuple) else arg

        args = (target, *(unshared(imp.arg(arg)) for arg in node.args[1:]))
        kwargs = tuple((key, unshared(imp.arg(arg))) for key, arg in node.kwargs.items())
        fn = UPDATES[str(node.target)]
        imp.emit(Call(fn=fn, args=args, kwargs=kwargs, outs=(target,), mutates=True, loc=imp.loc))


def _chain(last: object) -> set[fx.Node]:
    """The updates, scattered parts included, that lead to the last contents of an input."""
    found, todo = set[fx.Node](), [last]
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in found or node.op != "call_function":
            continue
        name = str(node.target)
        if name in WRITERS or name in RULES or is_view(node) or node.target is operator.getitem:
            found.add(node)
            todo += node.args[: 2 if name in SCATTERS else 1]
    return found
