"""Functional collectives of a graph, as steps that begin and steps that wait.

A collective begins on a stream of its group's own after what is on the current stream, and a
`wait_tensor` makes the stream that is current there wait for it.

    communication.lower(call, "_c10d_functional::wait_tensor", op, {"tensor": tensor})
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx

from interlace.errors import ProgramError, UnsupportedError
from interlace.torch_private import OpOverload
from interlace_check.graphs.reading import targets
from interlace_check.graphs.reading.tensors import Storage, TensorRef
from interlace_check.graphs.reading.values import NodeValue, aliases, example, tensors_in
from interlace_check.graphs.steps import GraphStep, Issue

if TYPE_CHECKING:
    from interlace_check.graphs.reading.walk import GraphCall, Walker

NEVER = 1 << 60


class BegunCommunication:
    """Communication that was begun and not waited for so far."""

    def __init__(self, walker: Walker) -> None:
        self.walker = walker
        self.begun: dict[int, list[int]] = defaultdict(list)
        """Steps that began something on each storage and have not been waited for since."""
        self.waits: dict[int, int] = {}
        """Last step that waited for each storage."""
        self.touched: dict[int, list[Storage]] = {}
        """Storages that each step which began something touches."""
        self.waited: set[int] = set()
        self.last: dict[str, int] = {}
        """Last step that began something in each group."""
        self.queues: dict[int, str] = {}
        self._free: defaultdict[str, list[str]] = defaultdict(list)
        self._num_queues = 0

    def lower(self, call: GraphCall, name: str, op: OpOverload, bound: dict[str, Any]) -> NodeValue:
        """One operator of these."""
        if name in targets.FINISHES:
            return self._finish(call, bound, targets.FINISHES[name])
        row = targets.COLLECTIVES[name]
        source = tensors_in(bound[row.source])
        filled = source if row.in_place else tensors_in(bound[row.out]) if row.out else []
        if bound.get("async_op"):  # Note [Traced calls] in targets.py
            raise UnsupportedError(
                f"node {call.node.name!r} calls {name} with async_op=True, and its wait is not in "
                f"the graph; fix: give async_op=False, or use functional collectives"
            )
        group = group_of(call.node, bound.get("group_name", bound.get("process_group")))
        issue = Issue(self._queue(call.stream), row.kind, group)
        value = self._begin(call, issue, source, filled, op, bound)
        if row.waits and not returns_early(bound.get("process_group")):
            call = dataclasses.replace(call, after=value.after)
            return self._finish(call, {"tensor": value.data}, "tensor")
        return value

    def _begin(
        self,
        call: GraphCall,
        issue: Issue,
        source: list[TensorRef],
        filled: list[TensorRef],
        op: OpOverload,
        bound: dict[str, Any],
    ) -> NodeValue:
        """Begins something that reads `source` and writes `filled`, or else what it makes."""
        walker = self.walker
        makes: list[Storage] = []
        kind = str(op._schema.returns[0].type) if op._schema.returns else ""
        if not filled:
            data = walker.made(call, example(call.node), kind, makes)
        else:
            shared = aliases(op, bound)
            given = shared[0] if shared and shared[0] else filled
            data = list(given) if "List" in kind else given[0]
            if len(op._schema.returns) > 1:  # and a Work
                data = data, None
        for tensor in filled:
            tensor.storage.written = True
        after = call.after
        if issue.group in self.last:  # a group's collectives stay in the order listed
            after |= {self.last[issue.group]}
        step = GraphStep(
            "start",
            call.place,
            call.stream,
            tuple(dict.fromkeys(tensor.view for tensor in source)),
            tuple(dict.fromkeys(tensor.view for tensor in filled)),
            tuple(makes),
            after,
            issue=issue,
        )
        number = self.last[issue.group] = walker.add(step)
        self.queues[number] = issue.queue
        touched = [*makes, *[tensor.storage for tensor in (*source, *filled)]]
        self.touched[number] = touched
        named = [*makes, *[tensor.storage for tensor in filled]] or touched
        for storage in named:
            self.begun[storage.number].append(number)
        return NodeValue(data, frozenset((number,)))

    def _queue(self, stream: str) -> str:
        """A stream for it to run on.

        That a later collective of the group is done does not mean that this one is: it holds for
        some backends and is no promise. So each has a stream of its own, or one on which all is
        done that the stream which begins it has waited for.
        """
        free = self._free[stream]
        if free:
            return free.pop()
        self._num_queues += 1
        return f"queue{self._num_queues}"

    def _finish(self, call: GraphCall, bound: dict[str, Any], argument: str) -> NodeValue:
        """The current stream waits for what fills these tensors, and torch forgets that it did: it
        waits for nothing a second time, whatever the stream."""
        storages = {tensor.storage.number for tensor in tensors_in(bound[argument])}
        finishes = tuple(sorted({b for one in storages for b in self.begun.pop(one, ())}))
        for begun in set(finishes) - self.waited:
            self._free[call.stream].append(self.queues[begun])
        self.waited.update(finishes)
        for begun in finishes:
            for storage in self.touched[begun]:
                storage.last_use = max(storage.last_use, call.place.number)
        after = call.after | {self.waits[one] for one in storages if one in self.waits}
        step = GraphStep("finish", call.place, call.stream, after=after, finishes=finishes)
        number = self.walker.add(step)
        self.waits.update(dict.fromkeys(storages, number))
        return NodeValue(bound[argument], frozenset((number,)))

    def keep_unfinished(self) -> None:
        """Torch keeps what it works on until it is waited for."""
        for begun, storages in self.touched.items():
            if begun not in self.waited:
                for storage in storages:
                    storage.last_use = NEVER


def returns_early(group: Any) -> bool:
    """Returns True for gloo's process group: Note [Traced calls] in targets.py."""
    if not isinstance(group, torch.ScriptObject):
        return False
    return dist.get_backend(dist.ProcessGroup.unbox(group)) == "gloo"


def group_of(node: fx.Node, group: Any) -> str:
    """The name of a process group, however a graph spells it."""
    if isinstance(group, str):
        return group
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    name = getattr(group, "group_name", None)
    if isinstance(name, str):
        return name
    position = len(node.args) - 1
    for used in node.all_input_nodes:
        if "process_group" in used.name or "pg" in used.name:
            return used.name
    raise ProgramError(
        f"node {node.name!r} has {type(group).__name__} as its process group (argument {position});"
        f" fix: name the group by a string"
    )
