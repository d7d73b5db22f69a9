"""Proves that no order of events can make a schedule go wrong, or shows one that does.

    report = check(program)                    # an SPMD Program: all of its ranks
    report = check([stage_0, stage_1])         # a set: a pipeline's stages, say
    report.raise_if_unsound()                  # SoundnessError with the counterexample

What is guaranteed
    If `check(programs).sound`, then for the reads and writes that the ops declare, and for the
    order that the model gives (graph.py lists every edge), in every interleaving of all streams and
    hosts of all ranks, over any number of runs in a row that no barrier joins:

    - every run ends: nothing waits in a circle or for what never comes;
    - two accesses of the same byte, one of them a write, always happen in one and the same order.
      A read of memory by a peer (`Get`, or a symmetric buffer) counts like any other;
    - every byte that is read, and every byte of every output and result, was written before in the
      same run, through the buffer that it is read through (inputs are written);
    - nothing is used before its Alloc or after its Free; every slot comes back in the run that
      took it; no result lives in memory that the next run uses again;
    - source and destination of an op share bytes in a form that the op allows, or not at all;
    - rows of FP8 that are multiplied by one scale have it from one origin (scales.py);
    - members of a collective agree on kind, reduction, root, splits, element type and shape, the
      two ends of a message on size and element type, and the ranks on the takes of each slot.

    Hence the results of a run do not depend on the interleaving. The other way round, a finding is
    a real fault of the model, with the ops and an interleaving behind it; but `as_strided` counts
    as the whole buffer, and buffers that share a storage are compared by the hulls of their boxes.
    (Strided boxes are compared exactly, except for boxes of more than 65,536 separate runs of bytes
    whose dimensions run into each other or whose strides have no small common multiple.)

What is not
    Kernels that touch what they do not declare; numbers (a sound schedule may compute the wrong
    function); time; libraries that break their word; resources of a device, such as a kernel that
    spins while the one it waits for finds no room.

The tests hold `check` against an oracle that runs small programs in every interleaving, shares
nothing with it but the ops, and must agree with it on thousands of random programs.

Reading order: source.py (one Program, names bound), graph.py and build.py (the order of all ranks),
regions.py (bytes), sweep.py (races and lifetimes), in_place.py (one op alone), scales.py (FP8),
deadlock.py, matching.py, report.py, explain.py and fixes.py (findings and their fixes, loaded when
there are any), turns.py and fold.py (few ranks stand for all), check.py, reuse.py (takes of slots
that may share memory).
"""

from interlace.verify.check import check
from interlace.verify.report import KINDS, SCHEMA, Finding, OpRef, Report

__all__ = ["KINDS", "SCHEMA", "Finding", "OpRef", "Report", "check"]
