"""Walks a graph's nodes in order and notes its steps.

trace = walk(gm, current=None)
trace.steps, trace.outputs
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from interlace.errors import ProgramError, UnsupportedError
from interlace.torch_private import HigherOrderOperator, OpOverload
from interlace_check.graphs.reading import naming, targets
from interlace_check.graphs.reading.communication import BegunCommunication
from interlace_check.graphs.reading.sync import Syncs
from interlace_check.graphs.reading.tensors import (
    Storage,
    TensorRef,
    facts_of,
    made_bytes,
    tensor_view,
)
from interlace_check.graphs.reading.values import (
    MAX_DEPTH,
    Lasting,
    NodeValue,
    aliases,
    bind,
    example,
    flatten,
    item_of,
    mapped,
    tensors_in,
    written_arguments,
)
from interlace_check.graphs.steps import MAIN, GraphStep, Place, Trace

MAX_NODES = 200_000
"""Nodes of a graph, those of inlined subgraphs counted each time."""
_INLINED = ("higher_order::control_deps", "higher_order::invoke_subgraph")
_MUTATING_HOPS = ("higher_order::triton_kernel_wrapper_mutation",)


def walk(gm: fx.GraphModule, current: frozenset[int] | None) -> Trace:
    """The steps of a graph.

    Raises ProgramError for a malformed graph, and UnsupportedError for an operator of which the
    effect on the order is unknown.
    """
    walker = Walker(gm, current)
    walker.run(gm, None, "", MAIN, 0)
    walker.finish()
    return walker.trace


class Walker:
    """The state while a graph is walked."""

    def __init__(self, gm: fx.GraphModule, current: frozenset[int] | None) -> None:
        self.trace = Trace()
        self.current, guessed = naming.stream_names(gm, current)
        self.trace.assumed = str(guessed) if guessed >= 0 else None
        self.syncs = Syncs(self)
        self.communication = BegunCommunication(self)
        self._writes: dict[int, int] = {}
        self._reads: defaultdict[int, set[int]] = defaultdict(set)

    def run(
        self,
        gm: fx.GraphModule,
        given: list[NodeValue] | None,
        outer: str,
        stream: str,
        depth: int,
        extra: frozenset[int] = frozenset(),
    ) -> NodeValue:
        """Walks one graph, with `given` for its placeholders; gives what it returns."""
        if depth > MAX_DEPTH:
            raise ProgramError(
                f"subgraphs are nested more than {MAX_DEPTH} deep; fix: does one hold itself?"
            )
        values: dict[fx.Node, NodeValue] = {}
        waiting = iter(given or [])
        for node in gm.graph.nodes:
            self.trace.num_nodes += 1
            if self.trace.num_nodes > MAX_NODES:
                raise ProgramError(
                    f"the graph has more than {MAX_NODES} nodes; fix: check its parts one by one"
                )
            place = naming.place_of(node, self.trace.num_nodes, outer)
            if node.op == "placeholder":
                if given is None:
                    values[node] = self._input(node, "input")
                else:
                    values[node] = next(waiting, NodeValue(None))
            elif node.op == "get_attr":
                held = naming.attribute(gm, node)
                if isinstance(held, fx.GraphModule):
                    values[node] = NodeValue(held)
                else:
                    values[node] = self._input(node, "constant", held)
            elif node.op == "output":
                return self._output(node, values, given is None)
            elif node.op == "call_function":
                after = self._uses(node, values, place.number) | extra
                args = mapped(node.args, lambda used: values[used].data)
                kwargs = mapped(node.kwargs, lambda used: values[used].data)
                on = naming.annotated_stream(node)
                name = stream if on is None else naming.stream_name(on, self.current)
                given_by = {used: values[used] for used in node.all_input_nodes}
                call = GraphCall(
                    node, place, name, tuple(args), dict(kwargs), after, depth, given_by
                )
                values[node] = self._call(call)
            else:
                raise UnsupportedError(
                    f"node {node.name!r} is a {node.op}, and what it touches is unknown; fix: "
                    f"check the graph that AOTAutograd makes, of aten operators"
                )
        raise ProgramError("a graph has no output node; fix: lint it with `graph.lint()`")

    def finish(self) -> None:
        """Adds the facts that are known only at the end."""
        self.communication.keep_unfinished()
        self.syncs.note_waits()
        if all(storage.is_host for storage in self.trace.storages if storage.origin == "made"):
            for storage in self.trace.storages:  # traced on a CPU, and no copies to the host
                storage.is_host = False

    def _uses(self, node: fx.Node, values: dict[fx.Node, NodeValue], number: int) -> frozenset[int]:
        """The steps behind a node's arguments, which stay alive up to this node."""
        after: frozenset[int] = frozenset()
        for used in node.all_input_nodes:
            value = values.get(used)
            if value is None:
                raise ProgramError(
                    f"node {node.name!r} uses {used.name!r} before it is made; fix: put the nodes "
                    f"in an order in which each comes after its arguments"
                )
            after |= value.after
            for tensor in tensors_in(value.data):
                tensor.storage.last_use = max(tensor.storage.last_use, number)
        return after

    def _input(self, node: fx.Node, origin: str, held: Any = None) -> NodeValue:
        """Value of a graph input, or of a constant that the module holds."""
        value = held if origin == "constant" else example(node)
        facts = facts_of(value)
        if facts is None and not isinstance(value, torch.Tensor) and value is not None:
            return NodeValue(held)  # a size, a process group, ...
        if origin == "constant" and value is None:
            return NodeValue(None)
        storage = self.storage(node.name, made_bytes(facts), origin, MAIN)
        return NodeValue(TensorRef(storage, tensor_view(storage, facts), facts))

    def _output(
        self, node: fx.Node, values: dict[fx.Node, NodeValue], outermost: bool
    ) -> NodeValue:
        after = self._uses(node, values, self.trace.num_nodes)
        returned = node.args[0] if node.args else None
        data = mapped(returned, lambda used: values[used].data)
        if outermost:
            self.trace.outputs = tensors_in(data)
            for tensor in self.trace.outputs:
                tensor.storage.kept = True
        if not isinstance(returned, tuple | list):
            return NodeValue(data, after)
        parts = [
            values[item] if isinstance(item, fx.Node) else NodeValue(item) for item in returned
        ]
        return NodeValue(data, after, tuple(parts))

    def storage(
        self, maker: str, num_bytes: int | None, origin: str, stream: str, is_host: bool = False
    ) -> Storage:
        """A new storage."""
        number = len(self.trace.storages)
        made = Storage(number, maker, num_bytes, origin, stream, is_host)
        self.trace.storages.append(made)
        made.kept = origin != "made"
        return made

    def add(self, step: GraphStep) -> int:
        """Notes a step, ordered after what it conflicts with; gives its number."""
        number = len(self.trace.steps)
        after = set(step.after)
        touched = [(storage.number, True) for storage in step.makes]
        touched += [(int(view.buffer[1:]), True) for view in step.writes]
        touched += [(int(view.buffer[1:]), False) for view in step.reads]
        for storage, write in touched:
            after.update(self._reads[storage] if write else ())
            if storage in self._writes:
                after.add(self._writes[storage])
        for storage, write in touched:
            if write:
                self._writes[storage] = number
                self._reads[storage].clear()
            else:
                self._reads[storage].add(number)
        after.discard(number)
        self.trace.steps.append(replace(step, after=frozenset(after)))
        return number

    def _call(self, call: GraphCall) -> NodeValue:
        """One call of a function."""
        target = call.node.target
        name = targets.operator_name(target)
        if isinstance(target, HigherOrderOperator):
            return self._higher_order(call, name)
        op = targets.overload(target)
        if op is None:
            return self._python(call, name)
        bound = bind(op, call.args, call.kwargs, call.node)
        if name in targets.STREAM_OPS:
            return self.syncs.lower(call, name, bound)
        if targets.is_ordering(name):
            return self.communication.lower(call, name, op, bound)
        targets.refuse_unknown(name, call.node)
        return self.compute(call, name, op, bound)

    def _python(self, call: GraphCall, name: str) -> NodeValue:
        """A function of Python's: it may take values apart, and compute with sizes."""
        if name == "getitem" and len(call.args) == 2:
            item = item_of(call.args[0], call.args[1], call.node)
            source = call.values.get(call.node.args[0])  # pyright: ignore[reportArgumentType]
            if source is not None and source.parts is not None and type(call.args[1]) is int:
                return source.parts[call.args[1]]
            return NodeValue(item, call.after)
        if tensors_in((call.args, call.kwargs)) and name not in targets.PURE:
            raise UnsupportedError(
                f"node {call.node.name!r} calls {name} on tensors, and what it touches is unknown; "
                f"fix: check the graph that AOTAutograd makes, of aten operators"
            )
        return NodeValue(None, call.after)

    def compute(
        self, call: GraphCall, name: str, op: OpOverload, bound: dict[str, Any]
    ) -> NodeValue:
        """An operator that touches its arguments and nothing else."""
        writes = written_arguments(op, bound)
        shared = aliases(op, bound)
        if name in targets.MAYBE_COPIES:
            shared = [_same_storage(call.node, tensors) for tensors in shared]
        reads = tensors_in(list(bound.values()))
        results = op._schema.returns
        if shared and all(shared) and not writes:
            return NodeValue(self._views(call, shared), call.after)
        makes: list[Storage] = []
        if name in targets.FILLED:
            return self.note(call, reads, writes, makes, self._views(call, shared))
        many = len(results) != 1
        value = example(call.node)
        parts: list[Any] = []
        for index, (result, tensors) in enumerate(zip(results, shared, strict=True)):
            part = value
            if many:
                part = value[index] if _has(value, index) else None
            if tensors:
                parts.append(_given_back(tensors, str(result.type)))
            else:
                parts.append(self.made(call, part, str(result.type), makes))
        return self.note(call, reads, writes, makes, parts[0] if len(parts) == 1 else tuple(parts))

    def note(
        self,
        call: GraphCall,
        reads: list[TensorRef],
        writes: list[TensorRef],
        makes: list[Storage],
        data: Any,
    ) -> NodeValue:
        """Adds the step of a computation; gives its value."""
        if not (reads or writes or makes):
            return NodeValue(data, call.after)
        for tensor in writes:
            tensor.storage.written = True
        number = self.add(
            GraphStep(
                "compute",
                call.place,
                call.stream,
                tuple(dict.fromkeys(tensor.view for tensor in reads)),
                tuple(dict.fromkeys(tensor.view for tensor in writes)),
                tuple(makes),
                call.after,
            )
        )
        return NodeValue(data, frozenset((number,)))

    def made(
        self, call: GraphCall, value: Any, kind: str, makes: list[Storage], depth: int = 0
    ) -> Any:
        """New tensors for a result of which `value` is the example and `kind` the schema's type."""
        if isinstance(value, tuple | list) and depth < MAX_DEPTH:
            found = [self.made(call, item, "", makes, depth + 1) for item in value]
            return tuple(found)
        if isinstance(value, dict) and depth < MAX_DEPTH:
            return {key: self.made(call, item, "", makes, depth + 1) for key, item in value.items()}
        if value is None and "Tensor" not in kind:
            return None
        if value is not None and not isinstance(value, torch.Tensor):
            return None
        facts = facts_of(value)
        host = facts is not None and facts.is_host
        storage = self.storage(call.place.name, made_bytes(facts), "made", call.stream, host)
        makes.append(storage)
        tensor = TensorRef(storage, tensor_view(storage, facts), facts)
        return Lasting(tensor) if value is None and "List" in kind else tensor

    def _views(self, call: GraphCall, shared: list[list[TensorRef]]) -> Any:
        """Views of tensors: no step, and the sizes that the node's metadata gives."""
        value = example(call.node)

        def viewed(part: Any, tensor: TensorRef) -> TensorRef:
            facts = facts_of(part)
            return TensorRef(tensor.storage, tensor_view(tensor.storage, facts), facts)

        if len(shared) == 1 and isinstance(value, tuple | list):
            return tuple([viewed(item, shared[0][0]) for item in value])
        found = [
            viewed(value[i] if len(shared) > 1 and _has(value, i) else value, tensors[0])
            for i, tensors in enumerate(shared)
        ]
        if len(found) > 1:
            return tuple(found)
        return found[0] if value is not None else Lasting(found[0])

    def _higher_order(self, call: GraphCall, name: str) -> NodeValue:
        """A higher-order operator: its subgraph in its place, or a call of it all."""
        if name in _INLINED:
            return self._inlined(call, name)
        for held in flatten((call.args, call.kwargs)):
            if isinstance(held, fx.GraphModule):
                self._refuse_order_within(held, call)
            elif isinstance(held, OpOverload):
                targets.refuse_unknown(held._schema.name, call.node)
                if not targets.is_ordering(held._schema.name):
                    continue
                raise UnsupportedError(
                    f"node {call.node.name!r} calls {held._schema.name} within {name}; fix: check "
                    f"the graph after the pass that takes {name} apart"
                )
        tensors = tensors_in((call.args, call.kwargs))
        writes = tensors if name in _MUTATING_HOPS else []
        makes: list[Storage] = []
        data = self.made(call, example(call.node), "", makes)
        return self.note(call, tensors, writes, makes, data)

    def _inlined(self, call: GraphCall, name: str) -> NodeValue:
        """`control_deps(deps, subgraph, *args)`, `invoke_subgraph(subgraph, name, *args)`."""
        place = 1 if name.endswith("control_deps") else 0
        subgraph = call.args[place] if len(call.args) > place else None
        if not isinstance(subgraph, fx.GraphModule):
            raise ProgramError(
                f"node {call.node.name!r} calls {name} without a subgraph; fix: its argument "
                f"{place} is a node that gets one"
            )
        given = [
            call.values[arg] if isinstance(arg, fx.Node) else NodeValue(data)
            for arg, data in zip(call.node.args[2:], call.args[2:], strict=True)
        ]
        depth = call.depth + 1
        if not place:
            return self.run(subgraph, given, call.place.name, call.stream, depth)
        self.trace.has_control_deps = True
        first = len(self.trace.steps)
        value = self.run(subgraph, given, call.place.name, call.stream, depth, call.after)
        done = frozenset(range(first, len(self.trace.steps))) or call.after
        parts = value.parts and tuple([NodeValue(part.data, done) for part in value.parts])
        return NodeValue(value.data, done, parts)

    def _refuse_order_within(self, held: fx.GraphModule, call: GraphCall) -> None:
        for node in naming.all_nodes(held):
            name = targets.operator_name(node.target) if node.op == "call_function" else ""
            targets.refuse_unknown(name, node)
            if targets.is_ordering(name):
                raise UnsupportedError(
                    f"node {call.node.name!r} calls {name} in a subgraph that may run any number "
                    f"of times; fix: check the subgraph alone"
                )


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A call of a function, with its arguments in hand."""

    node: fx.Node
    place: Place
    stream: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after: frozenset[int]
    depth: int
    values: dict[fx.Node, NodeValue]


def _has(value: Any, index: int) -> bool:
    return isinstance(value, tuple | list) and index < len(value)


def _given_back(tensors: list[TensorRef], kind: str) -> Any:
    """A result that is an argument: the tensor, or all of a list."""
    return list(tensors) if "List" in kind else tensors[0]


def _same_storage(node: fx.Node, tensors: list[TensorRef]) -> list[TensorRef]:
    """Returns `tensors` if a possible copy of them is a view, else none; unknown counts as copy."""
    value = example(node)
    source = node.args[0] if node.args else None
    base = example(source) if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(base, torch.Tensor):
        return []
    try:
        same = value.untyped_storage()._cdata == base.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return []
    return tensors if same else []
