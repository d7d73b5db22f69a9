"""The structural rules of Programs, `validate(program)`.

validate.py  the rules of a whole Program
context.py   the ranks to look at, the names known so far; declarations and arguments
ops.py       single ops, by the roles of their fields and by what they read, write and order
"""
