"""The CPU: a thread for each stream, real concurrency, every wait bounded.

engine.py   streams as threads
binder.py   events, copies, collectives, messages and signals, bound for threads
quick.py    runs of one stream, with little of Python;  flat.py: in a team
"""
