"""The exchange kernel: its tables, its arithmetic on the interpreter, its order in the PTX."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from tests.kernels.exchange_support import Emulated, exchange_reference, late

from interlace.errors import UnsupportedError
from interlace.kernels.exchange.exchange import LINE, REDUCED, PeerExchange, staging_nbytes
from interlace.kernels.exchange.moves import GRAIN, balanced, moves_of
from interlace.passes.strategies.write import EXCHANGED
from interlace.runtime.values import DTYPES

KINDS = (
    "all_gather",
    "gather",
    "broadcast",
    "scatter",
    "all_to_all",
    "reduce_scatter",
    "reduce",
    "all_reduce",
)
FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def sources_of(
    kind: str, parts: tuple[int, ...], size: int, dtype: torch.dtype, seed: int, merges: bool
) -> list[torch.Tensor]:
    """Random sources of all ranks; sums round."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [sum(parts)] * size
    if kind in ("all_gather", "gather"):
        lengths = list(parts)
    elif merges:
        lengths = [part * size for part in parts]
    found = [torch.randn(n, generator=generator) * 3 for n in lengths]
    return [(x * 100).to(dtype) if not dtype.is_floating_point else x.to(dtype) for x in found]


def parts_of(kind: str, rng: random.Random, size: int, most: int) -> tuple[int, ...]:
    """Random part sizes, some empty, some round."""
    if kind in ("all_reduce", "reduce", "broadcast"):
        return (rng.choice((1, 7, 1024, rng.randrange(1, size * most))),)
    match rng.randrange(3):
        case 0:
            return (rng.randrange(1, most),) * size
        case 1:
            return (16 * rng.randrange(1, 2 + most // 16),) * size
        case _:
            return tuple(rng.choice((0, 1, rng.randrange(most))) for _ in range(size))


def interpreted_reference(kind: str, sources: list[torch.Tensor], parts: tuple[int, ...], **given):
    """The reference's results as Triton's interpreter rounds, which cuts a bf16 off.

    That the compiled kernel rounds to nearest is read from its PTX, and tested on the device.
    """
    reduces = kind in ("all_reduce", "reduce_scatter", "reduce")
    if sources[0].dtype != torch.bfloat16 or not reduces:
        return exchange_reference(kind, sources, parts, **given)
    wide = exchange_reference(kind, [source.float() for source in sources], parts, **given)
    return [(x.view(torch.int32) & -65536).view(torch.float32).bfloat16() for x in wide]


def test_parts_are_whole_grains_and_staging_holds_them(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        total, size = rng.randrange(1, 10_000), rng.randrange(2, 9)
        cut = balanced(total, size)
        assert sum(cut) == total
        assert all(part % GRAIN == 0 for part in cut if part != min(p for p in cut if p))
    assert staging_nbytes("all_gather", torch.bfloat16, (100, 100), 2) == 2 * 2 * 128 * 2


# -- arithmetic on the interpreter -----------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_gives_the_bits_of_its_reference(kind: str, dtype: str, seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((2, 3, 4))
    team = Emulated(size, 1 << 20)
    for again in range(2):
        merges = kind == "all_to_all" and rng.random() < 0.5
        parts, given = parts_of(kind, rng, size, 3000), {"root": rng.randrange(size)}
        sources = sources_of(kind, parts, size, FLOATS[dtype], seed + again, merges)
        given |= {"merges": merges}
        wanted = interpreted_reference(kind, sources, parts, **given)
        options = {"one_shot": rng.random() < 0.5, "blocks": rng.randrange(1, 9)}
        for found, expected in zip(
            team.run(kind, sources, parts, **given, **options), wanted, strict=True
        ):
            assert torch.equal(found[: len(expected)], expected), (parts, size, options)


@pytest.mark.kernels
@pytest.mark.parametrize("reduce", ["sum", "avg", "prod", "min", "max"])
def test_every_reduction(reduce: str, seed: int) -> None:
    team = Emulated(3, 1 << 16)
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int32):
        if reduce == "avg" and dtype == torch.int32:
            continue
        sources = sources_of("all_reduce", (1001,), 3, dtype, seed, False)
        wanted = interpreted_reference("all_reduce", sources, (1001,), reduce=reduce)
        for one_shot in (True, False):
            for found in team.run("all_reduce", sources, (1001,), reduce=reduce, one_shot=one_shot):
                assert torch.equal(found, wanted[0])


@pytest.mark.kernels
def test_what_only_moves_has_any_type(seed: int) -> None:
    team = Emulated(2, 1 << 16)
    generator = torch.Generator().manual_seed(seed)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float64, torch.complex128):
        sources = [torch.randint(0, 2, (77,), generator=generator).to(dtype) for _ in range(2)]
        (found, _) = team.run("all_gather", sources, (77, 77))
        assert torch.equal(found, torch.cat(sources))


@pytest.mark.kernels
def test_in_place(seed: int) -> None:
    team = Emulated(3, 1 << 17)
    for one_shot in (True, False):
        sources = sources_of("all_reduce", (5000,), 3, torch.bfloat16, seed, False)
        wanted = interpreted_reference("all_reduce", sources, (5000,))
        given = [source.clone() for source in sources]
        for found in team.run("all_reduce", given, (5000,), in_place=True, one_shot=one_shot):
            assert torch.equal(found, wanted[0])


@pytest.mark.kernels
def test_one_set_of_memory_serves_calls_of_every_kind_and_size(seed: int) -> None:
    """Note [Flags that a call does not use]: numbers of CTAs go up and down from call to call."""
    rng, size = random.Random(seed), 3
    team = Emulated(size, 1 << 20)
    for again in range(14):
        kind = rng.choice(KINDS)
        parts = parts_of(kind, rng, size, rng.choice((20, 9000)))
        blocks = rng.randrange(1, 7)
        if again in (4, 5):  # whatever is drawn, once many and once one
            kind, parts, blocks = "all_gather", ((9000, 1)[again - 4],) * size, 6
        sources = sources_of(kind, parts, size, torch.bfloat16, seed + again, False)
        one_shot = rng.random() < 0.5
        found = team.run(kind, sources, parts, blocks=blocks, one_shot=one_shot)
        for mine, wanted in zip(found, interpreted_reference(kind, sources, parts), strict=True):
            assert torch.equal(mine[: len(wanted)], wanted)
    assert len(set(team.blocks)) > 1


@pytest.mark.kernels
def test_a_call_number_may_wrap_around(seed: int) -> None:
    team = Emulated(2, 1 << 16)
    for words, flags in zip(team.words, team.flags, strict=True):
        words[0] = 2**31 - 2
        flags.fill_(2**31 - 2)
    for again in range(4):
        sources = sources_of("all_reduce", (300,), 2, torch.float32, seed + again, False)
        moves, calls = moves_of("all_reduce", (300,), 0, 2), int(team.words[0][0])
        assert late(team.flags[0].tolist(), calls - 1, moves, 1) == []
        assert late(team.flags[0].tolist(), calls, moves, 1) == [1]
        (found, _) = team.run("all_reduce", sources, (300,))
        assert torch.equal(found, interpreted_reference("all_reduce", sources, (300,))[0])


# -- the compiled kernel ---------------------------------------------------------------------------


def exchange(
    kind: str, dtype: torch.dtype, parts: tuple[int, ...], size: int, **options: Any
) -> PeerExchange:
    """One rank's PeerExchange that is never launched."""
    none = [0] * size
    device = torch.device("cpu")
    return PeerExchange(kind, dtype, parts, 1, size, device, none, 1 << 26, none, 0, **options)


def order_of(one: PeerExchange, aligned: bool) -> list[str]:
    """The instructions that matter, in the order of the PTX for sm_90."""
    ptx: str = one.source(aligned).compile().asm["ptx"]
    names = (
        ("ld.acquire.sys.global.b32", "acquire"),
        ("atom.global.sys.release.exch.b32", "release"),
        ("bar.sync", "barrier"),
        ("st.global.v4.b32", "store"),
        ("ld.global.v4.b32", "load"),
        ("st.global", "narrow store"),
        ("ld.global.b32", "narrow load"),
        ("ld.global", "other load"),
        ("atom.global.gpu.acq_rel.add", "end"),
    )
    found: list[str] = []
    for line in ptx.splitlines():
        code = re.sub(r"^\s*(@!?%?\w+\s+)?", "", line)
        name = next((name for start, name in names if code.startswith(start)), None)
        if name is not None and found[-1:] != [name]:
            found.append(name)
    return found


PUSH = ["load", "store", "barrier", "release"]
AWAIT = ["acquire", "barrier"]
END = ["end", "barrier", "narrow store"]


@pytest.mark.kernels
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_flags_follow_their_stores_and_loads_follow_the_flags(size: int) -> None:
    even = (1 << 16,) * size
    gather = order_of(exchange("all_gather", torch.bfloat16, even, size), True)
    assert gather == ["narrow load", *PUSH, "load", "store", *AWAIT, "load", "store", *END]
    scatter = order_of(exchange("reduce_scatter", torch.bfloat16, even, size), True)
    assert scatter == ["narrow load", *PUSH, *AWAIT, "load", "store", *END]
    twice = exchange("all_reduce", torch.bfloat16, (1 << 18,), size, one_shot=False)
    assert order_of(twice, True) == [
        "narrow load", *PUSH, *AWAIT, *PUSH, *AWAIT, "load", "store", *END,
    ]  # fmt: skip


@pytest.mark.kernels
def test_results_are_rounded_to_nearest() -> None:
    for dtype, name in ((torch.bfloat16, "bf16x2"), (torch.float16, "f16")):
        one = exchange("all_reduce", dtype, (1 << 14,), 4)
        assert f"cvt.rn.{name}" in one.source(True).compile().asm["ptx"]


@pytest.mark.kernels
def test_odd_sizes_still_push_whole_vectors() -> None:
    found = order_of(exchange("reduce_scatter", torch.bfloat16, (1001, 7), 2), False)
    first = found.index("release")
    assert "store" in found[:first]
    assert found[first - 1] == "barrier"
    assert found[found.index("acquire") + 1] == "barrier"


@pytest.mark.kernels
def test_host_and_kernel_count_flags_alike() -> None:
    from interlace.kernels.exchange import exchange
    from interlace.kernels.exchange import kernel as exchange_kernel

    assert exchange_kernel.MAX_BLOCKS.value == exchange.MAX_BLOCKS
    assert exchange_kernel.LINE.value == exchange.LINE


@pytest.mark.kernels
def test_a_launch_gives_every_parameter_of_the_compiled_kernel() -> None:
    for size in (2, 4):
        one = exchange("all_to_all", torch.float16, (32,) * size, size)
        ptx: str = one.source(True).compile().asm["ptx"]
        entry = ptx[ptx.index(".entry") :]
        params = re.findall(r"\.param \.(u\d+)", entry[: entry.index(")")])
        numbers: Any
        words, stages, flags, *numbers = one.arguments
        pointers = ["u64"] * (2 + len((words, *stages, *flags)))
        tables, sizes = numbers[:-3], numbers[-3:]
        count = sum(map(len, tables)) + len(sizes)
        assert params == [*pointers, *["u32"] * count, "u64", "u64"]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [*FLOATS.values(), torch.float64], ids=str)
def test_an_average_is_rounded_to_nearest(dtype: torch.dtype) -> None:
    one = exchange("all_reduce", dtype, (32,), 3, reduce="avg")
    ptx: str = one.source(True).compile().asm["ptx"]
    assert re.findall(r"div\S+", ptx)
    assert set(re.findall(r"div\S+", ptx)) == {
        "div.rn.f64" if dtype.itemsize == 8 else "div.rn.f32"
    }


def test_what_is_reduced_is_what_passes_take_it_for() -> None:
    assert {DTYPES[dtype] for dtype in EXCHANGED} == set(REDUCED) - {torch.bool}  # it has no sum


def test_what_does_not_fit_or_has_no_sum_is_refused() -> None:
    none, cpu = [0, 0], torch.device("cpu")
    with pytest.raises(UnsupportedError, match="bytes of staging"):
        PeerExchange("all_gather", torch.float32, (999, 999), 0, 2, cpu, none, 4096, none, 0)
    with pytest.raises(UnsupportedError, match="does not reduce"):
        exchange("all_reduce", torch.complex64, (4,), 2)


def mirrored_call(kind: str, x: torch.Tensor, size: int, one_shot: bool) -> torch.Tensor:
    """The result of rank 0 of a team whose staging and flags are all its own."""
    team, parts = Emulated(size, 1 << 20), (len(x) // (1 if kind == "all_gather" else size),) * size
    seen = {"seen_by": lambda peer: -peer % size, "one_shot": one_shot}
    one = team.exchange(0, kind, x.dtype, parts if kind != "all_reduce" else (len(x),), **seen)
    stages, flags = one.arguments[1:3]  # addresses from 0 on
    team.stages = [team.stages[0][at:] for at in stages]
    team.flags = [team.flags[0][at // 4 :] for at in flags]
    y = torch.empty(one.moves.taken, dtype=x.dtype)
    for step in range(3):
        team._step(one, step, x, y)
        raised = team.flags[0].view(2, -1, LINE)[:, : one.blocks, 1:size] == 1
        assert raised[: 1 + (step > 0 and one.moves.twice)].all(), "what it waits for next"
    return y


@pytest.mark.kernels
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_that_is_its_own_peers(size: int, seed: int) -> None:
    """A peer's part is what this rank has for the peer on its other side."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(-9, 9, (size * size * GRAIN,), generator=rng).float()
    assert torch.equal(mirrored_call("all_gather", x, size, False), torch.cat([x] * size))
    parts = x.view(size, -1)
    assert torch.equal(mirrored_call("reduce_scatter", x, size, False), parts.sum(0))
    assert torch.equal(mirrored_call("all_reduce", x, size, True), size * x)
    both = torch.cat([parts.sum(0)] * size)
    assert torch.equal(mirrored_call("all_reduce", x, size, False), both)
    turned = torch.cat([parts[-peer % size] for peer in range(size)])
    assert torch.equal(mirrored_call("all_to_all", x, size, False), turned)
    with pytest.raises(UnsupportedError, match="is cut unevenly, and in a mirror team"):
        mirrored_call("all_reduce", x[:-GRAIN], size, False)
