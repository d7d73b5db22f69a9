"""Graphs of real models, forward and backward: no alarm."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from tests.external.graphs_support import fake_world, traced
from torch.distributed.device_mesh import init_device_mesh

from interlace import check_graph
from interlace.demo.model import Transformer, parallelize
from interlace.demo.plan import ModelConfig

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def language_model(kind: str) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    importlib.import_module("transformers")
    sizes: dict[str, Any] = dict(SIZES)
    if kind == "Mixtral":
        sizes["num_local_experts"] = 4
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def check_both(function: Any, tokens: torch.Tensor) -> list[Any]:
    """Checks the forward and the backward graph, in both orders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphs = traced(function, tokens, backward=True)
    assert len(graphs) == 2
    for gm in graphs:
        for report in (check_graph(gm), check_graph(gm, order="any")):
            assert not report.findings, str(report)
    return graphs


@pytest.mark.timeout(240)
def test_the_demo() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        config = ModelConfig(dim=64, heads=8, hidden=128, vocabulary=64, sequence=16)
        model = parallelize(Transformer(config), mesh)
        graphs = check_both(model, torch.randint(0, 64, (1, 16)))
    for gm in graphs:
        assert any("c10d" in str(node.target) for node in gm.graph.nodes)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_language_models(kind: str) -> None:
    model = language_model(kind)
    check_both(lambda tokens: model(tokens, use_cache=False).logits, torch.randint(0, 64, (2, 8)))
