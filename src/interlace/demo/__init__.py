"""The demo: a small Llama-style model, trained in several ways side by side.

model.py     the model, its sizes, and its DTensor plan (tensor and sequence parallel)
train.py     what is trained and on which text, training one way, and the report of all
"""
