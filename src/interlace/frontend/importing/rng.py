"""Random number operators that carry generator states: dropout that is recomputed in backward.

Activation checkpointing saves the generator's state before a random operator in forward, and runs
the operator from that state again in backward. A Program spells this with two operators of our
own, and everything that touches the generator reads and writes the implicit buffer `rng`, so it
keeps its order.

    main: call("interlace.get_rng_state.default", "@device", out=(state := u8[5056]))
    main: call("aten.native_dropout.default", x, 0.1, True, out=(y := ..., mask := ...))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from interlace.frontend.importing.importer import Importer, Lowering, Value
from interlace.frontend.importing.types import buffer_like
from interlace.ir import Buffer, Call, View

GET_STATE = "interlace.get_rng_state.default"
SET_STATE = "interlace.set_rng_state.default"


@torch.library.custom_op("interlace::get_rng_state", mutates_args=())
def get_rng_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


@torch.library.custom_op("interlace::set_rng_state", mutates_args=())
def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Sets the state of the device's default generator."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _save(imp: Importer, name: str, like: torch.Tensor) -> View:
    state: Buffer = buffer_like(imp.name(name), like, "fresh")
    view = imp.declare(state, like)
    imp.emit(Call(fn=GET_STATE, args=("@device",), fresh=(state,), rng=True, loc=imp.loc))
    return view


def _restore(imp: Importer, state: View) -> None:
    imp.emit(Call(fn=SET_STATE, args=(state, "@device"), rng=True, loc=imp.loc))


def _inner(imp: Importer, node: fx.Node, args: Any, value: Any) -> Value:
    target = node.args[0] if isinstance(node.args[0], torch._ops.OpOverload) else node.args[1]
    result = imp.call_like(node, str(target), args, node.kwargs, value)
    last = imp.ops[-1]
    assert isinstance(last, Call)
    imp.ops[-1] = Call(
        fn=last.fn, args=last.args, kwargs=last.kwargs, fresh=last.fresh, rng=True, loc=last.loc
    )
    return result


def _run_and_save(imp: Importer, node: fx.Node, args: list[Any]) -> Value:
    state, value = imp.value(node)
    saved = _save(imp, f"{node.name}_state", state)
    return saved, _inner(imp, node, node.args[1:], value)


def _run_with(imp: Importer, node: fx.Node, args: list[Any]) -> Value:
    state = imp.view(node.args[0])
    before = _save(imp, f"{node.name}_before", imp.value(node.args[0]))
    _restore(imp, state)
    result = _inner(imp, node, node.args[2:], imp.value(node))
    _restore(imp, before)
    return result


RANDOM: dict[str, Lowering] = {
    "run_and_save_rng_state": _run_and_save,
    "run_with_rng_state": _run_with,
}
"""Lowerings by operator."""
