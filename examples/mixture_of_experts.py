"""A mixture of experts over ranks: tokens travel to their experts and back, under grouped GEMMs.

    torchrun --nproc-per-node 2 examples/mixture_of_experts.py

Each rank has tokens and some of the experts. The router sends each token to one expert, where each
rank has a fixed capacity; tokens beyond that keep their residual alone. Both exchanges are
functional collectives, so the compiler sees them beside the grouped GEMMs that they feed and
follow, and the rows of one rank are multiplied while those of the next one travel.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.nn import GroupedLinear

DEVICE = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
LOCAL, ROOM, TOKENS, DIM, HIDDEN, STEPS = 2, 128, 256, 256, 512, 3
"""Experts of a rank, tokens that an expert takes from each rank, and sizes."""


class Mixture(nn.Module):
    """[tokens, DIM] to as many: each token through its best expert, scaled by the router."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, group.size()
        self.router = nn.Linear(DIM, self.ranks * LOCAL, bias=False)
        self.up = GroupedLinear(LOCAL, DIM, HIDDEN, bias=False)
        self.down = GroupedLinear(LOCAL, HIDDEN, DIM, bias=False)

    def exchange(self, x: Tensor) -> Tensor:
        """Part i of the rows goes to rank i."""
        return all_to_all_single_autograd(x, None, None, self.group)

    def experts(self, x: Tensor) -> Tensor:
        """Rows by the rank that sent them, then by expert; the results in the same order."""
        rows = x.view(self.ranks, LOCAL, ROOM, DIM).transpose(0, 1).reshape(-1, DIM)
        sizes = torch.full((LOCAL,), self.ranks * ROOM, dtype=torch.int32, device=x.device)
        y = self.down(F.silu(self.up(rows, sizes)), sizes)
        return y.view(LOCAL, self.ranks, ROOM, DIM).transpose(0, 1).reshape(-1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(expert, self.ranks * LOCAL)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1  # among the tokens of that expert
        slots = self.ranks * LOCAL * ROOM
        slot = torch.where(place < ROOM, expert * ROOM + place, slots)
        dispatch = F.one_hot(slot, slots + 1)[:, :slots].to(x.dtype)  # [tokens, slots]
        y = self.exchange(self.experts(self.exchange(dispatch.T @ x)))
        return x + share[:, None] * (dispatch @ y)


def train(model: Mixture, call: Callable[..., Tensor], x: Tensor, wanted: Tensor) -> list[float]:
    """The loss of each step, over all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        loss = F.mse_loss(call(x).float(), wanted)
        (loss / model.ranks).backward()  # an expert's gradient has the tokens of all ranks
        dist.all_reduce(model.router.weight.grad)  # all ranks have the same router
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / model.ranks)
    return losses


def main() -> None:
    mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    model = Mixture(mesh["ep"].get_group())
    torch.manual_seed(1 + dist.get_rank())  # experts and tokens of this rank
    for layer in (model.up, model.down):
        layer.reset_parameters()
    model.to(DEVICE, torch.bfloat16)
    x = torch.randn(TOKENS, DIM, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    wanted = torch.randn(TOKENS, DIM, device=DEVICE)

    compiled, start = torch.compile(model, backend="interlace"), copy.deepcopy(model.state_dict())
    plain_losses = train(model, model, x, wanted)
    model.load_state_dict(start)
    losses = train(model, compiled, x, wanted)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-3, atol=0)
    if dist.get_rank() == 0:
        print(interlace.explain(compiled))
        for step, both in enumerate(zip(losses, plain_losses, strict=True)):
            print("step {}  loss {:.6f}, of plain torch {:.6f}".format(step, *both))


if __name__ == "__main__":
    main()
    interlace.release()
    dist.destroy_process_group()
