"""The products of a grouped linear layer: rows sorted by group, a weight for each group.

products.py   the products, and their twins;  kernel.py: the kernels;  launch.py: their launches
"""
