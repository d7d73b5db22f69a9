"""Private names of TorchDynamo and AOTAutograd: what a backend of `torch.compile` needs of them."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch._dynamo.aot_compile_types import (
    GraphModuleSerializableCallable as GraphModuleSerializableCallable,
)
from torch._dynamo.aot_compile_types import SerializableCallable as SerializableCallable
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.backends.debugging import boxed_nop as boxed_nop
from torch._dynamo.callback import callback_handler as callback_handler
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
from torch._dynamo.eval_frame import innermost_backend as innermost_backend
from torch._dynamo.eval_frame import innermost_fn as innermost_fn
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback
from torch._dynamo.guards import DeletedGuardManagerWrapper as DeletedGuardManagerWrapper
from torch._dynamo.guards import GuardBuilder as GuardBuilder
from torch._dynamo.source import AttrSource as AttrSource
from torch._dynamo.source import NNModuleSource as NNModuleSource
from torch._dynamo.source import TensorProperty as TensorProperty
from torch._dynamo.source import TensorPropertySource as TensorPropertySource
from torch._dynamo.symbolic_convert import InstructionTranslator as InstructionTranslator
from torch._functorch import aot_autograd as functorch_aot  # noqa: F401  # whose names are patched
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module_simplified as aot_module_simplified
from torch._functorch.partitioners import (
    min_cut_rematerialization_partition as min_cut_rematerialization_partition,
)

functorch_config = functorch_config
dynamo_config = torch._dynamo.config
assume_constant_result = torch._dynamo.assume_constant_result
list_backends = torch._dynamo.list_backends
