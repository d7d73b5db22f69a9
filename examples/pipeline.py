"""A pipeline schedule written by hand: two stages, forward and backward, checked and run.

    torchrun --nproc-per-node 2 examples/pipeline.py

It is the schedule "1F1B": the first stage is one micro-batch ahead, then each stage has one forward
and one backward in turn. A Program for each stage says so op by op: `main` computes, `comm` sends
activations on and gradients back, and events order the two. The verifier proves both Programs
together, and shows what is wrong with a pair that is not sound. Gradients are those of autograd.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.ir import Program
from interlace.trace import figures_text

DEVICE = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
PARTS, ROWS, DIM, HIDDEN = 4, 64, 128, 256
"""Micro-batches, the rows of each, and sizes."""
BATCH = PARTS * ROWS
PARTS_OF = [slice(i * ROWS, (i + 1) * ROWS) for i in range(PARTS)]


def first(ahead: int = 1) -> Program:
    """Sends h = x @ w, and sums dw = x.T @ dh over the micro-batches."""
    with interlace.program("first", groups={"pp": [[0, 1]]}, ranks=[0]) as p:
        x, w = p.input("x", "f32", (BATCH, DIM)), p.input("w", "f32", (DIM, HIDDEN))
        dw = p.output("dw", "f32", (DIM, HIDDEN))
        h, dh = p.alloc("h", "f32", (BATCH, HIDDEN)), p.alloc("dh", "f32", (BATCH, HIDDEN))

        def forward(part: slice) -> None:
            p.mm(x[part], w, out=h[part])
            made = p.record()
            with p.stream("comm"):
                p.wait(made)
                p.send(h[part], peer=1)

        def backward(i: int, part: slice) -> None:
            with p.stream("comm"):
                p.recv(dh[part], peer=1)
                came = p.record()
            p.wait(came)
            if i == 0:
                p.mm(x[part].t(), dh[part], out=dw)
            else:
                p.call("aten.addmm_.default", dw, x[part].t(), dh[part], out=dw, mutates=True)

        for part in PARTS_OF[:ahead]:
            forward(part)
        for i, part in enumerate(PARTS_OF):
            for later in PARTS_OF[i + ahead : i + ahead + 1]:
                forward(later)
            backward(i, part)
    return p.program


def second(ahead: int = 1) -> Program:
    """y = relu(h) @ v and dy = y - target; sends dh, and sums dv = relu(h).T @ dy."""
    with interlace.program("second", groups={"pp": [[0, 1]]}, ranks=[1]) as p:
        target, v = p.input("target", "f32", (BATCH, DIM)), p.input("v", "f32", (HIDDEN, DIM))
        dv = p.output("dv", "f32", (HIDDEN, DIM))
        h, a, dh = (p.alloc(name, "f32", (BATCH, HIDDEN)) for name in ("h", "a", "dh"))
        dy = p.alloc("dy", "f32", (BATCH, DIM))
        arrived: list[str] = []

        def receive(part: slice) -> None:
            with p.stream("comm"):
                p.recv(h[part], peer=0)
                arrived.append(p.record())

        for part in PARTS_OF[: ahead + 1]:
            receive(part)
        for i, part in enumerate(PARTS_OF):
            p.wait(arrived[i])
            p.call("aten.relu.out", h[part], out=a[part])
            p.mm(a[part], v, out=dy[part])
            p.call("aten.sub.out", dy[part], target[part], out=dy[part])
            p.mm(dy[part], v.t(), out=dh[part])
            p.call("aten.threshold_backward.grad_input", dh[part], h[part], 0, out=dh[part])
            made = p.record()
            with p.stream("comm"):
                p.wait(made)
                p.send(dh[part], peer=0)
            for later in PARTS_OF[i + ahead + 1 : i + ahead + 2]:
                receive(later)
            if i == 0:
                p.mm(a[part].t(), dy[part], out=dv)
            else:
                p.call("aten.addmm_.default", dv, a[part].t(), dy[part], out=dv, mutates=True)
    return p.program


def main() -> None:
    pp = init_device_mesh(DEVICE, (2,)).get_group()
    rank, stages = dist.get_rank(), (first(), second())
    torch.manual_seed(0)  # all inputs on both ranks, to compare
    x, target = (torch.randn(BATCH, DIM, device=DEVICE) for _ in range(2))
    w, v = torch.randn(DIM, HIDDEN, device=DEVICE), torch.randn(HIDDEN, DIM, device=DEVICE)
    w, v = w.div_(DIM**0.5).requires_grad_(), v.div_(HIDDEN**0.5).requires_grad_()
    (0.5 * (torch.relu(x @ w) @ v - target).square().sum()).backward()

    with interlace.Executor(stages[rank], groups={"pp": pp}, device=DEVICE) as executor:
        executor.prepare()
        (gradient,) = executor.run([(x, w), (target, v)][rank])
        wanted = (w, v)[rank].grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-3)
        interlace.synchronize()

    if rank == 0:
        print(stages[0], stages[1], sep="\n\n")
        print(f"\nthe pair: {interlace.check(stages)}")
        print(f"all forwards first, on one rank alone: {interlace.check((first(PARTS), second()))}")
        print("\n" + figures_text([interlace.simulate(stages)]))
        print("gradients equal those of autograd")


if __name__ == "__main__":
    main()
    interlace.release()
    dist.destroy_process_group()
