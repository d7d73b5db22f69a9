"""Benchmarks: what the links do, what overlap gains, and the roof of both, measured alike.

ranks.py         the ranks of a benchmark: joining, meeting
launch.py        torchrun's ranks or processes of our own, what each does, and the progress bar
timing.py        bursts of back-to-back launches, in rounds that interleave the candidates
facts.py         what a row says of the machine: commit, versions, clocks
rows.py          rows of CSV
peer_memory.py   memory of the peers, and the two ways to copy it
links.py         copies between ranks
collectives.py   collectives of every backend
device.py        what calibration wants to know of one device alone
interconnect.py  `interlace bench interconnect`
sites.py         AG+GEMM, GEMM+RS and GEMM+AR: Program, inputs, reference
candidates.py    the ways to compute a site: ours, and what both are compared with
rivals.py        other libraries' ways; jax_rival.py: JAX's, in a process of its own
overlap.py       `interlace bench overlap`
bars.py          the bars that the rows must clear
layer.py         `interlace bench layer`
calibrate.py     what `interlace calibrate` measures
plots.py         pictures of rows (extra `bench`)

$ torchrun --nproc-per-node 4 -m interlace bench overlap --preset bars
"""
