"""Benchmarks: what the links do, what overlap gains, and the roof of both, measured alike.

ranks.py         the ranks of a benchmark: starting, joining, meeting; progress
timing.py        bursts of back-to-back launches, in rounds that interleave the candidates
race/            ways to compute one thing, ours and others': opened, checked, timed in turn
rows.py          rows of CSV, and what a row says of the machine: commit, versions
bars.py          the bars that rows must clear
transfers.py     copies between ranks, messages, collectives
device.py        what calibration wants to know of one device alone
interconnect.py  `interlace bench interconnect`, and what `interlace calibrate` measures
measured_sites.py  rows of `overlap` as the measured sites of a calibration
sites.py         AG+GEMM, GEMM+RS and GEMM+AR: Program, inputs, reference
overlap.py       `interlace bench overlap`
measured_sites.py: its rows, as measured sites of a calibration
schedule.py      what `interlace run` does on each rank
layer.py         `interlace bench layer`
transformer/     `interlace bench transformer`
kernels/         `interlace bench kernels`
plots.py         pictures of rows (extra `bench`)
commands/        `interlace run`, `calibrate` and `bench`

$ torchrun --nproc-per-node 4 -m interlace bench overlap --preset bars
"""
