"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations.

optimizer.py        the class;  routing.py: which parameter goes where, by rules that are data
update.py           one step of a group: matrices of equal shapes in batches
newton_schulz.py    the iteration, its coefficients and its Gram variant
symmetric.py        symmetric products and their plain-torch twin
kernel.py           the kernel;  launch.py: how it is cut and launched
"""
