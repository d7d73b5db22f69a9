"""A training script in the shape of torchtitan's, where Interlace is one line of the configuration.

    torchrun --nproc-per-node 2 examples/torchtitan_style.py
    torchrun --nproc-per-node 4 examples/torchtitan_style.py --tp 2 --steps 20

torchtitan itself is not needed. As there, each parallelism is a function that is applied to the
model, in the same order: tensor parallelism, a compiler for each block, FSDP2. The one line that
Interlace changes is `backend: str = "interlace"`; `--backend inductor` is what stood there before.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_parallel_llama import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_llama import Llama, text

import interlace


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """What is trained, and how; each field is an argument of the command."""

    backend: str = "interlace"
    tp: int = 2
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dim: int = 128
    layers: int = 2
    head: int = 16
    batch: int = 2
    sequence: int = 128
    steps: int = 6
    lr: float = 3e-3

    @classmethod
    def of_command(cls) -> JobConfig:
        parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
        for field in fields(cls):
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
        return cls(**vars(parser.parse_args()))


def apply_compile(model: Llama, config: JobConfig) -> None:
    """Compiles each block by itself: equal blocks share what is compiled."""
    for layer in model.layers:
        layer.compile(backend=config.backend, fullgraph=True)


def apply_fsdp(model: Llama, mesh: DeviceMesh) -> None:
    """Shards over data parallelism; on GPUs in bf16, with gradients reduced in fp32."""
    half = torch.bfloat16 if mesh.device_type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def parallelize_llama(model: Llama, mesh: DeviceMesh, config: JobConfig) -> Llama:
    """Everything that makes a model of one process one of many."""
    shard(model, mesh["tp"])
    apply_compile(model, config)
    apply_fsdp(model, mesh["dp"])
    return model


class Trainer:
    """The model, its data and the loop."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        shape = int(os.environ["WORLD_SIZE"]) // config.tp, config.tp
        mesh = init_device_mesh(config.device, shape, mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = Llama(config.dim, config.layers, config.head).to(config.device)
        self.model = parallelize_llama(model, mesh, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        self.data, self.draw = text(1 << 20).long(), torch.Generator()
        self.draw.manual_seed(mesh["dp"].get_local_rank())

    def batch(self) -> Tensor:
        """Sequences of bytes, each with the one that follows."""
        length = self.config.sequence + 1
        starts = torch.randint(len(self.data) - length, (self.config.batch,), generator=self.draw)
        return torch.stack([self.data[i : i + length] for i in starts]).to(self.config.device)

    def step(self) -> Tensor:
        """Forward, backward, update; the loss."""
        tokens = self.batch()
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self) -> list[float]:
        """The loss of each step, the mean over all ranks."""
        losses = []
        for step in range(1, self.config.steps + 1):
            began, loss = time.perf_counter(), self.step()
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
            took = (time.perf_counter() - began) * 1e3
            if dist.get_rank() == 0:
                print(f"step {step:3}  loss {losses[-1]:.4f}  {took:.0f} ms", flush=True)
        return losses


def main(config: JobConfig) -> None:
    trainer = Trainer(config)
    losses = trainer.train()
    if dist.get_rank() == 0:
        print(interlace.explain(trainer.model))
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} with backend={config.backend}")


if __name__ == "__main__":
    main(JobConfig.of_command())
    interlace.release()
    dist.destroy_process_group()
