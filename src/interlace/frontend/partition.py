"""Splits a joint graph into forward and backward, and decides what is saved in between.

torch's min-cut partitioner saves the result of a collective. After a gather that is W times this
rank's shard, kept from forward to backward. This policy marks gathers (and the views of their
results) for recomputation, so that the shard is saved and backward gathers it again, under the
matmuls that compute the other gradient:

    aot_autograd(..., partition_fn=Partition(regather="auto", machine=machine))

Nodes that the user marked, by `torch.utils.checkpoint`, are left as they are.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from interlace.cost import Machine
from interlace.frontend.calling.tracing import mark_checkpoints
from interlace.frontend.importing.exchanges import KnownPlaces
from interlace.frontend.importing.grouped import equal_groups
from interlace.frontend.importing.nodes import aliases, group_of, location
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
class Partition:
    """The partition function: marks gathers by policy, then cuts as torch does."""

    regather: bool | str = "auto"
    """True, False, or `auto`: where the gather is hidden by the matmuls it feeds, by `machine`."""
    machine: Machine | None = None
    timeout_s: float | None = None
    """Seconds that ranks wait for one another to decide alike; None: as process groups do."""
    places: KnownPlaces = field(default_factory=KnownPlaces, compare=False)

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: object, **given: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward graph of a joint one."""
        close_gaps(joint.graph)
        equal_groups(joint.graph)
        mark_checkpoints(joint.graph)
        keep_overwritten(joint.graph)
        merge_gathers(joint.graph)
        self.mark(joint.graph)
        stay_in_backward(joint.graph)
        own_opaque_outputs(joint.graph, given["num_fwd_outputs"])
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **given)
        opaque_last(forward.graph, backward.graph, given["num_fwd_outputs"])
        return forward, backward

    def mark(self, graph: fx.Graph) -> list[fx.Node]:
        """Marks what backward shall do again; gives the gathers among it."""
        found: list[tuple[fx.Node, list[fx.Node]]] = []
        for node in graph.nodes:
            if str(node.target) in GATHERS and _forward(node) and "recompute" not in node.meta:
                moved = _moved(node)
                needed = any(not _forward(user) for each in (node, *moved) for user in each.users)
                if needed and not any("recompute" in other.meta for other in moved):
                    found.append((node, moved))
        wanted = [self._wanted(node, moved) for node, moved in found]
        if found:  # also where the option of this rank says what to do
            places = [location(node).module for node, _ in found]
            wishes = [(group_of(node), wish) for (node, _), wish in zip(found, wanted, strict=True)]
            wanted = self.places.decided(
                graph, lambda: consent_of_ranks(places, wishes, self.timeout_s)
            )
        marked = [item for item, wish in zip(found, wanted, strict=True) if wish]
        for node, moved in marked:
            for other in (node, *moved):
                _again(other)
        return [node for node, _ in marked]

    def _wanted(self, gather: fx.Node, moved: list[fx.Node]) -> bool:
        matmuls = [user for node in moved for user in node.users if matmul_of(str(user.target))]
        if self.regather != "auto" or not matmuls:
            return self.regather is True
        if self.machine is None:
            return False
        hidden_s = sum(_matmul_seconds(node, self.machine) for node in matmuls if _forward(node))
        return _gather_seconds(gather, self.machine) <= hidden_s


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


def _gather_seconds(gather: fx.Node, machine: Machine) -> float:
    link = machine.link(machine.backend)
    size, value = _hint(gather.args[1]), gather.meta["val"]
    nbytes = math.prod(map(_hint, value.shape)) * value.element_size()
    return link.latency_s + nbytes * (size - 1) / size / link.bandwidth


def _matmul_seconds(node: fx.Node, machine: Machine) -> float:
    matmul = matmul_of(str(node.target))
    assert matmul is not None
    first = node.args[matmul.lhs]
    assert isinstance(first, fx.Node)
    value: torch.Tensor = node.meta["val"]
    flops = 2 * math.prod(map(_hint, value.shape)) * _hint(first.meta["val"].shape[-1])
    return flops / machine.flops(dtype_of(first.meta["val"].dtype))
