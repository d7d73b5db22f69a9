"""A grouped linear layer: rows sorted by group, a weight for each group.

linear.py     the layer, and its place in autograd
products.py   the products, by a reference too;  kernel.py: the kernels;  launch.py: their launches
"""
