"""Computes one op on torch tensors: calls, regions and the data movement of collectives.

The interpreter decides when an op runs; this file computes it. Reductions go in rank order.

    compute(op, regions={}, tensor=lambda view: ..., bind=lambda buffer, result: ...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from interlace.ir import Arg, Buffer, Call, Collective, DType, Name, Region, View

DTYPES = {
    DType.f64: torch.float64,
    DType.f32: torch.float32,
    DType.bf16: torch.bfloat16,
    DType.f16: torch.float16,
    DType.f8e4m3: torch.float8_e4m3fn,
    DType.f8e5m2: torch.float8_e5m2,
    DType.i64: torch.int64,
    DType.i32: torch.int32,
    DType.i16: torch.int16,
    DType.i8: torch.int8,
    DType.u64: torch.uint64,
    DType.u32: torch.uint32,
    DType.u16: torch.uint16,
    DType.u8: torch.uint8,
    DType.bool: torch.bool,
    DType.c64: torch.complex64,
    DType.c128: torch.complex128,
}
WORDS = {
    "@device": torch.device("cpu"),
    "@strided": torch.strided,
    "@contiguous_format": torch.contiguous_format,
    "@preserve_format": torch.preserve_format,
    "@channels_last": torch.channels_last,
}


def sum_slots(slots: torch.Tensor) -> torch.Tensor:
    """The sum over dimension 0 in index order, accumulated in fp32 at least."""
    wide = torch.promote_types(slots.dtype, torch.float32)
    total = torch.zeros(slots.shape[1:], dtype=wide)
    for slot in slots:
        total += slot
    return total.to(slots.dtype)


KERNELS: dict[str, Callable[..., Any]] = {"interlace.sum_slots": sum_slots}


def overload(fn: str) -> Callable[..., Any]:
    """The torch operator (`aten.mm.out`) or kernel of that name."""
    if fn in KERNELS:
        return KERNELS[fn]
    found: Any = torch.ops
    for part in fn.split("."):
        found = getattr(found, part)
    return found


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an operator's result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flat_tensors(item)]
    return []


def compute(
    op: Call,
    regions: Mapping[str, Region],
    tensor: Callable[[View], torch.Tensor],
    bind: Callable[[Buffer, torch.Tensor], None],
) -> None:
    """Runs a Call: `tensor` resolves a view, `bind` gives a fresh buffer its contents."""
    args = [decode(arg, tensor, {}) for arg in op.args]
    kwargs = {key: decode(arg, tensor, {}) for key, arg in op.kwargs}
    if op.fn in regions:
        fn: Callable[..., Any] = _region(regions[op.fn])
    else:
        fn = overload(op.fn)
    outs = [tensor(view) for view in op.outs]
    schema = getattr(fn, "_schema", None)
    out_names = [arg.name for arg in schema.arguments if arg.is_out] if schema else []
    if op.fresh:
        results = flat_tensors(fn(*args, **kwargs))
        for buffer, result in zip(op.fresh, results, strict=True):
            bind(buffer, result)
    elif op.mutates:
        fn(*args, **kwargs)
    elif out_names:
        shapes = [out.shape for out in outs]
        fn(*args, **kwargs, **dict(zip(out_names, outs, strict=True)))
        assert shapes == [out.shape for out in outs], f"{op.fn} resized its outputs"
    else:
        results = flat_tensors(fn(*args, **kwargs))
        for out, result in zip(outs, results, strict=True):
            assert out.shape == result.shape, f"{op.fn} gives {result.shape} for {out.shape}"
            out.copy_(result)


def decode(arg: Arg, tensor: Callable[[View], torch.Tensor], names: Mapping[str, Any]) -> Any:
    """An argument as torch takes it."""
    match arg:
        case View():
            return tensor(arg)
        case Name(name):
            return names[name]
        case DType():
            return DTYPES[arg]
        case str():
            return WORDS.get(arg, arg)
        case tuple():
            return [decode(item, tensor, names) for item in arg]
        case _:
            return arg


def _region(region: Region) -> Callable[..., Any]:
    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names: dict[str, Any] = dict(zip(region.inputs, args, strict=True))
        for node in region.body:
            given = [decode(arg, _no_view, names) for arg in node.args]
            kwargs = {key: decode(arg, _no_view, names) for key, arg in node.kwargs}
            result = overload(node.fn)(*given, **kwargs)
            if len(node.outs) == 1:
                names[node.outs[0]] = result
            else:
                names.update(zip(node.outs, result, strict=True))
        return tuple(names[name] for name in region.outputs)

    return run


def _no_view(view: View) -> torch.Tensor:
    raise AssertionError(f"a region's body names its values; it has no view {view}")


def reduce_all(kind: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction of one tensor a rank, in rank order."""
    total = parts[0].clone()
    for part in parts[1:]:
        match kind:
            case "sum" | "avg":
                total += part
            case "prod":
                total *= part
            case "min":
                total = torch.minimum(total, part)
            case "max":
                total = torch.maximum(total, part)
            case _:
                raise AssertionError(f"no reduction {kind!r}")
    return total / len(parts) if kind == "avg" else total


def collect(
    op: Collective,
    given: Sequence[torch.Tensor | None],
    me: int,
    root: int,
    splits: Sequence[int] | None,
) -> torch.Tensor:
    """One member's result of a collective, from all members' parts: flat, in the order of the team.

    A broadcast and a scatter need only the root's part.
    """
    reduce = op.reduce or "sum"
    present = [part for part in given if part is not None]

    def parts(whole: torch.Tensor) -> list[torch.Tensor]:
        if splits is None:
            return list(whole.reshape(len(given), -1))
        rows = whole.reshape(sum(splits), -1) if whole.numel() else whole.reshape(sum(splits), 0)
        return [part.reshape(-1) for part in rows.split(list(splits))]

    match op.kind:
        case "all_gather" | "gather":
            return torch.cat(present)
        case "all_reduce" | "reduce":
            return reduce_all(reduce, present)
        case "reduce_scatter":
            return parts(reduce_all(reduce, present))[me]
        case "broadcast":
            return _present(given[root])
        case "scatter":
            return parts(_present(given[root]))[me]
        case "all_to_all":
            assert splits is None, "an uneven all_to_all is not defined here"
            return torch.cat([parts(part)[me] for part in present])
        case _:
            raise AssertionError(f"no collective {op.kind!r} gives anything")


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "the root gives nothing to send"
    return tensor
