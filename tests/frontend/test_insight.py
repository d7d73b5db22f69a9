"""What a user sees of compiled models: explain, report, the log."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Block, least_memory, parallelise_block
from tests.support.pool import Pool
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace.errors import ExecutorError
from interlace.frontend import backend
from interlace.frontend.explain import graphs_of
from interlace.ir import parse


class Mlp(nn.Module):
    """Two layers, which a graph break may part."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        if self.broken:
            torch._dynamo.graph_break()
        return self.down(y)


def parallel(model: nn.Module) -> nn.Module:
    """Rows gathered before `up` and scattered after `down`."""
    mesh, rows = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), Shard(0)
    plan: dict[str, Any] = {
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
    }
    return parallelize_module(model, mesh, plan)


def by_torch(folder: str) -> dict[str, str]:
    """What is told of a module that torch.compile made, before and after it ran."""
    torch.compiler.reset()
    model, x = parallel(Mlp()), torch.randn(8, 32)
    options: Any = {"strategy": "peer", "trace": True}
    call: Any = torch.compile(model, backend="interlace", options=options)
    told = {"before": interlace.explain(call)}
    call(x).sum().backward()
    told |= {"after": interlace.explain(call), "plain": interlace.explain(model)}
    page = interlace.report(call, f"{folder}/{dist.get_rank()}.html")
    told |= {"page": page.read_text(), "why": interlace.explain(call, why=True)}
    told |= {"account": interlace.explain(call, account=True)}
    torch.compiler.reset()
    return told | {"reset": interlace.explain(call)}


def test_of_a_module_by_torch_compile(pool: Pool, tmp_path: Path) -> None:
    for told in pool(2).run(by_torch, str(tmp_path)):
        for text in (told["before"], told["reset"]):
            assert text.startswith("Mlp has no graph now. Either it was not compiled by torch")
        after = told["after"]
        assert after == told["plain"]
        assert after.startswith("graph 1 of 1: Mlp\n\nforward: 2 communications, sound\n")
        assert "\nbackward: " in after
        for line in after.splitlines():
            if "all_gather_matmul" in line or "matmul_reduce_scatter" in line:
                assert " peer/get x2 " in line
                assert " took " in line
        for word in (
            *("forward serial predicted", "forward overlapped predicted", "backward measured"),
            *(
                "as fast as serial; forward + backward, predicted",
                "<th>measured</th>",
                "<b>verifier</b> sound",
            ),
        ):
            assert word in told["page"]
        assert "forward: 2 communications, 0 serial, sound" in told["why"]
        assert told["account"].count("  account of the last run, ") == 2
        assert re.search(r"aten.addmm.out \d+x32x32 +up +forward \d+, \d+", told["account"])
        assert "exposed communication" in told["account"]


def accounts_of_lengths() -> tuple[str, str]:
    """The accounts of a model whose last run had as many rows as none before; and of a schedule."""
    torch.compiler.reset()
    call: Any = torch.compile(parallel(Mlp()), backend="interlace", options={"trace": True})
    for rows in (16, 32, 64, 48):
        call(torch.randn(rows, 32)).sum().backward()
    schedule = graphs_of(call)[0].bound[-1].program
    told = interlace.explain(call, account=True), interlace.explain(schedule, account=True)
    torch.compiler.reset()
    return told


def test_an_account_is_of_the_sizes_that_ran(pool: Pool) -> None:
    for told, of_schedule in pool(2).run(accounts_of_lengths):
        assert re.search(r"  account of the last run, .*\n(.*\n)+.*mm.* 48x32x32 ", told), told
        assert of_schedule.endswith("account: a schedule has no recorded run")


def broken_or_regathered() -> tuple[str, str, str]:
    """What is told of a model with a graph break, of one that gathers again, and of layers."""
    torch.compiler.reset()
    x, told = torch.randn(8, 32), list[str]()

    def called(model: nn.Module, options: dict[str, Any]) -> None:
        torch.compiler.reset()
        model.compile(backend="interlace", options=options)
        model(x).sum().backward()

    least = least_memory(lambda memory: called(parallel(Mlp()), {"memory": memory}))
    for broken in (True, False):
        model = parallel(Mlp(broken))
        called(model, {} if broken else {"memory": least})
        told.append(interlace.explain(nn.ModuleList([model]), why=True))
    layers = nn.Sequential(*[parallel(Mlp()) for _ in range(2)])
    for layer in layers:
        layer.compile(backend="interlace", options={"overlap": False})
    layers(x)
    return told[0], told[1], interlace.explain(layers[1], why=True)


def test_why_a_communication_stays_serial(pool: Pool) -> None:
    for broken, regathered, by_layer in pool(2).run(broken_or_regathered):
        assert "graph 1 of 2: Mlp, which a graph break ends: " in broken
        assert "a graph ends at a graph break" in broken
        assert f"graph_break()` at {__file__}:" in broken
        assert "forward: 2 communications, 0 serial" in regathered
        assert "all_gather  up  serial" in regathered
        assert "takes the gathered tensor as its right-hand side" in regathered
        assert "everything is serial by option" in by_layer, "layers of a class share their graphs"


def blocks_in_place(device: str, options: dict[str, Any], dim: int = 32) -> tuple[list[float], str]:
    """Seconds in which each timeline of a model communicates whose blocks are compiled in place, as
    trainers do it: tensor parallel, compiled, checkpointed, `fully_shard`. And what is known of
    all graphs, for a reader of a failure."""
    torch.compiler.reset()
    names = "dp of blocks", "tp of blocks"  # of no other test: torch keeps meshes by their names
    mesh = init_device_mesh(device, (1, dist.get_world_size()), mesh_dim_names=names)
    dp, tp, model = mesh[names[0]], mesh[names[1]], nn.Sequential()
    for _ in range(2):
        block: Any = parallelise_block(Block(dim, dim // 4, 2 * dim).to(device), tp)
        block.compile(backend=backend, fullgraph=True, options={"trace": True, **options})
        wrapped: Any = fully_shard(checkpoint_wrapper(block), mesh=dp)
        model.append(wrapped)
    fully_shard(model, mesh=dp)
    for _ in range(2):
        model(torch.randn(2, 16, dim, device=device)).square().mean().backward()
    seconds = [timeline.figures().comm_s for timeline in interlace.timelines(model)]
    known = [
        f"{graph.kind} of {graph.setting.origin and graph.setting.origin.name}, "
        f"{graph.unscheduled or 'scheduled'}: "
        + ", ".join(f"{bound.executor.options.trace} {bound.measured}" for bound in graph.bound)
        for graph in backend.graphs
    ]
    torch.compiler.reset()
    return seconds, f"torch {torch.__version__}, graphs: {known}"


def test_timelines_of_blocks_compiled_in_place(pool: Pool) -> None:
    for seconds, known in pool(2).run(blocks_in_place, "cpu", {}):
        assert min(seconds, default=0) > 0, known


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def called_between(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return doubled(x)


def test_of_functions_and_models_without_communication() -> None:
    torch.compiler.reset()
    call = torch.compile(called_between, backend="interlace")
    call(torch.ones(3))
    text = interlace.explain(call, why=True)
    assert ": called_between" in text
    assert "inference: 0 communications" in text
    assert "no graph communicates" in text
    net = nn.Sequential(nn.Linear(4, 4))
    torch.compile(net, backend="interlace")(torch.ones(2, 4))
    other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    torch.compile(other, backend="interlace")(torch.ones(2, 4))
    assert interlace.explain(net).count("graph ") == 1
    assert interlace.explain(nn.ModuleList([net, other])).count("graph ") == 2


def test_graphs_of_another_module_of_the_class(tmp_path: Path) -> None:
    torch.compiler.reset()
    first, again, other = (
        torch.compile(nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]), backend="interlace")
        for count in (2, 2, 1)
    )
    first(torch.ones(2, 4))
    assert "or not called since" in interlace.explain(other)
    assert "runs graphs of another Sequential for it" in interlace.explain(again)
    for refused in (again, other):
        with pytest.raises(ExecutorError, match=r"no schedule to show\. Sequential has no graph"):
            interlace.report(refused, tmp_path / "page.html")
        with pytest.raises(ExecutorError, match=r"no schedule to export.*has no graph"):
            interlace.export(refused, tmp_path)
    assert not [*tmp_path.iterdir()]
    other(torch.ones(2, 4))
    assert interlace.explain(other).startswith("graph 1 of 1: Sequential\n")


def test_of_what_interlace_compile_gave(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = interlace.compile(net, options={"trace": True})
    assert "Sequential: nothing is compiled yet" in interlace.explain(compiled)
    compiled(torch.randn(3, 4)).sum().backward()
    assert interlace.explain(compiled).startswith("forward: 0 communications, sound")
    page = interlace.report(compiled, tmp_path / "page.html").read_text()
    assert "forward measured" in page
    assert "backward measured" in page
    assert interlace.explain(compiled.program).startswith("forward: 0 communications\n")


def test_of_a_program_without_sites() -> None:
    text = "def f(tp: Team[2], x: f32[4], y: out[f32[8]]):\n    main: all_gather(x, y, team=tp)\n"
    program = parse(f"{text}    main: group(send(x, peer=tp.rank + 1), recv(x, peer=tp.rank - 1))")
    told = interlace.explain(program)
    assert told == (
        "f: it states no sites; it has 1 all_gather, 1 send, 1 recv\n"
        "  memory: peak 32 bytes at op 0: 32 of outputs"
    )
    table = interlace.explain(program, memory=True).splitlines()[-2:]
    assert [line.split() for line in table] == [
        ["module", "inputs", "outputs", "temporaries", "slots", "bytes"],
        ["(no", "module)", "-", "32", "-", "-", "32"],
    ]
    with pytest.raises(ExecutorError, match="simulate FILE --html"):
        interlace.report(program, "page.html")  # pyright: ignore[reportArgumentType]


# -- the log ---------------------------------------------------------------------------------------


def test_the_log_tells_what_is_compiled_bound_and_evicted(caplog: Any) -> None:
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(4, 4))
    interlace.compile(net, torch.ones(2, 4))
    assert not [r for r in caplog.records if r.name.startswith("interlace")], "off by default"
    with caplog.at_level(logging.INFO, logger="interlace"):
        torch.compile(net, backend="interlace")(torch.ones(2, 4))
        call = interlace.compile(net, torch.ones(2, 4), options={"cache_size": 1})
        call(torch.ones(3, 4))
    texts = [record.getMessage() for record in caplog.records]
    assert any(t.startswith("compiled Sequential: forward, backward, in ") for t in texts)
    bound = "bound forward: 0 of 0 communications overlapped, "
    assert sum(text.startswith(bound) for text in texts) == 3
    assert "evicted the oldest of Sequential, which keeps 1" in texts
