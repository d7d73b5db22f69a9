"""Updates of inputs put back in place: a KV cache is written, not copied.

AOTAutograd makes a graph functional: `cache[:, 3:5] = k` arrives as a new tensor
(`slice_scatter`), and a `copy_` at the end puts the whole of it into the input. Where nothing
reads the old contents after the update, the new tensor *is* the input, and the update writes only
its own box:

    main: copy(k, cache[...])            # at the place of the update
    main: call("aten.index_put_.default", cache, (None, i), k, False, ...)

Else the update stays functional and one Copy at the end writes the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from interlace.frontend.importing.nodes import aliases, bound
from interlace.frontend.importing.views import slice_bounds
from interlace.ir import Call, View

if TYPE_CHECKING:
    from interlace.frontend.importing.importer import Importer

BOXES = {"aten.slice_scatter.default", "aten.select_scatter.default"}
"""Updates that replace one box of their first argument by their second."""

UPDATES = {
    f"aten.{name}": f"aten.{name.replace('.', '_.', 1)}"
    for name in (
        *("index_put.default", "index_copy.default", "index_add.default", "masked_scatter.default"),
        *("index_fill.int_Scalar", "index_fill.int_Tensor", "masked_fill.Scalar"),
        *("masked_fill.Tensor", "scatter.src", "scatter.value", "scatter_add.default"),
    )
}
"""Updates of their first argument, and their form in place."""

COPY = "aten.copy.default"


class InPlace:
    """Which nodes of a graph write an input in place, and how."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.targets: list[fx.Node] = []
        """Inputs that the graph writes."""
        self.states: dict[fx.Node, fx.Node] = {}
        """Nodes that stand for the whole of a written input, by that input."""
        self.absorbed: set[fx.Node] = set()
        """Nodes that exist only as part of an update."""
        for node in graph.nodes:
            if str(node.target) == "aten.copy_.default" and node.args[0].op == "placeholder":
                self.targets.append(node.args[0])
                self._plan(node.args[0], node)

    def write(self, imp: Importer, node: fx.Node) -> View:
        """Emits the update that `node` is; its value is the input itself."""
        target = imp.view(self.states[node])
        self._write(imp, node, target)
        return target

    def _plan(self, target: fx.Node, final: fx.Node) -> None:
        chain: list[fx.Node] = []
        node: object = final.args[1]
        while isinstance(node, fx.Node) and node is not target and _is_update(node):
            chain.append(node)
            node = node.args[0]
        if node is not target or not chain:
            return
        chain.reverse()
        parts = [self._parts(state) for state in chain]
        previous = target
        for state, inner in zip(chain, parts, strict=True):
            if not self._free_after(previous, state, {*inner, final}):
                return
            previous = state
        self.states.update(dict.fromkeys(chain, target))
        for inner in parts:
            self.absorbed |= inner

    def _parts(self, state: fx.Node) -> set[fx.Node]:
        """The nested updates that only `state` uses."""
        found: set[fx.Node] = set()
        todo = [state]
        while todo:
            node = todo.pop()
            for arg in (node.args[0], node.args[1]) if node is not state else (node.args[1],):
                if isinstance(arg, fx.Node) and arg not in found and set(arg.users) == {node}:
                    if _is_update(arg) or str(arg.target) == COPY:
                        found.add(arg)
                        todo.append(arg)
        return found

    def _free_after(self, old: fx.Node, state: fx.Node, parts: set[fx.Node]) -> bool:
        """Returns True if only the update itself reads `old` after `state` is computed."""
        views = aliases(old)
        readers = {user for view in views for user in view.users} - views - parts - {state}
        if any(self.order[reader] > self.order[state] for reader in readers):
            return False
        updates = [node for node in (state, *parts) if _is_update(node)]
        given = {arg for node in updates for arg in node.all_input_nodes if arg is not node.args[0]}
        return len(updates) == 1 or given.isdisjoint(views)

    def _sink(self, imp: Importer, value: object, target: View) -> None:
        """Makes `target` hold what `value` stands for."""
        if isinstance(value, fx.Node) and value in self.absorbed:
            self._write(imp, value, target)
        else:
            imp.copy_into(imp.view(value), target)

    def _write(self, imp: Importer, node: fx.Node, target: View) -> None:
        """Makes `target` hold what `node` stands for; the rest of the input stays as it is."""
        args, sizes = bound(node), imp.sizes(target)
        if str(node.target) == COPY:
            self._sink(imp, args[1], target)
            return
        self._sink(imp, args[0], target)
        if str(node.target) == "aten.slice_scatter.default":
            dim = args[2] % len(sizes)
            start, stop, _ = slice_bounds([None, dim, *map(imp.arg, args[3:])], sizes[dim])
            self._sink(imp, args[1], target.slice(dim, start, stop))
        elif str(node.target) == "aten.select_scatter.default":
            dim = args[2] % len(sizes)
            self._sink(imp, args[1], target.select(dim, imp.arg(args[3]) % sizes[dim]))
        else:
            self._update(imp, node, target)

    def _update(self, imp: Importer, node: fx.Node, target: View) -> None:
        def apart(arg: object) -> Any:
            """An argument that shares no memory with what is written."""
            if isinstance(arg, View) and arg.buffer == target.buffer:
                return imp.copied(arg)
            return tuple(map(apart, arg)) if isinstance(arg, tuple) else arg

        args = (target, *(apart(imp.arg(arg)) for arg in node.args[1:]))
        kwargs = tuple((key, apart(imp.arg(arg))) for key, arg in node.kwargs.items())
        fn = UPDATES[str(node.target)]
        imp.emit(Call(fn=fn, args=args, kwargs=kwargs, outs=(target,), mutates=True, loc=imp.loc))


def _is_update(node: fx.Node) -> bool:
    name = str(node.target)
    if name == "aten.slice_scatter.default":
        return bound(node)[5] == 1
    return name in BOXES or name in UPDATES
