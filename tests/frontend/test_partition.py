"""What is saved between forward and backward: shards instead of gathered tensors, by policy."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import (
    Block,
    Function,
    Model,
    bits,
    gradients,
    least_memory,
    local,
    parallelise,
    parallelise_block,
    world_mesh,
)
from tests.support.pool import Pool
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.cost import Machine, default_machine
from interlace.errors import OptionError
from interlace.frontend.backend import compiling
from interlace.frontend.binding import Bound
from interlace.frontend.partition import Partition, saved_bytes
from interlace.ir import Collective, View
from interlace.options import Options
from interlace.torch_private.dynamo import aot_autograd, min_cut_rematerialization_partition

BATCH, LENGTH, DIM = 2, 8, 16


def saved_by(forward: Bound) -> int:
    """Bytes of activations that the forward keeps: fresh buffers beyond its one output."""
    program = forward.program
    buffers = program.buffers()
    names = {arg.buffer for arg in program.returned()[1:] if isinstance(arg, View)}
    return sum(
        prod(size for size in buffers[name].shape if isinstance(size, int))
        * buffers[name].dtype.itemsize
        for name in names
        if buffers[name].kind == "fresh"
    )


def gathers(bound: Bound) -> int:
    """The all-gathers of the serial Program."""
    return sum(isinstance(op, Collective) and op.kind == "all_gather" for op in bound.serial.ops)


def policies(checkpointed: bool) -> dict[str, tuple[int, int, int, dict[str, bytes]]]:
    """A block with memory for all, and with the least that a refusal names; where the user has no
    checkpoint, `auto` as well: what is saved, gathers forward and backward, gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found: dict[str, tuple[int, int, int, dict[str, bytes]]] = {}

    def compiled_with(memory: Any) -> tuple[Any, Any, torch.Tensor]:
        torch.manual_seed(0)
        block: Any = parallelise_block(Block(DIM, 4, 2 * DIM), mesh)
        x = torch.randn(BATCH, LENGTH // dist.get_world_size(), DIM).requires_grad_()

        def call(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)

        options = Options(memory=memory, overlap=False)
        fn = Function(call, block)
        return interlace.compile(fn, x, mesh=mesh, options=options), block, x

    least = least_memory(compiled_with)
    memories: dict[str, Any] = {"kept": 1 << 40, "again": least}
    if not checkpointed:
        memories["auto"] = "auto"
    for name, memory in memories.items():
        compiled, block, x = compiled_with(memory)
        (compiled(x) ** 2).sum().backward()
        forward, backward = compiled.bound
        grads = {**gradients(block), "x": local(x.grad)}
        found[name] = (saved_by(forward), gathers(forward), gathers(backward), bits(grads))
        compiled.close()
    assert found["again"][0] == least, "the refusal named another number"
    if not checkpointed:
        told = f"option memory={least - 1}: .* give memory={least} "
        with pytest.raises(OptionError, match=told):
            compiled_with(least - 1)
    return found


def test_gathering_again_saves_the_shard(pool: Pool) -> None:
    for found in pool(2).run(policies, False):
        kept, again = found["kept"], found["again"]
        # two gathers feed QKV and gate/up; backward gathers them again, beside its own two
        assert kept[1:3] == (2, 2)
        assert again[1:3] == (2, 4)
        gathered = BATCH * LENGTH * DIM * 4
        assert kept[0] - again[0] >= gathered  # two whole tensors less, two halves more
        assert kept[3] == again[3] == found["auto"][3], "gathering again changed a gradient"


class Gathers(TorchDispatchMode):
    """Counts the all-gathers that eager issues."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator itself; a DTensor's comes again as those of what it holds."""
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        self.count += str(func) == "_c10d_functional.all_gather_into_tensor.default"
        return func(*args, **(kwargs or {}))


def eager_gathers() -> tuple[int, int]:
    """The all-gathers of eager, forward and backward, under the user's checkpoint."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    block: Any = parallelise_block(Block(DIM, 4, 2 * DIM), mesh)
    x = torch.randn(BATCH, LENGTH // dist.get_world_size(), DIM).requires_grad_()
    with Gathers() as forward:
        y = checkpoint(block, x, use_reentrant=False)
    with Gathers() as backward:
        (y**2).sum().backward()
    return forward.count, backward.count


def test_users_checkpoint_goes_first(pool: Pool) -> None:
    """Its block runs again in backward, and issues as many gathers there as in eager."""
    eager = pool(2).run(eager_gathers)[0]
    for found in pool(2).run(policies, True):
        kept, again = found["kept"], found["again"]
        assert kept[:3] == again[:3], "the policy changed what the user decided"
        assert kept[3] == again[3]
        assert kept[1:3] == eager == (2, 4), "the user's checkpoint did not recompute the block"


def memory_that_changes(seed: int) -> None:
    """What is gathered is written afterwards: backward must not gather it again."""
    import torch.distributed._functional_collectives as funcol

    group: Any = dist.group.WORLD

    def fn(memory: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = funcol.all_gather_tensor_autograd(memory * 2, 0, group) @ w
        z = funcol.all_gather_tensor_autograd(memory, 0, group) @ w
        memory.mul_(0.5).add_(1)
        return y.square().sum() + z.square().sum()

    torch.manual_seed(seed + dist.get_rank())
    first, w = torch.randn(4, DIM), torch.randn(DIM, 8)
    found: list[torch.Tensor | None] = []
    memory, weight = torch.zeros(4, DIM), w.clone().requires_grad_()
    least = least_memory(
        lambda least: interlace.compile(Function(fn), memory, weight, options=Options(memory=least))
    )
    for call in (fn, interlace.compile(Function(fn), options=Options(memory=least))):
        memory, weight = first.clone(), w.clone().requires_grad_()
        call(memory, weight).backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_what_forward_writes_is_not_gathered_again(pool: Pool, seed: int) -> None:
    pool(2).run(memory_that_changes, seed)


@pytest.mark.parametrize(("bandwidth", "wanted"), [(1e15, 1), (1.0, 0)], ids=["fast", "slow"])
def test_auto_asks_the_machine(pool: Pool, bandwidth: float, wanted: int) -> None:
    assert pool(2).run(marked_by_auto, bandwidth) == [wanted] * 2


def test_ranks_with_uneven_weights_decide_alike(pool: Pool) -> None:
    """On rank 0 alone the matmul is long enough to hide the gather."""
    assert pool(2).run(marked_by_auto, 5e8, (16_000, 16_000)) == [1, 1]
    assert pool(2).run(marked_by_auto, 5e8, (16_000, 1)) == [0, 0]


def marked_by_auto(bandwidth: float, columns: tuple[int, ...] = (DIM, DIM)) -> int:
    """How many gathers `auto` marks on a machine with such links."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    machine = _with_links(default_machine("cpu"), bandwidth)
    marked: list[int] = []

    class Counting(Partition):
        def mark(self, graph: Any, saved: Any) -> Any:
            found = super().mark(graph, saved)
            marked.append(len(found))
            return found

    import torch.distributed._functional_collectives as funcol
    from torch._functorch.aot_autograd import aot_function

    w = torch.randn(DIM, columns[dist.get_rank()]).requires_grad_()

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor_autograd(x, 0, mesh["tp"]) @ w

    def nothing(gm: Any, example_inputs: Any) -> Any:
        return gm

    x = torch.randn(4, DIM).requires_grad_()
    aot_function(fn, nothing, nothing, partition_fn=Counting("auto", machine))(x, w)
    return marked[0]


def marked_within(budget: int) -> list[str]:
    """The gathers that are done again within a budget: of `x` its matmul hides that, of `y` not."""
    import torch.distributed._functional_collectives as funcol
    from torch._functorch.aot_autograd import aot_function

    group: Any = dist.group.WORLD
    marked = list[str]()

    class Naming(Partition):
        def mark(self, graph: Any, saved: Any) -> Any:
            found = super().mark(graph, saved)
            marked.extend(str(node.args[0]) for node in found)
            return found

    def fn(y: torch.Tensor, x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        one = funcol.all_gather_tensor_autograd(y, 0, group) @ v
        return one.sum() + (funcol.all_gather_tensor_autograd(x, 0, group) @ w).sum()

    args = [torch.randn(*size).requires_grad_() for size in ((4, DIM), (4, DIM), (DIM, 1))]
    machine = _with_links(default_machine("cpu"), 5e8)
    cut = Naming(budget, machine)
    w = torch.randn(DIM, 16_000).requires_grad_()
    as_traced: Any = lambda gm, _: gm  # noqa: E731
    compiled: Any = aot_function(fn, as_traced, as_traced, partition_fn=cut)
    compiled(*args, w)
    return marked


def test_a_budget_gathers_again_where_that_is_cheapest(pool: Pool) -> None:
    each = 8 * DIM * 4  # of two ranks
    budgets = {2 * each: [], 2 * each - 1: ["primals_2"], each: ["primals_2"]}
    budgets |= {each - 1: ["primals_1", "primals_2"], 0: ["primals_1", "primals_2"]}
    for budget, names in budgets.items():
        assert pool(2).run(marked_within, budget) == [names] * 2


def saved_by_auto(layers: int, bandwidths: tuple[float, ...]) -> list[tuple[int, int]]:
    """Bytes that `auto` saves in a model of so many blocks on machines with such links, and those
    that torch would."""
    found = list[tuple[int, int]]()

    def cut(joint: fx.GraphModule, joint_inputs: object, **given: Any) -> Any:
        def copied() -> fx.GraphModule:
            return fx.GraphModule(joint, copy.deepcopy(joint.graph))

        theirs, _ = min_cut_rematerialization_partition(copied(), joint_inputs, **given)
        graphs, count = None, given["num_fwd_outputs"]
        for bandwidth in bandwidths:
            partition = Partition(machine=_with_links(default_machine("cuda"), bandwidth))
            graphs = partition(copied(), joint_inputs, **given)
            found.append((saved_bytes(graphs[0].graph, count), saved_bytes(theirs.graph, count)))
        return graphs

    model = parallelise(Model(layers), world_mesh())
    compilers: dict[str, Any] = dict.fromkeys(("fw_compiler", "bw_compiler"), lambda gm, _: gm)
    with compiling():
        call = torch.compile(model, backend=aot_autograd(**compilers, partition_fn=cut))
        call(torch.randint(32, (2, 8))).sum().backward()
    return found


def test_auto_saves_no_more_than_torch(pool: Pool) -> None:
    for (ours, theirs), (slow, same) in pool(2).run(saved_by_auto, 2, (1e15, 1.0)):
        assert ours < theirs, "gathers that matmuls hide are done again"
        assert slow <= same


def _with_links(machine: Machine, bandwidth: float) -> Machine:
    import dataclasses

    links = tuple(
        (name, dataclasses.replace(link, bandwidth=bandwidth, latency_s=1.0 / bandwidth))
        for name, link in machine.links
    )
    return machine.replace(links=links)


def compile_again_and_again() -> list[int]:
    """Keys of the store after each of a few shapes, about which ranks agree while they compile."""
    from torch.distributed._functional_collectives import (
        all_gather_tensor_autograd,
        all_to_all_single_autograd,
    )

    torch.compiler.reset()
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    world = dist.get_world_size()
    tp = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)).get_group("tp")

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = all_gather_tensor_autograd(x, 0, tp) @ w
        return all_to_all_single_autograd(full, [x.shape[0]] * world, [x.shape[0]] * world, tp)

    compiled = torch.compile(fn, backend="interlace", dynamic=False)
    w, found = torch.randn(DIM, DIM, requires_grad=True), list[int]()
    for rows in range(2, 8):
        compiled(torch.randn(rows, DIM, requires_grad=True), w).sum().backward()
        dist.barrier()
        found.append(store.num_keys())
        dist.barrier()
    return found


def test_compiling_more_shapes_leaves_no_more_keys_behind(pool: Pool) -> None:
    for keys in pool(2).run(compile_again_and_again, replace=True):
        assert keys[-1] <= keys[2], keys
