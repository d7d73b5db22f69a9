"""From the arguments of a call to a run.

call_key.py     what a call is known by
as_module.py    a compiled module as a module itself
tracing.py      what is in force while `interlace.compile` traces, and what it refuses
leftovers.py    tensors of a trace that are left in Python objects
arguments.py    arguments that AOTAutograd or TorchDynamo would take for what they are not
direct.py       calls of an inference graph without AOTAutograd between
specialise.py   a symbolic graph made concrete
"""
