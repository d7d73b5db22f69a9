"""Collectives of small tensors as one kernel over peer memory, and sums in rank order.

launch.py    push, raise a flag, wait, finish;  kernel.py: the kernel;  moves.py: its tables
twin.py      what it must give, in plain torch
reduce.py    the sum over the ranks' slots;  sums.py: on the GPU
"""
