"""Linear layers whose weight is sharded over a group, their communication overlapped.

linear.py     the functions: checks, casts, and their place in autograd
programs.py   the Programs behind them, forward and backward, and where they are kept
"""
