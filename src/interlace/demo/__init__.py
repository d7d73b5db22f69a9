"""The demo: a small Llama-style model trained three ways, side by side.

plan.py      what is trained and for how long
model.py     the model, and its DTensor plan (tensor and sequence parallel)
train.py     the text it learns, training one way on every rank, and what all ranks saw
report.py    what is printed and written
"""
