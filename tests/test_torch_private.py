"""Private names of torch: none is used but through `interlace.torch_private`, and each does there
what Interlace counts on, in the installed torch."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.multiprocessing.reductions import StorageWeakRef

import interlace
from interlace import torch_private as private
from interlace.runtime.calling.regions import compile_graph
from interlace.torch_private import caches, distributed, dynamo, inductor
from interlace.torch_private import testing as from_tests

SOURCE = Path(interlace.__file__).parents[1]


def is_private(names: list[str]) -> bool:
    return any(name.startswith("_") and not name.startswith("__") for name in names)


def private_uses(tree: ast.Module) -> list[str]:
    """Imports of private names of torch, and attributes of its modules that are private."""
    uses: list[str] = []
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    if is_private(alias.name.split(".")):
                        uses.append(f"line {node.lineno}: import {alias.name}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                modules[alias.asname or alias.name] = full
                if is_private(full.split(".")):
                    uses.append(f"line {node.lineno}: from {node.module} import {alias.name}")
    for node in ast.walk(tree):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id in modules and is_private(names):
            uses.append(f"line {node.lineno}: {modules[node.id]}.{'.'.join(names)}")
    return uses


def launches_directly() -> bool:
    """What Inductor compiled is called without torch's wrapper around it, on the CPU at least."""
    graph = torch.fx.symbolic_trace(lambda x: (torch.ops.aten.add.Tensor(x, 1.0),))
    compiled = compile_graph(graph, [((4,), (1,), torch.float32)], torch.device("cpu"))
    run: Any = inductor.launched_directly(compiled)
    (y,) = run([torch.zeros(4)])
    return run.__self__ is compiled.current_callable.__self__ and y.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C._set_grad_enabled(True)",
        "from torch.distributed import distributed_c10d as c10d\nc10d._get_default_store()",
        "from torch._guards import tracing",
        "import torch.utils._pytree as pytree",
        "def f():\n    from torch.distributed.rendezvous import _x",
    ],
)
def test_private_uses_are_seen(text: str) -> None:
    assert private_uses(ast.parse(text))


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    found = {
        f"{path.relative_to(SOURCE)}: {use}"
        for package in ("interlace", "interlace_check", "interlace_bench")
        for path in sorted((SOURCE / package).rglob("*.py"))
        if path.parent.name != "torch_private"
        for use in private_uses(ast.parse(path.read_text()))
    }
    assert not found, "\n".join(sorted(found))


# -- what each name does ---------------------------------------------------------------------------


def takes(function: Callable[..., Any], *names: str) -> bool:
    """True if a function has parameters of these names, or takes any keywords."""
    parameters = inspect.signature(function).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return anything or set(names) <= parameters.keys()


def has(cls: object, *names: str) -> bool:
    return all(hasattr(cls, name) for name in names)


def in_backward(look: Callable[[], Any]) -> Any:
    """Result of `look` while a backward runs."""
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(look()))
    y.sum().backward()
    return seen[0]


def node_runs() -> bool:
    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    nodes = [t.expand_as(t).grad_fn.next_functions[0][0] for t in (x, other)]  # type: ignore[union-attr]
    y, seen = x * other.detach(), list[bool]()
    y.register_hook(lambda grad: seen.append(private.will_engine_execute_node(nodes[0])))
    y.sum().backward()
    return seen == [True]


def on_gpus(name: str) -> Callable[[], bool]:
    """A check that a machine with a GPU has a name, which builds for CPUs lack."""
    return lambda: hasattr(torch._C, name) or not torch.cuda.is_available()


def under_autocast() -> bool:
    with torch.autocast("cpu", torch.bfloat16):
        inside = private.is_any_autocast_enabled()
        with private.DisableAutocast():
            off = private.is_any_autocast_enabled()
    return inside and not off and not private.is_any_autocast_enabled()


def under_functorch() -> bool:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.are_functorch_transforms_active())
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    return seen == [True] and not private.are_functorch_transforms_active()


def modes() -> bool:
    with private.FakeTensorMode():
        inside = private.len_torch_dispatch_stack()
    return inside == 1 and private.len_torch_dispatch_stack() == 0


def weak_storages() -> bool:
    storage = torch.empty(2).untyped_storage()
    ref = StorageWeakRef(storage)
    again = private.storage_behind(ref.cdata)
    alive = again is not None and again.data_ptr() == storage.data_ptr()
    del storage, again
    return alive and private.storage_behind(ref.cdata) is None


def counts_holders() -> bool:
    """Each tensor is one, whatever refers to it, and the storage's object is one."""
    tensor = torch.ones(4)
    storage = tensor.untyped_storage()
    counts = [private.storage_use_count(storage._cdata)]
    view, weight = tensor.data, torch.ones(4, requires_grad=True)
    counts.append(private.storage_use_count(storage._cdata))
    saved = (weight * view).sum()
    del view
    counts.append(private.storage_use_count(storage._cdata))
    del saved
    tensor.untyped_storage()
    counts.append(private.storage_use_count(storage._cdata))
    return counts == [2, 3, 3, 2]


def gradients_off() -> bool:
    private.set_grad_enabled(False)
    off = not torch.is_grad_enabled()
    private.set_grad_enabled(True)
    return off and torch.is_grad_enabled()


def fakes() -> bool:
    with private.FakeTensorMode() as mode:
        fake = torch.empty(2)
        with private.unset_fake_temporarily():
            real = torch.empty(2)
    found = private.detect_fake_mode([fake])
    return isinstance(fake, private.FakeTensor) and type(real) is torch.Tensor and found is mode


def contexts() -> bool:
    context = private.TracingContext(private.FakeTensorMode())
    with private.tracing(context):
        return private.TracingContext.try_get() is context


def forward_level() -> bool:
    before = private.forward_ad_level()
    with torch.autograd.forward_ad.dual_level():
        return before < 0 <= private.forward_ad_level()


def without_subclass() -> bool:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("asked")

    loud = torch.ones(2).as_subclass(Loud)
    with private.DisableTorchFunctionSubclass():
        return bool(loud.sum() == 2)


def foreach() -> bool:
    x, y = [torch.zeros(2)], [torch.ones(2)]
    private.foreach_add_(x, y, alpha=2)
    private.foreach_mul_(x, 3)
    private.foreach_lerp_(x, y, 0.5)
    (z,) = private.foreach_lerp(x, y, 1.0)
    private.foreach_copy_(y, x)
    return x[0].tolist() == y[0].tolist() == [3.5, 3.5] and z.tolist() == [1, 1]


def multiplies_groups() -> bool:
    x, w = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(2, 16, 16, dtype=torch.bfloat16)
    y = private.grouped_mm(x, w, offs=torch.tensor([1, 3], dtype=torch.int32))
    return y.tolist() == [[16] * 16] * 3


def multiplies_fp8() -> bool:
    x = torch.ones(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())
    y = private.scaled_mm(x, x.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return y.tolist() == [[16] * 16] * 16


def groups(store: dist.Store) -> bool:
    live = private.live_groups()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = private.default_group()
        backend = private.backend_of(group, torch.device("cpu"))
        return (
            private.process_groups() == [group]
            and private.is_process_group(group)
            and group in live
            and set(private.backends_of(group)) == {backend}
            and backend.name() == "gloo"
            and private.default_store() is not None
            and private.resolve_process_group(group.group_name) is group
            and private.group_name(group) == group.group_name
            and private.flight_records().keys() <= {"nccl", "gloo"}
            and not private.uses_agents_store()
        )
    finally:
        dist.destroy_process_group()
        assert not live


def aborts(store: dist.Store) -> bool:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    private.abort_process_group()
    return not dist.is_initialized()


def finds_operators() -> bool:
    private.find_operator("aten::add", "Tensor")
    with pytest.raises(RuntimeError):
        private.find_operator("aten::ad", "Tensor")
    return True


def allocates() -> bool:
    allocate = private.quick_empty_strided("cpu")
    return allocate is None or allocate((2,), (1,), torch.float32).shape == (2,)


def process_groups() -> bool:
    return groups(dist.HashStore())


SHARED: dict[Callable[[], bool], str] = {
    fakes: "FakeTensor FakeTensorMode detect_fake_mode unset_fake_temporarily",
    foreach: "foreach_add_ foreach_copy_ foreach_lerp foreach_lerp_ foreach_mul_",
    process_groups: "backend_of backends_of default_group default_store flight_records group_name "
    "is_process_group live_groups process_groups resolve_process_group uses_agents_store",
    contexts: "TracingContext tracing",
    under_autocast: "DisableAutocast is_any_autocast_enabled",
}
"""Checks of several names."""
add = torch.ops.aten.add.Tensor


def caches_are_told() -> bool:
    told: list[bool] = []
    for on, disabled in ((True, False), (True, True), (False, False)):
        config = SimpleNamespace(enable_autograd_cache=on)
        with (
            mock.patch.object(caches, "functorch_config", config),
            torch.compiler.config.patch(force_disable_caches=disabled),  # pyright: ignore
        ):
            told.append(caches.are_graphs_cached())
    return told == [True, False, False]


CHECKS: dict[ModuleType, dict[str, Callable[[], Any]]] = {
    private: {
        **{name: check for check, names in SHARED.items() for name in names.split()},
        "ConvNd": lambda: isinstance(nn.Conv2d(1, 1, 1), private.ConvNd),
        "DataDependentOutputException": lambda: issubclass(
            private.DataDependentOutputException, Exception
        ),
        "DisableTorchFunctionSubclass": without_subclass,
        "DynamicOutputShapeException": lambda: issubclass(
            private.DynamicOutputShapeException, Exception
        ),
        "FunctionalTensor": lambda: issubclass(private.FunctionalTensor, torch.Tensor),
        "HigherOrderOperator": lambda: (
            isinstance(torch.cond, object) and has(private.HigherOrderOperator, "__call__")
        ),
        "OpOverload": lambda: isinstance(add, private.OpOverload),
        "OpOverloadPacket": lambda: isinstance(torch.ops.aten.add, private.OpOverloadPacket),
        "abort_process_group": lambda: aborts(dist.HashStore()),
        "are_functorch_transforms_active": under_functorch,
        "cuda_device": on_gpus("_cuda_getDevice"),
        "cuda_raw_stream": on_gpus("_cuda_getCurrentRawStream"),
        "cuda_sleep": lambda: callable(torch.cuda._sleep),
        "cuda_stream": on_gpus("_cuda_getCurrentStream"),
        "current_graph_task_id": lambda: (
            in_backward(private.current_graph_task_id) >= 0 > private.current_graph_task_id()
        ),
        "enable_python_dispatcher": lambda: has(private.enable_python_dispatcher, "__enter__"),
        "find_operator": finds_operators,
        "forward_ad_level": forward_level,
        "grouped_mm": multiplies_groups,
        "has_kernel_for_dispatch_key": lambda: private.has_kernel_for_dispatch_key(
            "aten::matmul", "CompositeImplicitAutograd"
        ),
        "is_cuda_stream_capturing": on_gpus("_cuda_isCurrentStreamCapturing"),
        "is_process_group": lambda: groups(dist.HashStore()),
        "is_traceable_wrapper_subclass": lambda: (
            not private.is_traceable_wrapper_subclass(torch.ones(1))
        ),
        "keeps_graph": lambda: not in_backward(private.keeps_graph),
        "len_torch_dispatch_stack": modes,
        "pytree": lambda: private.pytree.tree_flatten([1, {"a": 2}])[0] == [1, 2],
        "quick_empty_strided": allocates,
        "scaled_mm": multiplies_fp8,
        "set_cuda_stream": on_gpus("_cuda_setStream"),
        "set_grad_enabled": gradients_off,
        "storage_behind": weak_storages,
        "storage_use_count": counts_holders,
        "storage_at": lambda: callable(torch._C._construct_storage_from_data_pointer),
        "sympy_handlers": lambda: len(private.sympy_handlers()) > 3,
        "will_engine_execute_node": node_runs,
    },
    distributed: {
        "AsyncCollectiveTensor": lambda: has(distributed.AsyncCollectiveTensor, "wait"),
        "CHECKPOINT_PREFIX": lambda: distributed.CHECKPOINT_PREFIX == "_checkpoint_wrapped_module.",
        "DeviceType": lambda: has(distributed.DeviceType, "CUDA"),
        "StridedShard": lambda: distributed.StridedShard(0, split_factor=2).split_factor == 2,
        "SymmetricMemory": lambda: has(
            distributed.SymmetricMemory, "empty_strided_p2p", "rendezvous", "has_multicast_support"
        ),
        "compute_local_shape_and_global_offset": lambda: takes(
            distributed.compute_local_shape_and_global_offset, "global_shape", "mesh", "placements"
        ),
        "functional": lambda: has(
            distributed.functional,
            *("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "wait_tensor"),
        ),
    },
    dynamo: {
        "GraphModuleSerializableCallable": lambda: has(
            dynamo.GraphModuleSerializableCallable, "deserialize_compile_artifacts"
        ),
        "SerializableCallable": lambda: has(
            dynamo.SerializableCallable, "serialize_compile_artifacts"
        ),
        "DeletedGuardManagerWrapper": lambda: isinstance(dynamo.DeletedGuardManagerWrapper, type),
        "GuardBuilder": lambda: has(dynamo.GuardBuilder, "TENSOR_MATCH"),
        "InstructionTranslator": lambda: has(dynamo.InstructionTranslator, "current_tx"),
        "OptimizedModule": lambda: issubclass(dynamo.OptimizedModule, nn.Module),
        "ShortenTraceback": lambda: issubclass(dynamo.ShortenTraceback, Exception),
        "TensorProperty": lambda: has(dynamo.TensorProperty, "SIZE"),
        "TensorPropertySource": lambda: takes(dynamo.TensorPropertySource, "base", "prop", "idx"),
        "AttrSource": lambda: takes(dynamo.AttrSource, "base", "member"),
        "NNModuleSource": lambda: takes(dynamo.NNModuleSource, "base"),
        "aot_autograd": lambda: takes(dynamo.aot_autograd, "fw_compiler", "bw_compiler"),
        "aot_module_simplified": lambda: takes(dynamo.aot_module_simplified, "mod", "fw_compiler"),
        "assume_constant_result": lambda: dynamo.assume_constant_result(modes) is modes,
        "boxed_nop": lambda: takes(dynamo.boxed_nop, "fx_g"),
        "callback_handler": lambda: has(dynamo.callback_handler, "register_start_callback"),
        "dynamo_config": lambda: has(dynamo.dynamo_config, "disable", "patch"),
        "functorch_config": lambda: has(dynamo.functorch_config, "patch"),
        "innermost_backend": lambda: dynamo.innermost_backend(modes) is modes,  # type: ignore[arg-type]
        "functorch_aot": lambda: (
            list(inspect.signature(dynamo.functorch_aot.aot_stage2_compile).parameters)[3:]
            == ["fw_compiler", "bw_compiler", "inference_compiler"]
        ),
        "innermost_fn": lambda: dynamo.innermost_fn(modes) is modes,
        "list_backends": lambda: "inductor" in dynamo.list_backends(),
        "min_cut_rematerialization_partition": lambda: takes(
            dynamo.min_cut_rematerialization_partition, "joint_module", "num_fwd_outputs"
        ),
    },
    inductor: {
        "ALIGNMENT": lambda: inductor.ALIGNMENT == 16,
        "BoxedBool": lambda: not inductor.BoxedBool(False),
        "CachingAutotuner": lambda: takes(inductor.CachingAutotuner.run, "stream"),
        "CustomGraphPass": lambda: has(inductor.CustomGraphPass, "uuid"),
        "V": lambda: has(inductor.V, "set_fake_mode"),
        "compile_fx_inner": lambda: takes(inductor.compile_fx_inner, "gm", "example_inputs"),
        "inductor_config": lambda: isinstance(inductor.inductor_config.get_hash(), str | bytes),
        "joint_graph_passes": lambda: takes(inductor.joint_graph_passes, "graph"),
        "launched_directly": lambda: launches_directly(),
        "size_symbol": lambda: (
            not isinstance(
                inductor.size_symbol(private.FakeTensorMode(shape_env=ShapeEnv()), "S", 7), int
            )
        ),
        "select_decomp_table": lambda: (
            torch.ops.aten.addmm.default in inductor.select_decomp_table()
        ),
    },
    caches: {
        "CacheArtifact": lambda: has(caches.CacheArtifact, "populate_cache", "type", "encode"),
        "CacheArtifactFactory": lambda: takes(caches.CacheArtifactFactory.register, "artifact_cls"),
        "CacheArtifactManager": lambda: takes(
            caches.CacheArtifactManager.record_artifact, "artifact_type", "key", "content"
        ),
        "are_graphs_cached": caches_are_told,
        "functorch_config": lambda: has(caches.functorch_config, "enable_autograd_cache"),
        "cache_dir": lambda: Path(caches.cache_dir()).is_dir(),
    },
    from_tests: {
        "PipelineScheduleRuntime": lambda: takes(
            from_tests.PipelineScheduleRuntime._prepare_schedule_with_comms, "actions"
        ),
        "fake_pg": lambda: has(from_tests.fake_pg, "FakeStore"),
    },
}


@pytest.mark.parametrize(
    ("module", "name"),
    [pytest.param(module, name, id=name) for module, names in CHECKS.items() for name in names],
)
def test_a_private_name_does_what_is_counted_on(module: ModuleType, name: str) -> None:
    assert CHECKS[module][name]()


@pytest.mark.parametrize("module", CHECKS, ids=lambda module: module.__name__)
def test_each_private_name_has_a_check(module: ModuleType) -> None:
    own = {"Any", "Callable", "Sequence", "FunctionType", "MethodType"}
    own |= {"annotations", "torch", "dist", "nn"}
    submodules = {"caches", "distributed", "dynamo", "inductor", "testing"}
    names = {name for name in vars(module) if not name.startswith("_")}
    assert names - own - submodules == CHECKS[module].keys()
