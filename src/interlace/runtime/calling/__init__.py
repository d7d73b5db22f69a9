"""From the name of an operator or a region to one bound function.

operators.py     what the names of a schedule stand for in torch, and what they may not
calls.py         Calls bound to torch operators;  quick_calls.py: the most usual ones
regions.py       groups of calls that run as one, eager or compiled
"""
