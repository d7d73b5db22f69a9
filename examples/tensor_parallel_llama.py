"""A tensor-parallel Llama: torch's own plan, then `torch.compile(model, backend="interlace")`.

    torchrun --nproc-per-node 2 examples/tensor_parallel_llama.py

It runs on CPU processes, or on GPUs where there are some. One step is run eagerly and one compiled:
the losses and the gradients agree, and `interlace.explain` prints how each communication is
overlapped, and why.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from train_llama import VOCABULARY, Llama  # an ordinary module, without a line about parallelism

import interlace

DEVICE = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
LAYERS, DIM, HEAD, BATCH, SEQUENCE = 1, 128, 16, 2, 256


def shard(
    model: Llama, mesh: DeviceMesh, style: Callable[..., object] = parallelize_module
) -> None:
    """Tensor parallel matmuls; norms and residuals hold a part of the sequence each.

    `style` puts the plan of a block in place: torch's function, or `interlace.parallelize`.
    """
    part, whole = Shard(1), Replicate()
    plan = {
        "tok_embeddings": RowwiseParallel(
            input_layouts=whole, output_layouts=part, use_local_output=False
        ),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }
    of_a_block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=part, use_local_output=False),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "feed_forward.w2": RowwiseParallel(output_layouts=part, use_local_output=False),
    }
    for layer in model.layers:
        style(layer, mesh, of_a_block)
    parallelize_module(model, mesh, plan)


def step(call: Callable[..., Tensor], model: nn.Module, tokens: Tensor) -> tuple[Tensor, list]:
    """The loss of predicting each next token, and this rank's part of the gradients."""
    loss = F.cross_entropy(call(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), [g.to_local() if isinstance(g, DTensor) else g for g in grads]


def main() -> None:
    mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same weights and tokens on every rank
    model = Llama(DIM, LAYERS, HEAD).to(DEVICE)
    shard(model, mesh)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), device=DEVICE)

    compiled = torch.compile(model, backend="interlace")
    plain_loss, plain_grads = step(model, model, tokens)
    loss, grads = step(compiled, model, tokens)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads, plain_grads, rtol=1e-3, atol=1e-4)
    if dist.get_rank() == 0:
        print(interlace.explain(compiled))
        print(f"loss {loss:.6f}, of plain torch {plain_loss:.6f}")


if __name__ == "__main__":
    main()
    interlace.release()
    dist.destroy_process_group()
