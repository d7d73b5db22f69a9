"""From the arguments of a call to a run.

call_key.py     what a call is known by
state.py        the modules and tensors that a function uses, as arguments;  held.py finds them
direct.py       calls of an inference graph without AOTAutograd between
specialise.py   a symbolic graph made concrete;  sizes.py: DTensors of other sizes
outputs.py      tensors, and all else that a function returns
waiting.py      arguments that a caller's collective has not filled yet
functional.py   collectives that write into a tensor, made functional while tracing
refusals.py     what cannot be traced, in words that help
"""
