"""From the arguments of a call to a run.

call_key.py     what a call is known by
arguments.py    a graph's arguments: their signature, and those of its Program
direct.py       calls of an inference graph without TorchDynamo and AOTAutograd between
forwards.py     which forward pass a backward pass belongs to
"""
