"""Who touches which bytes, in an order that agrees with the graph.

regions.py     boxes resolved once;  bytesets.py: whether several cover one
memory.py      who touched which bytes last, and what is written
sweep.py       the walk that compares;  unwritten.py: which rows nobody wrote
origins.py     where bytes come from, wherever they have moved
"""
