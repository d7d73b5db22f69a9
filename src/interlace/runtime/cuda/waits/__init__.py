"""Waits of streams, and their bounds.

waiting.py    when a kernel that waits for peers may begin
watchdog.py   sees how far runs are, finds what stalls, says what it waits for, and ends it
"""
