"""Ways of using the compiler beside training: `interlace.compile`, options, bounds.

Everything runs on real processes and is compared with the same function run eagerly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from tests.frontend.models import Function
from tests.support.pool import Pool
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import interlace
from interlace.demo.model import Transformer, parallelize
from interlace.demo.plan import ModelConfig
from interlace.errors import BackendError, UnsupportedError
from interlace.frontend import capture
from interlace.frontend.explain import explain_bound
from interlace.ir import Collective, Program, View


def mesh_of() -> DeviceMesh:
    """All ranks of the pool as one axis; what was compiled before is forgotten."""
    torch.compiler.reset()
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def whole(value: Any) -> Tensor:
    """A DTensor's shard, or the tensor itself; detached."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


# -- interlace.compile ---------------------------------------------------------------------------


def feed_forward(x: Any, up: Any, down: Any) -> Any:
    """Gather, two matmuls, scatter."""
    y: Any = F.relu(F.linear(x.redistribute(placements=[Replicate()]), up))
    y = F.linear(y, down)
    return y.redistribute(placements=[Shard(0)])


def arguments(mesh: DeviceMesh, rows: int = 8, grad: bool = True) -> list[Any]:
    """Small integers: rows sharded, the weights by columns and rows."""
    generator = torch.Generator().manual_seed(rows)
    sizes = {(rows, 8): Shard(0), (6, 8): Shard(0), (8, 6): Shard(1)}
    return [
        distribute_tensor(torch.randint(-2, 3, size, generator=generator).float(), mesh, [place])
        .requires_grad_(grad)
        for size, place in sizes.items()
    ]  # fmt: skip


# -- bounds --------------------------------------------------------------------------------------


def many_sizes(how: str, cache_size: int, sizes: int) -> tuple[int, int, bool]:
    """Calls of many sizes: the most Executors held at once, those at the end, and equality."""
    mesh = mesh_of()
    options = {"cache_size": cache_size, "timeout_s": 20.0}
    up, down = (whole(arg) for arg in arguments(mesh, grad=False)[1:])

    def fn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = F.linear(F.relu(F.linear(x, up)), down)
        return funcol.all_reduce(y, "sum", mesh.get_group("tp"))

    held, equal = [0], True
    with capture() as captured:
        if how == "interlace.compile":
            call: Any = interlace.compile(Function(fn), mesh=mesh, options=options)
        else:
            call = torch.compile(fn, backend="interlace", options=options, dynamic=True)
        for rows in [*range(2, 2 + sizes), 2, 2 + sizes - 1]:
            x = torch.arange(float(rows * 8)).view(rows, 8) % 5
            equal &= torch.equal(call(x, up, down), fn(x, up, down) + 0)
            held.append(len(captured.bound))
    return max(held), held[-1], equal


@pytest.mark.parametrize("how", ["torch.compile", "interlace.compile"])
def test_executors_of_many_sizes_are_bounded(pool: Pool, how: str) -> None:
    for most, last, equal in pool(2).run(many_sizes, how, 2, 5, timeout_s=90):
        assert equal
        assert most <= 3, "more than the two that the option allows (and one not yet dropped)"
        assert last == 2


# -- options -------------------------------------------------------------------------------------


def with_options(**options: Any) -> tuple[bool, str, list[str]]:
    """The feed-forward with options: equal to eager?, the Program's text, its sites' strategies."""
    mesh = mesh_of()
    args = arguments(mesh)
    call = interlace.compile(Function(feed_forward), *args, options={"timeout_s": 20.0, **options})
    equal = torch.equal(whole(call(*args)), whole(feed_forward(*args)))
    text, taken = str(call.program), [site.strategy for site in call.program.sites]
    call.close()
    return equal, text, taken


def transports(names: tuple[str, ...]) -> dict[str, tuple[bool, str]]:
    """The same Program on several transports: equal to eager, or the typed error."""
    found: dict[str, tuple[bool, str]] = {}
    for name in names:
        try:
            found[name] = (with_options(strategy="pipeline", transport=name)[0], "")
        except BackendError as error:
            found[name] = (False, str(error))
    return found


def test_the_transport_is_the_one_asked_for(pool: Pool) -> None:
    for found in pool(2).run(transports, ("auto", "gloo", "peer", "nccl", "ucc"), timeout_s=90):
        assert all(found[name] == (True, "") for name in ("auto", "gloo", "peer"))
        for name in ("nccl", "ucc"):
            equal, why = found[name]
            assert not equal
            assert f"'{name}' is not there" in why
            assert "choose gloo or peer" in why or "run" in why


def resharded() -> dict[str, tuple[bool, list[str]]]:
    """A gather before a cast to fewer bytes: what is gathered by position, and equality."""
    mesh = mesh_of()
    x, w, _ = arguments(mesh, grad=False)

    def fn(x: Any, w: Any) -> Any:
        return F.linear(x.redistribute(placements=[Replicate()]).to(torch.bfloat16), w)

    found: dict[str, tuple[bool, list[str]]] = {}
    given = (x, w.to(torch.bfloat16))
    wanted = whole(fn(*given))
    for position in ("auto", "before", "after"):
        options = {"resharding": position, "strategy": "serial", "timeout_s": 20.0}
        call = interlace.compile(Function(fn), *given, options=options)
        gathers = [op for op in call.program.ops if isinstance(op, Collective)]
        boxes = call.program.boxes(dist.get_rank())
        types = [str(boxes(op.src).dtype) for op in gathers if op.src]
        found[position] = (torch.equal(whole(call(*given)), wanted), types)
        call.close()
    return found


def test_a_gather_stands_where_the_option_says(pool: Pool) -> None:
    for found in pool(2).run(resharded):
        assert all(equal for equal, _ in found.values())
        types = {position: kinds for position, (_, kinds) in found.items()}
        assert types == {"auto": ["bf16"], "before": types["before"], "after": types["after"]}
        assert {*types["before"], *types["after"]} == {"bf16", "f32"}


def graph_on_cpu() -> str:
    """What asking for a CUDA graph on the CPU gives."""
    mesh = mesh_of()
    try:
        interlace.compile(Function(feed_forward), *arguments(mesh), options={"graph": True})
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_graph_on_the_cpu_is_refused(pool: Pool) -> None:
    for text in pool(2).run(graph_on_cpu):
        assert "graph=True captures CUDA graphs" in text


def test_static_outputs_without_a_graph_are_refused() -> None:
    with pytest.raises(interlace.errors.OptionError, match="graph=True"):
        interlace.Options(static_outputs=True)


# -- what is saved between forward and backward ---------------------------------------------------


def regather(choice: bool | str) -> dict[str, Any]:
    """Gradients, the sizes that forward leaves for backward, and backward's communications."""
    mesh = mesh_of()
    args = arguments(mesh, rows=16)
    options = {"regather": choice, "strategy": "peer", "timeout_s": 20.0}
    call = interlace.compile(Function(feed_forward), *args, options=options)
    y = call(*args)
    (y.to_local() ** 2).sum().backward()
    grads = [whole(arg.grad) for arg in args]
    forward, backward = call.bound
    boxes = forward.serial.boxes(dist.get_rank())
    returned = [view for view in forward.serial.returned() if isinstance(view, View)]
    left = [tuple(boxes(view).sizes) for view in returned]
    streams = {
        op.stream for op in backward.program.ops if "all_gather" in _kind(backward.program, op.site)
    }
    found = {
        "grads": [grad.tolist() for grad in grads],
        "saved": sorted(left[1:]),
        "gathers": sum(
            isinstance(op, Collective) and op.kind == "all_gather" for op in backward.serial.ops
        ),
        "streams": len(streams),
    }
    call.close()
    return found


def _kind(program: Program, site: int | None) -> str:
    return "" if site is None else program.site(site).kind


def test_backward_gathers_again_instead_of_saving(pool: Pool) -> None:
    keep, again = pool(2).run(regather, False), pool(2).run(regather, True)
    for kept, regathered in zip(keep, again, strict=True):
        assert kept["grads"] == regathered["grads"]
        assert (16, 8) in kept["saved"]
        assert (16, 8) not in regathered["saved"], "the gathered activation is saved"
        assert regathered["gathers"] == kept["gathers"] + 1
        assert regathered["streams"] > 1, "the gather of backward is not overlapped"


# -- every collective ----------------------------------------------------------------------------


def collectives_of_the_demo() -> list[tuple[int, int, list[tuple[str, str, str]], str]]:
    """For each graph: collectives, those without a site, (kind, strategy, reason), explain."""
    mesh = mesh_of()
    torch.manual_seed(0)
    config = ModelConfig(layers=2, dim=64, heads=4, hidden=128, sequence=64, batch=2)
    model = parallelize(Transformer(config), mesh)
    tokens = torch.randint(config.vocabulary, (config.batch, config.sequence))
    with capture() as captured:
        options: Any = {"timeout_s": 20.0, "strategy": "peer"}
        call = torch.compile(
            model, backend="interlace", options=options, fullgraph=True, dynamic=False
        )
        logits = call(tokens)
        logits.square().mean().backward()
        found: list[tuple[int, int, list[tuple[str, str, str]], str]] = []
        for bound in captured.bound:
            count = sum(isinstance(op, Collective) for op in bound.serial.ops)
            lost = sum(isinstance(op, Collective) and op.site is None for op in bound.program.ops)
            sites = [(site.kind, site.strategy, site.reason) for site in bound.program.sites]
            found.append((count, lost, sites, explain_bound([bound])))
    return found


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["2-ranks", "4-ranks"]
)
def test_every_collective_of_the_demo_is_explained(pool: Pool, ranks: int) -> None:
    for graphs in pool(ranks).run(collectives_of_the_demo, timeout_s=100):
        assert len(graphs) == 2
        for count, lost, sites, text in graphs:
            assert lost == 0
            assert count == len(sites) >= 10, "a collective of the graph has no site"
            listed = [line for line in text.splitlines() if line.split()[0].isdigit()]
            assert len(listed) == count
            for kind, strategy, reason in sites:
                assert reason, f"{kind} has no reason"
                assert strategy == "peer" or kind in ("all_gather", "reduce_scatter", "all_reduce")
        kinds = [kind for graph in graphs for kind, _, _ in graph[2]]
        assert kinds.count("all_gather_matmul") >= 2 * 4 + 1
        assert kinds.count("matmul_reduce_scatter") >= 2 * 4 + 1
