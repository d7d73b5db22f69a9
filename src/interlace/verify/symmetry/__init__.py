"""Scale by symmetry: a few ranks are looked at, and stand for all.

automorphisms.py  which ranks stand for each other: maps that keep Programs and turn teams
turning.py        whether what they touch of their buffers turns along
order.py          the happens-before graph of the ranks that stand for others
fold.py           the check by that graph: it certifies, or all ranks are looked at
"""
