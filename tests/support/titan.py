"""Tiny models of torchtitan on ranks of gloo, as its `parallelize` functions make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torchtitan.tools.utils as utils

if utils.device_type != "cpu":  # without any accelerator it is "cuda"
    utils.device_type, utils.device_module = "cpu", torch.cpu

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry as llama3
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3 import model_registry as qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

MODULE = "interlace.integrations.torchtitan"
OVERRIDES = (f"{MODULE}.feed_forward", f"{MODULE}.attention")
SEQUENCE, BATCH = 32, 2


def config_of(
    kind: str = "llama3", *, sdpa: bool = True, sequence_parallel: bool = True, layers: int = 2
) -> Any:
    """A config of two layers with its sharding; `qwen3` has three projections and norms of them."""
    registry = llama3 if kind == "llama3" else qwen3
    flavor = "debugmodel" if kind == "llama3" else "debugmodel_non_fused_qkv"
    config: Any = registry(flavor, attn_backend="flex").model
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.feed_forward.w1.bias = kind == "llama3"
        if sdpa:  # FlexAttention has no backward on a CPU
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if kind == "llama3":
        set_llama3_sharding_config(config, enable_sp=sequence_parallel)
    else:
        set_qwen3_sharding_config(config, enable_sp=sequence_parallel, enable_ep=False)
    return config


def overridden(config: Any, imports: Sequence[Any] = OVERRIDES) -> Any:
    """The config as `--override.imports` changes it."""
    apply_overrides(OverrideConfig(imports=[*imports]), config)
    return config


def build(
    config: Any, backend: Any, tp: int = 2, compiler: str | None = None, ac: Any = None
) -> tuple[Any, Any]:
    """The model with its sharding, and its meshes.

    With `spmd_types` without FSDP2, which knows it from torch 2.14 on.
    """
    set_spmd_backend(backend)
    settings = ParallelismConfig(tensor_parallel_degree=tp, spmd_backend=backend)
    dims = ParallelDims.from_config(settings, dist.get_world_size())
    dims.build_mesh()
    compiling = CompileConfig(enable=compiler is not None, backend=compiler or "inductor")
    torch.manual_seed(0)
    if backend == "spmd_types":
        model = config.build()
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        model.parallelize(dims)
        if compiler:
            apply_compile(model, compile_config=compiling, parallel_dims=dims)
        return model, dims
    with torch.device("meta"):
        model = config.build()
    given = TrainingConfig(seq_len=SEQUENCE, mixed_precision_param="float32")
    settings_of = {"training": given, "parallelism": settings, "compile_config": compiling}
    llama3("debugmodel").parallelize_fn(
        model, parallel_dims=dims, ac_config=ac, dump_folder="", **settings_of
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model, dims


def inputs(dims: ParallelDims, words: int, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Tokens, labels, and what else a model is given."""
    tokens = torch.randint(words, (BATCH, SEQUENCE + 1), generator=torch.manual_seed(seed))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(SEQUENCE).expand_as(x).contiguous()
    if dims.spmd_backend == "spmd_types":
        return annotate_input_spmd_types(dims, x, y, {"positions": positions})
    return x, y, {"positions": positions}


def loss_of(words: int) -> Any:
    """torchtitan's loss of logits that are cut over TP."""
    return CrossEntropyLoss.Config(global_vocab_size=words).build(compile_config=CompileConfig())


def trained(model: Any, dims: ParallelDims, seed: int, *, checked: bool = False) -> dict[str, Any]:
    """Losses of three steps, gradients of the first, Parameters after the last.

    `checked`: the first step has spmd_types' own type check."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    words = model.config.vocab_size
    found: dict[str, Any] = {}
    for step in range(3):
        context = get_spmd_context(parallel_dims=dims, spmd_typechecking=checked and step == 0)
        x, y, given = inputs(dims, words, seed + step)
        with context():
            loss, _ = loss_of(words)(model(x, **given), y, torch.tensor(float(y.numel())))
            with spmd.no_typecheck():  # as the trainer does
                loss.backward()
        found[f"loss {step}"] = loss.detach()
        for name, param in model.named_parameters():
            if "norm" in name and dims.spmd_backend == "spmd_types":  # else FSDP2 does that
                dist.all_reduce(param.grad)
            if step == 0:
                found[f"grad {name}"] = whole(param.grad).clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: whole(param.detach()) for name, param in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    """A DTensor's local part, or the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
