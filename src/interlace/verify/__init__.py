"""Proves that no order of events can make a schedule go wrong, or shows one that does.

report = check(program)                    # an SPMD Program: all of its ranks
report = check([stage_0, stage_1])         # a set: a pipeline's stages, say
report.raise_if_unsound()
"""

from interlace.verify.check import check
from interlace.verify.report import KINDS, SCHEMA, Finding, OpRef, Report

__all__ = ["KINDS", "SCHEMA", "Finding", "OpRef", "Report", "check"]
