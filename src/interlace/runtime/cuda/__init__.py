"""The CUDA engine: streams, copy engines and kernels instead of threads.

engine.py    the engine: a run, from the caller's tensors to the results, and the end of runs
binder.py    each op as a function that issues it, with what stands before and after them in a run
lanes.py     the streams of a Program, their words, the points between them, and when each op ran
sharing.py   what a Program needs of its teams' devices

launches/    what one launch does: fused GEMMs, exchanges, sums, NCCL
waits/       when kernels that wait may begin, and the watchdog that bounds every wait
graphs/      the same ops captured in CUDA graphs, a pair for each of a few sets of addresses
"""
