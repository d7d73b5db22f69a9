"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations.

optimizer.py        the class;  routing.py: which parameter goes where, by rules that are data
update.py           one step of a group: matrices of equal shapes in batches
newton_schulz.py    the iteration, its Gram variant, and symmetric products
kernel.py           the kernels;  launch.py: how they are cut and launched
"""
