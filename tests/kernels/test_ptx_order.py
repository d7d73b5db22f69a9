"""The order of what the compiled kernels do, read off their PTX: no GPU is needed to compile.

A flag must not overtake its data and no load may rise above its wait; the source alone does not say
so, since Triton's pipeliner moves loads and its stores by TMA are asynchronous.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.support.resources import resources, spills

pytest.importorskip("triton")

from interlace.kernels.exchange.sums import sum_source
from interlace.kernels.gemm.matmul import gather_source, scatter_source
from interlace.kernels.gemm.support import CONFIGS, PACKED, SPECIALIZED, WITH_TAIL, TileConfig

pytestmark = pytest.mark.kernels

EVENTS = {
    "acquire": r"ld\.acquire\.sys\.global|atom\.global\.sys\.acquire|ld\.global\.sys\.acquire",
    "proxy_fence": r"fence\.proxy\.async;",
    "load": r"cp\.async\.bulk\.tensor\.2d\.shared::(?:cluster|cta)\.global",
    "store": r"cp\.async\.bulk\.tensor\.2d\.global",
    "performed": r"cp\.async\.bulk\.wait_group\s+0;",
    "barrier": r"bar\.(?:sync\s+0|warp\.sync\s+-1);",
    "raise": r"(?:atom|red)\.global\.sys\.(?:release|acq_rel)\.add",
    "multiply": r"wgmma\.mma_async",
    "write": r"st\.global\.v4",
    "scale": r"ld\.volatile\.global",
}
PATTERN = re.compile("|".join(f"(?P<{name}>{what})" for name, what in EVENTS.items()))

ALL = [config for config, _ in CONFIGS] + [WITH_TAIL]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def events_of(source: Any) -> list[str]:
    """What the kernel does that the order depends on, in the order of its PTX."""
    compiled = source.compile()
    assert not spills(compiled)
    code = "\n".join(line.split("//")[0] for line in compiled.asm["ptx"].splitlines())
    return [match.lastgroup or "" for match in PATTERN.finditer(code)]


def name(config: TileConfig) -> str:
    return f"{config.bm}x{config.bn}x{config.stages}"


@pytest.mark.parametrize("subs", [1, 2])
@pytest.mark.parametrize("config", ALL, ids=name)
@pytest.mark.parametrize("by_tma", [True, False])
def test_gather_waits_before_it_loads(config: TileConfig, by_tma: bool, subs: int) -> None:
    """Each copy of the loads that the pipeliner makes has its own wait right before it."""
    same = {"size": 4, "dtype": torch.bfloat16, "by_tma": by_tma, "subs": subs}
    tail = config is WITH_TAIL
    source = gather_source(config, **same, tail=tail)
    seen = [e for e in events_of(source) if e in ("acquire", "proxy_fence", "load", "multiply")]
    text = " ".join(seen)
    assert text.count("acquire") == text.count("acquire proxy_fence"), text
    # Stages are filled before the loop, then the loop waits, multiplies and loads the next stage.
    stages = config.stages - 1
    multiplied = r"(?:multiply )+"
    group = r"acquire proxy_fence load load "
    waits = r"(?:acquire proxy_fence )*"
    pattern = rf"{waits}(?:{group}){{{stages}}}acquire proxy_fence {multiplied}load load "
    assert re.match(pattern, text + " "), text
    if tail:  # a tail's tile is one loop without a wait inside: it waits before the first load
        rest = re.sub(pattern, "", text + " ", count=1)
        assert re.match(r"acquire proxy_fence (?:load )+multiply", rest), rest


@pytest.mark.parametrize("config", [config for config, _ in CONFIGS], ids=name)
@pytest.mark.parametrize("by_tma", [True, False])
def test_counters_rise_after_the_stores(config: TileConfig, by_tma: bool) -> None:
    """Stores, then all of them performed (TMA) and visible, then all threads, then the counter."""
    source = scatter_source(config, size=4, rank=1, dtype=torch.bfloat16, by_tma=by_tma)
    seen = events_of(source)
    raised = [index for index, event in enumerate(seen) if event == "raise"]
    assert len(raised) >= 2, "one raise in the loop, one after it"
    stored = "store" if by_tma else "write"
    for index in raised:
        before = seen[:index]
        assert stored in before
        settled = ["performed", "proxy_fence", "barrier"] if by_tma else ["barrier"]
        assert before[-len(settled) :] == settled, before[-6:]
    # The raise in the loop belongs to its last stage: nothing of it comes before a multiplication.
    assert seen.index("multiply") < raised[0]


@pytest.mark.parametrize("subs", [1, 2])
@pytest.mark.parametrize("transposed", [True, False])
def test_the_warp_that_loads_waits_for_chunks(transposed: bool, subs: int) -> None:
    """It alone does, in one place: wait, fence, and only then any load (own rows' stand apart)."""
    large = SPECIALIZED[0]
    source = gather_source(
        large, size=4, dtype=torch.bfloat16, transposed=transposed, bias=transposed, subs=subs
    )
    seen = events_of(source)
    assert seen.count("acquire") == 1
    wait = seen.index("acquire")
    assert seen[wait + 1] == "proxy_fence"
    assert seen.index("load") > wait
    assert "multiply" not in seen[wait:], "warps that multiply do not wait here"


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_a_scale_is_read_after_its_rows(
    kinds: tuple[torch.dtype, torch.dtype], bias: bool, size: int
) -> None:
    """By each group of warps, past the L1 cache, once it has multiplied a tile of them; and sums
    stay in the tensor cores."""
    source = gather_source(
        PACKED, size=size, dtype=torch.bfloat16, transposed=True, bias=bias, packed=kinds
    )
    compiled = source.compile()
    names = [{E4M3: "e4m3", E5M2: "e5m2"}[kind] for kind in kinds]
    assert f"wgmma.mma_async.sync.aligned.m64n256k32.f32.{'.'.join(names)} " in compiled.asm["ptx"]
    assert bias or not re.search(r"add(\.rn)?\.f32", compiled.asm["ptx"])
    seen = [e for e in events_of(source) if e in ("multiply", "scale", "store", "acquire")]
    mine = [*["multiply"] * (PACKED.bk // 32), "scale", "scale"]
    text, of_group = " ".join(seen), " ".join(mine)
    assert text.count("scale") == 2 * 2
    assert text.count(of_group) == 2
    assert seen.count("acquire") == (size > 1)


@pytest.mark.parametrize("transposed", [True, False])
def test_each_half_of_a_tile_rises_after_its_stores(transposed: bool) -> None:
    """As above, by the warp that stores."""
    large = SPECIALIZED[0]
    source = scatter_source(
        large, size=4, rank=1, dtype=torch.bfloat16, transposed=transposed, bias=transposed, subs=2
    )
    seen = events_of(source)
    raised = [index for index, event in enumerate(seen) if event == "raise"]
    assert len(raised) == 2, "one for each half"
    for index in raised:
        assert seen[index - 3 : index] == ["performed", "proxy_fence", "barrier"]
        assert seen[index - 4] == "store"


@pytest.mark.parametrize("config", [CONFIGS[0][0], SPECIALIZED[0]], ids=name)
def test_a_scatter_waits_for_nobody(config: TileConfig) -> None:
    """Its peers wait for it: were some of its blocks kept off their processors, nothing ended."""
    seen = events_of(scatter_source(config, size=4, rank=2, dtype=torch.float16))
    assert "acquire" not in seen


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_sum_has_room_beside_a_scatter(size: int) -> None:
    """What a processor (9.0) has, in registers and shared memory, is enough for a block of each."""
    scatter = scatter_source(
        SPECIALIZED[0], size=size, rank=1, dtype=torch.bfloat16, subs=4, own_parts=5
    )
    total = sum_source(size=size, dtype=torch.bfloat16, aligned=True)
    registers, shared = 0, 0
    for source in (scatter, total):
        compiled = source.compile()
        assert not spills(compiled)
        ptx = compiled.asm["ptx"]
        (threads,), (each,) = (re.findall(rf"\.{n} (\d+)", ptx) for n in ("reqntid", "maxnreg"))
        registers += int(threads) * int(each)
        shared += compiled.metadata.shared + 1024
    assert registers <= 64 * 1024
    assert shared <= 228 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_sum_loads_nothing_before_its_words_have_come(size: int, dtype: torch.dtype) -> None:
    """All acquires come first; it has no shared memory, and leaves half of the registers."""
    source = sum_source(size=size, dtype=dtype, aligned=True, words=size - 1)
    compiled = source.compile()
    assert not spills(compiled)
    ptx = compiled.asm["ptx"]
    seen = re.findall(r"ld\.acquire\.sys|ld\.global\.v4", ptx)
    assert seen == ["ld.acquire.sys"] * (size - 1) + ["ld.global.v4"] * (len(seen) - size + 1)
    assert len(seen) >= 2 * size - 1
    assert compiled.metadata.shared == 0
    assert resources(compiled)["REG"] <= 32


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("transposed", [True, False])
def test_other_sizes_compile_without_spilling(size: int, transposed: bool) -> None:
    for config in (CONFIGS[0][0], WITH_TAIL, SPECIALIZED[0]):
        for kind in (gather_source, scatter_source):
            more: dict[str, Any] = {"rank": size - 1} if kind is scatter_source else {}
            assert events_of(
                kind(config, size=size, dtype=torch.bfloat16, transposed=transposed, **more)
            )
