"""The commands that measure: `interlace run`, `calibrate` and `bench`, and what they print.

run.py           a schedule, run on this machine
calibrate.py     links, matmuls and sites of this machine, measured
commands.py      a command for each benchmark: the table of them, their rows, whether bars are met
"""
