"""The GEMM kernels on a GPU: what they compute, and that they wait and raise when they should.

All streams are made before a kernel spins (making one may wait for the device), and a timer raises
the gates of a test that would hang.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from interlace.float8 import E4M3, E5M2, Float8Data, Recipe, quantize
from interlace.float8.products import multiply_into
from interlace.kernels import sum_slots, sum_slots_reference
from interlace.kernels.gemm.support import (
    CONFIGS,
    SPECIALIZED,
    WITH_TAIL,
    TileConfig,
    refuse,
    refuse_packed,
)
from interlace_bench.sites import FAST

pytestmark = pytest.mark.gpu

HOLD_S = 10.0
RAISED = 1 << 20


def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", 0)
    why = refuse(rows=64, inner=64, columns=64, dtype=torch.bfloat16, device=device)
    if why is not None:
        pytest.skip(why)
    return device


@dataclass
class Line:
    """A stream of copies and words beside the one that computes, and what frees a stuck test."""

    device: torch.device
    copies: torch.cuda.Stream
    words: torch.Tensor

    def write(self, index: int, value: int) -> None:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

        at = self.words.data_ptr() + 4 * index
        (error,) = driver.cuStreamWriteValue32(self.copies.cuda_stream, at, value & 0xFFFFFFFF, 0)
        assert int(error) == 0

    def wait(self, index: int, value: int) -> None:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

        at = self.words.data_ptr() + 4 * index
        (error,) = driver.cuStreamWaitValue32(self.copies.cuda_stream, at, value, 0)
        assert int(error) == 0

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """By copy engine: one side is pinned host memory."""
        with torch.cuda.stream(self.copies):
            to.copy_(source, non_blocking=True)


@pytest.fixture
def line() -> Iterator[Line]:
    device = gpu()
    from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

    rescue = torch.cuda.Stream(device)
    words = torch.zeros(64, dtype=torch.int32, device=device)
    made = Line(device, torch.cuda.Stream(device, priority=-1), words)
    torch.cuda.synchronize()
    stuck = threading.Event()

    def free() -> None:
        stuck.set()
        for index in range(64):
            at = made.words.data_ptr() + 4 * index
            driver.cuStreamWriteValue32(rescue.cuda_stream, at, RAISED, 0)

    timer = threading.Timer(HOLD_S, free)
    timer.start()
    yield made
    torch.cuda.synchronize()
    timer.cancel()
    assert not stuck.is_set(), "the kernel or a copy waited for a word that never came"


def filled(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def assert_product(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: object) -> None:
    """Within 2^-8 of the sum of magnitudes, elementwise, of a product in double precision."""
    wanted = x.double() @ w.double()
    if isinstance(bias, torch.Tensor):
        wanted = wanted + bias.double()
    room = (x.double().abs() @ w.double().abs() + wanted.abs()) * 2**-8
    assert bool(((got.double() - wanted).abs() <= room).all())


CASES = [
    (4, 512, 512, 1024, torch.bfloat16, False, False),
    (4, 384, 2048, 2560, torch.bfloat16, True, False),
    (4, 2048, 4096, 256, torch.bfloat16, True, False),  # keys or values of an 8B layer
    (2, 136, 1000, 2056, torch.float16, True, True),
    (3, 200, 344, 520, torch.float16, False, True),
    (8, 64, 1024, 4096, torch.bfloat16, False, False),
    (2, 1000, 64, 264, torch.bfloat16, True, True),
    (1, 300, 264, 136, torch.bfloat16, False, False),
    (1, 2050, 1000, 4104, torch.float16, True, True),
    (2, 1280, 32, 8200, torch.bfloat16, True, True),
]
LARGE = SPECIALIZED[0]


def fits(case: tuple, config: TileConfig | None) -> bool:
    """Whether chunks end with a tile of the kernel with a warp for loads."""
    size, rows = case[:2]
    return config is not LARGE or size == 1 or rows % LARGE.bm == 0


def cases(*configs: TileConfig | None) -> list[object]:
    """Each case with each configuration that serves it."""
    return [
        pytest.param(case, config, id=f"{case}-{config and (config.bm, config.bn, config.stages)}")
        for case in CASES
        for config in configs
        if fits(case, config)
    ]


def ranges(rows: int, subs: int) -> list[slice]:
    """What comes together of a chunk's rows."""
    return [slice(rows * i // subs, rows * (i + 1) // subs) for i in range(subs)]


@pytest.mark.parametrize(("case", "config"), cases(None, WITH_TAIL, LARGE))
def test_gather_with_late_gates(
    line: Line, case: tuple, config: TileConfig | None, seed: int
) -> None:
    """Slots arrive while the kernel runs, one after another and piece by piece, across the wrap of
    the epoch."""
    from interlace.kernels.gemm.matmul import GatherMatmul

    torch.manual_seed(seed)
    size, rows, inner, columns, dtype, transposed, has_bias = case
    device, rank, subs = line.device, seed % size, rows // 128 if rows % 128 == 0 else 1
    w = drawn(*((columns, inner) if transposed else (inner, columns)), dtype=dtype)
    plain = w.t() if transposed else w
    bias = drawn(columns, dtype=dtype) if has_bias else None
    full = drawn(size * rows, inner, dtype=dtype)
    host = full.cpu().pin_memory()
    x = full[rank * rows : (rank + 1) * rows].clone()
    slots = filled(size * rows, inner, device=device, dtype=dtype)
    y = filled(size * rows, columns, device=device, dtype=dtype)
    kernel = GatherMatmul(
        rows=rows, inner=inner, columns=columns, size=size, rank=rank, dtype=dtype,
        device=device, transposed=transposed, bias=has_bias, config=config, subs=subs,
    )  # fmt: skip
    epoch = 0xFFFFFFFF if seed % 2 else 3
    line.words.fill_(epoch - subs - (1 << 32 if seed % 2 else 0))
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(stream, x, w, slots, y, bias, line.words.data_ptr(), epoch)
    for k in range(1, size):
        chunk = (rank + k) % size
        for number, piece in enumerate(ranges(rows, subs), start=1):
            at = slice(chunk * rows + piece.start, chunk * rows + piece.stop)
            line.copy(slots[at], host[at])
            line.write(chunk, epoch - subs + number + (k == 1 and number == subs))
    torch.cuda.synchronize()
    assert_product(y, full, plain, bias)


PACKED_CASES = [
    (4, 256, 512, 1024, E4M3, E4M3, torch.bfloat16, False),
    (4, 384, 2000, 2576, E5M2, E4M3, torch.bfloat16, True),
    (2, 128, 144, 272, E4M3, E5M2, torch.float16, True),
    (8, 128, 4096, 512, E4M3, E4M3, torch.bfloat16, True),
    (3, 1024, 16, 4112, E4M3, E4M3, torch.float16, False),
    (1, 1280, 1040, 4112, E5M2, E4M3, torch.bfloat16, True),
]


@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed_gather_with_late_gates(line: Line, case: tuple, seed: int) -> None:
    """Rows come with their scale, another for each chunk. Part by part the bits are the same; how
    many are those of `_scaled_mm` is printed."""
    from interlace.kernels.gemm.matmul import GatherMatmul

    if (why := refuse_packed()) is not None:
        pytest.skip(why)
    torch.manual_seed(seed)
    size, rows, inner, columns, kind, weight_kind, dtype, has_bias = case
    device, rank, subs = line.device, seed % size, rows // 128
    recipe = Recipe(scale="team", power_of_two=bool(seed % 2))

    def packed(rows: int, kind: torch.dtype, scale: float) -> torch.Tensor:
        return quantize(drawn(rows, inner, dtype=torch.float32) * scale, kind, recipe).packed

    full = torch.cat([packed(rows, kind, 3.0**part) for part in range(size)])
    w = packed(columns, weight_kind, inner**-0.5)
    bias = drawn(columns, dtype=dtype) if has_bias else None
    host = full.view(torch.uint8).cpu().pin_memory()
    x = full[rank * rows : (rank + 1) * rows].clone()
    slots = torch.full_like(full.view(torch.uint8), 0xFF)  # NaN, in FP8 and in fp32
    y, theirs, apart = (filled(size * rows, columns, device=device, dtype=dtype) for _ in range(3))
    facts = {
        **{"rows": rows, "inner": full.shape[1] - 128, "columns": columns, "dtype": dtype},
        **{"device": device, "transposed": True, "bias": has_bias, "packed": (kind, weight_kind)},
    }
    kernel = GatherMatmul(**facts, size=size, rank=rank, subs=subs)
    alone = GatherMatmul(**facts, size=1, rank=0)
    line.words.fill_(7 - subs)
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(stream, x, w.t(), slots.view(kind), y, bias, line.words.data_ptr(), 7)
    for k in range(1, size):
        chunk = (rank + k) % size
        for number, piece in enumerate(ranges(rows, subs), start=1):
            at = slice(chunk * rows + piece.start, chunk * rows + piece.stop)
            line.copy(slots[at], host[at])
            line.write(chunk, 7 - subs + number)
    torch.cuda.synchronize()
    for mine, into in zip(full.chunk(size), apart.chunk(size), strict=True):
        alone.launch(stream, mine, w.t(), None, into, bias, 0, 0)
    multiply_into(theirs, full, w, size, bias, True)
    wide, weight = (Float8Data(rows8, inner).dequantize().double() for rows8 in (full, w))
    wanted = wide @ weight.t() + (0 if bias is None else bias.double())
    for part in range(size):
        at = slice(part * rows, (part + 1) * rows)
        room = wanted[at].abs() * torch.finfo(dtype).eps + wanted[at].square().mean().sqrt() * FAST
        for found in (y, theirs):
            assert bool(((found[at].double() - wanted[at]).abs() <= room).all())
    assert torch.equal(y, apart)
    print(f"{(y == theirs).double().mean():.2%} have the bits of _scaled_mm")


@pytest.mark.parametrize("own_parts", [1, 0, 3])
@pytest.mark.parametrize(("case", "config"), cases(None, CONFIGS[0][0], LARGE))
def test_scatter_with_copies_behind_it(
    line: Line, case: tuple, config: TileConfig | None, own_parts: int, seed: int
) -> None:
    """Copies of the rows, range by range, wait for the counters of two runs."""
    from interlace.kernels.gemm.matmul import ScatterMatmul

    torch.manual_seed(seed)
    size, rows, inner, columns, dtype, transposed, has_bias = case
    device, rank = line.device, seed % size
    w = drawn(*((columns, inner) if transposed else (inner, columns)), dtype=dtype)
    plain = w.t() if transposed else w
    bias = drawn(columns, dtype=dtype) if has_bias else None
    if rows % {1: 1, 0: 256, 3: 512}[own_parts]:
        pytest.skip("only of whole tiles")
    kernel = ScatterMatmul(
        rows=rows, inner=inner, columns=columns, size=size, rank=rank, dtype=dtype,
        device=device, transposed=transposed, bias=has_bias, config=config, subs=2,
        own_parts=own_parts,
    )  # fmt: skip
    counters, subs = line.words.data_ptr(), kernel.subs
    each = len(kernel.sub_rows(0))
    slabs = own_parts == 0  # else ranges of a chunk lie together
    ranges = [
        (chunk * subs + sub, kernel.raised, chunk, kernel.sub_rows(sub))
        for chunk in ((rank + k) % size for k in range(1, size + 1))
        for sub in range(subs)
    ]
    if own_parts > subs:
        word, raised, _, span = ranges.pop()
        halves = range(span.start, span.start + each // 2), range(span.start + each // 2, span.stop)
        ranges += [(word, raised // 2, rank, halves[0])]
        ranges += [(size * subs, raised // 2, rank, halves[1])]

    def place(chunk: int, span: range) -> slice:
        """Where rows of a chunk lie in x and in the stage."""
        down = (span.start * (size - 1) + chunk * each) if slabs else chunk * rows
        return slice(down + span.start, down + span.stop)

    for number in (1, 2):
        x = drawn(size * rows, inner, dtype=dtype)
        stage = filled(size * rows, columns, device=device, dtype=dtype)
        own = filled(rows, columns, device=device, dtype=dtype)
        sent = torch.zeros(size * rows, columns, dtype=dtype).pin_memory()
        torch.cuda.synchronize()
        kernel.launch(torch.cuda.current_stream().cuda_stream, x, w, stage, own, bias, counters)
        for word, raised, chunk, span in ranges:
            line.wait(word, number * raised)
            at = place(chunk, span)
            source = own[span.start : span.stop] if chunk == rank else stage[at]
            line.copy(sent[at], source)
        torch.cuda.synchronize()
        for sub in range(subs):
            span = kernel.sub_rows(sub)
            assert bool(stage[place(rank, span)].isnan().all())
            stage[place(rank, span)] = own[span.start : span.stop]
        assert_product(stage, x, plain, bias)
        assert torch.equal(sent, stage.cpu()), "a copy overtook the tiles that it waited for"
        found = line.words[: size * subs + (own_parts > subs)].tolist()
        wanted = [0] * len(found)
        for word, raised, _, _ in ranges:
            wanted[word] = number * raised
        assert found == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 1024, 512), (2, 777, 13), (3, 5000), (1, 64), (8, 3, 8)])
def test_sum_is_the_reference_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gpu()
    slots = drawn(*shape, dtype=dtype)
    assert torch.equal(sum_slots(slots), sum_slots_reference(slots))
    out = torch.empty_like(slots[0])
    assert sum_slots(slots, out=out) is out
    assert torch.equal(out, sum_slots_reference(slots))


@pytest.mark.parametrize("count", [8, 4096, 3 * 32768 + 24, 1 << 22])
def test_a_sum_waits_for_all_its_words(line: Line, count: int) -> None:
    """What is put late, by copies and words on another stream, is in it: bits of the reference."""
    from interlace.kernels.exchange.sums import SumSlots

    made = drawn(3, count)
    late = [part.cpu().pin_memory() for part in made[1:]]
    slots = filled(3, count + 8, device=line.device, dtype=made.dtype)[:, :count]
    slots[0].copy_(made[0])
    out = filled(count, device=line.device, dtype=made.dtype)
    words = tuple([line.words.data_ptr() + 4 * i for i in (5, 9)])
    kernel = SumSlots(size=3, dtype=made.dtype, device=line.device, words=2)
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    where = slots.data_ptr(), slots.stride(0), out.data_ptr()
    kernel.launch(stream, *where, count, words, 7)
    for index, part in enumerate(late):
        line.copy(slots[index + 1], part)
        line.write((5, 9)[index], 7 + index)
    torch.cuda.synchronize()
    assert torch.equal(out, sum_slots_reference(made))
