"""Without gradients: prefill and decode with a KV cache, inference mode, and changing sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Block, local, parallelise_block
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh

from interlace.frontend import backend, capture
from interlace.ir import Call

LENGTH = 12


def block_and_cache() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """A parallelised block, and a cache for this rank's heads."""
    torch.compiler.reset()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    block = parallelise_block(Block(16, 4, 32), mesh)
    return block, (torch.zeros(2, 4 // world, LENGTH, 4), torch.zeros(2, 4 // world, LENGTH, 4))


def prefill_and_decode(mode: str) -> tuple[int, list[str]]:
    """A prefill of 6 tokens, then steps of 2; every step equals eager, the cache too."""
    switch = torch.no_grad if mode == "no_grad" else torch.inference_mode
    world, rank = dist.get_world_size(), dist.get_rank()
    outcomes: list[list[torch.Tensor]] = []
    with capture() as captured:
        for chosen in (None, backend):
            block, cache = block_and_cache()
            call = torch.compile(block, backend=chosen, dynamic=False) if chosen else block
            torch.manual_seed(1)
            seen: list[torch.Tensor] = []
            place = cache[0].data_ptr()
            with switch():
                for start, stop in ((0, 6), (6, 8), (8, 10), (10, 12)):
                    x = torch.randn(2, stop - start, 16).chunk(world, 1)[rank].contiguous()
                    y = call(x, cache, torch.arange(start, stop))
                    seen += [local(y).clone(), cache[0].clone(), cache[1].clone()]
            assert cache[0].data_ptr() == place
            outcomes.append(seen)
    for eager, mine in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
    for program in captured.programs:
        caches = [p.name for p in program.params if p.shape == (2, 4 // world, LENGTH, 4)]
        assert len(caches) == 2, program
        copies = [
            op
            for op in program.ops
            if isinstance(op, Call) and op.fn.endswith("index_copy_.default")
        ]
        assert sorted(op.outs[0].buffer for op in copies) == sorted(caches), program
        assert all(a.view.buffer in caches for op in copies for a in op.writes()), program
    return len(captured.programs), [bound.kind for bound in captured.bound]


@pytest.mark.parametrize(
    "mode", [pytest.param("no_grad", marks=pytest.mark.slow), "inference_mode"]
)
def test_prefill_and_decode(pool: Pool, mode: str) -> None:
    # one Program for the prefill, one for every decode step
    assert pool(2).run(prefill_and_decode, mode) == [(2, ["inference", "inference"])] * 2
