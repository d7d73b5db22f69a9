"""`interlace bench transformer` and `bench layer`: layers trained and run, and what overlap gains.

models.py     dimensions, layers with exchangeable linear maps, their DTensor plan, FLOP
training.py   `bench transformer`: the ways to train layers, checked against eager, timed by stage
account.py    where a way's time over the ideal goes, part by part (`--account`)
inference.py  `bench layer`: a prefill and a decode step without gradients
"""
