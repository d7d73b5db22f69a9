"""Calibration of a machine: its measurements, and the model that is made of them.

work.py    all of it, on every rank
device.py  what one device alone does: matmuls, copies, launches, the host
fit.py     samples, and a Machine of them
sites.py   rows of `bench overlap` as measured sites of a Machine
"""
