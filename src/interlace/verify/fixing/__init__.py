"""How a fault is fixed: edits of the Programs that its kind suggests, each tried before it is told.

A finding carries the edits that may fix it; nothing is tried until someone reads its `fix`.

Reading order: edits.py (what an edit is), edges.py (what orders two ops), proposals.py (what is
proposed for which fault), trials.py (which of it holds).
"""
