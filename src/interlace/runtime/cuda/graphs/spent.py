"""Memory of what forward saved, for the results of the backward that frees it.

    note_handed(storage)                        # in the graphs of a forward
    homes = homes_in(program, sizes, spent)     # {"dw": ByteRange(storage=.., start=4096, stop=..)}

Note [Memory of what was saved]
    Gradients are as large as the parameters, and by the time that the last of them are computed
    most of what forward saved has been read. So results of a backward lie where inputs lay that its
    Program frees before. All uses of such an input come before its Free, and all writes of the
    result behind that on the same stream, so no other order is needed. A result that several
    streams write has memory of its own: its Alloc orders none of them.

    That holds only for inputs that nobody else has: what a forward graph saved and handed to nobody
    but AOTAutograd (`GraphUse.handed`, one storage a pair), and a backward that is the last one of
    its graph (`boxed`; `retain_graph` runs one whose results have memory of their own). Results
    hold that storage as what was saved did, so the forward is not replayed while one of them is
    referenced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.cost.memory import aligned
from interlace.ir import Program


@cache
def handed_memory(device: torch.device) -> dict[int, StorageWeakRef]:
    """Storages of a process's graphs that forwards handed to their backwards, by pointer."""
    return {}


def is_handed(tensor: torch.Tensor) -> bool:
    """True if one later run alone has the tensor's memory."""
    storage = tensor.untyped_storage()
    ref = handed_memory(tensor.device).get(storage._cdata)
    return ref is not None and not ref.expired()


def note_handed(storage: torch.UntypedStorage) -> None:
    """Has a storage known as one of such memory for as long as it lives."""
    known = handed_memory(storage.device)
    for pointer in [pointer for pointer, ref in list(known.items()) if ref.expired()]:
        known.pop(pointer, None)  # another thread may be here, too
    known[storage._cdata] = StorageWeakRef(storage)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a storage, which its address names."""

    storage: int
    start: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ByteRange:
        """The bytes from a tensor's first element to the end of its last."""
        storage = tensor.untyped_storage().data_ptr()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        numel = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
        start = tensor.data_ptr() - storage if numel else 0
        return cls(storage, start, start + numel * tensor.itemsize)

    def without(self, other: ByteRange) -> list[ByteRange]:
        """The parts that the other one does not cover."""
        if other.storage != self.storage or other.stop <= self.start or self.stop <= other.start:
            return [self]
        parts = ((self.start, other.start), (other.stop, self.stop))
        return [ByteRange(self.storage, start, stop) for start, stop in parts if start < stop]


def homes_in(
    program: Program, sizes: Mapping[str, int], spent: Mapping[str, ByteRange]
) -> dict[str, ByteRange]:
    """Places of results (bytes by name) in the memory of inputs: Note [Memory of what was saved].
    Those that fit nowhere are left out."""
    writers: dict[str, set[str]] = {}
    for op in program.ops:
        for access in op.writes():
            writers.setdefault(access.view.buffer, set()).add(op.stream)
    streams, homes = dict[str, str](), dict[str, ByteRange]()
    free: dict[str, list[ByteRange]] = {}
    for op in program.ops:
        gaps = free.setdefault(op.stream, [])
        freed = op.ordering().frees
        if freed is not None and freed in spent:
            streams[freed] = op.stream
            used = [span for name, span in spent.items() if streams.get(name) != op.stream]
            gaps[:] = _joined([*gaps, *_without([spent[freed]], used)])
        for buffer in op.declares():
            size = aligned(sizes.get(buffer.name, 0))
            alone = writers.get(buffer.name, set()) <= {op.stream}
            fitting = [gap for gap in gaps if aligned(gap.start) + size <= gap.stop]
            if size and alone and fitting:
                gap = min(fitting, key=lambda gap: gap.stop - gap.start)
                home = ByteRange(gap.storage, aligned(gap.start), aligned(gap.start) + size)
                homes[buffer.name], gaps[:] = home, _without(gaps, [home])
    return homes


def _without(spans: Sequence[ByteRange], others: Iterable[ByteRange]) -> list[ByteRange]:
    parts = list(spans)
    for other in others:
        parts = [rest for part in parts for rest in part.without(other)]
    return parts


def _joined(spans: Iterable[ByteRange]) -> list[ByteRange]:
    """The same bytes in as few spans as there can be."""
    joined: list[ByteRange] = []
    for span in sorted(spans, key=lambda span: (span.storage, span.start)):
        if joined and (joined[-1].storage, joined[-1].stop) == (span.storage, span.start):
            span = ByteRange(span.storage, joined.pop().start, span.stop)
        joined.append(span)
    return joined
