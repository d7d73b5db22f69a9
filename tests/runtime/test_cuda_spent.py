"""Results of a backward in memory of the inputs that it frees: no GPU is needed."""

from __future__ import annotations

import random

import torch

from interlace.ir import parse
from interlace.runtime.cuda.graphs.spent import ByteRange, homes_in, is_handed, note_handed

UNIT = 256


def test_results_lie_in_what_was_freed_on_their_stream_before() -> None:
    program = parse("""
def f(a: f32[64], b: f32[64], c: f32[64], d: f32[64]):
    early = empty(f32[64])
    main: copy(a, early)
    main: free(a)
    main: free(c)
    other: free(d)
    large = empty(f32[128])
    main: call("aten.neg.default", b, out=(small := f32[64]))
    main: free(b)
    main: call("aten.zero_.default", large)
    last = empty(f32[128])
    main: call("aten.zero_.default", last)
    return early, large, small, last
""")
    sizes = {"early": UNIT, "large": 2 * UNIT, "small": UNIT, "last": 2 * UNIT}
    spent = {name: ByteRange(7, UNIT * i, UNIT * (i + 1)) for i, name in enumerate("acbd")}
    assert homes_in(program, sizes, spent) == {"large": ByteRange(7, 0, 2 * UNIT)}
    spent["d"] = ByteRange(8, 0, UNIT)
    apart = {**spent, "c": ByteRange(8, UNIT, 2 * UNIT)}
    found = homes_in(program, sizes, apart)
    assert found["small"] in (ByteRange(7, 0, UNIT), ByteRange(8, UNIT, 2 * UNIT))
    assert "large" not in found, "no storage has so much in one piece"


def test_a_result_that_another_stream_writes_has_memory_of_its_own() -> None:
    """Its Alloc orders nothing: the copy may run before the matmul that reads what is freed."""
    program = parse("""
def f(a: f32[64], b: f32[64]):
    main: call("aten.neg.default", a, out=(early := f32[64]))
    main: free(a)
    dx = empty(f32[64])
    comm: copy(b, dx)
    comm: record(e1)
    main: wait(e1)
    dw = empty(f32[64])
    main: copy(b, dw)
    return early, dx, dw
""")
    sizes: dict[str, int] = dict.fromkeys(("early", "dx", "dw"), UNIT)
    assert homes_in(program, sizes, {"a": ByteRange(7, 0, UNIT)}) == {"dw": ByteRange(7, 0, UNIT)}


def test_no_byte_is_used_that_is_not_free(seed: int) -> None:
    """Of random Programs whose inputs overlap, as views of one buffer do: a result's bytes are of
    inputs that were all freed before, on the result's stream, and of no other result."""
    drawn = random.Random(seed)
    placed = 0
    for _ in range(300):
        inputs = [f"x{i}" for i in range(drawn.randint(1, 8))]
        spans = {}
        for name in inputs:
            start = drawn.randrange(3000)
            spans[name] = ByteRange(drawn.randrange(2), start, start + drawn.randint(1, 1500))
        steps = [f"free({name})" for name in inputs if drawn.random() < 0.8]
        results = {f"y{i}": drawn.randint(1, 5) * UNIT for i in range(drawn.randint(1, 6))}
        steps += [f"zero {name}" for name in results]
        drawn.shuffle(steps)
        lines, order = [], []
        for step in steps:
            stream = drawn.choice(("main", "main", "main", "other"))
            order.append((stream, step))
            name = step.split()[-1]
            call = f'call("aten.sin.default", w, out=({name} := f32[{results.get(name, 0) // 4}]))'
            lines.append(f"    {stream}: {step if step.startswith('free') else call}")
        params = ", ".join(f"{name}: f32[64]" for name in [*inputs, "w"])
        returned = f"    return {', '.join(results)}\n"
        program = parse("\n".join([f"def f({params}):", *lines, returned]))
        homes = homes_in(program, results, spans)
        placed += len(homes)
        freed: dict[str, str] = {}
        taken = set[tuple[int, int]]()
        for stream, step in order:
            name = step.split()[-1]
            if step.startswith("free"):
                freed[step[5:-1]] = stream
            elif name in homes:
                home = bytes_of(homes[name])
                assert homes[name].start % UNIT == 0
                assert len(home) == results[name]
                assert not home & taken
                taken |= home
                for each, span in spans.items():
                    assert freed.get(each) == stream or not home & bytes_of(span)
                assert home <= set[tuple[int, int]]().union(*map(bytes_of, spans.values()))
    assert placed > 20


def bytes_of(span: ByteRange) -> set[tuple[int, int]]:
    return {(span.storage, byte) for byte in range(span.start, span.stop)}


def test_memory_is_known_as_handed_for_as_long_as_it_lives() -> None:
    tensor = torch.empty(8)
    assert not is_handed(tensor)
    note_handed(tensor.untyped_storage())
    assert is_handed(tensor[2:])
    others = [torch.empty(8) for _ in range(50)]
    del tensor
    others += [torch.empty(8) for _ in range(50)]
    assert not any(map(is_handed, others))


def test_the_bytes_of_a_tensor() -> None:
    tensor = torch.empty(10, 10, dtype=torch.float64)
    storage = tensor.untyped_storage().data_ptr()
    assert ByteRange.of(tensor[2:4, 1:3]) == ByteRange(storage, 8 * 21, 8 * 33)
    assert ByteRange.of(tensor.t()) == ByteRange(storage, 0, 800)
    assert ByteRange.of(tensor[:0]) == ByteRange(storage, 0, 0)
