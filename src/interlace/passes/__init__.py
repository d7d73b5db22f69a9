"""Passes: Program in, Program out, one file a pass. No torch.

pipeline.py           what a pass is; pipelines as text, and the one that lowers a serial Program
find_sites.py         every collective becomes a Site, by meaning and not by spelling
place_resharding.py   gathers stand where fewer bytes move
decompose.py          a site becomes chunks, by a strategy
accumulate.py         sums of matmuls that a matmul adds up itself
form_regions.py       pointwise operators that run as one
schedule.py           order and streams
plan_memory.py        Alloc and Free, storage reused
insert_sync.py        the fewest events that suffice
take_turns.py         ranks put into a peer one after another
fuse.py               what one kernel is to do becomes one op

slots.py: which symmetric buffers share memory
dependencies.py: what must stay before what;  uses.py: who declares, reads and writes a buffer
rewrite.py: a list of ops as it changes
sites/                what a collective is to the computation around it
strategies/           the strategies as rows of data, how each is written, and which a site gets
"""

from interlace.passes.pipeline import (
    PASSES,
    Pass,
    candidates,
    lower,
    lowering,
    parse_pipeline,
    run_pipeline,
    spell,
)

__all__ = [
    "PASSES",
    "Pass",
    "candidates",
    "lower",
    "lowering",
    "parse_pipeline",
    "run_pipeline",
    "spell",
]
