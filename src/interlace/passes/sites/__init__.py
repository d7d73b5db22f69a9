"""Sites: a collective with the computation around it, on all ranks at once.

values.py      who makes and uses a value
rows.py        where its bytes come from, and how the rows of a matrix are dealt to the ranks
recognise.py   one collective: the rows it brings to matmuls, or takes away from them
cone.py        the computation behind a reduction that can be cut along its rows
"""
