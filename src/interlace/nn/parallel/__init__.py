"""Linear layers whose weight is sharded over a group, their communication overlapped.

linear.py     the functions: what they take, checked and cast
sharded.py    their place in autograd
traced.py     the same in a graph that our backend compiles
text.py       the Programs behind them, forward and backward;  programs.py: where they are kept
"""
