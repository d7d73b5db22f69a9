"""`interlace bench`: the commands, and what they print of their rows.

commands.py      a command for each benchmark
interconnect.py  the tables of links and of backends
report.py        the tables of all others, and whether bars are met
"""
