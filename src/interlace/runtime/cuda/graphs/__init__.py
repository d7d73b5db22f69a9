"""A Program in two CUDA graphs, for even and for odd runs, replayed in turn.

graphs.py     captures and replays;  captured.py: a pair, what is copied into and out of it
homes.py      where results lie;  changes.py: what runs write of the caller's tensors, for autograd
"""
