"""The cross-entropy, of logits or of a linear layer's output: one read forward, one write backward.

loss.py         the loss of logits, its checks, and targets that are no class
linear_loss.py  the loss of a linear layer;  chunks.py: of some rows at a time
vocabulary.py   classes that are cut over ranks
steps.py        what the losses call, between which ranks exchange;  reference.py: in plain torch
launch.py       in Triton: launches;  layout.py: how they are cut;  kernel.py: the kernels
"""
