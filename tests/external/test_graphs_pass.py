"""`interlace_check.graphs.checking` where others take a pass: Inductor, AOTAutograd's compilers, a
pipeline of graph passes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.external.graphs_support import C10D, STREAMS, Maker, fake_world, traced
from torch import fx
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import interlace
from interlace.errors import OptionError, SoundnessError, UnsupportedError
from interlace_check.graphs import check


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with fake_world(2):
        yield
    torch._dynamo.reset()


def group() -> str:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def waited(x: torch.Tensor) -> torch.Tensor:
    return C10D.wait_tensor.default(C10D.all_reduce.default(x, "sum", group())) * 2


def pending(x: torch.Tensor) -> torch.Tensor:
    return C10D.all_reduce.default(x * 2, "sum", group())


class Checked(CustomGraphPass):
    """The form of the documentation, with which Inductor keeps its caches."""

    __call__, uuid = staticmethod(check), staticmethod(lambda: interlace.__version__)  # type: ignore[assignment]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("form", [check, Checked()], ids=["function", "with uuid"])
def test_as_a_post_grad_pass_of_inductor(form: Any) -> None:
    with config.patch(post_grad_custom_post_pass=form):
        with pytest.raises(Exception, match="unwaited: all_reduce is returned, and nothing waited"):
            torch.compile(pending)(torch.ones(4))
        torch._dynamo.reset()
        counters.clear()
        assert torch.compile(waited)(torch.ones(4)).shape == (4,)
    assert bool(counters["inductor"]["fxgraph_cache_bypass"]) == (form is check)


def test_in_the_compilers_of_aot_module_simplified() -> None:
    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        def compiler(gm: fx.GraphModule, example_inputs: Any) -> Any:
            return make_boxed_func(check(gm, example_inputs).forward)

        return aot_module_simplified(gm, inputs, fw_compiler=compiler)

    assert torch.compile(waited, backend=backend)(torch.ones(4)).shape == (4,)
    with pytest.raises(Exception, match="SoundnessError: unsound: 1 fault"):
        torch.compile(pending, backend=backend)(torch.ones(4))


def test_in_a_pipeline_of_passes() -> None:
    """As GraphTrainer of torchtitan calls one: `(gm, example_inputs) -> gm`."""

    def drop_waits(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=C10D.wait_tensor.default):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        return gm

    inputs = (torch.ones(4),)
    (gm,) = traced(waited, *inputs)
    assert check(gm, inputs) is gm
    dropped = drop_waits(gm, inputs)
    with pytest.raises(SoundnessError, match="unwaited"):
        check(dropped, inputs)


def test_in_graph_trainer_of_torchtitan() -> None:
    passes = pytest.importorskip("torchtitan.experiments.graph_trainer.passes")
    inputs = (torch.ones(4),)
    (gm,) = traced(waited, *inputs)
    assert passes.apply_graph_passes(gm, inputs, [check]) is gm
    (gm,) = traced(pending, *inputs)
    with pytest.raises(SoundnessError, match="unwaited"):
        passes.apply_graph_passes(gm, inputs, [check])


def test_faults_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    (gm,) = traced(pending, torch.ones(4))
    with caplog.at_level(logging.ERROR, "interlace_check"):
        assert partial(check, on_fault="log")(gm.graph) is gm.graph
    (record,) = (each for each in caplog.records if each.name.startswith("interlace_check"))
    assert "unwaited: all_reduce is returned" in record.message


def test_a_graph_that_cannot_be_checked(caplog: pytest.LogCaptureFixture) -> None:
    g = Maker()
    gm = g.done(g.call(STREAMS.wait_stream.default, 1, 0))
    (node,) = gm.graph.find_nodes(op="call_function", target=STREAMS.wait_stream.default)
    node.target, node.args = torch.ops.c10d.barrier.default, (None, None, [])
    with pytest.raises(UnsupportedError, match="what it waits for or orders is unknown"):
        check(gm)
    with caplog.at_level(logging.ERROR, "interlace_check"):
        assert check(gm, on_fault="log") is gm
    assert "what it waits for or orders is unknown" in caplog.text


@pytest.mark.parametrize("options", [{"on_fault": "ignore"}, {"order": "none"}, {"ordr": "any"}])
def test_options_are_checked(options: Any) -> None:
    """Also where faults are only logged."""
    g = Maker()
    with pytest.raises(OptionError, match=r"fix: (it is one of|the options are) "):
        partial(check, on_fault="log")(g.done(g.input("x")), **options)
