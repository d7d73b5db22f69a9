"""`interlace bench`: the benchmarks' commands, and how they get their ranks.

$ interlace bench overlap --preset bars                          # starts a rank for each GPU
$ torchrun --nproc-per-node 4 -m interlace bench overlap         # takes torchrun's

Alone, the command starts its ranks as processes and ends them all, whatever happens; under torchrun
each process is a rank already, and rank 0 alone prints and writes.
"""

from __future__ import annotations

import typer

from interlace.commands.bench_interconnect import interconnect
from interlace.commands.bench_kernels import kernels
from interlace.commands.bench_layer import layer
from interlace.commands.bench_overlap import overlap

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure links, overlapped sites, whole layers and kernels, here and now.",
)
for function in (interconnect, overlap, layer, kernels):
    bench.command(no_args_is_help=False)(function)
