"""The commands of `interlace`, one file each; `cli.py` puts them together.

    output.py     tables, JSON and errors, on a terminal and off it
    files.py      reading schedules, and laying them on another mesh or world

None imports torch, nor anything else that is slow, before it runs.
"""
