"""Storages that a run on the CPU allocates, as torch's allocator reports them, beside those that an
Executor holds: to compare with the memory that is counted from its Program.

    with Executor(program, options=Options(in_order=True)).prepare() as executor:
        levels = storage_levels(executor, inputs)      # bytes behind each step of a run
"""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from interlace.ir import Free
from interlace.runtime import Executor
from interlace.runtime.values import laid_out, nbytes

STEP = "interlace step"


def storage_levels(executor: Executor, inputs: list[torch.Tensor]) -> list[int]:
    """Bytes that a run holds behind each of its steps: what it allocated and has not freed, the
    arena, its slots, and (copies of) the inputs that it is given up and holds still. All ops are on
    one stream; what an operator allocates and frees again is no more there behind its step."""
    engine: Any = executor.engine
    values, stream = engine.context.values, engine._first
    slots = dict[int, int]()  # other Programs may have larger buffers in them
    for name, slot in engine.context.resources.slots.items():
        buffer = engine.context.plan.buffers[name]
        size = buffer.offset + nbytes(buffer)
        assert all(copy.nbytes >= size for copy in slot.copies[slot.me])
        slots[id(slot)] = max(slots.get(id(slot), 0), len(slot.copies[slot.me]) * size)
    _, arena = laid_out(engine.context.plan.buffers)  # of memory that other Programs may share
    lasting = sum(slots.values()) + arena

    def mark() -> None:
        with record_function(STEP):
            assert values.arena.nbytes() >= arena

    freed = {op.buffer for op in executor.program.ops if isinstance(op, Free)}
    given = [b.name for b in executor.program.params if b.kind == "input"]
    kept = sum(t.nbytes for name, t in zip(given, inputs, strict=True) if name not in freed)
    plain = stream.runs
    stream.runs = [mark, *(each for run in plain for each in (run, mark))]
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            # The allocator reports no end of what was there before.
            results = executor.run([tensor.clone() for tensor in inputs], boxed=True)
            del results
    finally:
        stream.runs = plain
    result: Any = profiled.profiler
    events = sorted(result.kineto_results.events(), key=lambda event: event.start_ns())
    levels, now = list[int](), -kept
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
        elif event.name() == STEP:
            levels.append(now + lasting)
    return levels
