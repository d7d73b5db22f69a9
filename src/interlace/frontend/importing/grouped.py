"""Grouped matmuls whose groups are equal, as `bmm`: one spelling for experts of one capacity.

`torch._grouped_mm(x, w, offs)` takes as its groups the rows between offsets, which are data. Where
a graph computes the offsets of equal groups from constants, the groups are a dimension, and a batch
of matmuls says the same without data, so that it can be overlapped with the all-to-alls around it.
It is done where forward and backward are still one graph: apart, backward sees only saved offsets.
Equal groups leave no row over, so that a mask of padding, as `GroupedLinear` has, is known to be
true as well: it goes, for it would stand between the all-to-all and the matmul.

    _grouped_mm(x, w, arange(1, E + 1) * C)   ->   bmm(x.view(E, C, K), w).view(E * C, N)
    where(arange(T) < T, x, 0)                ->   x
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from interlace.frontend.importing.nodes import bound, draws_random_numbers, is_mutable
from interlace.torch_private import unset_fake_temporarily

GROUPED = "aten._grouped_mm.default"
MASKED = "aten.where.self"
MOST = 1 << 20
"""Constants of more elements than this are not computed: a mask has one for each token."""
aten: Any = torch.ops.aten


def equal_groups(graph: fx.Graph) -> list[fx.Node]:
    """Puts `bmm` for grouped matmuls of equal groups; gives the nodes that took their place.

    A graph without an all-to-all stays as it is: nothing would be gained.
    """
    if not any("all_to_all" in str(node.target) for node in graph.nodes):
        return []
    known: dict[fx.Node, torch.Tensor | None] = {}
    made: list[fx.Node] = []
    for node in list(graph.nodes):
        if str(node.target) != GROUPED:
            continue
        with unset_fake_temporarily():  # constants are real
            groups = _groups(node, known)
        if groups is not None:
            made.append(_batched(graph, node, groups))
    if made:
        _drop_masks(graph, known)
    return made


def _groups(node: fx.Node, known: dict[fx.Node, torch.Tensor | None]) -> int | None:
    """The groups of a grouped matmul that a batch of matmuls can do (0: they are a dimension)."""
    x, w, offs, bias, out_dtype = bound(node)
    left, right, value = x.meta["val"], w.meta["val"], node.meta["val"]
    sizes = (*left.shape, *right.shape)
    plain = bias is None and out_dtype in (None, left.dtype) and value.is_contiguous()
    if not plain or not all(isinstance(size, int) and size for size in sizes):
        return None
    if offs is None:
        return 0 if left.ndim == right.ndim == 3 else None
    if left.ndim != 2:
        return None
    rows = left.shape[0] if right.ndim == 3 else left.shape[1]
    groups = int(offs.meta["val"].shape[0])
    ends = _constant(offs, known)
    if ends is None or rows % groups:
        return None
    equal = [rows // groups * (i + 1) for i in range(groups)]
    return groups if ends.tolist() == equal else None


def _constant(node: fx.Node, known: dict[fx.Node, torch.Tensor | None]) -> torch.Tensor | None:
    """The value of a node that follows from constants alone; None where it does not."""
    if node not in known:
        known[node] = None
        known[node] = _computed(node, known)
    return known[node]


def _computed(node: fx.Node, known: dict[fx.Node, torch.Tensor | None]) -> torch.Tensor | None:
    value = node.meta.get("val")
    if node.op == "get_attr":
        found = getattr(node.graph.owning_module, str(node.target), None)
        small = isinstance(found, torch.Tensor) and found.numel() <= MOST
        return found.cpu() if small and type(found) is torch.Tensor else None
    aten_op = node.op == "call_function" and str(node.target).startswith("aten.")
    if not aten_op or is_mutable(node) or draws_random_numbers(node):
        return None
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return None
    if not all(isinstance(size, int) for size in value.shape) or value.numel() > MOST:
        return None
    if any(_constant(item, known) is None for item in node.all_input_nodes):
        return None
    kwargs = dict(node.kwargs)
    if "device" in kwargs:
        kwargs |= {"device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, kwargs), known.__getitem__)
    result = target(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None


def _drop_masks(graph: fx.Graph, known: dict[fx.Node, torch.Tensor | None]) -> None:
    """Puts a value in place of its choice where the mask is known to be true everywhere."""
    for node in list(graph.nodes):
        if str(node.target) != MASKED:
            continue
        mask, x, _ = node.args
        if not isinstance(mask, fx.Node) or not isinstance(x, fx.Node):
            continue
        with unset_fake_temporarily():
            value = _constant(mask, known)
            true = value is not None and bool(value.all())
        if not true:
            continue
        given, made = x.meta["val"], node.meta["val"]
        if (given.shape, given.dtype, given.device) != (made.shape, made.dtype, made.device):
            continue
        with graph.inserting_before(node):  # a value of its own, as the choice was
            new = graph.call_function(aten.clone.default, (x,))
        new.meta = {**node.meta, "val": aten.clone.default(given)}
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _batched(graph: fx.Graph, node: fx.Node, groups: int) -> fx.Node:
    """Puts views and a `bmm` in place of a grouped matmul."""
    x, w = node.args[0], node.args[1]
    assert isinstance(x, fx.Node)
    assert isinstance(w, fx.Node)

    def call(target: Any, *args: Any) -> fx.Node:
        new = graph.call_function(target, args)
        new.meta = {key: item for key, item in node.meta.items() if key != "tensor_meta"}
        new.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
        return new

    def stacked(matrix: fx.Node) -> fx.Node:
        rows, width = matrix.meta["val"].shape
        return call(aten.reshape.default, matrix, [groups, rows // groups, width])

    with graph.inserting_before(node):
        if not groups:
            result = call(aten.bmm.default, x, w)
        elif w.meta["val"].ndim == 3:
            product = call(aten.bmm.default, stacked(x), w)
            result = call(aten.reshape.default, product, list(node.meta["val"].shape))
        else:  # contracts over the rows of a group: the gradient of its matrix
            rows = call(aten.permute.default, x, [1, 0])
            turned = call(aten.permute.default, stacked(rows), [0, 2, 1])
            result = call(aten.bmm.default, turned, stacked(w))
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return result
