"""The demo: a small Llama-style model, trained in several ways side by side.

plan.py      what is trained, and how: settings, without torch
model.py     the model, and its DTensor plan (tensor and sequence parallel)
train.py     what is trained and on which text, training one way, and the report of all
"""
