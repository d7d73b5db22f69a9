"""Programs for classes of sizes on GPUs: a run has the bits of the Program made for its size."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.test_sizes import HEADS, WIDTH, Decoder
from tests.gpu.cases import KINDS, STRATEGIES, transport
from tests.runtime.programs import world_group
from tests.support.captured import capture
from tests.support.pool import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from interlace.frontend import backend
from interlace.frontend.compiled_graph import MOST_CAPTURED
from interlace.ir import Program, parse
from interlace.options import Options
from interlace.passes import lower
from interlace.runtime import Executor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

K, N = 128, 72
TEXTS = {
    "all_gather_matmul": """
def f(tp: Team[{ranks}], S: Size[{rows}], x: bf16[S, 128], w: bf16[128, 72]):
    full = empty(bf16[{ranks} * S, 128])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := bf16[{ranks} * S, 72]))
    return y
""",
    "matmul_reduce_scatter": """
def f(tp: Team[{ranks}], S: Size[{rows}], x: bf16[{ranks} * S, 128], w: bf16[128, 72]):
    main: call("aten.mm.default", x, w, out=(p := bf16[{ranks} * S, 72]))
    y = empty(bf16[S, 72])
    main: reduce_scatter(p, y, reduce="sum", team=tp)
    return y
""",
    "matmul_all_reduce": """
def f(tp: Team[{ranks}], S: Size[{rows}], x: bf16[{ranks} * S, 128], w: bf16[128, 72]):
    main: call("aten.mm.default", x, w, out=(p := bf16[{ranks} * S, 72]))
    y = empty(bf16[{ranks} * S, 72])
    main: all_reduce(p, y, reduce="sum", team=tp)
    return y
""",
}


def run_sizes(kind: str, strategy: str, sizes: list[int], seed: int) -> list[str]:
    """What is wrong on one rank."""
    ranks, wrong = dist.get_world_size(), list[str]()
    chosen = {"timeout_s": 20.0, **transport(), **STRATEGIES[strategy]}
    options = Options.from_dict(chosen)
    generator = torch.Generator().manual_seed(seed + dist.get_rank())

    def made(program: Program) -> Executor:
        groups = {"tp": world_group()}
        return Executor(program, groups=groups, device="cuda", options=options).prepare()

    classes: list[Executor] = []
    for size in sizes:
        given = parse(TEXTS[kind].format(ranks=ranks, rows=size))
        executor = next((e for e in classes if e.sizes.holds({"S": size})), None)
        if executor is None:
            executor = made(lower(given, options))
            classes.append(executor)
        twin = made(lower(given.at({"S": size}), options))
        rows = size if kind == "all_gather_matmul" else ranks * size
        for _ in range(3):  # the slots are used in turn
            inputs = [
                torch.randn(s, generator=generator).bfloat16().cuda() for s in ((rows, K), (K, N))
            ]
            (found,), (expected,) = executor.run(inputs), twin.run(inputs)
            if not torch.equal(found, expected):
                wrong.append(f"S = {size}")
        twin.synchronize()
        twin.close()
    if len(classes) == len(sizes):
        wrong.append(f"a class for each size: {[str(executor.sizes) for executor in classes]}")
    for executor in classes:
        executor.synchronize()
        executor.close()
    return wrong


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "beside"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_that_of_the_program_for_its_size(
    gpus: Ranks, kind: str, strategy: str, seed: int
) -> None:
    rng = random.Random(seed)
    sizes = [
        1,
        *(rng.randrange(36, 60, 4) for _ in range(4)),
        *(rng.choice([256, 384, 512]) for _ in "abc"),
    ]
    for wrong in gpus.run(run_sizes, kind, strategy, sizes, seed, timeout_s=150):
        assert not wrong


def decode(tokens: int, options: dict[str, Any]) -> tuple[float, int, int, str]:
    """How far tokens one by one are from eager, how many Programs were made, how many of one graph
    are CUDA graphs, and what is said of them."""
    torch.compiler.reset()
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plan: Any = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
    model = parallelize_module(Decoder().eval().cuda(), mesh, plan)
    apart = 0.0
    with capture() as captured, torch.no_grad():
        call = torch.compile(model, backend=backend, dynamic=True, options=options)
        empty = torch.zeros(1, HEADS // world, 0, WIDTH // HEADS, device="cuda")
        caches = [(empty, empty), (empty, empty)]
        x = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()
        for _ in range(tokens):
            outputs = [way(x, *c) for way, c in zip((call, model), caches, strict=True)]
            caches = [(keys, values) for _, keys, values in outputs]
            apart = max(apart, (outputs[0][0] - outputs[1][0]).abs().max().item())
            x = outputs[1][0][:, -1:].tanh()
    graphs = [sum(b.executor.options.graph for b in g.bound) for g in captured.graphs]
    return apart, len(captured.bound), max(graphs), captured.explain()


@pytest.mark.nccl
@pytest.mark.parametrize("options", [{"regions": "eager"}, {}, {"graph": True}], ids=str)
def test_a_cache_that_grows(gpus: Ranks, options: dict[str, Any]) -> None:
    """The first sizes have CUDA graphs, if those are asked for, and others have none."""
    given = {"timeout_s": 30.0, **options}
    for apart, programs, captured, told in gpus.run(decode, 24, given, timeout_s=150):
        assert apart < 1e-4
        assert programs < 12 + MOST_CAPTURED
        assert captured == (MOST_CAPTURED if "graph" in options else 0)
        assert ("not captured in CUDA graphs: its sizes change" in told) == ("graph" in options)
