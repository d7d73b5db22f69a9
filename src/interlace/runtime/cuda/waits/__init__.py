"""Waits of streams, and their bounds.

words.py      words that streams write and wait for
waiting.py    when a kernel that waits for peers may begin
marks.py      events by which the watchdog sees how far runs are
watchdog.py   finds what stalls, says what it waits for, and ends it
"""
