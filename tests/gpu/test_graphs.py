"""Programs captured in CUDA graphs: the bits of eager runs, whatever inputs come from where."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Block, local, parallelise_block
from tests.gpu.cases import KINDS, STRATEGIES, Case, prepared, run, transport
from tests.runtime.programs import world_group
from tests.support.pool import Ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace.frontend import backend
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

REPLAYS = 24


def replay(strategy: str, seed: int) -> list[str]:
    """Replays of all three sites: inputs changed in place, and inputs at new addresses."""
    wrong: list[str] = []
    own = random.Random(seed + dist.get_rank())
    for kind in KINDS:
        case = Case(kind, dist.get_world_size(), "bf16", "odd")
        with (
            prepared(case, strategy, graph=True) as graphed,
            prepared(case, strategy, in_order=True) as twin,
        ):
            sets = [case.inputs(seed + number) for number in range(REPLAYS)]
            wanted = [run(twin, case, given) for given in sets]
            twin.synchronize()
            torch.cuda.synchronize()
            fixed, y = [x.clone() for x in sets[0]], case.output()
            found: list[torch.Tensor] = []
            streams = [torch.cuda.Stream(), torch.cuda.Stream()]
            for number, given in enumerate(sets):
                if own.random() < 0.3:
                    torch.cuda._sleep(own.randrange(400_000))
                if number < REPLAYS // 2:  # the same tensors with other contents
                    for mine, new in zip(fixed, given, strict=True):
                        mine.copy_(new)
                    y.fill_(torch.nan)
                    graphed.run(fixed, out=[y])
                    found.append(y.clone())
                else:  # other tensors, for the inputs and for the result, on changing streams
                    with torch.cuda.stream(own.choice(streams)):
                        torch.cuda._sleep(own.randrange(400_000))
                        if number < 3 * REPLAYS // 4:
                            found.append(run(graphed, case, given))
                        else:  # a result of its own
                            found += graphed.run(given)
            graphed.synchronize()
            torch.cuda.synchronize()
            wrong += [
                f"{kind} {strategy}, replay {number}"
                for number, (mine, right) in enumerate(zip(found, wanted, strict=True))
                if not torch.equal(mine, right)
            ]
    return wrong


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replays_give_the_bits_of_eager_runs(gpus: Ranks, strategy: str, seed: int) -> None:
    for wrong in gpus.run(replay, strategy, seed, timeout_s=90):
        assert not wrong


def from_a_new_thread(strategy: str, seed: int) -> list[str]:
    """Runs of threads whose current device is the first one, whichever this rank's is."""
    case = Case("all_gather_matmul", dist.get_world_size())
    given = case.inputs(seed)
    with (
        prepared(case, strategy) as eager,
        prepared(case, strategy, graph=True) as graphed,
        prepared(case, strategy, in_order=True) as twin,
        ThreadPoolExecutor(1) as thread,
    ):
        wanted = run(twin, case, given)

        def call(executor: Executor) -> torch.Tensor:
            assert torch.cuda.current_device() == 0
            (found,) = executor.run(given)
            executor.synchronize()
            return found

        found = [thread.submit(call, each).result(60) for each in (eager, graphed) * 3]
        torch.cuda.synchronize()
        return [f"run {n}" for n, mine in enumerate(found) if not torch.equal(mine, wanted)]


@pytest.mark.parametrize("strategy", ["serial", "peer-put", "fused", "exchange"])
def test_a_new_thread_may_call(gpus: Ranks, strategy: str, seed: int) -> None:
    for wrong in gpus.run(from_a_new_thread, strategy, seed, timeout_s=90):
        assert not wrong


PUT = """
def passed_on(tp: Team[{size}], x: f32[{count}], y: out[f32[{count}]]):
    slot = alloc(f32[{count}], symmetric=tp)
    main: put(x, slot, peer=tp.rank + 1)
    main: notify(came, to=tp.rank + 1)
    main: expect(came, tp.rank - 1)
    main: copy(slot, y)
    main: free(slot)
"""
GET = """
def passed_on(tp: Team[{size}], x: f32[{count}], y: out[f32[{count}]]):
    slot = alloc(f32[{count}], symmetric=tp)
    main: copy(x, slot)
    main: notify(ready, to=tp.rank + 1)
    main: expect(ready, tp.rank - 1)
    main: get(slot, y, peer=tp.rank - 1)
    main: free(slot)
"""
COUNT = 8 << 20
"""32 MiB: an allocation of its own, which is freed when torch's cache is emptied."""


def in_memory_made_anew(text: str, seed: int) -> list[str]:
    """Replays after the caller's tensors were freed and others made at the same addresses."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator, groups = torch.Generator("cuda"), {"tp": world_group()}
    program, options = parse(text.format(size=size, count=COUNT)), Options(graph=True)
    wrong: list[str] = []
    before: tuple[int, int] | None = None
    same = 0

    def draw(number: int, rank: int) -> torch.Tensor:
        generator.manual_seed(seed + number * size + rank % size)
        return torch.randn(COUNT, device="cuda", generator=generator)

    with Executor(program, groups=groups, device="cuda", options=options) as executor:
        executor.prepare()
        for number in range(8):
            # ranks move at different times, so one captures anew while another replays
            spare = torch.empty(COUNT * ((number + rank) % 3 // 2), device="cuda")
            x, y = draw(number, rank), torch.empty(COUNT, device="cuda")
            same += (at := (x.data_ptr(), y.data_ptr())) == before
            before = at
            for _ in range(2):
                executor.run([x], out=[y.fill_(torch.nan)])
                if not torch.equal(y, draw(number, rank - 1)):
                    wrong.append(f"rank {rank}, memory {number}")
            executor.synchronize()
            del x, y, spare
            torch.cuda.empty_cache()
    return wrong if same else [*wrong, "torch gave no address again: this shows nothing"]


@pytest.mark.parametrize("text", [PUT, GET], ids=["put", "get"])
def test_a_replay_copies_to_peers_from_memory_made_anew(gpus: Ranks, text: str, seed: int) -> None:
    """captured.py, Note [Copies and allocations]; within one GPU this shows little."""
    for wrong in gpus.run(in_memory_made_anew, text, seed, timeout_s=90):
        assert not wrong


DRAWS = """
def f(x: f32[1000], y: out[f32[1000]]):
    main: call("aten.bernoulli.p", x, 0.5, out=(kept := f32[1000]){rng})
    main: call("aten.neg.out", kept, out=y)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rng", ["", ", rng=True"], ids=["silent", "told"])
def test_replays_draw_the_random_numbers_of_eager_runs(rng: str, seed: int) -> None:
    x, found = torch.zeros(1000, device="cuda"), dict[bool, list[torch.Tensor]]()
    for graph in (False, True):
        options = Options(graph=graph)
        with Executor(parse(DRAWS.format(rng=rng)), device="cuda", options=options) as executor:
            executor.prepare()
            torch.manual_seed(seed)
            found[graph] = [executor.run([x])[0].clone() for _ in range(6)]
    for eager, replayed in zip(found[False], found[True], strict=True):
        assert torch.equal(eager, replayed)
    assert not torch.equal(*found[True][:2])


WIDTH, ROWS = 512, 128


def blocks_of(count: int, mesh: Any, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    made = [Block(WIDTH, 64, 2 * WIDTH).to("cuda", torch.bfloat16) for _ in range(count)]
    for block in made:
        parallelise_block(block, mesh, src_data_rank=None)
    return list(made)


def compiled_blocks(count: int, mesh: Any, seed: int, graph: bool, whole: bool) -> nn.Module:
    torch._dynamo.reset()
    model = nn.Sequential(*blocks_of(count, mesh, seed))
    # `auto` chooses others where a graph issues the ops, and arithmetic differs with the strategy.
    options = {"graph": graph, "strategy": "peer", "timeout_s": 30.0, **transport()}
    if whole:
        return torch.compile(model, backend=backend, options=options)  # pyright: ignore
    for block in model:
        block.compile(backend=backend, options=options)
    return model


def scheduled(model: nn.Module, order: str, steps: int, seed: int) -> list[torch.Tensor]:
    """Outputs and gradients of steps of several micro-batches: forwards (n) and backwards (~n). In
    `late` gradients live until the next backward, in `twice` each backward runs again."""
    torch.manual_seed(seed)
    orders = {"one": [0, ~0], "two": [0, 1, ~1, ~0], "1F1B": [0, 1, ~0, 2, ~1, 3, ~2, ~3]}
    orders |= {"late": orders["one"], "twice": orders["two"]}
    found: list[torch.Tensor] = []
    spare: list[torch.Tensor] = []
    for step in range(steps):
        live: dict[int, torch.Tensor] = {}
        for number in orders[order]:
            if number >= 0:
                spare.append(torch.empty(1 << (10 + step), device="cuda"))  # so that inputs move
                x = torch.randn(2, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
                live[number] = model(x)
            else:
                y = live.pop(~number)
                if order == "late":
                    model.zero_grad()
                if order == "twice":
                    y.float().square().mean().backward(retain_graph=True)
                y.float().square().mean().backward()
                found.append(y.detach().clone())
        if step % 2:
            with torch.no_grad():
                for weight in model.parameters():
                    if step == 3:  # Parameters move
                        weight.data = weight.data.clone()
        found += [local(w.grad).clone() for w in model.parameters()]
        if order != "late":
            model.zero_grad()
    return found


def as_eager(order: str, count: int, whole: bool, seed: int) -> list[str]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = [
        scheduled(compiled_blocks(count, mesh, seed, graph, whole), order, 5, seed)
        for graph in (False, True)
    ]
    torch.cuda.synchronize()
    interlace.reset()
    return [
        f"{order}, tensor {number}"
        for number, (eager, graphed) in enumerate(zip(*found, strict=True))
        if not torch.equal(eager, graphed)
    ]


@pytest.mark.parametrize("order", ["one", "two", "1F1B", "late", "twice"])
@pytest.mark.parametrize(("count", "whole"), [(1, True), (3, False)], ids=["whole", "blocks"])
def test_steps_have_the_bits_of_eager_ones(
    gpus: Ranks, order: str, count: int, whole: bool, seed: int
) -> None:
    """Micro-batches, blocks that share code, inputs and Parameters that move."""
    for wrong in gpus.run(as_eager, order, count, whole, seed, timeout_s=120):
        assert not wrong


def memory_of_layers(seed: int) -> dict[bool, float]:
    """Bytes of torch a further layer, without and with graphs."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    grown: dict[bool, float] = {}
    for graph in (False, True):
        peaks: list[int] = []
        for count in (2, 8):
            model = compiled_blocks(count, mesh, seed, graph, False)
            x = torch.randn(2, 16 * ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
            for number in range(6):
                if number == 5:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                model(x).float().square().mean().backward()
                for weight in model.parameters():
                    weight.grad = None
            torch.cuda.synchronize()
            weights = sum(local(weight).nbytes for weight in model.parameters())
            peaks.append(torch.cuda.max_memory_reserved() - weights)
            interlace.release()
            del model, x
        grown[graph] = (peaks[1] - peaks[0]) / 6
    return grown


def test_layers_in_graphs_take_the_memory_of_eager_ones(gpus: Ranks, seed: int) -> None:
    for grown in gpus.run(memory_of_layers, seed, timeout_s=120):
        assert grown[True] <= 1.25 * grown[False], "small layers: torch rounds segments up"
