"""The kernels of the cross-entropy, one read forward, one read and one write backward.

steps.py    what the losses call: steps between which ranks exchange
twin.py     the same in plain torch
launch.py, layout.py: how kernels are launched and cut;  kernel.py, totals.py, parts.py: the kernels
"""
