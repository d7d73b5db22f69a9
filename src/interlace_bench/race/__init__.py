"""Ways to compute one thing, timed in turn.

ways.py        a way: opened, checked, timed, closed
candidates.py  the ways to compute a site: ours, and what both are compared with
"""
