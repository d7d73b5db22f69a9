"""Benchmarks: what the links do, what overlap gains, and the roof of both, measured alike.

settings.py      settings of every benchmark, which are its command's options
commands/        `interlace run`, `calibrate` and `bench`, a row of one table for each benchmark
ranks.py         the ranks of a benchmark: starting, joining, meeting; progress
race.py          variants of one computation: opened, checked, timed in turn by bursts, memory
rows.py          rows of CSV, and what a row says of the machine: commit, versions
bars.py          the bars that rows must clear
links.py         copies between ranks, messages, collectives: `interlace bench interconnect`
calibration/     what `interlace calibrate` measures, and the machine that it makes
shapes.py        shapes of sites, as options name them
sites.py         AG+GEMM, GEMM+RS and GEMM+AR: Program, inputs, reference
candidates.py    the variants that compute a site: ours, and what both are compared with
overlap.py       `interlace bench overlap`
schedule.py      what `interlace run` does on each rank
layers/          `interlace bench layer` and `bench transformer`
kernels/         `interlace bench kernels`
optimizer.py     `interlace bench optimizer`

$ torchrun --nproc-per-node 4 -m interlace bench overlap --preset bars
"""
