"""Private names of Inductor, by which a region is compiled without the wrapper that
`standalone_compile` puts around it (20 microseconds a call).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes as joint_graph_passes
from torch._inductor.utils import BoxedBool as BoxedBool
from torch._inductor.virtualized import V as V

inductor_config = inductor_config


def size_symbol(mode: Any, name: str, value: int) -> torch.SymInt:
    """A size of any value from 2 on, of which `value` is one, for the fake tensors of a mode."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    how = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    one = torch.empty(value, device="meta")
    return mode.from_tensor(one, symbolic_context=how, source=ConstantSource(name)).shape[0]
