"""Where the results of graph replays lie, and what a caller gets of them: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any
from unittest.mock import Mock

import torch

from interlace.ir import parse
from interlace.runtime.cuda.graphs.captured import GraphPair
from interlace.runtime.engine import GraphUse
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.run_sizes import RunSizes
from interlace.runtime.values import ValueTable

RETURNED = """
def f(x: f32[2, 3], w: f32[2, 3], o: out[f32[2, 3]]):
    y = empty(f32[4, 6])
    z = empty(f32[3])
    main: call("aten.neg.out", x, out=o)
    main: call("aten.zero_.default", y)
    main: call("aten.zero_.default", z)
    return {}
"""
CPU = torch.device("cpu")


def replayed(
    returned: str,
    results: Callable[[dict[str, torch.Tensor]], tuple[Any, ...]],
    given: Sequence[torch.Tensor],
    moved: Collection[int] = (),
    lent: Collection[int] = range(9),
) -> tuple[GraphPair, Callable[[Sequence[torch.Tensor]], Any]]:
    """A pair of a Program that returns this, and its replays; `results` makes what was captured, of
    the tensors that the graphs have."""
    program = parse(RETURNED.format(returned))
    plan = Plan(program, program.instantiate(0), lambda team, asked: asked or "nccl")
    values = ValueTable(program, plan.box, {}, CPU, RunSizes({}))
    context: Any = Mock(plan=plan, values=values, device=CPU)
    context.inputs.names, context.outputs.names = ("x", "w"), ("o",)
    context.graph_use = GraphUse()
    pair = GraphPair(context, Mock(), given, moved, (), lent)
    named = dict(zip(("x", "w", "o"), given, strict=False)) | pair.homes | pair.make_places(given)
    kept.append(named)  # as a pool keeps its memory
    pair.take_results(results(named), {"o"})
    pair.launch.append(Mock())
    return pair, lambda tensors: pair.run(0, 1, tensors)


kept: list[Any] = []


def three() -> list[torch.Tensor]:
    return [torch.randn(2, 3) for _ in range(3)]


def test_results_in_the_callers_tensors_are_those_of_each_run(seed: int) -> None:
    """Also where these are copied, and views of them, as backward saves both."""
    torch.manual_seed(seed)
    for moved in ((), {1, 2}):
        text = "o, w, (x[0:1], 3), w.permute(1, 0)"
        _, run = replayed(
            text, lambda of: (of["o"], of["w"], (of["x"][:1], 3), of["w"].t()), three(), moved
        )
        for given in (three(), three()):
            found, w, (part, number), turned = run(given)
            assert found is given[2]
            assert w is given[1]
            assert number == 3
            assert torch.equal(part, given[0][:1])
            assert torch.equal(turned, given[1].t())
            assert part.data_ptr() == given[0].data_ptr()
            assert turned.data_ptr() == given[1].data_ptr()


def test_lent_results_lie_in_memory_of_the_pair(seed: int) -> None:
    """Each buffer of them once, with all views of it."""
    torch.manual_seed(seed)
    text = "y[:, 1:3], (z, y.permute(1, 0)), o"

    def results(of: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        for name in "yzo":
            of[name].copy_(torch.randn(of[name].shape))
        return of["y"][:, 1:3], (of["z"], of["y"].t()), of["o"]

    pair, run = replayed(text, results, three()[:2])
    first, (second, third), fourth = run(three()[:2])
    assert torch.equal(first, pair.homes["y"][:, 1:3])
    assert torch.equal(second, pair.homes["z"])
    assert torch.equal(third, pair.homes["y"].t())
    assert torch.equal(fourth, pair.homes["o"])
    assert first.untyped_storage().data_ptr() == third.untyped_storage().data_ptr()
    assert (first.stride(), third.stride()) == ((6, 1), (1, 6))
    assert pair.held(1) == {0, 1, 2}
    assert pair.held(2) == {*range(9)}, "reads on the first stream may be under way"
    del second, third
    assert pair.held(1) == {0, 1, 2}, "y is that of both"
    del first
    assert pair.held(1) == {2}
    part = fourth[1:]
    del fourth
    assert pair.held(1) == {2}
    del part
    assert not pair.held(1)
    assert pair.fits(three()[:2])
    run(three()[:2])[0].untyped_storage().resize_(0)
    assert not pair.fits(three()[:2]), "what is replayed would write to memory that is free"


def test_copied_results_are_of_each_run_and_have_their_strides() -> None:
    """A backward is made for those of what its forward saves, such as a part of a split product."""
    y = torch.randn(4, 6)
    items = (
        y[:, 2:4],
        y.t(),
        y[:, :3].t(),
        y[0].expand(4, 6),
        y[:, :1].expand(4, 6),
        y[0].unfold(0, 3, 1),
        y[:0],
    )
    pair, run = replayed(", ".join(["y"] * len(items)), lambda of: items, three(), lent=())
    for found, item in zip(run(three()), items, strict=True):
        assert torch.equal(found, item)
        assert (found.stride(), found.is_contiguous()) == (item.stride(), item.is_contiguous())
        assert found.data_ptr() != item.data_ptr() or not item.numel()
    assert not pair.homes
    assert not pair.held(1)
    assert not pair.held(2)


def test_each_run_hands_out_other_tensors_with_versions_of_their_own() -> None:
    """As autograd sees it: what a backward saved stays as it is."""
    _, run = replayed("z, z[0:2]", lambda of: (of["z"], of["z"][:2]), three())
    (first, part), (second, _) = run(three()), run(three())
    assert first is not second
    first.add_(1)
    assert (first._version, part._version, second._version) == (1, 0, 0)
