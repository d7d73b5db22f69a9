"""One spelling for what torch writes in several, so that sites are found by meaning.

Every matmul of two matrices becomes `aten.mm` (with a bias: `aten.addmm`) on 2-D views, whether it
was `linear`, a 3-D `matmul` or a `bmm` with an expanded weight. Clones that change nothing, and
concatenations of neighbours in memory, become views.

    linear(x, w, b)  ->  addmm(b, x.view(m, k), w.permute(1, 0)).view(..., n)

Note [Generator states]
    Activation checkpointing saves the generator's state before a random operator in forward, and
    runs the operator from that state again in backward. A Program spells this with two operators of
    our own, and everything that touches the generator reads and writes the implicit buffer `rng`,
    so it keeps its order.

        main: call("interlace.get_rng_state.default", "@device", out=(state := u8[5056]))
        main: call("aten.native_dropout.default", x, 0.1, True, out=(y := ..., mask := ...))
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import fx

from interlace.frontend.importing.symbols import sizes_of
from interlace.frontend.importing.types import Args, buffer_like, dtype_of, on_host, same_layout
from interlace.ir import Call, DType, View

if TYPE_CHECKING:
    from interlace.frontend.importing.importer import Importer, Normaliser, Value

GET_STATE = "interlace.get_rng_state.default"
SET_STATE = "interlace.set_rng_state.default"


def matmul_2d(imp: Importer, name: str, x: View, w: View, bias: View | None = None) -> View:
    """`x @ w` of 2-D views, plus `bias`."""
    result = imp.fresh(name, imp.box(x).dtype, (imp.sizes(x)[0], imp.sizes(w)[1]))
    if bias is None:
        return imp.call("aten.mm.default", (x, w), result)
    return imp.call("aten.addmm.default", (bias, x, w), result)


def _plain(imp: Importer, node: fx.Node, fn: str | None = None) -> Value:
    return imp.call_like(node, fn or str(node.target), node.args, node.kwargs, imp.value(node))


def _linear(imp: Importer, node: fx.Node, args: Args) -> View:
    """`x @ w.t() + bias` for an `x` of any leading dimensions; `matmul` has neither."""
    x, w = imp.view(args[0]), imp.view(args[1])
    linear = str(node.target) == "aten.linear.default"
    if len(imp.sizes(w)) != 2 or len(imp.sizes(x)) < (1 if linear else 2):
        return _plain(imp, node)
    w = w.permute(1, 0) if linear else w
    bias = imp.view(args[2]) if linear and args[2] is not None else None
    *lead, k = imp.sizes(x)
    y = matmul_2d(imp, node.name, imp.reshaped(x, (prod(lead), k)), w, bias)
    return imp.reshaped(y, (*lead, imp.sizes(w)[1]))


def _bmm(imp: Importer, node: fx.Node, args: Args) -> View:
    """A batch that shares one right-hand matrix (expanded, or a batch of one) is one `mm`."""
    x, w = imp.view(args[0]), imp.view(args[1])
    box = imp.box(w)
    batch, m, k = imp.sizes(x)
    shared = batch == 1 or box.strides[0] == 0
    flat = imp.viewed(x, (batch * m, k)) if shared and batch else None
    if flat is None:
        return _plain(imp, node)
    matrix = (imp.viewed(w, imp.sizes(w)[1:]) if batch == 1 else None) or w.select(0, 0)
    y = matmul_2d(imp, node.name, flat, matrix)
    return imp.reshaped(y, sizes_of(imp.value(node).shape))


def _addmm(imp: Importer, node: fx.Node, args: Args) -> View:
    """`addmm` with a scaled operand stays as it is written; a plain one has no factors."""
    scaled = (args[3], args[4]) != (1, 1)
    given = (node.args, node.kwargs) if scaled else (args[:3], {})
    return imp.call_like(node, str(node.target), *given, imp.value(node))


def _clone(imp: Importer, node: fx.Node, args: Args) -> View:
    """A copy that changes nothing is a view, unless it leaves or its source is written."""
    source, value = imp.view(args[0]), imp.value(node)
    if imp.may_share(node, [source]) and same_layout(imp.box(source), value):
        return source
    if str(node.target) == "aten.clone.default":
        return _plain(imp, node)
    return imp.call_like(node, "aten.clone.default", (args[0],), {}, value)


def _to_copy(imp: Importer, node: fx.Node, args: Args) -> View:
    same_device = imp.value(node).device == imp.value(args[0]).device
    moves = not same_device or imp.box(imp.view(args[0])).dtype != dtype_of(imp.value(node).dtype)
    return _plain(imp, node) if moves else _clone(imp, node, args)


def _cat(imp: Importer, node: fx.Node, args: Args) -> View:
    """Neighbours in memory are one view; empty 1-D tensors, which torch skips, go away."""
    value: torch.Tensor = imp.value(node)
    views = [view for view in imp.arg(args[0]) if imp.sizes(view) != (0,) or value.ndim == 1]
    dim = args[1] % max(value.ndim, 1)
    sizes = sizes_of(value.shape)
    joined = imp.joined(views, dim, sizes) if imp.may_share(node, views) else None
    if joined is not None and same_layout(imp.box(joined), value):
        return joined
    return imp.call_like(node, "aten.cat.default", (args[0], dim), {}, value)


def _copy(imp: Importer, node: fx.Node, args: Args) -> View:
    """`copy(x, y)`: the contents of `y` in the shape and element type of `x`."""
    value = imp.value(node)
    if on_host(value, imp.device):
        return _plain(imp, node)  # an Alloc would be on the GPU
    return imp.copied_like(node.name, imp.view(args[1]), value)


def _as_strided_scatter(imp: Importer, node: fx.Node, args: Args) -> View:
    """A copy of the first argument, and one of the second into a part of it: torch would count the
    offset in the storage, which holds more than one buffer of a Program."""
    imp.check_storage(node)
    (skipped,) = sizes_of([imp.value(args[0]).storage_offset()])
    result = imp.copied_like(node.name, imp.view(args[0]), imp.value(node))
    start = 0 if args[4] is None else imp.arg(args[4]) - skipped
    imp.copy_into(imp.view(args[1]), result.as_strided(imp.arg(args[2]), imp.arg(args[3]), start))
    return result


def _index_put(imp: Importer, node: fx.Node, args: Args) -> View:
    """One number where a mask is set: by `where`, which needs no count of the mask's elements.

    torch counts them on the host, so the host would wait for the device; and as a pointwise
    operator it may join others in a region.
    """
    x, indices, value = imp.view(args[0]), imp.arg(args[1]), imp.view(args[2])
    given = [i for i, index in enumerate(indices) if index is not None]
    mask = indices[given[0]] if len(given) == 1 else None
    single = prod(imp.sizes(value)) == 1 and len(imp.sizes(value)) <= len(imp.sizes(x))
    if mask is None or imp.box(mask).dtype != DType.bool or not single or args[3]:
        return _plain(imp, node)
    sizes = imp.sizes(mask)
    after = len(imp.sizes(x)) - given[0] - len(sizes)
    wide = imp.reshaped(mask, (*(1,) * given[0], *sizes, *(1,) * after))
    return imp.call_like(node, "aten.where.self", (wide, value, args[0]), {}, imp.value(node))


# -- random numbers: Note [Generator states] -------------------------------------------------------


def get_rng_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Sets the state of the device's default generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


_library = torch.library.Library("interlace", "FRAGMENT")
"""Holds the two operators while the process lives; `custom_op` takes 10 ms for each."""
_library.define("get_rng_state(Device device) -> Tensor")
_library.define("set_rng_state(Tensor state, Device device) -> ()")
_library.impl("get_rng_state", get_rng_state, "CompositeExplicitAutograd")
_library.impl("set_rng_state", set_rng_state, "CPU")  # a state is bytes there, no fake tensor


def _save(imp: Importer, name: str, like: torch.Tensor) -> View:
    state = buffer_like(imp.name(name), like, "fresh")
    imp.emit(Call(fn=GET_STATE, args=("@device",), fresh=(state,), rng=True, loc=imp.loc))
    return imp.declare(state, like)


def _restore(imp: Importer, state: View) -> None:
    imp.emit(Call(fn=SET_STATE, args=(state, "@device"), rng=True, loc=imp.loc))


def _run_random(imp: Importer, node: fx.Node, args: Args) -> Value:
    """A random operator of a checkpoint: of which the state before is saved, or restored."""
    saves = str(node.target) == "run_and_save_rng_state"
    state, value = imp.value(node) if saves else (imp.value(node.args[0]), imp.value(node))
    target, given = node.args[0 if saves else 1], node.args[1 if saves else 2 :]
    before = _save(imp, f"{node.name}_{'state' if saves else 'before'}", state)
    if not saves:
        _restore(imp, imp.view(node.args[0]))
    result = imp.call_like(node, str(target), given, node.kwargs, value)
    last = imp.ops[-1]
    assert isinstance(last, Call)
    imp.ops[-1] = replace(last, rng=True)
    if saves:
        return before, result
    _restore(imp, before)
    return result


NORMALISERS: dict[str, Normaliser] = {
    "aten.as_strided_scatter.default": _as_strided_scatter,
    "aten.index_put.default": _index_put,
    "aten.linear.default": _linear,
    "aten.matmul.default": _linear,
    "aten.bmm.default": _bmm,
    "aten.addmm.default": _addmm,
    "aten.clone.default": _clone,
    "aten.contiguous.default": _clone,
    "aten.lift_fresh_copy.default": _clone,
    "aten._to_copy.default": _to_copy,
    "aten.cat.default": _cat,
    "aten.copy.default": _copy,
    # These may be lazy in torch (a bit on the tensor); a Program computes.
    "aten._conj.default": lambda imp, node, _: _plain(imp, node, "aten.conj_physical.default"),
    "aten._neg_view.default": lambda imp, node, _: _plain(imp, node, "aten.neg.default"),
    **dict.fromkeys(("run_and_save_rng_state", "run_with_rng_state"), _run_random),
    "aten._assert_scalar.default": lambda *_: None,
    "aten.sym_constrain_range.default": lambda *_: None,
    "aten.sym_constrain_range_for_size.default": lambda *_: None,
}
"""Normalisers by operator."""
