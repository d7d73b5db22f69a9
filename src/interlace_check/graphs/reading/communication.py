"""Functional collectives and messages of a graph, as steps that begin and steps that
wait.

A collective begins on a stream of its group's own after what is on the current stream, and a
`wait_tensor` makes the stream that is current there wait for it.

    communication.lower(call, "_c10d_functional::wait_tensor", op, {"tensor": tensor})
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._ops import OpOverload

from interlace.errors import ProgramError
from interlace_check.graphs.reading import targets
from interlace_check.graphs.reading.aliasing import aliases
from interlace_check.graphs.reading.tensors import Storage, TensorRef
from interlace_check.graphs.reading.values import Value, example, tensors_in
from interlace_check.graphs.steps import Issue, Step

if TYPE_CHECKING:
    from interlace_check.graphs.reading.walk import GraphCall, Walker

NEVER = 1 << 60
_AGREED = ("reduce_op", "group_size", "src", "gather_dim", "shard_dim")


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
        """Last step that began something in each group (or pair of ranks)."""
        self.queues: dict[int, str] = {}
        self._free: defaultdict[str, list[str]] = defaultdict(list)
        self._num_queues = 0

    def lower(self, call: GraphCall, name: str, op: OpOverload, bound: dict[str, Any]) -> Value:
        """One operator of these."""
        if name in targets.FINISHES:
            return self._finish(call, bound, targets.FINISHES[name])
        if name in targets.MESSAGES:
            return self._message(call, name, op, bound)
        row = targets.COLLECTIVES[name]
        source = tensors_in(bound[row.source])
        filled = source if row.in_place else tensors_in(bound[row.out]) if row.out else []
        issue = self._issue(call.node, row, bound, source, name.endswith("coalesced"))
        value = self._begin(call, issue, source, filled, op, bound)
        if row.waits:
            call = dataclasses.replace(call, after=value.after)
            return self._finish(call, {"tensor": value.data}, "tensor")
        return value

    def _issue(
        self,
        node: fx.Node,
        row: targets.CollectiveRow,
        bound: dict[str, Any],
        source: list[TensorRef],
        coalesced: bool,
    ) -> Issue:
        group = group_of(node, bound["group_name"])
        agreed = [("kind", row.kind + (" (coalesced)" if coalesced else ""))]
        agreed += [(name, str(bound[name])) for name in _AGREED if bound.get(name) is not None]
        splits = None
        if row.kind == "all_to_all" and "input_split_sizes" in bound:
            given = _integers(bound["input_split_sizes"])
            taken = _integers(bound["output_split_sizes"])
            splits = None if given is None or taken is None else (given, taken)
        for index, tensor in enumerate(source):
            if tensor.facts is None:
                continue
            agreed.append((f"dtype of input {index}", tensor.facts.dtype))
            if splits is None:
                agreed.append((f"elements of input {index}", str(tensor.facts.numel)))
        size = bound.get("group_size")
        if size is not None and (type(size) is not int or size < 1):
            raise ProgramError(
                f"node {node.name!r} has a group of {size!r} ranks; fix: group_size is an integer "
                f">= 1"
            )
        return Issue("", row.kind, group, tuple(agreed), splits, size)

    def _begin(
        self,
        call: GraphCall,
        issue: Issue,
        source: list[TensorRef],
        filled: list[TensorRef],
        op: OpOverload,
        bound: dict[str, Any],
    ) -> Value:
        """Begins something that reads `source` and writes `filled`, or else what it makes."""
        walker = self.walker
        makes: list[Storage] = []
        kind = str(op._schema.returns[0].type) if op._schema.returns else ""
        if not filled and not issue.sends:
            data = walker.made(call, example(call.node), kind, makes)
        else:
            shared = aliases(op, bound)
            given = shared[0] if shared and shared[0] else filled or source
            data = list(given) if "List" in kind else given[0] if given else None
        for tensor in filled:
            tensor.storage.written = True
        after, ordered = call.after, f"{issue.group} {issue.peer} {issue.sends}"
        if ordered in self.last:  # a group's collectives stay in the order listed
            after |= {self.last[ordered]}
        issue = dataclasses.replace(issue, queue=self._queue(call.stream))
        step = Step(
            "start",
            call.place,
            call.stream,
            tuple(dict.fromkeys(tensor.view for tensor in source)),
            tuple(dict.fromkeys(tensor.view for tensor in filled)),
            tuple(makes),
            after,
            issue=issue,
        )
        number = self.last[ordered] = walker.add(step)
        self.queues[number] = issue.queue
        touched = [*makes, *[tensor.storage for tensor in (*source, *filled)]]
        self.touched[number] = touched
        named = [*makes, *[tensor.storage for tensor in filled]] or touched
        for storage in named:
            self.begun[storage.number].append(number)
        return Value(data, frozenset((number,)))

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

    def _finish(self, call: GraphCall, bound: dict[str, Any], argument: str) -> Value:
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
        step = Step("finish", call.place, call.stream, after=after, finishes=finishes)
        number = self.walker.add(step)
        self.waits.update(dict.fromkeys(storages, number))
        return Value(bound[argument], frozenset((number,)))

    def _message(self, call: GraphCall, name: str, op: OpOverload, bound: dict[str, Any]) -> Value:
        tensor_name, peer_name = targets.MESSAGES[name]
        group, peer = group_of(call.node, bound["group_name"]), bound[peer_name]
        if type(peer) is not int or peer < 0:
            raise ProgramError(
                f"node {call.node.name!r} has a message with rank {peer!r}; fix: a peer is an "
                f"integer >= 0"
            )
        tensors, sends = tensors_in(bound[tensor_name]), peer_name == "dst"
        facts = tensors[0].facts if tensors else None
        num_bytes = None if facts is None else facts.numel * facts.itemsize
        kind = "send" if sends else "recv"
        issue = Issue("", kind, group, peer=peer, sends=sends, num_bytes=num_bytes)
        source, filled = (tensors, []) if sends else ([], tensors)
        return self._begin(call, issue, source, filled, op, bound)

    def keep_unfinished(self) -> None:
        """Torch keeps what it works on until it is waited for."""
        for begun, storages in self.touched.items():
            if begun not in self.waited:
                for storage in storages:
                    storage.last_use = NEVER


def group_of(node: fx.Node, group: Any) -> str:
    """The name of a process group, however a graph spells it."""
    if isinstance(group, str):
        return group
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


def _integers(sizes: Any) -> tuple[int, ...] | None:
    if isinstance(sizes, tuple | list) and all(type(size) is int for size in sizes):
        return tuple(sizes)
    return None
