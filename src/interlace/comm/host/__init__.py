"""Memory that the processes of one host share, and signals and data that move through it.

shared_memory.py      segments, and how ranks come to share them
signals.py            counters, and the one bounded wait
slots.py              the pool of symmetric slots, two copies each
workspace.py          an Executor's signals and staging areas
peer_collectives.py   the kinds of collective through shared memory;  messages.py: Send and Recv
"""
