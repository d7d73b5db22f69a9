"""A mirror team on one GPU: a schedule for N ranks in this process, whose peers are itself.

python -m pytest tests/gpu/test_mirror.py -q
"""

from __future__ import annotations

import pytest
import torch
from tests.gpu.cases import KINDS, STRATEGIES, on_a_gpu
from tests.support.mirrored import on, wrong_layer, wrong_sites

from interlace_bench.mirror import mirror

pytestmark = on_a_gpu(200)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_site_has_the_bits_of_its_program_in_order(
    kind: str, strategy: str, graph: bool, seed: int
) -> None:
    wrong = [
        line
        for size in (2, 4)
        for line in wrong_sites(on("cuda", kind, size, "bf16"), [strategy], seed, graph=graph)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("strategy", ["peer", "fused", "auto"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_compiled_layer_has_the_bits_of_its_programs_in_order(
    size: int, graph: bool, strategy: str, seed: int
) -> None:
    if strategy == "auto" and graph:
        pytest.skip("auto chooses others where a graph issues the ops")
    wrong = wrong_layer(size, "cuda", seed, strategy=strategy, graph=graph)
    assert not wrong, "\n".join(wrong)


def test_collectives_of_torch_come_back() -> None:
    with mirror(4):
        x = torch.arange(8.0, device="cuda")
        full, part = x.new_empty(32), x.new_empty(2)
        torch.distributed.all_gather_into_tensor(full, x)
        torch.distributed.reduce_scatter_tensor(part, x)
        torch.distributed.all_reduce(x)
        assert full.tolist() == [*range(8)] * 4
        assert part.tolist() == [0, 4]
        assert x.tolist() == [4 * each for each in range(8)]
