"""The commands of `interlace`, each a function in a file with its like; `cli.py` joins them.

options.py    the options that several commands have
output.py     tables, JSON and errors, on a terminal and off it
files.py      reading schedules, and laying them on another mesh or world
check.py      whether a schedule can go wrong
schedules.py  passes, pages and predictions of a schedule
explain.py    the strategy of every site, and why
run.py        a schedule, run on this machine
demo.py, calibrate.py, doctor.py    what runs on this machine
doctor_job.py what `doctor` finds out about the hosts of a job

bench/        the benchmarks

None imports torch, nor anything else that is slow, before it runs.
"""
