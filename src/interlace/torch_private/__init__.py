"""Every private name of torch that Interlace uses, each with the reason for it.

No other file of the package imports or reads one (tests/test_torch_private.py looks for them, and
tests each name on the installed torch), so that a new version of torch is one place to look at:

    from interlace.torch_private import process_groups

Here is what `import torch` loads anyway. Read on in `distributed` (DTensor's and the collectives'
parts), `dynamo` (TorchDynamo and AOTAutograd) and `inductor`, which load more, and which only what
uses them imports. Private attributes of a user's own objects (`tensor._version`,
`tensor._local_tensor`, `module._parameters`) stay where they are read.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._guards import TracingContext as TracingContext
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._guards import tracing as tracing
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.utils import _pytree as pytree  # noqa: F401  # the public one knows other types
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

# -- calls and modes -------------------------------------------------------------------------------

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Reads a Parameter of a subclass without its `__torch_function__`."""
DisableAutocast = torch._C._DisableAutocast
"""Runs what was compiled with the dtypes that it was compiled for."""
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""One question for all devices, on the way of every call."""
are_functorch_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Under `torch.func` a layer runs in plain torch."""
len_torch_dispatch_stack: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Number of dispatch modes, which must see each operator by itself."""
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Switch without a context manager, for hot paths."""
has_kernel_for_dispatch_key: Callable[[str, Any], bool] = (
    torch._C._dispatch_has_kernel_for_dispatch_key
)
"""Tells operators that torch takes apart by itself."""
find_operator: Callable[[str, str], Any] = torch._C._dispatch_find_schema_or_throw
"""Handle of an operator by its name; RuntimeError where torch has none of it."""
sympy_handlers: Callable[[], dict[Any, Any]] = (
    torch.fx.experimental.proxy_tensor._sympy_handlers  # a product of three symbols needs another
)
ConvNd: type[nn.Module] = nn.modules.conv._ConvNd
"""Base of all convolutions."""


def quick_empty_strided(device_type: str) -> Callable[..., torch.Tensor] | None:
    """Returns the allocation that Inductor's code calls, in half the time of `empty_strided`."""
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}", None)


# -- autograd --------------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that runs on this thread; -1 outside one."""
will_engine_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Tells which Parameters get a gradient in the backward that runs."""


def keeps_graph() -> bool:
    """True unless the backward that runs is known to be the last of its graph."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is None or bool(keeps())


def forward_ad_level() -> int:
    """Level of forward-mode differentiation; -1 outside it."""
    return torch.autograd.forward_ad._current_level


# -- operators whose public form is slower or absent -----------------------------------------------

grouped_mm: Callable[..., torch.Tensor] = torch._grouped_mm
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
foreach_add_: Callable[..., None] = torch._foreach_add_
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_lerp: Callable[..., Sequence[torch.Tensor]] = torch._foreach_lerp
foreach_lerp_: Callable[..., None] = torch._foreach_lerp_
foreach_mul_: Callable[..., None] = torch._foreach_mul_

# -- CUDA: names that a build of torch for CPUs lacks ----------------------------------------------


cuda_stream: Callable[[int], tuple[int, int, int]] | None
cuda_stream = getattr(torch._C, "_cuda_getCurrentStream", None)
"""Current stream of a device, without an object around it; around each operator on a stream."""
set_cuda_stream: Callable[..., None] | None = getattr(torch._C, "_cuda_setStream", None)
"""Makes a stream the current one, without a context manager."""


def cuda_device() -> int:
    """Number of the current device, without the checks of `torch.cuda.current_device`."""
    return torch._C._cuda_getDevice()


def cuda_raw_stream(device: int) -> int:
    """Handle of the current stream of a device."""
    return torch._C._cuda_getCurrentRawStream(device)


def is_cuda_stream_capturing() -> bool:
    """True while the current stream is captured in a graph; makes a context on a new thread."""
    return torch._C._cuda_isCurrentStreamCapturing()


def storage_at(address: int, device: torch.device, nbytes: int) -> Any:
    """Storage over memory that torch did not allocate."""
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Tensors that have a storage, and its Python object: who else holds results of a CUDA graph."""


def storage_behind(pointer: int) -> torch.UntypedStorage | None:
    """The storage of a `StorageWeakRef`, if there still is one."""
    return torch.UntypedStorage._new_with_weak_ptr(pointer)


def cuda_sleep(cycles: int) -> None:
    """Keeps the current stream busy for a number of cycles."""
    torch.cuda._sleep(cycles)


# -- process groups --------------------------------------------------------------------------------


def process_groups() -> list[dist.ProcessGroup]:
    """Process groups that live in this process."""
    return [*dist.distributed_c10d._world.pg_map]


def live_groups() -> Any:
    """A collection of this process's groups, at any time: torch changes it in place."""
    return dist.distributed_c10d._world.pg_map


def is_process_group(group: dist.ProcessGroup | None) -> bool:
    """True if a process group lives in this process."""
    return group in live_groups()


def default_group() -> dist.ProcessGroup:
    """Default process group; RuntimeError where there is none."""
    return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """Store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """Process group of the name that graphs of functional collectives hold."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


def abort_process_group() -> None:
    """Ends the default process group without waiting for its other ranks."""
    dist.distributed_c10d._abort_process_group()


def group_name(group: dist.ProcessGroup) -> str:
    """Name of a process group here; of a Python class, which torch's own property has none of."""
    return dist.distributed_c10d._world.pg_names[group]


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Backend of a process group for a device; RuntimeError where it has none."""
    return group._get_backend(device)


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Backends of a process group, one for each type of device."""
    return [group._get_backend(device) for device in group._device_types]


def uses_agents_store() -> bool:
    """True if torchrun's agent, and no rank, holds the store."""
    from torch.distributed.rendezvous import _torchelastic_use_agent_store

    return _torchelastic_use_agent_store()


def flight_records() -> dict[str, str]:
    """JSON of the collectives that this process recorded, by library, where torch was built so."""
    from torch._C import _distributed_c10d

    dumps = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
    there = {library: getattr(_distributed_c10d, name, None) for library, name in dumps.items()}
    return {library: dump() for library, dump in there.items() if dump is not None}
