"""FSDP2 and tensor parallelism: blocks are sharded, then compiled, then wrapped by `fully_shard`.

    torchrun --nproc-per-node 4 examples/fsdp_tensor_parallel.py

On four ranks the mesh is 2 x 2. Interlace overlaps the tensor-parallel communication inside of each
block; FSDP2 gathers weights and reduces gradients between blocks, as ever. The model is trained
with and without the compiler, from the same weights and on the same batches: the losses agree.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_parallel_llama import shard  # the plan: torch's styles for each block
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_llama import DEVICE, Llama, text

import interlace

LAYERS, DIM, HEAD, BATCH, SEQUENCE, STEPS = 2, 128, 16, 2, 128, 3


def build(mesh: DeviceMesh, backend: str | None) -> Llama:
    """The model on this rank; the order of the three calls matters."""
    torch.manual_seed(0)
    model = Llama(DIM, LAYERS, HEAD).to(DEVICE)
    shard(model, mesh["tp"])
    for layer in model.layers:
        if backend is not None:
            layer.compile(backend=backend, fullgraph=True)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def train(model: Llama, batches: Tensor) -> list[float]:
    """The loss of each step on this data-parallel rank's sequences."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens in batches:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    shape = int(os.environ["WORLD_SIZE"]) // 2, 2
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp"))
    mine = text(mesh["dp"].size() * STEPS * BATCH * (SEQUENCE + 1)).chunk(mesh["dp"].size())
    batches = mine[mesh["dp"].get_local_rank()].view(STEPS, BATCH, -1).long().to(DEVICE)
    plain_losses = train(build(mesh, None), batches)
    model = build(mesh, "interlace")
    losses = train(model, batches)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-4, atol=0)
    if dist.get_rank() == 0:
        print(interlace.explain(model))
        for step, both in enumerate(zip(losses, plain_losses, strict=True)):
            print("step {}  loss {:.6f}, of plain torch {:.6f}".format(step, *both))


if __name__ == "__main__":
    main()
    interlace.release()
    dist.destroy_process_group()
