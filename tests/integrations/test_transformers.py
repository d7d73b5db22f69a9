"""Models that transformers distributes with overlapped layers, on 2 processes, beside the whole."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.hugging_face import FAMILIES, MORE_FAMILIES, PLANS, VOCABULARY, model_of
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from interlace.tensor_parallel import parallelize

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="from_pretrained distributes models where accelerate is installed",
)
GENERATED = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def loaded(folder: str, whole: Any, **given: Any) -> Any:
    """A model that the first rank saves and all of them load."""
    importlib.import_module("interlace.integrations.transformers")
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    return type(whole).from_pretrained(folder, **{"tp_plan": "auto", **given}).train()


def step(model: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """The loss and the gradients of a step."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss, **grads}


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The values that differ by more than fp32's rounding: 1e-4 of each, and 1e-5 in all."""
    wrong = []
    for name, right in expected.items():
        value = found[name]
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if (value is None) != (right is None):
            wrong.append(f"{name}: {value} for {right}")
        elif right is not None and not torch.allclose(value, right, rtol=1e-4, atol=1e-5):
            wrong.append(f"{name}: off by {(value - right).abs().max()}")
    return wrong


def like_whole(kind: str, folder: str, seed: int) -> list[str]:
    """Differences between the whole model and both ways of distributing it, on this rank."""
    torch.manual_seed(seed)
    whole = model_of(kind)
    for param in whole.parameters():  # some begin as zeros
        param.data.add_(torch.randn_like(param), alpha=0.1)
    tokens = torch.randint(VOCABULARY, (2, 7))
    given, added = copy.deepcopy(whole), PLANS.get(kind, {})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize(given, mesh, given.tp_plan | added)
    models = {"loaded": loaded(folder, whole, tp_plan=added or "auto"), "parallelized": given}
    expected = step(whole, tokens)
    text = whole.generate(tokens, **GENERATED)
    wrong: list[str] = []
    for way, model in models.items():
        wrong += [f"{way}: {each}" for each in differing(step(model, tokens), expected)]
        if not torch.equal(model.generate(tokens, **GENERATED), text):
            wrong.append(f"{way}: generate")
    return wrong


@pytest.mark.parametrize(
    "kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_FAMILIES)]
)
def test_a_family_trains_and_generates_as_the_whole_model(
    pool: Pool, kind: str, tmp_path: Path, seed: int
) -> None:
    for wrong in pool(2).run(like_whole, kind, str(tmp_path), seed, timeout_s=100):
        assert not wrong
