"""Collectives of small tensors as one kernel over peer memory, and sums in rank order.

exchange.py    push, raise a flag, wait, finish;  kernel.py: the kernel;  moves.py: its tables
sums.py        the sum over the ranks' slots on the GPU
"""
