"""Trains a small Llama with Muon: each matrix is updated by its owner, under data parallelism.

    torchrun --nproc-per-node 4 examples/train_muon.py

Each way starts from the same weights and sees the same batches: `adamw` (AdamW on every rank, under
DDP), `muon` (Muon on every rank, under DDP), `synchronous` and `overlapped` (LayerWise, which
gathers weights in the step or under the next forward, and compares the ranks' every 10 steps).
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from train_llama import DEVICE, Llama, batch, loss_of, text  # pyright: ignore[reportMissingImports]

from interlace.optim import AdamW, LayerWise, Muon, muon_groups

WAYS = ("adamw", "muon", "synchronous", "overlapped")


def train(way: str, mesh: DeviceMesh, args: argparse.Namespace) -> tuple[list[float], float, int]:
    """The loss of each step on this rank, milliseconds a step, and bytes of optimizer state."""
    data = text(4 << 20)
    torch.manual_seed(args.seed)
    model: nn.Module = Llama(args.dim, args.layers, args.head).to(args.device)
    if way == "adamw":
        inner = AdamW(model.parameters(), lr=args.adamw_lr)
    else:
        inner = Muon(muon_groups(model), lr=args.lr, adamw={"lr": args.adamw_lr})
    if way in ("adamw", "muon"):
        model, optimizer = DistributedDataParallel(model), inner
    else:
        facts = {"overlap_param_gather": way == "overlapped", "check_replicas_every": 10}
        optimizer = LayerWise(inner, model, mesh, bucket_bytes=args.bucket_bytes, **facts)
    draw, losses, began = torch.Generator().manual_seed(args.seed), [], time.perf_counter()
    for _ in range(args.steps):
        loss = loss_of(model, batch(data, draw, mesh.size(), mesh.get_local_rank(), args), False)
        loss.backward()
        if isinstance(optimizer, LayerWise):
            optimizer.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    took = (time.perf_counter() - began) / args.steps * 1e3
    if isinstance(optimizer, LayerWise):
        optimizer.close()
    states = [value for state in inner.state.values() for value in state.values()]
    return losses, took, sum(value.nbytes for value in states if isinstance(value, Tensor))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    parser.add_argument("--device", default=DEVICE, help="cpu or cuda (%(default)s here)")
    for name, value in (
        *(("steps", 30), ("batch", 8), ("sequence", 128), ("seed", 0)),
        *(("dim", 256), ("layers", 2), ("head", 32), ("bucket_bytes", 1 << 20)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--adamw_lr", type=float, default=1e-3)
    args = parser.parse_args()
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    for way in args.ways.split(","):
        losses, took, nbytes = train(way, mesh, args)
        mean = torch.tensor([losses[0], losses[-1]], device=args.device)
        dist.all_reduce(mean)
        first, last = (mean / mesh.size()).tolist()
        if dist.get_rank() == 0:
            print(
                f"{way:>12}  loss {first:.6f} to {last:.6f}  {took:.0f} ms a step  "
                f"{nbytes / 1e6:.1f} MB of state on this rank",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
