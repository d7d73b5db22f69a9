"""interlace.compile: modules on DTensors, without TorchDynamo."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Function, Model, gradients, local, parallelise
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.cost import default_machine
from interlace.errors import ExecutorError, OptionError, UnsupportedError
from interlace.frontend import backend
from interlace.frontend.binding import Bound
from interlace.frontend.compile import Compiled
from interlace.ir import Call, Collective, Get, Op
from interlace.passes import lower


def module_against_eager() -> dict[str, Any]:
    """A whole model: results, gradients, and everything that a compiled object tells."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = parallelise(Model(layers=1), mesh)
    tokens = torch.randint(0, 32, (2, 8))
    model(tokens).square().sum().backward()
    eager = gradients(model)
    options = interlace.Options(strategy="peer", trace=True)
    compiled = interlace.compile(model, tokens, mesh=mesh, options=options)
    out = compiled(tokens)
    out.square().sum().backward()
    mine = gradients(model)
    torch.testing.assert_close(local(out), local(model(tokens)), rtol=1e-5, atol=1e-5)
    assert mine.keys() == eager.keys()
    for name, theirs in eager.items():
        torch.testing.assert_close(mine[name], theirs, rtol=1e-4, atol=1e-5)
    predicted = interlace.simulate(compiled.program)
    names = [p.name for p in compiled.program.params]
    told = {
        "explain": compiled.explain(),
        "modules": [site.module for site in compiled.program.sites],
        "predicted": len({span.rank for span in predicted.spans}),
        "unmeasured": [_without_span(bound) for bound in compiled.bound],
        "parameters": [name for name in names if name.startswith("layers_0_mlp")],
    }
    compiled.close()
    return told


def _without_span(bound: Bound) -> list[Op]:
    """The ops that compute or communicate and that no span of the measured timeline shows."""
    assert bound.measured is not None
    shown = {span.op_index for span in bound.measured.spans}
    ops = enumerate(bound.program.ops)
    return [op for i, op in ops if isinstance(op, Call | Collective | Get) and i not in shown]


def test_module(pool: Pool) -> None:
    for told in pool(2).run(module_against_eager):
        assert "layers.0.mlp" in told["modules"]
        assert "layers.0.attn.wo" in told["explain"]
        assert "forward: 7 communications, sound" in told["explain"]
        assert told["predicted"] == 2
        assert told["unmeasured"] == [[], []]
        assert told["parameters"] == [f"layers_0_mlp_{name}_weight" for name in ("w1", "w3", "w2")]


def test_single_process_module_trains() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    twin = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    twin.load_state_dict(net.state_dict())
    compiled = interlace.compile(net, torch.randn(4, 8))
    for step in range(3):
        x = torch.randn(4, 8)
        outs = []
        for call in (compiled, twin):
            torch.manual_seed(step)
            out = call(x)
            out.square().sum().backward()
            outs.append(out)
        assert torch.equal(*outs)
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for mine, theirs in zip(net.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs), "running statistics differ"
    assert [bound.kind for bound in compiled.bound] == ["forward", "backward"]
    net.eval()
    assert compiled(torch.randn(4, 8)).shape == (4, 8)


def test_nothing_compiled_yet_is_a_typed_error() -> None:
    compiled: Compiled = interlace.compile(nn.ReLU())
    with pytest.raises(ExecutorError, match="nothing is compiled yet"):
        compiled.explain()
    compiled(torch.ones(2))


@pytest.mark.parametrize("backend", [backend, "eager"], ids=["interlace", "eager"])
@pytest.mark.parametrize("what", ["module", "child", "in a function"])
def test_what_torch_compile_was_given_before(backend: Any, what: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
    want = net(x)
    by_torch: Any = torch.compile(net[0] if what == "child" else net, backend=backend)
    given: Any = by_torch
    if what == "child":
        net[0] = by_torch
        given = net
    elif what == "in a function":
        relu: Any = torch.compile(torch.relu, backend=backend)
        given, want = Function(lambda x: relu(by_torch(x)), net), torch.relu(want)
    given(x)  # torch.compile has compiled it
    compiled = interlace.compile(given, x)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), want)
        torch.testing.assert_close(given(x), want)  # and so it still is
    assert len(compiled.bound) == 2, "its parts are not in it"


def test_graphs_on_the_cpu_and_static_outputs_without_graphs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="graph=True captures CUDA graphs"):
        interlace.compile(nn.ReLU(), torch.ones(2), options={"graph": True})
    with pytest.raises(OptionError, match="graph=True"):
        interlace.Options(static_outputs=True)


def test_a_mesh_is_a_mesh() -> None:
    mesh: Any = "tp"
    with pytest.raises(OptionError, match="mesh='tp' is no DeviceMesh"):
        interlace.compile(nn.Linear(4, 4), mesh=mesh)


def test_a_checkpoint_that_runs_backward_while_it_is_traced_is_a_typed_error() -> None:
    net = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> Any:
        return checkpoint(net, x, use_reentrant=True)

    with pytest.raises(UnsupportedError, match="give it use_reentrant=False"):
        interlace.compile(Function(step, net))(torch.ones(2, 4, requires_grad=True))


def refused_on_ranks() -> list[str]:
    """A module that is sharded by hooks, before it ran and after; a collective for its effect."""
    net, x, told = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), list[str]()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for _ in range(2):
        with pytest.raises(UnsupportedError) as found:
            interlace.compile(net)(x)
        told.append(str(found.value))
        net(x).sum().backward()  # it is as it was

    for op in (partial(dist.reduce, dst=0), dist.all_reduce):

        def add_up(x: torch.Tensor, op: Any = op) -> torch.Tensor:
            op(x)
            return x + 1

        with pytest.raises(UnsupportedError) as found:
            interlace.compile(Function(add_up))(x.clone())
        told.append(str(found.value))
    return told


def test_what_cannot_be_traced_says_what_to_do(pool: Pool) -> None:
    for before, after, *effects in pool(2).run(refused_on_ranks):
        assert before == after
        assert "is sharded by fully_shard" in before
        for name, effect in zip(("reduce", "allreduce"), effects, strict=True):
            assert f"c10d.{name}_.default for its effect" in effect
            assert "functional collective" in effect


@pytest.mark.parametrize("by", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_within_what_torch_compile_compiles(by: str) -> None:
    torch.compiler.reset()
    net = nn.Linear(3, 3)
    inner = interlace.compile(net)
    outer = torch.compile(lambda x: inner(x) * 2, backend=by)
    for rows in (1, 2, 1):
        x = torch.ones(rows, 3)
        torch.testing.assert_close(outer(x), net(x) * 2)


def decided(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x  # Python decides


def selected(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]  # how many?


@pytest.mark.parametrize(("fn", "words"), [(decided, "Python decides"), (selected, "how many")])
def test_what_depends_on_values_is_a_typed_error(fn: Any, words: str) -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if f"# {words}" in text)
    told = f"Function cannot be compiled as a whole.*test_compile.py:{line}. Compute that"
    with pytest.raises(UnsupportedError, match=told):
        interlace.compile(Function(fn), torch.ones(4))
    torch.compiler.reset()
    x = torch.tensor([1.0, -2.0, 3.0])
    assert torch.equal(torch.compile(fn, backend=backend)(x), fn(x))  # as the error says


def test_code_that_asks_whether_it_is_compiled() -> None:
    """As that of Hugging Face's masks, which look at values only where they may."""

    def shortened(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and bool((x > 0).all()):
            return x
        return x.relu()

    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(interlace.compile(Function(shortened))(x), x.relu())
    assert not torch.compiler.is_compiling()


def uneven_weights() -> tuple[list[str], list[str], list[str]]:
    """A gather whose matmul is large on one rank and tiny on the other, so that `auto` differs."""
    import torch.distributed._functional_collectives as funcol

    group: Any = dist.group.WORLD

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x, 0, group) @ w

    x = torch.randn(256, 64)
    w = torch.randn(64, 2 if dist.get_rank() == 0 else 8192)
    compiled = interlace.compile(Function(fn), x, w)
    torch.testing.assert_close(compiled(x, w), fn(x, w), rtol=1e-4, atol=1e-4)
    program = compiled.program
    alone = lower(compiled.bound[0].serial, compiled.options, default_machine("cpu"))
    return (
        [site.strategy for site in alone.sites],
        [site.strategy for site in program.sites],
        [remark.text for remark in program.remarks if remark.pass_name == "frontend"],
    )


def test_ranks_that_would_choose_differently_run_serially(pool: Pool) -> None:
    first, second = pool(2).run(uneven_weights)
    assert first[0] != second[0], "both ranks chose alike: the test needs other sizes"
    for _, strategies, remarks in (first, second):
        assert strategies == ["serial"]
        assert remarks
        assert "all run serially" in remarks[0]


def test_a_module_gives_a_module(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    own = set(vars(net))
    compiled: Any = interlace.compile(net, torch.randn(3, 4))
    assert nn.Module in type(compiled).mro()
    assert list(compiled.state_dict()) == list(net.state_dict())
    assert [*map(id, compiled.parameters())] == [*map(id, net.parameters())]
    assert compiled.eval() is compiled
    assert not net[0].training
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled.forward(x), net(x))
    compiled.train()(x).sum().backward()
    assert net[0].weight.grad is not None
    assert set(vars(net)) == own, "it was left in the model"
    compiled.tag = "mine"
    assert net.tag == "mine"
    assert net.get_submodule("0") is compiled.get_submodule("0")
    outer = nn.ModuleDict({"inner": compiled}).eval()
    assert not net.training
    assert list(outer.state_dict()) == [f"inner.{name}" for name in net.state_dict()]
    outer.load_state_dict({name: x + 1 for name, x in outer.state_dict().items()})
    torch.testing.assert_close(compiled(x), net(x))
    torch.save(compiled, tmp_path / "it.pt")
    again = torch.load(tmp_path / "it.pt", weights_only=False)
    torch.testing.assert_close(again(x), net(x))
    with pytest.raises(AttributeError, match=r"neither interlace's Compiled.*'nothing'"):
        _ = compiled.nothing


@pytest.mark.parametrize("given", [None, 3, torch.relu])
def test_what_is_no_module_is_a_typed_error(given: Any) -> None:
    with pytest.raises(
        OptionError, match=r'takes modules.*torch\.compile\(fn, backend="interlace"'
    ):
        interlace.compile(given)


@pytest.mark.parametrize(
    ("name", "told"),
    [("dynamic", ": give .*dynamic=True"), ("overlap", ': give options={"overlap"'), ("mode", "$")],
)
def test_an_argument_that_it_does_not_have_is_a_typed_error(name: str, told: str) -> None:
    with pytest.raises(OptionError, match=f"has no argument '{name}'{told}"):
        interlace.compile(nn.ReLU(), **{name: True})  # pyright: ignore
