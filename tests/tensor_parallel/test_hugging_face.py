"""Models of transformers on 2 real processes, by their own plans, beside the whole model."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.hugging_face import VOCABULARY, differing, model_of
from tests.support.pool import Pool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from interlace.errors import InputError, UnsupportedError
from interlace.tensor_parallel import parallelize

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
NEWER = ("DeepseekV2", "Llama4", "Qwen3Next")


def trained(model: Any, batches: list[Tensor]) -> dict[str, Tensor]:
    """Logits, gradients, and Parameters of steps of SGD, with two micro-batches each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found: dict[str, Any] = {}
    for step, tokens in enumerate(batches):
        for i, part in enumerate(tokens.chunk(2)):
            made = model(input_ids=part, labels=part)
            made.loss.backward()
            found[f"{step}.{i} logits"] = made.logits
        found[f"{step} norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found |= {f"{step} grad {name}": p.grad for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"{step} {name}": p.clone() for name, p in model.named_parameters()}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}


def like_whole(kind: str, seed: int) -> list[str]:
    """What differs, on this rank."""
    torch.manual_seed(seed)
    whole = model_of(kind).double()
    batches = list(torch.randint(VOCABULARY, (2, 4, 7)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = copy.deepcopy(whole)
    done = parallelize(model, mesh)
    left = ("q_a_proj", "kv_a_proj")  # of latent attention
    whole_ones = [name for name in done.replicated if not any(part in name for part in left)]
    assert not any("proj" in name or "embed" in name for name in whole_ones)
    assert list(model.state_dict()) == list(whole.state_dict())
    expected = trained(whole, batches)
    found = trained(model, batches)
    assert found.keys() == expected.keys()
    wrong = []
    for name, right in expected.items():
        if not torch.allclose(found[name], right, rtol=1e-5, atol=1e-6):  # norms are in float32
            wrong.append(f"{name}: off by {(found[name] - right).abs().max()}")
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    made = [m.generate(batches[0], **given) for m in (model, whole)]
    return wrong + ([] if torch.equal(*made) else ["generate"])


@pytest.mark.parametrize(
    "kind",
    [
        "Llama",
        *NEWER,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Qwen2", "Qwen3", "Mixtral")),
    ],
)
@pytest.mark.timeout(110)
def test_trains_and_generates_as_the_whole_model(pool: Pool, kind: str, seed: int) -> None:
    for wrong in pool(2).run(like_whole, kind, seed, timeout_s=100):
        assert not wrong


def compiled_like_whole(kind: str, seed: int) -> list[str]:
    """What differs of a step that `backend="interlace"` compiles, on this rank."""
    torch.manual_seed(seed)
    layers = {"num_hidden_layers": 1, "first_k_dense_replace": 0} if kind == "DeepseekV2" else {}
    whole = model_of(kind, experts="batched_mm", **layers).double()
    tokens = torch.randint(VOCABULARY, (2, 7))
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize(model, mesh)
    compiled: Any = torch.compile(model, backend="interlace", fullgraph=True)
    found: list[dict[str, Any]] = []
    for call, owner in ((whole, whole), (compiled, model)):
        made = call(input_ids=tokens, labels=tokens)
        made.loss.backward()
        found.append({"logits": made.logits, **{n: p.grad for n, p in owner.named_parameters()}})
    expected, values = found
    return differing(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind", [NEWER[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in NEWER[1:])]
)
@pytest.mark.timeout(230)
def test_compiled_as_the_whole_model(pool: Pool, kind: str, seed: int) -> None:
    for wrong in pool(2).run(compiled_like_whole, kind, seed, timeout_s=220):
        assert not wrong


def refused() -> None:
    """Errors say what is not taken, before the model is changed."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    llama, experts = model_of("Llama"), model_of("Mixtral")
    layer, mlp = "model.layers.*", "model.layers.*.mlp"
    attempts: list[tuple[Any, Any, dict[str, Any], str]] = [
        (InputError, llama, {"mesh": square}, "mesh has 2 dimensions"),
        (InputError, torch.nn.Linear(2, 2), {}, "Linear has no `tp_plan`"),
        (InputError, model_of("Llama", num_key_value_heads=1), {}, "num_key_value_heads 1"),
        (InputError, model_of("Llama", intermediate_size=21), {}, "out_features 21"),
        (InputError, llama, {"plan": {f"{layer}.input_layernorm": "rowwise"}}, r"LlamaRMSNorm: "),
        (UnsupportedError, llama, {"plan": {mlp: "all_reduce"}}, "'all_reduce' for model.layers.0"),
        (UnsupportedError, llama, {"plan": {mlp: "packed_colwise"}}, "mlp is 'packed_colwise'"),
        (UnsupportedError, llama, {"plan": {"lm_head.weight": "rowwise"}}, "for a Parameter"),
        (UnsupportedError, experts, {"plan": {f"{mlp}.experts": "moe_tp_experts"}}, "is None in"),
        (InputError, model_of("Mixtral", intermediate_size=21), {}, "multiples of 4"),
        (InputError, model_of("DeepseekV2", num_attention_heads=3), {}, "num_attention_heads 3"),
        (InputError, llama, {"plan": {f"{layer}.q": "colwise"}}, "names nothing"),
        (InputError, llama, {"plan": {"lm_head": "mla_kv_a_proj"}}, "has `qk_rope_head_dim`"),
    ]
    for error, model, given, told in attempts:
        with pytest.raises(error, match=told):
            parallelize(model, **{"mesh": mesh, **given})
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    plan = {f"{mlp}.down_proj": "rowwise", "model.norm": "replicate", "model.other": "colwise"}
    done = parallelize(llama, mesh, plan=plan)
    places = [n for n, p in llama.named_parameters() if n not in done.replicated]
    assert places == [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]
    assert done.unmatched == ("model.other",)
    assert "lm_head.weight" in done.replicated
    assert done.applied["model.layers.1.mlp.down_proj"] == "rowwise"


def test_what_a_plan_cannot_do_is_refused(pool: Pool) -> None:
    pool(2).run(refused)
