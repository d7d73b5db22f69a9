"""Preparation by all ranks together, before the first run.

agreement.py    ranks agree on a Program; which of its ranks this process is
plan.py         what a concrete Program says before anything is allocated
"""
