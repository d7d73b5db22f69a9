"""Passes: Program in, Program out, one file a pass. No torch.

base.py               what a pass is
pipeline.py           pipelines as text, and the one that lowers a serial Program
find_sites.py         every collective becomes a Site, by meaning and not by spelling
place_resharding.py   gathers stand where fewer bytes move
decompose.py          a site becomes chunks, by a strategy
form_regions.py       pointwise operators that run as one
schedule.py           order and streams
plan_memory.py        Alloc and Free, storage reused
insert_sync.py        the fewest events that suffice
take_turns.py         ranks put into a peer one after another
fuse.py               what one kernel is to do becomes one op

sites/                what a collective is to the computation around it
choosing/             which strategy a site gets: measured, or predicted by playing it alone
strategies/           the strategies as rows of data (table.py), and how each is written
order/                what must stay before what
"""

from interlace.passes.base import Pass, add_remarks, spell
from interlace.passes.pipeline import (
    PASSES,
    lower,
    lowering,
    parse_pipeline,
    pass_class,
    run_pipeline,
)

__all__ = [
    "PASSES",
    "Pass",
    "add_remarks",
    "lower",
    "lowering",
    "parse_pipeline",
    "pass_class",
    "run_pipeline",
    "spell",
]
