"""Memory of what forward saved, for the results of the backward that frees it.

    handed = handed_memory(device)              # storages of results that one later run frees
    homes = homes_in(program, sizes, spent)     # {"dw": Home(storage=.., start=4096)}

Note [Memory of what was saved]
    Gradients are as large as the parameters, and by the time that the last of them are computed
    most of what forward saved has been read. So results of a backward lie where inputs lay that its
    Program frees before: all uses of such an input come before its Free, all uses of a result after
    the op that declares it, and both stand on one stream. That holds only for inputs that nobody
    else has: what a forward graph saved and handed to nobody but AOTAutograd (`GraphUse.handed`,
    one storage a pair), and a backward that is the last one of its graph (`boxed`; `retain_graph`
    runs one whose results have memory of their own). Results hold that storage as what was saved
    did, so the forward is not replayed while one of them is referenced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.cost.memory import aligned
from interlace.ir import Program


@cache
def handed_memory(device: torch.device) -> dict[int, StorageWeakRef]:
    """Storages of a process's graphs that hold nothing but what forwards saved."""
    return {}


def is_handed(tensor: torch.Tensor) -> bool:
    """True if one later run alone has the tensor's memory."""
    storage = tensor.untyped_storage()
    ref = handed_memory(tensor.device).get(storage._cdata)
    return ref is not None and not ref.expired()


def note_handed(storage: torch.UntypedStorage) -> None:
    """Has a storage known as one of such memory for as long as it lives."""
    known = handed_memory(storage.device)
    for pointer in [pointer for pointer, ref in known.items() if ref.expired()]:
        del known[pointer]
    known[storage._cdata] = StorageWeakRef(storage)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a storage, which its address names."""

    storage: int
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Span:
        """The bytes from a tensor's first element to the end of its last."""
        storage = tensor.untyped_storage().data_ptr()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        numel = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
        start = tensor.data_ptr() - storage if numel else 0
        return cls(storage, start, start + numel * tensor.itemsize)

    def without(self, other: Span) -> list[Span]:
        """The parts that the other one does not cover."""
        if other.storage != self.storage or other.stop <= self.start or self.stop <= other.start:
            return [self]
        parts = ((self.start, other.start), (other.stop, self.stop))
        return [Span(self.storage, start, stop) for start, stop in parts if start < stop]


def homes_in(
    program: Program, sizes: Mapping[str, int], spent: Mapping[str, Span]
) -> dict[str, Span]:
    """Places of results (bytes by name) in the memory of inputs: Note [Memory of what was saved].
    Those that fit nowhere are left out."""
    held, homes = dict(spent), dict[str, Span]()
    free: dict[str, list[Span]] = {}
    for op in program.ops:
        gaps = free.setdefault(op.stream, [])
        freed = op.ordering().frees
        if freed is not None and freed in held:
            gaps[:] = _joined([*gaps, *_without([held.pop(freed)], held.values())])
        for buffer in op.declares():
            size = aligned(sizes.get(buffer.name, 0))
            fitting = [gap for gap in gaps if size and gap.stop - gap.start >= size]
            if not fitting:
                continue
            gap = min(fitting, key=lambda gap: gap.stop - gap.start)
            homes[buffer.name] = home = Span(gap.storage, gap.start, gap.start + size)
            gaps[gaps.index(gap) :] = [*gap.without(home), *gaps[gaps.index(gap) + 1 :]]
    return homes


def _without(spans: list[Span], others: Iterable[Span]) -> list[Span]:
    for other in others:
        spans = [part for span in spans for part in span.without(other)]
    return spans


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The same bytes in as few spans as there can be."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.storage, span.start)):
        if joined and (joined[-1].storage, joined[-1].stop) == (span.storage, span.start):
            span = Span(span.storage, joined.pop().start, span.stop)
        joined.append(span)
    return joined
