"""What a collective is to the computation around it, on all ranks at once.

values.py, rows.py   who makes and uses a value, and where its bytes come from
layout.py            how the rows of a matrix are dealt to the ranks
recognise.py         one collective: the rows it brings to matmuls, or takes away from them
cone.py              the computation behind a reduction that can be cut along its rows
blocks.py            groups of ops taken as one
analysis.py          all collectives of a Program together
fusable.py           what the kernels of the strategy `fused` can do
"""
