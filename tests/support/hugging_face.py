"""Tiny models of transformers, of random weights, for tests of its plans."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

VOCABULARY = 33
LATENT = {
    "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 6,
}  # fmt: skip
"""Sizes of latent attention."""
OWN: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": True},
    "Mixtral": {"intermediate_size": 32},  # grouped_mm takes rows of 16 bytes, here and below
    "GraniteMoe": {"intermediate_size": 32},
    "MiniMaxM2": {"intermediate_size": 32},
    "Olmoe": {"intermediate_size": 32},
    "Phi": {"hidden_size": 32, "head_dim": 8},
    "SeedOss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "DeepseekV2": {  # "mla_kv_a_proj"
        **LATENT, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "greedy",
    },
    "DeepseekV3": {**LATENT, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "LongcatFlash": {  # "moe_identity_expert"
        **LATENT, "num_layers": 1, "ffn_hidden_size": 20, "expert_ffn_hidden_size": 8,
        "moe_topk": 2, "zero_expert_num": 2,
    },
    "Inkling": {  # "all_reduce"
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 6,
        "d_rel": 4, "rel_extent": 8, "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["hybrid_sliding", "hybrid"], "n_shared_experts": 2,
    },
    "Dots3Note": {  # layers with other counts of heads
        **LATENT, "head_dim": 10, "layer_types": ["full_attention", "sliding_attention"],
        "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8, "swa_head_dim": 10, "swa_qk_nope_head_dim": 6, "swa_v_head_dim": 6,
        "shared_experts_intermediate_size": 8, "use_dsa": False,
    },
    "GraniteSWA": {"sliding_window": 4},  # "local_params"
    "Beam": {"mlp_layer_types": ["dense", "sparse"]},
    "Llama4": {  # experts [in, out]: "packed_rowwise"
        "num_experts_per_tok": 1, "intermediate_size_mlp": 20, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
    },
    "Qwen3Next": {  # a mixer reads its convolution's weight itself
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    },
}  # fmt: skip
"""What kinds have beside the sizes of all."""
FAMILIES = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi", "Phi3", "Mixtral"),
    *("Qwen2Moe", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "Olmo", "Olmo2", "Cohere", "Cohere2"),
    *("Glm", "Glm4", "Granite", "Starcoder2", "Llama4", "GptOss", "SmolLM3", "Qwen3Next"),
    *("GraniteSWA", "Beam", "LongcatFlash", "Apertus", "Dots3Note"),
)
"""Kinds whose models bring a plan, and which `make test` tries."""
MORE_FAMILIES = (
    *("Arcee", "Ernie4_5", "Exaone4", "GPTNeoX", "Glm4Moe", "GraniteMoe", "HYV4", "Helium"),
    *("MiMoV2Flash", "MiniMaxM2", "Olmo3", "Olmoe", "SeedOss"),
)
"""Kinds that `make test-slow` tries beside them."""
PLANS = {"Apertus": {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}}
"""Words that the plans of kinds lack: see docs/upstream."""


def model_of(kind: str, experts: str = "eager", **changes: Any) -> Any:
    """A tiny model of random weights."""
    transformers: Any = importlib.import_module("transformers")
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": None,
        **OWN.get(kind, {}),
        **changes,
    }
    if (named := getattr(transformers, f"{kind}ForCausalLM", None)) is None:
        pytest.skip(f"this release of transformers has no {kind}")
    config = named.config_class(**sizes)
    config._experts_implementation = experts
    model = named(config)
    if kind == "Llama4":  # whose experts begin as zeros
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.2)
    return model


def differing(
    found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-4, atol: float = 1e-5
) -> list[str]:
    """The values that differ by more than `rtol` of each and `atol` in all."""
    wrong = []
    for name, right in expected.items():
        value = found[name]
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if (value is None) != (right is None):
            wrong.append(f"{name}: {value} for {right}")
        elif right is not None and not torch.allclose(value, right, rtol=rtol, atol=atol):
            wrong.append(f"{name}: off by {(value - right).abs().max()}")
    return wrong
