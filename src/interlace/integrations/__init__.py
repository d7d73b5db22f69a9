"""Sockets of other packages that Interlace plugs into; each module needs the package of its name.

torchtitan.py    torchtitan 0.3.0: overrides of its feed-forward and attention, a pass pipeline
"""
