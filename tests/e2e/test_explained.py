"""Every collective of the demo's model is explained, forward and backward, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.captured import capture
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh

from interlace.demo.model import Transformer, parallelize
from interlace.demo.plan import ModelConfig
from interlace.frontend.explain import explain_bound
from interlace.ir import Collective


def collectives_of_the_demo() -> list[tuple[int, int, list[tuple[str, str, str]], str]]:
    """For each graph: collectives, those without a site, (kind, strategy, reason), explain."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    config = ModelConfig(layers=2, dim=64, heads=4, hidden=128, sequence=64, batch=2)
    model = parallelize(Transformer(config), mesh)
    tokens = torch.randint(config.vocabulary, (config.batch, config.sequence))
    with capture() as captured:
        options: Any = {"timeout_s": 20.0, "strategy": "peer"}
        call = torch.compile(
            model, backend="interlace", options=options, fullgraph=True, dynamic=False
        )
        logits = call(tokens)
        logits.square().mean().backward()
        found: list[tuple[int, int, list[tuple[str, str, str]], str]] = []
        for bound in captured.bound:
            count = sum(isinstance(op, Collective) for op in bound.serial.ops)
            lost = sum(isinstance(op, Collective) and op.site is None for op in bound.program.ops)
            sites = [(site.kind, site.strategy, site.reason) for site in bound.program.sites]
            found.append((count, lost, sites, explain_bound([bound])))
    return found


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["2-ranks", "4-ranks"]
)
def test_every_collective_of_the_demo_is_explained(pool: Pool, ranks: int) -> None:
    for graphs in pool(ranks).run(collectives_of_the_demo, timeout_s=100):
        assert len(graphs) == 2
        for count, lost, sites, text in graphs:
            assert lost == 0
            assert count == len(sites) >= 10, "a collective of the graph has no site"
            listed = [line for line in text.splitlines() if line.split()[0].isdigit()]
            assert len(listed) == count
            for kind, strategy, reason in sites:
                assert reason, f"{kind} has no reason"
                assert strategy == "peer" or kind in ("all_gather", "reduce_scatter", "all_reduce")
        kinds = [kind for graph in graphs for kind, _, _ in graph[2]]
        assert kinds.count("all_gather_matmul") >= 2 * 4 + 1
        assert kinds.count("matmul_reduce_scatter") >= 2 * 4 + 1
