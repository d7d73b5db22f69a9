"""The commands of `interlace`, each a function in a file with its like; `cli.py` joins them.

options.py    the options that several commands have
output.py     tables, JSON and errors, on a terminal and off it
files.py      reading schedules, and laying them on another mesh or world
check.py      whether a schedule can go wrong
schedules.py  passes, pages and predictions of a schedule
explain.py    the strategy of every site, and why
demo.py       an example that trains
doctor.py     the state of this machine, and of the hosts of a job

`run`, `calibrate` and `bench` measure, and stand in `interlace_bench.commands`.

None imports torch, nor anything else that is slow, before it runs.
"""
