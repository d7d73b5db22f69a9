"""The CUDA engine: streams, copy engines and kernels instead of threads.

engine.py      the engine: binds a Program's ops once, issues them in every run
binder.py      each kind of op as a function that issues it
fused.py       a Fused op as one persistent kernel
lanes.py       the streams of a Program and the points between them
graphs.py      the same ops captured in two CUDA graphs
watchdog.py    bounds every wait: finds what stalls, lets it go, says what it was
sharing.py     what a Program needs of its teams' devices
"""
