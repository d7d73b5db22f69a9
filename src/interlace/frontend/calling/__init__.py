"""From the arguments of a call to a run.

call_key.py     what a call is known by
as_module.py    a compiled module as a module itself
tracing.py      what is in force while torch traces, and what is refused
leftovers.py    tensors of a trace that are left in Python objects
arguments.py    a graph's arguments: their signature, and those of its Program
direct.py       calls of an inference graph without AOTAutograd between
forwards.py     which forward pass a backward pass belongs to
"""
