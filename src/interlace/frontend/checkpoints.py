"""The user's activation checkpointing, where no TorchDynamo sees it.

`torch.utils.checkpoint` saves nothing and runs its function again in backward. Traced as it is,
both runs land in one joint graph, where equal nodes are merged and the second run with them. So
while `interlace.compile` traces, a checkpoint only marks its nodes, and the partitioner does them
again:

    with checkpoints_marked():
        graph = trace(fn)                 # checkpointed nodes carry CHECKPOINT_KEY
    mark_checkpoints(graph)               # ... and are recomputed in backward
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

CHECKPOINT_KEY = "interlace_checkpoint"
"""Where a node's checkpointed region is noted, in `meta["custom"]`."""

_GENERATORS = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",  # newer releases (2.14.1, 2.15) call this
)


@contextlib.contextmanager
def checkpoints_marked() -> Iterator[None]:
    """Has `torch.utils.checkpoint(use_reentrant=False)` mark nodes instead of running twice."""
    numbers = itertools.count(1)

    def marking(function: Callable[..., Any], *_: Any, **__: Any) -> Iterator[None]:
        with fx_traceback.annotate({CHECKPOINT_KEY: next(numbers)}):
            yield

    originals = {name: f for name in _GENERATORS if (f := getattr(torch_checkpoint, name, None))}
    assert originals, "torch.utils.checkpoint has changed: a checkpoint would go unnoticed"
    try:
        for name in originals:
            setattr(torch_checkpoint, name, marking)
        yield
    finally:
        for name, original in originals.items():
            setattr(torch_checkpoint, name, original)


def mark_checkpoints(graph: fx.Graph) -> None:
    """Tells the partitioner to do the forward nodes of checkpointed regions again in backward."""
    for node in graph.nodes:
        region = (node.meta.get("custom") or {}).get(CHECKPOINT_KEY)
        forward = node.meta.get("partitioner_tag") == "is_forward"
        if region is not None and forward and node.op == "call_function":
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta.setdefault("ac_graph_id", region)
