"""Programs written by hand in Python.

builder.py  the builder: what it declares, its streams, and the Program that comes of it
ops.py      a method for each op, and the handles that they take
"""
