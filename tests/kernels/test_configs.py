"""Which tiles a shape gets, and what the kernels refuse."""

from __future__ import annotations

import random

import pytest
import torch

from interlace.kernels.gemm.support import (
    CONFIGS,
    PACKED,
    SPECIALIZED,
    WITH_TAIL,
    choose,
    refuse,
    short_tail,
    tiles,
)

ALL = [config for config, _ in (*CONFIGS, SPECIALIZED)] + [WITH_TAIL]
SM_BYTES = 228 * 1024


def test_every_shape_gets_tiles_that_cover_it(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        rows, columns = draw.randrange(1, 20000), 8 * draw.randrange(1, 4000)
        parts, processors = draw.randrange(1, 9), draw.choice([78, 114, 132])
        config = choose(rows=rows, columns=columns, parts=parts, processors=processors)
        assert config in ALL
        assert not config.specialized or parts == 1 or rows % config.bm == 0
        count = tiles(config, rows, columns, parts)
        assert count * config.bm * config.bn >= parts * rows * columns


def test_small_shapes_spread_over_the_processors() -> None:
    """Large tiles would leave most processors without work."""
    small = choose(rows=64, columns=4096, parts=4, processors=132)
    assert tiles(small, 64, 4096, 4) > 100


def test_the_last_wave_is_halved_where_its_halves_fit() -> None:
    assert short_tail(448, 132)
    assert choose(rows=512, columns=7168, parts=4, processors=132) is WITH_TAIL
    assert not short_tail(448 + 20, 132), "72 left: 144 halves are more than a wave"
    assert not short_tail(132 * 3, 132), "none left"
    assert not short_tail(50, 132), "all tiles are in the last wave"


@pytest.mark.parametrize("config", [*ALL, PACKED])
def test_pipeline_fits_in_shared_memory(config) -> None:
    stage = (1 if config is PACKED else 2) * config.bk * (config.bm + config.bn)
    results = 2 * config.bm * config.bn if config.specialized else 0
    assert config.blocks * config.stages * stage + results < SM_BYTES


def test_refusals_say_why() -> None:
    device = torch.device("cpu")
    fine = {"rows": 128, "inner": 64, "columns": 64, "dtype": torch.bfloat16, "device": device}

    def why(**changed: object) -> str:
        return refuse(**{**fine, **changed}) or ""  # pyright: ignore[reportArgumentType]

    assert "float32" in why(dtype=torch.float32)
    assert "K is 60" in why(inner=60)
    assert "N is 4" in why(columns=4)
    assert "empty" in why(rows=0)
    assert "2^31" in why(rows=2**30, size=4)
    assert "cpu" in why()
