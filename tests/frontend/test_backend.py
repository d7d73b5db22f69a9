"""torch.compile(backend=interlace) on real processes: dropout, checkpointing, blocks, meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.frontend.models import (
    Model,
    bits,
    feed_forward,
    gradients,
    local,
    parallelise,
)
from tests.support.captured import capture
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.errors import ExecutorError, OptionError, UnsupportedError
from interlace.frontend import backend
from interlace.ir import View


def make(seed: int = 0, **model: Any) -> tuple[Model, torch.Tensor]:
    """A parallelised model and tokens, the same on every rank of the pool."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    whole = parallelise(Model(**model), mesh)
    return whole, torch.randint(0, 32, (2, 8))


def compiled(model: Any, **options: Any) -> Any:
    """The model behind our backend."""
    return torch.compile(model, backend=backend, options=options, fullgraph=True)


def step(model: Any, of: Model, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one training step, in which nothing is updated."""
    loss = loss_of(model, tokens)
    loss.backward()
    return loss.item(), gradients(of)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference."""
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


# -- an empty batch ------------------------------------------------------------------------------


def empty_batches() -> list[tuple[int, ...]]:
    """Of three dimensions, in which what is saved for backward has strides by the rank."""
    torch.compiler.reset()
    model = feed_forward(32, Shard(0), Shard(0))
    call = torch.compile(model, backend=backend, dynamic=False, options={"timeout_s": 20})
    shapes: list[tuple[int, ...]] = []
    for batch in (0, 2, 0, 2):
        x = torch.ones(batch, 2, 32, requires_grad=True)
        call(x).sum().backward()
        assert x.grad is not None
        shapes.append(tuple(x.grad.shape))
        model.zero_grad()
    return shapes


@pytest.mark.skipif(torch.__version__ < "2.12", reason="DTensor fails, without a compiler too")
def test_an_empty_batch_runs_backward(pool: Pool) -> None:
    for shapes in pool(2).run(empty_batches):
        assert shapes == [(0, 2, 32), (2, 2, 32)] * 2


# -- dropout and activation checkpointing ---------------------------------------------------------


def dropout_against_eager(checkpointed: bool) -> None:
    """Dropout draws what eager draws; also when backward draws it again."""
    outcomes: list[tuple[float, dict[str, torch.Tensor]]] = []
    texts: list[str] = []
    for way in ("eager", "compiled"):
        model, tokens = make(dropout=0.25)
        if checkpointed:
            model.wrap = lambda layer, *args: checkpoint(layer, *args, use_reentrant=False)
        torch.manual_seed(5)
        with capture() as captured:
            call = compiled(model) if way == "compiled" else model
            outcomes.append(step(call, model, tokens))
            second = step(call, model, tokens)
        texts = [str(program) for program in captured.programs]
        assert second[0] != outcomes[-1][0], "dropout drew the same twice"
    (loss, grads), (mine, my_grads) = outcomes
    assert abs(loss - mine) < 1e-5
    assert close(grads, my_grads) < 1e-5
    forward, backward = texts
    assert "rng=True" in forward
    if checkpointed:
        assert "set_rng_state" in backward, "backward does not draw the forward's numbers again"
        assert backward.count("aten.silu.default") == 1, "the block is not recomputed"


@pytest.mark.parametrize(
    "checkpointed",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["plain", "checkpointed"],
)
def test_dropout(pool: Pool, checkpointed: bool) -> None:
    pool(2).run(dropout_against_eager, checkpointed, timeout_s=120)


# -- blocks, meshes, processes --------------------------------------------------------------------


def per_block() -> int:
    """Each layer compiled on its own: one graph serves them all."""
    eager, tokens = make(layers=3)
    want = step(eager, eager, tokens)
    model, _ = make(layers=3)
    with capture() as captured:
        for layer in model.layers:
            layer.compile(backend=backend, fullgraph=True)
        got = [step(model, model, tokens) for _ in range(2)]
    for loss, grads in got:
        assert abs(loss - want[0]) < 1e-5
        assert close(grads, want[1]) < 1e-5
    return len(captured.programs)


def test_per_block_compile_shares_graphs(pool: Pool) -> None:
    # two graphs: the first layer's input comes from a collective, and may not be there yet
    assert pool(2).run(per_block) == [4, 4]


def two_axes() -> list[list[tuple[str, int, Any]]]:
    """Data parallel 2 x tensor parallel 2; gradients are reduced over dp in the graph."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    tensors = [torch.randn(8, 6), torch.randn(8, 6), torch.randn(6, 8)]
    places = [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Shard(1)]]

    def loss(x: Any, w: Any, v: Any) -> Any:
        w, v = (t.redistribute(placements=p) for t, p in zip((w, v), places[1:], strict=True))
        y: Any = x.redistribute(placements=[Shard(0), Replicate()])
        y = F.linear(torch.relu(F.linear(y, w)), v)
        return (y.redistribute(placements=[Shard(0), Shard(0)]).to_local() ** 2).sum()

    def run(fn: Any) -> list[torch.Tensor]:
        args: list[Any] = [
            distribute_tensor(t.clone(), mesh, p).requires_grad_()
            for t, p in zip(tensors, places, strict=True)
        ]
        fn(*args).backward()
        assert [list(arg.grad.placements) for arg in args] == places
        return [local(arg.grad) for arg in args]

    with capture() as captured:
        mine = run(torch.compile(loss, backend=backend, fullgraph=True))
    for ours, theirs in zip(mine, run(loss), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    return [[(t.name, t.size, t.groups) for t in p.teams] for p in captured.programs]


def test_two_axes(pool: Pool) -> None:
    for forward, backward in pool(4).run(two_axes):
        # each tensor parallel group runs the forward for itself; in backward dp joins them all
        assert [(name, size) for name, size, _ in forward] == [("tp", 2)]
        assert backward == [("dp", 2, None), ("tp", 2, None)]


def one_process() -> None:
    """Without a process group, or with one rank, everything runs unchanged."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model(layers=1)
    tokens = torch.randint(0, 32, (2, 8))
    want = step(model, model, tokens)
    got = step(compiled(model), model, tokens)
    assert want[0] == got[0]
    assert close(want[1], got[1]) < 1e-6


def test_one_process(pool: Pool) -> None:
    one_process()
    pool(1).run(one_process)


def graph_uses(how: str) -> list[tuple[list[str], list[str], int]]:
    """By graph: inputs that move, others, and the number of results that are saved."""
    model, tokens = make()
    if how == "torch.compile":
        with capture() as captured:
            step(compiled(model), model, tokens)
        graphs = captured.graphs
    else:
        call = interlace.compile(model)
        step(call, model, tokens)
        graphs = call.graphs
    found: list[tuple[list[str], list[str], int]] = []
    for bound in (bound for graph in graphs for bound in graph.bound):
        names = [b.name for b in bound.serial.params if b.kind == "input"]
        use = bound.imported.graph_use
        others = [name for name in names if name not in use.moving]
        found.append((sorted(use.moving), others, len(use.saved)))
    return found


@pytest.mark.parametrize("how", ["torch.compile", "interlace.compile"])
def test_graphs_know_which_inputs_move_and_what_is_saved(pool: Pool, how: str) -> None:
    """Parameters stay, and what forward saves; but not the tokens, of which it saves a view."""
    for forward, backward in pool(2).run(graph_uses, how):
        moving, others, num_saved = forward
        assert len(moving) == 1
        assert others == [name for name, _ in named_parameters()]
        assert backward[0] == ["tangents_1", "view"]
        assert num_saved == len(backward[1]) + 1


@pytest.mark.parametrize("visible", [None, "whole", "view"])
def test_what_a_caller_has_too_is_handed_to_no_backward(visible: str | None) -> None:
    """Results of a backward in a CUDA graph lie where what was handed to it lay."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = x @ w
        shown = {None: (), "whole": (product,), "view": (product.view(-1)[:4],)}[visible]
        return product.sin(), *shown

    torch.compiler.reset()
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with capture() as captured:
        torch.compile(fn, backend=backend)(x, w)[0].sum().backward()
    forward, backward = (graph.bound[0].imported for graph in captured.graphs)
    handed = [forward.program.returned()[number] for number in forward.graph_use.handed]
    assert len(forward.graph_use.saved) == 3
    assert handed == ([] if visible else [View("mm")])
    assert not backward.graph_use.handed


def named_parameters() -> list[tuple[str, torch.Tensor]]:
    return [(name.replace(".", "_"), w) for name, w in Model().named_parameters()]


def reset_frees() -> tuple[int, int]:
    """What `torch.compiler.reset()` frees, and that compiling goes on afterwards."""
    model, tokens = make()
    with capture() as captured:
        first = step(compiled(model), model, tokens)
        executors = [bound.executor for bound in captured.bound]
        held = len(captured.bound)
        torch.compiler.reset()
        left = len(captured.bound)
        for executor in executors:
            with pytest.raises(interlace.errors.ExecutorError, match="closed"):
                executor.run([])
        again = step(compiled(model), model, tokens)
    assert first[0] == again[0]
    assert bits(first[1]) == bits(again[1])
    return held, left


def test_reset_frees_executors(pool: Pool) -> None:
    assert pool(2).run(reset_frees) == [(2, 0), (2, 0)]


# -- what cannot be compiled ----------------------------------------------------------------------


def test_unknown_option_is_a_typed_error() -> None:
    torch.compiler.reset()
    fn = torch.compile(lambda x: x * 2, backend=backend, options={"stratgy": "ring"})
    with pytest.raises(OptionError, match="stratgy"):
        fn(torch.ones(2))


def test_unsupported_operator_is_a_typed_error_with_its_line() -> None:
    torch.compiler.reset()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(UnsupportedError, match=r"cond in .*test_backend.py:\d+.*disable"):
        torch.compile(fn, backend=backend)(torch.ones(2))


def test_none_and_plain_numbers_pass_through() -> None:
    torch.compiler.reset()

    def fn(x: torch.Tensor, scale: float, mask: Any, times: int) -> Any:
        y = x * scale if mask is None else x * mask
        return {"y": y.repeat(times), "mask": mask, "times": times, "input": x}

    call = torch.compile(fn, backend=backend, fullgraph=True)
    x = torch.randn(3)
    for scale, times in ((2.0, 1), (3.0, 2), (4.0, 3)):
        got, want = call(x, scale, None, times), fn(x, scale, None, times)
        assert torch.equal(got.pop("y"), want.pop("y"))
        assert got.pop("input") is x
        want.pop("input")
        assert got == want


def test_a_call_that_fails_leaves_the_next_one_alone() -> None:
    torch.compiler.reset()
    table = torch.randn(4, 3)
    call = torch.compile(lambda rows: table[rows] + 1, backend=backend, dynamic=False)
    for row in (1, 9, 2, 9, 3):
        rows = torch.tensor([row])
        if row < len(table):
            assert torch.equal(call(rows), table[rows] + 1)
        else:
            with pytest.raises(ExecutorError, match="IndexError"):
                call(rows)


def other_sizes(lengths: list[int], dynamic: bool | None) -> list[float]:
    """How far results of DTensors of these many rows are from those of eager. At 8 and 7 rows rank
    0 of 2 holds 4 of either, laid out alike. From the second size on TorchDynamo takes the rows for
    a symbol, on all ranks, where it may."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def fn(x: Any) -> Any:
        return (x * 2 + x.shape[0]).sum().full_tensor()

    options: Any = {"timeout_s": 30.0}
    call = torch.compile(fn, backend=backend, dynamic=dynamic, options=options, fullgraph=True)
    far: list[float] = []
    for rows in lengths:
        x = distribute_tensor(torch.arange(rows * 3.0).view(rows, 3), mesh, [Shard(0)])
        far.append(float((call(x) - fn(x)).abs()))
    return far


@pytest.mark.parametrize(
    ("lengths", "dynamic"),
    [
        ([8, 7, 9, 10, 7], False),
        ([8, 7, 8], None),
        ([64, 32, 48], None),
        ([64, 32, 49, 7, 8, 7], None),
    ],
)
def test_a_dtensor_of_other_sizes_is_compiled_anew_on_all_ranks(
    pool: Pool, lengths: list[int], dynamic: bool | None
) -> None:
    assert pool(2).run(other_sizes, lengths, dynamic) == [[0.0] * len(lengths)] * 2
