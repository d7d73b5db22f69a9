"""The demo: a small Llama-style model trained three ways, side by side.

model.py     the model, and its DTensor plan (tensor and sequence parallel)
data.py      the text it learns: the source of Python's own standard library
train.py     training one way, on every rank
worker.py    what each rank does, and what rank 0 tells
report.py    what is printed and written
"""
