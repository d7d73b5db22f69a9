"""`OverlapColwiseGroup`: layers of one input gather it once, and sum its gradient once."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput

from interlace.errors import InputError
from interlace.float8 import Recipe
from interlace.nn.functional import all_gather_linear, replicated_linear
from interlace.nn.parallel.linear import Given
from interlace.optim.untraced import eager
from interlace.tensor_parallel.styles import (
    ALL,
    FEATURES,
    Checked,
    Forward,
    OverlapColwise,
    as_torch,
    distribute,
    is_plain,
    laid_out,
    local,
    local_of,
)


class OverlapColwiseGroup(Checked):
    """Column-parallel linear layers of one input, which a parent module gives to each of them.

    The input is gathered once, and the gradients that the layers give it are summed before one
    reduce-scatter or all-reduce, so other roundings add up than of separate layers. The layer that
    is called first computes the outputs of all; the others give theirs when they are called with
    the same tensor (of an inference tensor each computes its own). FSDP2 goes around the module,
    not around its layers.

    Args:
        names: those of the layers, in the module that has this style.
        input_layouts: of the module's first argument. `Shard(dim)`, `dim` not the last: the rows
            are gathered once; the module is given a DTensor, of the whole shape. `Replicate()`: the
            module is given what it was given.
        use_local_output, options, recipe: as of `OverlapColwise`. Outputs are cut in their last
            dimension.

    Raises:
        InputError: as `OverlapColwise`, and for a name that is no linear layer's.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        input_layouts: Placement | None = None,
        use_local_output: bool = True,
        options: Given = None,
        recipe: Recipe | None = None,
    ) -> None:
        if isinstance(names, str) or not names or len({*names}) < len(names):
            raise InputError(f"`names` is {names!r}: give the names of linear layers, each once")
        self.names = tuple(names)
        self._style = OverlapColwise(
            input_layouts=input_layouts,
            use_local_output=use_local_output,
            options=options,
            recipe=recipe,
        )
        self.prepare: PrepareModuleInput | None = None
        """Style that prepares the module's inputs, where its first argument is not all."""
        if self._style.dim is None and self._style.input_layouts != ALL:
            raise InputError(
                f"`input_layouts` is {input_layouts!r}: give Replicate(), or a Shard(dim) with "
                "`dim` not the last"
            )

    def why(self, module: nn.Module) -> str | None:
        return None

    def check(self, module: nn.Module, mesh: DeviceMesh, planned: dict[int, Placement]) -> None:
        found = dict(module.named_modules())
        for name in self.names:
            if not is_plain(found.get(name)):
                raise InputError(
                    f"`names` has {name!r}, and {type(module).__name__} has no nn.Linear there "
                    "without a forward of its own"
                )
            self._style.check(found[name], mesh, planned)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh, {})
        style, first = self._style, self.names[0]
        shared = _Shared([module.get_submodule(name) for name in self.names])
        for i, layer in enumerate(shared.layers):
            distribute(layer, style.placements(layer), device_mesh, self.src_data_rank)
            vars(layer)["_interlace_shared"] = shared
            layer.forward = types.MethodType(self._forward(i, device_mesh), layer)
        groups = module.__dict__.setdefault("_interlace_groups", {})
        groups[first] = shared
        if self.prepare is not None:
            _LeftRows(self.prepare, style)._apply(module, device_mesh)
        elif style.dim is not None:
            hook = functools.partial(_prepare_first, style, device_mesh)
            module.register_forward_pre_hook(hook, with_kwargs=True)
        module.register_forward_hook(functools.partial(_forget, style, first), always_call=True)
        return module

    def _forward(self, index: int, mesh: DeviceMesh) -> Forward:
        """The forward of one of the layers."""
        style = self._style

        def compute(input: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
            x = local(input, mesh, style.input_layouts, style.input_layouts)
            for layer in layers:
                if not isinstance(layer.weight, DTensor) or layer.weight.device_mesh != mesh:
                    raise InputError(
                        f"a layer of the group {', '.join(self.names)} is sharded again when "
                        "another of them is called: apply fully_shard to the module that has this "
                        "style, or to one around it, and not to its layers"
                    )
            pairs = [local_of(layer) for layer in layers]
            weights, biases = zip(*pairs, strict=True)
            if style.dim is None:
                return replicated_linear(x, weights, biases, group=mesh, **style.how)
            return all_gather_linear(x, weights, biases, group=mesh, dim=style.dim, **style.how)

        def forward(self_: Any, input: Tensor) -> Tensor:
            if style.traced:
                return as_torch(style, ALL, self_, input, mesh)
            y = self_._interlace_shared.output(index, input, compute)
            return laid_out(style, self_, y, FEATURES, mesh)

        return forward


class _Shared:
    """Layers of one input, and outputs that wait for their layers to be called, as long as neither
    the input, a weight nor a mode of torch changes."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self.forget()

    def forget(self) -> None:
        """Drops input and outputs."""
        self.input: Tensor | None = None
        self.state: tuple[object, ...] = ()
        self.outputs: dict[int, Tensor] = {}

    @eager
    def output(
        self, index: int, x: Tensor, compute: Callable[[Tensor, list[nn.Module]], Sequence[Tensor]]
    ) -> Tensor:
        """The output of a layer; an input that was changed in place is another one."""
        if x.is_inference():  # it does not tell whether it was changed
            return compute(x, [self.layers[index]])[0]
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        weights = [_mark(p) for layer in self.layers for p in layer._parameters.values()]
        state = x._version, torch.is_grad_enabled(), autocast, weights
        if self.input is not x or self.state != state or index not in self.outputs:
            self.outputs = dict(enumerate(compute(x, self.layers)))
            self.input, self.state = x, state
        y = self.outputs.pop(index)
        if not self.outputs:
            self.forget()
        return y


def _mark(param: Tensor | None) -> tuple[int, ...] | None:
    """Another one where a Parameter is written to or replaced, whole or by what it is made of."""
    if param is None:
        return None
    part = getattr(param, "_local_tensor", param)
    return id(param), param._version, part._version, part.data_ptr()


class _LeftRows(PrepareModuleInput):
    """Inputs as torch prepares them, but for rows that the layers of a style gather."""

    def __init__(self, given: PrepareModuleInput, style: OverlapColwise) -> None:
        super().__init__(
            input_layouts=given.input_layouts,
            desired_input_layouts=given.desired_input_layouts,
            input_kwarg_layouts=given.input_kwarg_layouts if given.with_kwargs else None,
            desired_input_kwarg_layouts=given.desired_input_kwarg_layouts,
        )
        self.style = style

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        if is_gathered(input_layout, desired_layout):
            return _rows(input, self.style, mesh)
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)


def is_gathered(given: Placement | None, desired: Placement | None) -> bool:
    """Returns true where `PrepareModuleInput` gathers the rows of an input."""
    return isinstance(given, Shard) and given.dim != -1 and desired == Replicate()


def _prepare_first(
    style: OverlapColwise,
    mesh: DeviceMesh,
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Makes a module's first argument a DTensor, by position or by name."""
    name = "" if args else next(iter(inspect.signature(module.forward).parameters))
    x = args[0] if args else kwargs.get(name)
    if not isinstance(x, Tensor):
        raise InputError(f"the first argument of {type(module).__name__} is {x!r}: give a tensor")
    x = _rows(x, style, mesh)
    return ((x, *args[1:]), kwargs) if args else ((), {**kwargs, name: x})


def _rows(x: Tensor, style: OverlapColwise, mesh: DeviceMesh) -> DTensor:
    """An input as a DTensor of the style's layout; in a graph it is gathered here, once for all."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, style.input_layouts, run_check=False)
    return x.redistribute(placements=ALL) if style.traced else x


def _forget(style: OverlapColwise, name: str, module: nn.Module, *_: object) -> None:
    """After a module's forward, drops what a layer was not asked for."""
    if not style.traced:
        vars(module)["_interlace_groups"][name].forget()
