"""Peer-mapped device memory that ranks with NVLink share, and signal words and slots in it.

driver.py        the few functions of the CUDA driver that runs use
memory.py        device memory that every rank of a team maps, and the symmetric slots in it
words.py         counters in mapped memory: signals, bounded access, what exchanges stage
side.py          a team's device side: all of these, the hand-over from run to run, reset
nccl.py          NCCL's ranks connected, its collectives and messages on a stream, its end

Imported for CUDA devices only; nothing here runs when `interlace` is imported.
"""
