"""Effects of an operator: by the table of operators, else by torch's own schema and tags.

    >>> effects(torch.ops.aten.add_.Tensor).writes
    ((0, 'self'),)
    >>> confirm(Call(fn="mylib.fill.default", args=(View("x"),)))    # what the table does not know
    ProgramError: 'mylib.fill.default' writes its argument 'x' in place: ...

Whether a result shares memory with an argument is
seen when it is made (calls.py); `may_share` says of which operators that has to be looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from interlace.errors import ProgramError
from interlace.ir import Arg, Call, Region
from interlace.ir.operators import Facts, facts_of
from interlace.kernels import KERNELS
from interlace.runtime.calling.operators import resolve
from interlace.torch_private import OpOverload, has_kernel_for_dispatch_key


@lru_cache(4096)
def effects(op: OpOverload) -> Facts:
    """Effects of a call, beside reading its arguments and making its results: by the table of
    operators, or by torch's own schema and tags where the table lacks it."""
    return facts_of(str(op)) or effects_by(op._schema, {tag.name for tag in op.tags})


def effects_by(schema: Any, tags: Collection[str]) -> Facts:
    """Effects of an operator with this schema and the tags of these names."""
    arguments = list(enumerate(schema.arguments))
    writes = [
        (place, argument.name)
        for place, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out
    ]
    rate = next(((i, arg.name) for i, arg in arguments if arg.name == "dropout_p"), None)
    draws = "nondeterministic_seeded" in tags
    return Facts(
        writes=tuple(writes),
        outs=tuple(argument.name for _, argument in arguments if argument.is_out),
        draws=draws,
        unless=rate if draws else None,
        remakes="inplace_view" in tags,
    )


@lru_cache(4096)
def may_share(fn: object) -> bool:
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


def fills_list(fn: object) -> bool:
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


def _within(arg: Arg, written: Iterable[Arg]) -> bool:
    if isinstance(arg, tuple):
        return all(_within(item, written) for item in arg)
    return arg in written
