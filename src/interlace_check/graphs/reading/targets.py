"""Kinds of a node's target: a collective, a wait, a stream op, or an operator like any other.

One row for each operator that orders anything; all else is compute. The rows cover the spellings
of torch 2.11 to 2.15: `streams::`, `_c10d_functional::` and `_dtensor::`.

    >>> COLLECTIVES["_c10d_functional::all_reduce_"].kind
    'all_reduce'

Note [Traced calls]: `dist.all_gather_into_tensor(out, x)` is traced as an operator of `c10d::`.
NCCL runs it on the current stream unless `async_op` is true; gloo's, and those with `async_op`, are
done once their Work was waited for, which no graph shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from interlace.errors import UnsupportedError
from interlace.torch_private import HigherOrderOperator, OpOverload, OpOverloadPacket


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """Names of a collective's arguments, and its effects on them."""

    kind: str
    source: str = "input"
    out: str | None = None
    """The argument that it fills; None where it makes its result."""
    in_place: bool = False
    waits: bool = False
    """True if it ends before the operators after it begin, without a `wait_tensor`."""


def _rows() -> dict[str, CollectiveRow]:
    rows = {
        "all_reduce": CollectiveRow("all_reduce"),
        "all_reduce_": CollectiveRow("all_reduce", in_place=True),
        "all_reduce_coalesced": CollectiveRow("all_reduce", "inputs"),
        "all_reduce_coalesced_": CollectiveRow("all_reduce", "inputs", in_place=True),
        "all_gather_into_tensor": CollectiveRow("all_gather"),
        "all_gather_into_tensor_out": CollectiveRow("all_gather", out="out"),
        "all_gather_into_tensor_coalesced": CollectiveRow("all_gather", "inputs"),
        "reduce_scatter_tensor": CollectiveRow("reduce_scatter"),
        "reduce_scatter_tensor_out": CollectiveRow("reduce_scatter", out="out"),
        "reduce_scatter_tensor_coalesced": CollectiveRow("reduce_scatter", "inputs"),
        "all_to_all_single": CollectiveRow("all_to_all"),
        "broadcast": CollectiveRow("broadcast"),
        "broadcast_": CollectiveRow("broadcast", in_place=True),
    }
    named = {f"_c10d_functional::{name}": row for name, row in rows.items()}
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        named[f"_c10d_functional_autograd::{name}"] = rows[name]
    # It waits for its own result before it returns.
    named["_dtensor::shard_dim_alltoall"] = CollectiveRow("all_to_all", waits=True)
    # What torch.distributed's functions become where make_fx traces them (Note [Traced calls]).
    for name, kind in {"allgather": "all_gather", "reduce_scatter": "reduce_scatter"}.items():
        row = CollectiveRow(kind, "input_tensor", "output_tensor", waits=True)
        named[f"c10d::_{name}_base_"] = row
    named["c10d::allreduce_"] = CollectiveRow("all_reduce", "tensors", in_place=True, waits=True)
    named["c10d::alltoall_base_"] = CollectiveRow("all_to_all", out="output", waits=True)
    return named


COLLECTIVES = _rows()
"""The collectives, by the operator's name."""
FINISHES = {
    "_c10d_functional::wait_tensor": "tensor",
    "_c10d_functional::wait_tensors": "tensors",
}
"""Operators after which the stream may touch a result: the argument that gives it."""
STREAM_OPS: dict[str, tuple[int, ...]] = {
    "streams::record_event": (1,),
    "streams::wait_event": (1,),
    "streams::wait_stream": (0, 1),
    "streams::synchronize_event": (),
    "streams::synchronize_device": (),
    "streams::synchronize_stream": (0,),
    "streams::sync_dealloc": (1,),
    "streams::record_stream": (1,),
}
"""Operators of user streams: the places of the arguments that name streams."""
VIEWS = frozenset({"aten::_unsafe_view", "_c10d_functional::_wrap_tensor_autograd"})
"""Operators whose result shares the storage of their first argument, unlike their schema says."""
FILLED = {"fsdp::all_gather_copy_in": "all_gather_output"}
"""Operators that write this argument and give views of it, unlike their schema says."""
MAYBE_COPIES = frozenset(
    f"aten::{name}" for name in ("reshape", "contiguous", "to", "flatten", "reshape_as", "ravel")
)
"""Operators that give a view where they can, and a copy else; their schema says view."""
PURE = frozenset({"get_external_object_by_index", "getitem", "getattr"})
ORDERING_SPACES = ("_c10d_functional", "_c10d_functional_autograd", "streams", "c10d")
ORDERING_SPACES += ("symm_mem", "ao")
"""Namespaces of which an operator without a row is refused: it may order or wait for anything."""


def overload(target: Any) -> OpOverload | None:
    """The operator that a node calls, if it calls one; Dynamo leaves the overload open."""
    if isinstance(target, OpOverload):
        return target
    if isinstance(target, OpOverloadPacket):
        overloads = target.overloads()
        if len(overloads) == 1:
            return getattr(target, overloads[0])
    return None


def operator_name(target: Any) -> str:
    """The operator's name without its overload (`aten::mm`), or what the function is called."""
    found = overload(target)
    if found is not None:
        return found._schema.name
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target._name}"
    return str(getattr(target, "__name__", target))


def is_ordering(name: str) -> bool:
    """Returns True if an operator affects the order of others."""
    rows = (COLLECTIVES, FINISHES, STREAM_OPS)
    return any(name in row for row in rows)


def refuse_unknown(name: str, node: fx.Node) -> None:
    """Raises UnsupportedError for an operator that may order others in a way not known here."""
    space = name.partition("::")[0]
    if space in ORDERING_SPACES and not is_ordering(name) and name not in VIEWS:
        raise UnsupportedError(
            f"node {node.name!r} calls {name}, and what it waits for or orders is unknown; fix: "
            f"check the graph before the pass that put it in, or report the operator"
        )
