"""Schedules that other software made, as Programs that the verifier checks.

Reading order: pipelining/ (torch.distributed.pipelining), graphs/ (FX graphs with collectives and
streams), recorded/ (what ranks of a run that hung had recorded).
"""
