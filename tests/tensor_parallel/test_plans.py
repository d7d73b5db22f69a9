"""`parallelize` with plans of torch's styles: what stays as it was, is refused, or is compiled."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from tests.tensor_parallel.test_styles import FeedForward, drawn, full, mesh_of, plan_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace.errors import InputError
from interlace.float8 import Recipe
from interlace.tensor_parallel import OverlapColwise, OverlapColwiseGroup, parallelize

ROWS: Any = Shard(1)
WHOLE: Any = Replicate()
BELOW: dict[str, Any] = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}


class Own(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Colwise(ColwiseParallel):
    """Somebody else's style."""


def stepped(model: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
    """An output, and the gradients of Parameters."""
    y = model(*args, **kwargs)
    y.square().sum().backward()
    found = [full(y), *(full(p.grad) for p in model.parameters())]
    model.zero_grad()
    return found


def near(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def kept(seed: int) -> None:
    """Plans that overlap in part, or whose input has a name: what torch gives, and why."""
    torch.manual_seed(seed)
    mesh, x = mesh_of(), torch.randn(2, 4, 48)
    part = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    rows: dict[str, Any] = {"input_layouts": ROWS, "desired_input_layouts": WHOLE}
    names: dict[str, Any] = {
        "input_kwarg_layouts": {"x": ROWS},
        "desired_input_kwarg_layouts": {"x": WHOLE},
    }
    group = {name: "OverlapColwiseGroup" for name in ("", "w1", "w3")}
    dtensors = ColwiseParallel(use_local_output=False)
    cases: list[tuple[dict[str, Any], dict[str, str], dict[str, str]]] = [
        ({}, group, {}),
        ({"": PrepareModuleInput(**names)}, group, {}),
        ({"w1": dtensors, "w3": dtensors, "w2": RowwiseParallel()}, group, {}),
        (
            {"": PrepareModuleInput(**rows, use_local_output=True)},
            {"w2": "OverlapRowwise"},
            {"": "gathers 1 .*local_output=False", "w1": r"`input_layouts` is Replicate\(\)"},
        ),
        ({"w1": Colwise()}, {"w1": "Colwise"}, {"": "w1 has Colwise, which may"}),
        (
            {"w2": RowwiseParallel(output_layouts=Partial())},
            group | {"w2": "RowwiseParallel"},
            {"w2": "RowwiseParallel is applied as it is given"},
        ),
        ({"w1": dtensors, "w3": dtensors, "w[13]": ColwiseParallel()}, group, {}),
        (
            {
                "w1": ColwiseParallel(output_layouts=WHOLE),
                "w3": ColwiseParallel(output_layouts=WHOLE),
            }
            | {"w2": RowwiseParallel(input_layouts=WHOLE)},
            {"w1": "OverlapColwise"},
            {"": "w1 is no linear layer right below"},
        ),
    ]
    for change, applied, why in cases:
        plan: dict[str, Any] = {"": PrepareModuleInput(**rows)} | BELOW | change
        ours = FeedForward(biased=True)
        theirs = copy.deepcopy(ours)
        done = parallelize(ours, mesh, {**plan, "w4": ColwiseParallel()})
        assert done.applied | applied == done.applied
        assert done.unmatched == ("w4",)
        assert bool(done.plain) == bool(why)
        for name, told in why.items():
            assert re.search(told, done.plain[name]), done
        plan.pop("w[13]", None)
        parallelize_module(theirs, mesh, plan)
        args, kwargs = ((), {"x": part}) if "x" in str(plan[""]) else ((part,), {})
        near(stepped(ours, *args, **kwargs), stepped(theirs, *args, **kwargs))


def test_what_stays_as_it_was_is_told(pool: Pool, seed: int) -> None:
    pool(2).run(kept, seed)


def unchanged(seed: int) -> None:
    """A plan whose last entry is wrong leaves the model as it was; so does a second call."""
    mesh = mesh_of()
    good = plan_of("torch sequence")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"norm": ColwiseParallel()}, r"names a torch\.nn\.modules\.normalization\.RMSNorm"),
        ({"head": RowwiseParallel()}, "`weight` is shared"),
        ({"norm.weight": ColwiseParallel()}, "norm.weight is a Parameter"),
        ({"norm_2": OverlapColwiseGroup(["0"])}, "`names` has '0'"),
        ({"attention": OverlapColwiseGroup(["wk"])}, "attention.wk is in its parent's group"),
    ]
    for change, told in wrong:
        model, (tokens, _) = drawn(True, True, seed)
        before = model(tokens)
        with pytest.raises(InputError, match=told):
            parallelize(model, mesh, good | change)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert torch.equal(model(tokens), before)
    small, rows = nn.Sequential(nn.Linear(32, 16 * mesh.size() + 2)), Shard(1)
    with pytest.raises(InputError, match="parts that are multiples of 16"):
        parallelize(small, mesh, {"0": OverlapColwise(input_layouts=rows, recipe=Recipe())})
    assert not any(isinstance(p, DTensor) for p in small.parameters())
    model, (tokens, _) = drawn(True, True, seed)
    parallelize(model, mesh, good)
    before = full(model(tokens))
    for plan in (good, plan_of("sequence", group=True), {"attention.wq": ColwiseParallel()}):
        with pytest.raises(InputError, match=r"is a DTensor, .* parallelise a module once"):
            parallelize(model, mesh, plan)
        assert torch.equal(full(model(tokens)), before)
    part = nn.Sequential(nn.Linear(4, 4), Own(4, 4))
    with pytest.raises(InputError, match="`names` has '1'"):
        parallelize_module(part, mesh, OverlapColwiseGroup(["0", "1"], input_layouts=ROWS))
    assert not any(isinstance(p, DTensor) for p in part.parameters())


def test_errors_come_before_a_change(pool: Pool, seed: int) -> None:
    pool(2).run(unchanged, seed)


def compiled(seed: int) -> str:
    """Layers in one graph, and what Interlace makes of it."""
    mesh, (whole, (tokens, _)) = mesh_of(), drawn(bool(seed % 2), False, seed)
    told: str = ""
    theirs: Any = copy.deepcopy(whole)
    parallelize_module(theirs, mesh, plan_of("torch sequence"))
    expected = stepped(theirs, tokens)
    for kind in ("torch sequence", "sequence"):
        model: Any = copy.deepcopy(whole)
        parallelize(model, mesh, plan_of(kind))
        if kind == "torch sequence":
            traced = interlace.compile(model, tokens, mesh=mesh)
            told = traced.explain()
        else:
            traced = torch.compile(model, backend="aot_eager", fullgraph=True)
        y = traced(tokens)
        y.square().sum().backward()
        near([full(y), *(full(p.grad) for p in model.parameters())], expected)
    quantised, x = FeedForward(biased=False), torch.randn(2, 8, 48)
    plan: dict[str, Any] = {
        "": PrepareModuleInput(input_layouts=ROWS, desired_input_layouts=WHOLE)
    } | BELOW
    parallelize(quantised, mesh, plan, recipe=Recipe())
    eager = stepped(quantised, x)
    for mine, theirs in zip(
        stepped(torch.compile(quantised, backend="eager"), x), eager, strict=True
    ):
        assert torch.equal(mine, theirs), "FP8 runs as ever, between graphs"
    return told


@pytest.mark.timeout(110)
def test_a_graph_has_torchs_own_layers(pool: Pool, seed: int) -> None:
    for told in pool(2).run(compiled, seed, timeout_s=100):
        for name in ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2"):
            assert name in told, told
