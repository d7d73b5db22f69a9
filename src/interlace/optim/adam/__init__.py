"""Adam for many parameters in one launch.

arithmetic.py   one tensor in plain torch: the reference, and the CPU's path
kernel.py       the kernel;  table.py: the table that it reads
state.py        moments and masters;  plan.py: what a step launches
"""
