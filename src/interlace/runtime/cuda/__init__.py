"""The CUDA engine: streams, copy engines and kernels instead of threads.

engine.py      the engine: binds a Program's ops once, issues them in every run
binding.py     a Program's ops in a run, with what stands before and after them
binder.py      each kind of op as a function that issues it
transfers.py   collectives and messages
exchanges.py   collectives that one kernel does
parts.py       what the parts of a Fused op do
fused.py       a Fused op as one persistent kernel
sums.py        the sum of a reduction's slots
waiting.py     when a kernel that waits for peers may begin
drops.py       tensors of a run that streams still use
runner.py      one run, from the caller's tensors to the results
changes.py     what runs write of the caller's tensors, for autograd
lanes.py       the streams of a Program and the points between them
graphs.py      the same ops captured in CUDA graphs, a pair for each of a few sets of addresses
captured.py    such a pair, what is copied into and out of it;  homes.py: where its results lie
words.py       words that streams write and wait for, as many at once as stand in a row
watchdog.py    bounds every wait: finds what stalls and lets it go;  stalls.py: says what it was
marks.py       events by which the watchdog sees how far runs are
timed.py       when each op ran, for the option `trace`
sharing.py     what a Program needs of its teams' devices
"""
