"""Linear layers whose weight is sharded over a group, their communication overlapped.

linear.py     the functions: what they take, checked and cast
sharded.py    their place in autograd;  programs.py: where their Programs are kept
layer.py      their operators, forward and backward, spelled once
serial.py     the operators as Programs;  traced.py: on tensors, as in a graph that we compile
"""
