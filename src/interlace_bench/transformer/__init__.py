"""`interlace bench transformer`: forward, backward and step of layers, and what overlap gains.

models.py      dimensions, layers with exchangeable linear maps, their DTensor plan, FLOP
candidates.py  the ways to train them: opened, checked against eager, timed by stage
work.py        settings, the race, rows
predict.py     the same table for a machine that is not here, by the simulator
"""
