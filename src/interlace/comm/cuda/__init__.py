"""What ranks with NVLink share: peer-mapped device memory, signal words and slots in it.

driver.py        the few functions of the CUDA driver that runs use
memory.py        device memory that every rank of a team maps, by CUDA IPC handles
access.py        words of this rank's own, in bounded calls of the driver
collector.py     keeps Python's garbage collector away
words.py         counters in that memory, and the numbers that they count
slots.py         the pool of symmetric slots
registry.py      tensors of callers that peers map
side.py          a team's device side: words, slots, the hand-over from run to run, reset
space.py         what one Executor needs of it: signals
collectives.py   NCCL's collectives and messages on a stream
area.py          staging memory for collectives that one kernel does

Imported for CUDA devices only; nothing here runs when `interlace` is imported.
"""
