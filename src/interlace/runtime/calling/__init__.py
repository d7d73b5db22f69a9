"""From the name of an operator or a region to one bound function.

operators.py   names, to what PyTorch calls so
calls.py       Calls bound to operators, and what a run gives back
regions.py     groups of calls that run as one, eager or compiled
"""
