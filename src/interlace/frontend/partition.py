"""Splits a joint graph into forward and backward, and decides what is saved in between.

torch's min-cut partitioner saves the result of a collective. After a gather that is W times this
rank's shard, kept from forward to backward. This policy marks gathers (and the views of their
results) for recomputation, so that the shard is saved and backward gathers it again, under the
matmuls that compute the other gradient. With a budget the fewest are marked that meet it, first
those that cost the least predicted time for each byte:

    aot_autograd(..., partition_fn=Partition(memory="auto", machine=machine))

Nodes that the user marked, by `torch.utils.checkpoint`, are left as they are.
"""

from __future__ import annotations

import copy
import math
import operator
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from interlace.cost import Machine
from interlace.errors import OptionError
from interlace.frontend.calling.tracing import mark_checkpoints
from interlace.frontend.importing.exchanges import KnownPlaces
from interlace.frontend.importing.grouped import equal_groups
from interlace.frontend.importing.nodes import (
    LAZY,
    aliases,
    group_of,
    is_view,
    location,
    name_groups,
)
from interlace.frontend.importing.types import dtype_of
from interlace.frontend.teams import consent_of_ranks
from interlace.ir.operators import matmul_of
from interlace.torch_private import pytree
from interlace.torch_private.dynamo import min_cut_rematerialization_partition

GATHERS = ("_c10d_functional.all_gather_into_tensor.default",)
MOVEMENT = {
    "_c10d_functional.wait_tensor.default",
    *(f"aten.{name}.default" for name in ("cat", "view", "reshape", "_unsafe_view", "clone", "t")),
    *(f"aten.{name}.default" for name in ("permute", "unsqueeze", "detach", "alias", "expand")),
    *("aten.split.Tensor", "aten.slice.Tensor", "aten.transpose.int", "aten.squeeze.dim"),
}
"""Operators that may stand between a gather and the matmul that it feeds."""

WAIT = "_c10d_functional.wait_tensor.default"
BACKWARD = (
    *(*GATHERS, WAIT),
    *("interlace.float8_across.default", "interlace.float8_turn.default"),
)
"""Operators that stay in backward where its own code has them."""

NUMBER = re.compile(r"_\d+$")

GATHER_REGION = 1 << 30
"""An `ac_graph_id` after every region of the user's: what feeds a gather out of one is saved."""


@dataclass(frozen=True, slots=True)
class SavedGather:
    """A gather of forward whose result backward needs, with the nodes that only move the result."""

    gather: fx.Node
    moved: tuple[fx.Node, ...]

    @property
    def matmuls(self) -> list[fx.Node]:
        """The matmuls of forward that it feeds."""
        users = [user for node in self.moved for user in node.users]
        return [user for user in users if _forward(user) and matmul_of(str(user.target))]

    @property
    def spared(self) -> int:
        """Bytes that are not saved where backward gathers again: what it reads, less the shard."""
        nodes = (self.gather, *self.moved)
        read = [node for node in nodes if any(not _forward(user) for user in node.users)]
        shard = self.gather.args[0]
        assert isinstance(shard, fx.Node)
        return max(map(_nbytes, read)) - _nbytes(shard)

    def exposed_s(self, machine: Machine) -> float:
        """Predicted seconds of the gather that the matmuls do not hide; below 0 if they hide it."""
        hidden = sum(_matmul_seconds(node, machine) for node in self.matmuls)
        return _gather_seconds(self.gather, machine) - hidden


@dataclass(frozen=True, slots=True)
class Partition:
    """The partition function: marks gathers by policy, then cuts as torch does."""

    memory: int | Literal["auto"] = "auto"
    """Most bytes that forward saves for backward, or `auto`: no more than torch would save, and
    gathered again where the matmuls hide that, by `machine`."""
    machine: Machine | None = None
    timeout_s: float | None = None
    """Seconds that ranks wait for one another to decide alike; None: as process groups do."""
    places: KnownPlaces = field(default_factory=KnownPlaces, compare=False)

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: object, **given: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward graph of a joint one."""
        close_gaps(joint.graph)
        name_groups(joint.graph)
        equal_groups(joint.graph)
        mark_checkpoints(joint.graph)
        keep_overwritten(joint.graph)
        merge_gathers(joint.graph)

        def saved(again: Sequence[bool]) -> int:
            probe = fx.GraphModule(joint, copy.deepcopy(joint.graph))
            _mark(gather_sites(probe.graph), again)
            forward, _ = _cut(probe, joint_inputs, **given)
            return saved_bytes(forward.graph, given["num_fwd_outputs"])

        self.mark(joint.graph, saved)
        return _cut(joint, joint_inputs, **given)

    def mark(self, graph: fx.Graph, saved: Callable[[Sequence[bool]], int]) -> list[fx.Node]:
        """Marks what backward shall do again; gives the gathers among it.

        `saved` gives the bytes that forward saves where backward does these gathers again. On some
        rank each may be needed for the budget, so it is kept only if all ranks can keep it; without
        a budget it is done again only if all ranks want it.
        """
        sites, budget = gather_sites(graph), self.memory != "auto"
        if self.memory == "auto":
            again, least, fits = self._hidden(sites), 0, True
        else:
            again, least = self._fewest(sites, self.memory, saved)
            fits = least <= self.memory
        agreed = True
        if sites:  # also where the option of this rank says what to do
            places = [location(site.gather).module for site in sites]
            groups = [group_of(site.gather) for site in sites]
            wishes = [(of, want != budget) for of, want in zip(groups, again, strict=True)]
            wishes += [(of, fits) for of in dict.fromkeys(groups)]

            def ask() -> list[bool]:
                answers = consent_of_ranks(places, wishes, self.timeout_s)
                count = len(sites)
                return [*(answer != budget for answer in answers[:count]), all(answers[count:])]

            *again, agreed = self.places.decided(graph, ask)
        if not (fits and agreed):
            why = f"forward saves {least} bytes for backward, if that gathers all that it can again"
            fix = f"give memory={least} or more, or memory='auto'"
            if fits:
                why, fix = "another rank cannot meet it", "give as many bytes as that rank names"
            raise OptionError(f"option memory={self.memory}: {why}. fix: {fix}")
        return _mark(sites, again)

    def _hidden(self, sites: Sequence[SavedGather]) -> list[bool]:
        if self.machine is None:
            return [False] * len(sites)
        return [
            bool(site.matmuls) and site.spared >= 0 and site.exposed_s(self.machine) <= 0
            for site in sites
        ]

    def _fewest(
        self, sites: Sequence[SavedGather], budget: int, saved: Callable[[Sequence[bool]], int]
    ) -> tuple[list[bool], int]:
        """The gathers to do again, cheapest first, until no more than `budget` bytes are saved; the
        bytes saved with all of them, where fewer do not suffice."""

        def price(index: int) -> tuple[float, int]:
            site = sites[index]
            seconds = site.exposed_s(self.machine) if self.machine is not None else 0.0
            return max(seconds, 0.0) / max(site.spared, 1), -site.spared

        order, every = sorted(range(len(sites)), key=price), [True] * len(sites)

        def first(count: int) -> list[bool]:
            return [index in order[:count] for index in range(len(sites))]

        count = bisect_left(
            range(len(sites)), True, key=lambda count: saved(first(count)) <= budget
        )
        return (first(count), 0) if count < len(sites) else (every, saved(every))


def gather_sites(graph: fx.Graph) -> list[SavedGather]:
    """The gathers that policy decides on: those that the user left unmarked."""
    sites: list[SavedGather] = []
    for node in graph.nodes:
        if str(node.target) in GATHERS and _forward(node) and "recompute" not in node.meta:
            moved = _moved(node)
            needed = any(not _forward(user) for each in (node, *moved) for user in each.users)
            if needed and not any("recompute" in other.meta for other in moved):
                sites.append(SavedGather(node, tuple(moved)))
    return sites


def saved_bytes(forward: fx.Graph, num_fwd_outputs: int) -> int:
    """Bytes of the memory that a forward graph makes and keeps for backward, each once."""
    leaves = pytree.tree_leaves(forward.output_node().args)[num_fwd_outputs:]
    tensors = [n for n in leaves if isinstance(n, fx.Node) and _is_tensor(n)]
    storages = dict.fromkeys(map(_storage, tensors))
    return sum(_nbytes(node) for node in storages if node.op == "call_function")


def _mark(sites: Sequence[SavedGather], again: Sequence[bool]) -> list[fx.Node]:
    """Has backward do some of the gathers again; gives these."""
    marked = [site for site, wish in zip(sites, again, strict=True) if wish]
    for site in marked:
        for node in (site.gather, *site.moved):
            _again(node)
    return [site.gather for site in marked]


def _cut(
    joint: fx.GraphModule, joint_inputs: object, **given: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graph of a joint one in which all is marked."""
    stay_in_backward(joint.graph)
    own_opaque_outputs(joint.graph, given["num_fwd_outputs"])
    forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **given)
    opaque_last(forward.graph, backward.graph, given["num_fwd_outputs"])
    return forward, backward


def close_gaps(graph: fx.Graph) -> None:
    """Numbers the names of nodes anew where torch left gaps.

    Torch 2.11 traces nodes that nothing uses where the caches of DTensor are cold; saved tensors
    would have other names when a model is compiled again, and its schedules would not be found.
    """
    counts = Counter[str]()
    for node in graph.nodes:
        if node.op == "call_function":
            base = NUMBER.sub("", node.name)
            number, counts[base] = counts[base], counts[base] + 1
            node.name = f"{base}_{number}" if number else base


def keep_overwritten(graph: fx.Graph) -> None:
    """Has backward do nothing again that reads an argument which forward writes afterwards.

    It would read what was written. What the user marked to be done again is left as it is.
    """
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        argument = write.args[0]
        if isinstance(argument, fx.Node) and argument.op == "placeholder":
            views = aliases(argument)
            for reader in {user for view in views for user in view.users} - views - {write}:
                if reader.op == "call_function":
                    reader.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def merge_gathers(graph: fx.Graph) -> None:
    """Has backward use what forward gathers, where its code gathers the same: policy says then
    whether that is done again. Torch merges equal nodes too, but from 2.15 on not these."""
    known: dict[object, fx.Node] = {}
    for node in [node for node in graph.nodes if str(node.target) in GATHERS]:
        first = known.setdefault((node.target, node.args), node)
        if first is node or _forward(node):
            continue
        for wait in [user for user in node.users if str(user.target) == WAIT]:
            for other in first.users:
                if str(other.target) == WAIT:
                    wait.replace_all_uses_with(other)
                    graph.erase_node(wait)
                    break
        if not node.users:
            graph.erase_node(node)


def stay_in_backward(graph: fx.Graph) -> None:
    """Leaves to backward what its code gathers, or transposes in FP8, of what forward has.

    torch would have forward do and keep what no tangent has a part in: all ranks' rows, and a byte
    for each weight. What is in a region that the user marked is left as it is.
    """
    late, theirs = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if "tangents" in str(node.target) or not late.isdisjoint(sources):
            late.add(node)
        elif not _forward(node) and any(s in theirs or _users_own(s) for s in sources):
            theirs.add(node)
        elif str(node.target) in BACKWARD and not _forward(node) and "recompute" not in node.meta:
            _again(node)


def own_opaque_outputs(graph: fx.Graph, num_fwd_outputs: int) -> None:
    """Lets forward return the mesh of its own arguments, where it was traced to return a tangent's.

    DTensor remembers results by equal meshes, so the mesh of an output may be the very object that
    also came in with the tangents; torch then takes it for an input of backward and gives up.
    """
    output = graph.output_node()
    leaves, spec = pytree.tree_flatten(output.args)
    opaque = [node for node in graph.find_nodes(op="placeholder") if _opaque(node)]
    for i, leaf in enumerate(leaves[:num_fwd_outputs]):
        if leaf in opaque and "tangents" in str(leaf.target):
            for other in opaque:
                if "tangents" not in str(other.target) and _opaque(other) == _opaque(leaf):
                    leaves[i] = other
                    break
    output.args = pytree.tree_unflatten(leaves, spec)


def opaque_last(forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int) -> None:
    """Puts saved tensors before saved meshes, as AOTAutograd counts them.

    The partitioner adds the generator states of recomputed random operators behind everything.
    """
    output = forward.output_node()
    leaves = list(output.args[0])  # pyright: ignore[reportArgumentType]
    order = sorted(range(num_fwd_outputs, len(leaves)), key=lambda i: _saved_rank(leaves[i]))
    order = [*range(num_fwd_outputs), *order]
    if order == sorted(order):
        return
    output.args = (tuple(leaves[i] for i in order),)
    if len(descriptions := output.meta.get("desc") or ()) == len(order):
        output.meta["desc"] = [descriptions[i] for i in order]
    places = backward.find_nodes(op="placeholder")
    saved = [node for node in places if "tangents" not in str(node.target)]
    tensors = [node for node in saved if isinstance(node.meta.get("val"), torch.Tensor)]
    for node in reversed([node for node in saved if _opaque(node) is not None]):
        tensors[-1].append(node)


def _saved_rank(node: object) -> int:
    """Where AOTAutograd wants it: tensors, then meshes, then sizes."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float):
        return 2
    return int(getattr(value, "real_obj", None) is not None)


def _opaque(node: fx.Node) -> object:
    return getattr(node.meta.get("val"), "real_obj", None)


def _forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_forward"


def _again(node: fx.Node) -> None:
    """Has backward do it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = GATHER_REGION


def _users_own(node: fx.Node) -> bool:
    """Returns True if the user marked the node to be saved or recomputed."""
    return "recompute" in node.meta and node.meta.get("ac_graph_id") != GATHER_REGION


def _moved(gather: fx.Node) -> list[fx.Node]:
    """The nodes that only move what a gather returned, in forward."""
    found: list[fx.Node] = []
    todo = [gather]
    while todo:
        for user in todo.pop().users:
            moves = str(user.target) in MOVEMENT or user.target is operator.getitem
            if moves and _forward(user) and user not in found:
                found.append(user)
                todo.append(user)
    return found


def _hint(size: Any) -> int:
    """A size as a number; a symbolic one by the example it was traced with."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _nbytes(node: fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return math.prod(map(_hint, value.shape)) * value.element_size()


def _storage(node: fx.Node) -> fx.Node:
    """The node in whose memory a node's value lies."""
    while node.op == "call_function":
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            break
        part = node.target is operator.getitem and is_view(source)
        if not (part or str(node.target) in LAZY or is_view(node)) or source.op == "get_attr":
            break
        node = source
    return node


def _gather_seconds(gather: fx.Node, machine: Machine) -> float:
    link = machine.link(machine.backend)
    size = _hint(gather.args[1])
    return link.latency_s + _nbytes(gather) * (size - 1) / size / link.bandwidth


def _matmul_seconds(node: fx.Node, machine: Machine) -> float:
    matmul = matmul_of(str(node.target))
    assert matmul is not None
    first = node.args[matmul.lhs]
    assert isinstance(first, fx.Node)
    value: torch.Tensor = node.meta["val"]
    flops = 2 * math.prod(map(_hint, value.shape)) * _hint(first.meta["val"].shape[-1])
    return flops / machine.flops(dtype_of(first.meta["val"].dtype))
