"""How a serial Program is bound: what is chosen for its device, and what is remarked on."""

from __future__ import annotations

import gc
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.errors import InterlaceError
from interlace.frontend import Imported, binding
from interlace.frontend.backend import Compilation
from interlace.frontend.compiled_graph import Setting
from interlace.ir import parse
from interlace.options import Options

TEXT = """
def double(x: f32[4], s: f32[()]):
    main: call("aten.mul.Tensor", x, s, out=(y := f32[4]))
    return y
"""


class Recorded:
    """An Executor that keeps what it is given and runs nothing."""

    def __init__(self, program: Any, **given: Any) -> None:
        self.program, self.given = program, given
        self.agreement = SimpleNamespace(proof_s=0.0)

    def prepare(self) -> None: ...


def bound(monkeypatch: pytest.MonkeyPatch, options: Options, host: str = "") -> Recorded:
    monkeypatch.setattr(binding, "Executor", Recorded)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("interlace.runtime.machine.gpus_of", lambda device: "")
    names = frozenset(filter(None, [host]))
    imported = Imported(parse(TEXT), (0, 1), (), (0,), names)
    executor: Any = binding.bind("forward", imported, {}, options, "cuda").executor
    return executor


def remarks(executor: Recorded) -> str:
    return " ".join(remark.text for remark in executor.program.remarks)


def test_a_backward_without_an_origin_does_not_keep_the_last_one() -> None:
    class Labelled:
        def run_as_before(self, _: Any, out: Any, at: Any, origin: str, boxes: Any) -> Any:
            return (torch.tensor(len(origin)),)

    executor: Any = Labelled()
    machine: Any = None
    of = binding.Bound("backward", Imported(parse(TEXT), (0, 1), (), (0,)), executor, machine)
    args = [torch.ones(4), torch.ones(())]
    found = [of.run(args, origin=origin) or [] for origin in ("of forward 1", "")]
    assert [int(each[0]) for each in found] == [12, 0]


@pytest.mark.parametrize("triton", [True, False])
def test_regions_by_what_is_there(monkeypatch: pytest.MonkeyPatch, triton: bool) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        return triton or None if name == "triton" else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    executor = bound(monkeypatch, Options())
    assert executor.given["options"].regions == ("inductor" if triton else "eager")
    assert ("needs the package triton" in remarks(executor)) == (not triton)
    assert bound(monkeypatch, Options(regions="eager")).given["options"].regions == "eager"


def test_what_is_on_the_cpu_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Options(graph=True, static_outputs=True)
    assert bound(monkeypatch, captured).given["options"].graph
    executor = bound(monkeypatch, captured, host="s")
    assert not executor.given["options"].graph
    assert executor.given["host"] == {"s"}
    assert "not captured in CUDA graphs: s is on the CPU" in remarks(executor)


def test_nothing_collects_garbage_while_graphs_are_traced() -> None:
    """Collections would look through torch's graphs, again and again; an error ends that time."""
    collects: list[bool] = []

    def trace(_: object) -> Any:
        collects.append(gc.isenabled())
        raise InterlaceError("no graph")

    with pytest.raises(InterlaceError, match="no graph"):
        Compilation(Setting(Options())).run(trace, [], "a graph")
    assert collects == [False]
    assert gc.isenabled()
