"""How a fault is fixed: edits that its kind suggests, each tried when someone reads the `fix`.

Reading order: edits.py (what an edit is), edges.py (what orders two ops), proposals.py (what is
proposed for which fault), trials.py (what holds).
"""
