"""Graphs that torch writes and loads: its `aot_compile` and `load_compiled_function`.

    compiled = torch.compile(step, backend="interlace", fullgraph=True).aot_compile(((x,), {}))
    compiled.save_compiled_function("step.pt")        # calls `serialize_compile_artifacts`
    torch.compiler.load_compiled_function(file)       # calls `deserialize_compile_artifacts`

TorchDynamo's graph travels, with the options and what TorchDynamo knows of the arguments. It is
compiled at its first call, which all ranks make together, by the schedules and proofs that the
cache has (store.py). So one rank alone may trace for all, with torch's `compile_on_one_rank`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import fx

from interlace.errors import UnsupportedError
from interlace.frontend.importing.nodes import MODULE_KEY, location
from interlace.options import Options
from interlace.torch_private.dynamo import (
    GraphModuleSerializableCallable,
    SerializableCallable,
    functorch_config,
)


def travels() -> bool:
    """Returns True if `aot_compile` asks for the graph."""
    return bool(getattr(functorch_config, "force_autograd_cache", False))


class PortableCall(SerializableCallable):
    """A graph of TorchDynamo that can be written and loaded, and is compiled when it is called."""

    def __init__(
        self,
        gm: fx.GraphModule,
        options: Options,
        labels: tuple[str, ...],
        state: frozenset[int],
        grad: bool,
    ) -> None:
        """`labels` name the arguments, `state` has the positions of parameters and buffers, and
        `grad` says if gradients were enabled as the graph was traced."""
        for node in gm.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat):
                raise UnsupportedError(
                    f"aot_compile of a graph whose sizes change ({node.name}): give "
                    "torch.compile(..., dynamic=False), and an input of each size"
                )
        self._gm, self._options, self._grad = gm, options, grad
        self._labels, self._state = labels, state
        self._call: Callable[..., object] | None = None

    def __call__(self, *args: object) -> object:
        """The graph's outputs."""
        if self._call is None:
            from interlace.frontend.backend import backend  # which makes objects of this class

            self._gm.meta.pop("dynamo_compile_id", None)  # else torch asks for the inputs' sources
            with torch.set_grad_enabled(self._grad):
                facts = self._options, self._labels, self._state
                self._call = backend.compiled_as(self._gm, args, *facts)
        return self._call(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: PortableCall) -> bytes:
        """The graph as torch writes it, behind a line of JSON with what belongs to it."""
        for node in fn._gm.graph.nodes:
            if module := location(node).module:  # torch leaves the stack of modules out
                node.meta["custom"] = {**(node.meta.get("custom") or {}), MODULE_KEY: module}
        head = {
            "options": {f.name: getattr(fn._options, f.name) for f in fields(Options)},
            "labels": fn._labels,
            "state": sorted(fn._state),
            "grad": fn._grad,
        }
        held = GraphModuleSerializableCallable(fn._gm)
        body = GraphModuleSerializableCallable.serialize_compile_artifacts(held)
        return json.dumps(head).encode() + b"\n" + body

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> PortableCall:
        """The call that was written, to be compiled when it is made."""
        head, _, body = data.partition(b"\n")
        told: dict[str, Any] = json.loads(head)
        held: Any = GraphModuleSerializableCallable.deserialize_compile_artifacts(body)
        options, state = Options.from_dict(told["options"]), frozenset[int](told["state"])
        return cls(held.graph_module, options, tuple(told["labels"]), state, told["grad"])
