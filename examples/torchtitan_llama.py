"""torchtitan's own Llama 3, trained as it is and with Interlace's overrides: the losses are alike.

    pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser
    torchrun --nproc-per-node 2 examples/torchtitan_llama.py
    torchrun --nproc-per-node 4 examples/torchtitan_llama.py --tp 2 --steps 20

The model, its sharding, the overrides and FSDP2 are applied in the order of torchtitan's trainer,
which itself does not start without an accelerator. What is different on a CPU: attention is SDPA,
since FlexAttention has no backward there.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan
from torch.distributed.fsdp import FSDPModule

if not torch.accelerator.is_available():  # where torchtitan would say "cuda"
    titan.device_type, titan.device_module = "cpu", torch.cpu

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

import interlace

MODULE = "interlace.integrations.torchtitan"
OVERRIDES = (f"{MODULE}.feed_forward", f"{MODULE}.attention")
LAYERS, SEQUENCE, BATCH = 2, 128, 2


def build(dims: ParallelDims, settings: ParallelismConfig, overrides: tuple[str, ...]) -> Any:
    """The debug model in the hands of torchtitan's own functions."""
    spec = model_registry("debugmodel")
    config: Any = spec.model
    config.layers = config.layers[:LAYERS]
    if titan.device_type == "cpu":
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=True)
    if overrides:
        apply_overrides(OverrideConfig(imports=[*overrides]), config)
    with torch.device("meta"):
        model = config.build()
    kind = "float32" if titan.device_type == "cpu" else "bfloat16"
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=SEQUENCE, mixed_precision_param=kind),
        parallelism=settings,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for part in model.modules():
        if isinstance(part, FSDPModule) and titan.device_type == "cpu":
            part.set_force_sum_reduction_for_comms(True)  # gloo sums, and scales nothing
    model.to_empty(device=titan.device_type)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def train(model: Any, dims: ParallelDims, steps: int) -> list[float]:
    """The loss of each step, the same on all ranks of TP."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    words = model.config.vocab_size
    loss_of = CrossEntropyLoss.Config(global_vocab_size=words).build(compile_config=CompileConfig())
    draw, context = torch.Generator(), get_spmd_context(parallel_dims=dims)
    draw.manual_seed(dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(words, (BATCH, SEQUENCE + 1), generator=draw).to(titan.device_type)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(SEQUENCE, device=x.device).expand_as(x).contiguous()
        given: dict[str, Any] = {"positions": positions}
        if titan.device_type != "cpu":
            given["attention_masks"] = model.get_attention_masks(positions=positions)
        if dims.spmd_backend == "spmd_types":
            x, y, given = annotate_input_spmd_types(dims, x, y, given)
        with context():
            loss, _ = loss_of(model(x, **given), y, torch.tensor(float(y.numel())))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    old = torch.__version__ < "2.14"  # whose FSDP2 does not know spmd_types, torchtitan's default
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", default="partial_dtensor" if old else "spmd_types")
    args = parser.parse_args()
    dist.init_process_group()
    if titan.device_type != "cpu":
        titan.device_module.set_device(dist.get_rank())
    set_spmd_backend(args.backend)
    settings = ParallelismConfig(tensor_parallel_degree=args.tp, spmd_backend=args.backend)
    dims = ParallelDims.from_config(settings, dist.get_world_size())
    dims.build_mesh()
    stock, overlapped = (
        train(build(dims, settings, overrides), dims, args.steps) for overrides in ((), OVERRIDES)
    )
    far = max(abs(a / b - 1) for a, b in zip(stock, overlapped, strict=True))
    if dist.get_rank() == 0:
        for i, losses in enumerate(zip(stock, overlapped, strict=True), 1):
            print("step {:2}  stock {:.6f}  overlapped {:.6f}".format(i, *losses))
        print(f"losses differ from stock torchtitan's by {far:.1e} of their size at most")
    interlace.release()
    dist.destroy_process_group()
    if far > (1e-5 if titan.device_type == "cpu" else 2e-2):
        raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
