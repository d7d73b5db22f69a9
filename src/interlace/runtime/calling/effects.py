"""Effects of an operator by torch's own schema and tags: what `ir/operators.txt` is written from.

    >>> effects(torch.ops.aten.add_.Tensor).writes
    ((0, 'self'),)
    >>> confirm(Call(fn="mylib.fill.default", args=(View("x"),)))    # what the table does not know
    ProgramError: 'mylib.fill.default' writes its argument 'x' in place: ...

The lists have what schemas and tags leave out. Whether a result shares memory with an argument is
seen when it is made (calls.py); `may_share` says of which operators that has to be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from interlace.errors import ProgramError
from interlace.ir import Call, Region
from interlace.ir.operators import Facts, facts_of
from interlace.kernels import KERNELS
from interlace.runtime.calling.operators import resolve
from interlace.torch_private import OpOverload, has_kernel_for_dispatch_key

_STATISTICS = frozenset(
    {
        *("batch_norm", "native_batch_norm", "instance_norm", "_batch_norm_impl_index"),
        *("cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    }
)
"""Operators that update running_mean and running_var in training; their schemas do not say so."""
_REMADE = frozenset(
    {
        *("set_data", "retain_grad", "record_stream", "rename_", "requires_grad_"),
        *("_backward", "_coalesced_", "_resize_output_", "resize_as_sparse_"),
        *("sparse_resize_", "sparse_resize_and_clear_", "resize", "swapaxes_", "squeeze_"),
    }
)
"""Operators that change what an argument is, beside those with torch's tag `inplace_view`."""
_UNFILLED = frozenset({"_ctc_loss.out", "_ctc_loss.Tensor_out", "fft_ihfft2.out", "fft_ihfftn.out"})
"""Overloads that leave some of the memory that they are given as it was, for some arguments."""
_UNWRITTEN = re.compile(r"(new_|_)?empty(_|$)")
_SHAPE_ONLY = re.compile(
    r"(full|zeros|ones|empty|rand|randn|randint)_like|new_(full|zeros|ones|empty|empty_strided)"
    r"|(_foreach_)?(zero|copy)_?|fill_?|normal_functional"
    r"|(normal|random|uniform|exponential|geometric|cauchy|log_normal)_"
    r"|(random|uniform|exponential|geometric|cauchy|log_normal)|copy_to"
)
_PROBABILITY_GIVEN = re.compile(r"bernoulli(_\.|\.(p|Tensor))")
_DRAWS = frozenset({"interlace::get_rng_state", "interlace::set_rng_state"})


@lru_cache(4096)
def effects(op: OpOverload) -> Facts:
    """Effects of a call, beside reading its arguments and making its results."""
    return effects_by(op._schema, {tag.name for tag in op.tags})


def effects_by(schema: Any, tags: Collection[str]) -> Facts:
    """The same, of an operator with this schema and the tags of these names."""
    space, _, name = schema.name.partition("::")
    arguments = list(enumerate(schema.arguments))
    writes = [
        (place, argument.name)
        for place, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
    ]
    plain = space in ("aten", "prims")
    if plain and name in _STATISTICS:
        running = ("running_mean", "running_var")
        writes += [(place, arg.name) for place, arg in arguments if arg.name in running]
    rate = next(((i, arg.name) for i, arg in arguments if arg.name == "dropout_p"), None)
    draws = "nondeterministic_seeded" in tags or schema.name in _DRAWS
    whole = f"{name}.{schema.overload_name}"
    return Facts(
        writes=tuple(writes),
        outs=tuple(argument.name for _, argument in arguments if argument.is_out),
        draws=draws,
        unless=rate if draws else None,
        unwritten=plain and (_UNWRITTEN.match(name) is not None or whole in _UNFILLED),
        shape_only=plain
        and (
            _SHAPE_ONLY.fullmatch(name) is not None or _PROBABILITY_GIVEN.match(whole) is not None
        ),
        remakes="inplace_view" in tags or (plain and name in _REMADE),
    )


def may_share(fn: Any) -> bool:
    """True if a result may share memory with an argument or another result.

    A backend's own kernel makes new results where the schema says nothing else. A composite
    operator may give an argument back (dropout out of training, type_as); a function that is not
    of the dispatcher is of this package, and does not.
    """
    if not isinstance(fn, OpOverload):
        return False
    if any(result.alias_info is not None for result in fn._schema.returns):
        return True
    has, name = has_kernel_for_dispatch_key, fn.name()
    composed = "CompositeImplicitAutograd", "CompositeExplicitAutograd"
    return any(has(name, key) for key in composed)


T = TypeVar("T", torch.Tensor, torch.Tensor | None)


def apart(results: Sequence[T], given: Iterable[torch.Tensor]) -> list[T]:
    """The results in memory of their own: copies, without marks that they are yet to be conjugated
    or negated, of those that lie in the memory of one that was given or came before."""
    seen = {tensor.untyped_storage()._cdata for tensor in given}
    found: list[T] = []
    for result in results:
        if result is not None and result.untyped_storage()._cdata in seen:
            result = result.clone().resolve_conj().resolve_neg()
        if result is not None:
            seen.add(result.untyped_storage()._cdata)
        found.append(result)
    return found


def fills_list(fn: Any) -> bool:
    """True if an operator takes its outputs as one list."""
    schema = getattr(fn, "_schema", None)
    outs = [] if schema is None else [a for a in schema.arguments if a.is_out]
    return len(outs) == 1 and isinstance(outs[0].type, torch.ListType)


def confirm(op: Call, region: Region | None = None) -> None:
    """Raises ProgramError where what the table does not know does more than the call declares."""
    if region is not None:
        for node in region.body:
            confirm(Call(fn=node.fn, args=node.args, kwargs=node.kwargs, loc=op.loc))
    elif facts_of(op.fn) is None and op.fn not in KERNELS:
        found = resolve(op.fn)
        if isinstance(found, OpOverload):
            _confirm(op, effects(found))


def _confirm(op: Call, found: Facts) -> None:
    missing: list[str] = []
    given = dict(op.kwargs)
    written = [*op.outs] if op.mutates else []
    for at, name in found.writes:
        arg = op.args[at] if at < len(op.args) else given.get(name)
        if arg is not None and not _within(arg, written):
            missing.append(f"writes its argument {name!r} in place: declare mutates=True and out=")
    if found.draws and not op.rng:
        missing.append("draws random numbers: declare rng=True")
    if found.remakes:
        missing.append("changes the shape, strides or memory of an argument: write a view")
    if missing:
        raise ProgramError(f"{op.fn!r} {'; it '.join(missing)}")


def _within(arg: Any, written: Iterable[Any]) -> bool:
    if isinstance(arg, tuple):
        return all(_within(item, written) for item in arg)
    return arg in written
