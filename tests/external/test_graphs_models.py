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
from interlace.tensor_parallel import parallelize as parallelize_by_plan

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
    if kind == "GPT2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
        sizes |= {name: SIZES[name] for name in ("bos_token_id", "eos_token_id")}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config)


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
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Mixtral"])
def test_language_models(kind: str) -> None:
    model = language_model(kind)
    check_both(lambda tokens: model(tokens, use_cache=False).logits, torch.randint(0, 64, (2, 8)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_language_model_over_ranks() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = language_model("Llama")
        parallelize_by_plan(model, mesh)
        graphs = check_both(
            lambda tokens: model(tokens, use_cache=False).logits, torch.randint(0, 64, (2, 8))
        )
    assert any("c10d" in str(node.target) for gm in graphs for node in gm.graph.nodes)
