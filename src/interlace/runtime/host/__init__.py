"""The CPU: a thread for each stream, real concurrency, every wait bounded.

engine.py    binds a Program, and runs it: streams, their threads, the points that they await
binder.py    events, copies, collectives, messages and signals, bound for threads
"""
