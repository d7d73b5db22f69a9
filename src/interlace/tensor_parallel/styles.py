"""Styles for `parallelize_module` whose communication runs under their matmuls.

    up, down = OverlapColwise(input_layouts=Shard(1)), OverlapRowwise(output_layouts=Shard(1))
    parallelize_module(block, mesh, {"w1": up, "w2": down})

Parameters are DTensors with the placements of torch's styles, under the same names. A
`GradAccumulator` takes them without a buffer.

Note [What overlaps]: the rows of a linear layer's input that are gathered, and those of its output
that are summed. For all else (embeddings, features that are cut or gathered, an input that is the
same on all ranks, a subclass of nn.Linear with its own forward) these classes are torch's own, of
which they inherit. So the gradient of an input that is the same on all ranks is all-reduced by
DTensor, for each layer; `OverlapColwiseGroup` does that once for several.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.weak import WeakTensorKeyDictionary

from interlace.errors import InputError
from interlace.float8 import Recipe
from interlace.frontend.backend import options_from
from interlace.nn.autograd import eager
from interlace.nn.functional import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)
from interlace.nn.parallel.linear import Given

FEATURES, ALL = (Shard(-1),), (Replicate(),)
"""Layouts: cut in the last dimension; the same on all ranks."""


class _Overlap(ParallelStyle):
    """What the styles add to torch's, of which they inherit next."""

    _side: str
    """The layouts whose communication overlaps."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        options: Given = None,
        overlap: bool = True,
        recipe: Recipe | None = None,
    ) -> None:
        layouts = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        for name, given in layouts.items():
            if given is not None and not isinstance(given, Shard | Replicate):
                raise InputError(f"`{name}` is {given!r}: give Shard(dim) or Replicate()")
        if not isinstance(recipe, Recipe | None):
            raise InputError(f"`recipe` is {recipe!r}: give an interlace.float8.Recipe, or None")
        base: Any = super()
        base.__init__(use_local_output=use_local_output, **layouts)
        self._how = {"options": options_from(options), "overlap": overlap, "recipe": recipe}
        (layout,) = getattr(self, self._side)
        self._dim = layout.dim if isinstance(layout, Shard) and layout.dim != -1 else None
        """The dimension of rows that is gathered or scattered, if one is."""
        sums = self._side == "output_layouts" and layout == Replicate()
        self._overlaps = sums or self._dim is not None
        if recipe is not None and not self._overlaps:
            raise InputError(
                f"`recipe` is given, and `{self._side}` is {layout!r}, where nothing overlaps: "
                "give a Shard(dim) with `dim` not the last, or leave `recipe` out"
            )

    def _takes(self, module: nn.Module, mesh: DeviceMesh) -> bool:
        """Whether a layer overlaps; else it is for torch's style."""
        check_module(module, mesh)
        if self._how["recipe"] is not None and not _is_plain(module):
            raise InputError(
                f"`recipe` is given for a {type(module).__name__}: FP8 is for nn.Linear, and no "
                "forward of its own"
            )
        return self._overlaps and _is_plain(module)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        base: Any = super()
        keep_ties(base._partition_linear_fn, name, module, device_mesh)

    def _partition_embedding_fn(
        self, name: str, module: nn.Module, device_mesh: DeviceMesh
    ) -> None:
        base: Any = super()
        keep_ties(base._partition_embedding_fn, name, module, device_mesh)


class OverlapColwise(_Overlap, ColwiseParallel):
    """torch's `ColwiseParallel`; rows of the input are gathered under the matmul.

    Args:
        input_layouts, output_layouts, use_local_output: as of torch's. A linear layer whose input
            is `Shard(dim)` with `dim` not the last is an `all_gather_linear`: ranks have equal
            parts. Features are the dimension -1.
        options, overlap, recipe: as of `interlace.nn.functional.all_gather_linear`. A recipe is for
            layers that gather.

    `InputError` names an argument, module or mesh that is not taken, in forward an input of another
    mesh, and layers that share a Parameter and would have it in two layouts.
    """

    _side = "input_layouts"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = self._dim
        if not self._takes(module, device_mesh) or dim is None:
            return super()._apply(module, device_mesh)

        def forward(self_: Any, input: Tensor) -> Tensor:
            x = _local(input, device_mesh, self.input_layouts, self.input_layouts)
            y = all_gather_linear(x, *_local_of(self_), group=device_mesh, dim=dim, **self._how)
            return _laid_out(self, self_, y, FEATURES, device_mesh)

        return _overlapped(module, device_mesh, self._partition_linear_fn, forward)


class OverlapRowwise(_Overlap, RowwiseParallel):
    """torch's `RowwiseParallel`; the output is summed under the matmul.

    Args:
        input_layouts, output_layouts, use_local_output: as of torch's. A linear layer whose output
            is `Shard(dim)` with `dim` not the last is a `linear_reduce_scatter`, and takes sizes of
            that dimension that are multiples of the mesh's; one whose output is `Replicate()` is a
            `linear_all_reduce`.
        options, overlap, recipe: as of `interlace.nn.functional.linear_reduce_scatter`. A recipe is
            for those two.

    `InputError` as of `OverlapColwise`.
    """

    _side = "output_layouts"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        dim = self._dim
        if not self._takes(module, device_mesh):
            return super()._apply(module, device_mesh)

        def forward(self_: Any, input: Tensor) -> Tensor:
            x = _local(input, device_mesh, self.input_layouts, FEATURES)
            given = x, *_local_of(self_)
            if dim is None:
                y = linear_all_reduce(*given, group=device_mesh, **self._how)
            else:
                y = linear_reduce_scatter(*given, group=device_mesh, dim=dim, **self._how)
            return _laid_out(self, self_, y, self.output_layouts, device_mesh)

        return _overlapped(module, device_mesh, self._partition_linear_fn, forward)


class OverlapColwiseGroup(ParallelStyle):
    """Column-parallel linear layers of one input, which a parent module gives to each of them.

        {"attention": OverlapColwiseGroup(("wq", "wk", "wv"), input_layouts=Shard(1))}

    Args:
        names: those of the layers, in the module that has this style.
        input_layouts: of the module's first argument. `Shard(dim)`, `dim` not the last: the rows
            are gathered once; the module is given a DTensor, of the whole shape. `Replicate()`: the
            module is given what it was given.
        options, overlap, recipe: as of `OverlapColwise`.

    The layers' outputs are local, cut in their last dimension. The layer that is called first
    computes the outputs of all; the others give theirs when they are called with the same tensor
    (of an inference tensor each computes its own). So one backward takes all outputs together.
    FSDP2 goes around the module, not around its layers.
    The gradients that they give the input are summed before one reduce-scatter, or one all-reduce,
    so other roundings add up than of separate layers. `InputError` as of `OverlapColwise`, and for
    a name that is no linear layer's.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        input_layouts: Placement | None = None,
        options: Given = None,
        overlap: bool = True,
        recipe: Recipe | None = None,
    ) -> None:
        if isinstance(names, str) or not names or len({*names}) < len(names):
            raise InputError(f"`names` is {names!r}: give the names of linear layers, each once")
        self._names = tuple(names)
        self._style = OverlapColwise(
            input_layouts=input_layouts, options=options, overlap=overlap, recipe=recipe
        )
        if self._style._dim is None and self._style.input_layouts != ALL:
            raise InputError(
                f"`input_layouts` is {input_layouts!r}: give Replicate(), or a Shard(dim) with "
                "`dim` not the last"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style, found = self._style, dict(module.named_modules())
        for name in self._names:
            if not _is_plain(found.get(name)):
                raise InputError(
                    f"`names` has {name!r}, and {type(module).__name__} has no nn.Linear there "
                    "without a forward of its own"
                )
            check_module(found[name], device_mesh)
        style.src_data_rank = self.src_data_rank
        shared = _Shared([found[name] for name in self._names])
        for i, layer in enumerate(shared.layers):
            layer._interlace_shared = shared
            forward = self._forward(i, device_mesh)
            _overlapped(layer, device_mesh, style._partition_linear_fn, forward)
        groups = module.__dict__.setdefault("_interlace_groups", {})
        groups[self._names[0]] = shared
        if style._dim is not None:
            module.register_forward_pre_hook(
                functools.partial(_distribute_input, style.input_layouts, device_mesh),
                with_kwargs=True,
            )
        module.register_forward_hook(functools.partial(_forget, self._names[0]), always_call=True)
        return module

    def _forward(self, index: int, mesh: DeviceMesh) -> Callable[[Any, Tensor], Tensor]:
        """The forward of one of the layers."""
        style = self._style

        def compute(input: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
            x = _local(input, mesh, style.input_layouts, style.input_layouts)
            for layer in layers:
                if not isinstance(layer.weight, DTensor) or layer.weight.device_mesh != mesh:
                    raise InputError(
                        f"a layer of the group {', '.join(self._names)} is sharded again when "
                        "another of them is called: apply fully_shard to the module that has this "
                        "style, or to one around it, and not to its layers"
                    )
            pairs = [_local_of(layer) for layer in layers]
            weights, biases = zip(*pairs, strict=True)
            if style._dim is None:
                return replicated_linear(x, weights, biases, group=mesh, **style._how)
            return all_gather_linear(x, weights, biases, group=mesh, dim=style._dim, **style._how)

        def forward(self_: Any, input: Tensor) -> Tensor:
            return self_._interlace_shared.output(index, input, compute)

        return forward


class _Shared:
    """Layers of one input, and outputs that wait for their layers to be called, as long as neither
    the input, a weight nor a mode of torch changes."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.forget()

    def forget(self) -> None:
        """Drops input and outputs."""
        self.input: Tensor | None = None
        self.state: tuple[Any, ...] = ()
        self.outputs: dict[int, Tensor] = {}

    @eager
    def output(
        self, index: int, x: Tensor, compute: Callable[[Tensor, list[Any]], Sequence[Tensor]]
    ) -> Tensor:
        """That of a layer; an input that was changed in place is another one."""
        if x.is_inference():  # it does not tell whether it was changed
            return compute(x, [self.layers[index]])[0]
        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        weights = [layer.weight._version for layer in self.layers]
        state = x._version, torch.is_grad_enabled(), autocast, weights
        if self.input is not x or self.state != state or index not in self.outputs:
            self.outputs = dict(enumerate(compute(x, self.layers)))
            self.input, self.state = x, state
        y = self.outputs.pop(index)
        if not self.outputs:
            self.forget()
        return y


def _distribute_input(
    layouts: tuple[Placement, ...],
    mesh: DeviceMesh,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes a module's first argument a DTensor, by position or by name."""
    name = "" if args else next(iter(inspect.signature(module.forward).parameters))
    x = args[0] if args else kwargs.get(name)
    if not isinstance(x, Tensor):
        raise InputError(f"the first argument of {type(module).__name__} is {x!r}: give a tensor")
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, layouts, run_check=False)
    return ((x, *args[1:]), kwargs) if args else ((), {**kwargs, name: x})


def _forget(name: str, module: Any, *_: Any) -> None:
    """After a module's forward, drops what a layer was not asked for."""
    module._interlace_groups[name].forget()


# what the styles share


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuses meshes of several dimensions."""
    if mesh.ndim != 1:
        raise InputError(f"the mesh has {mesh.ndim} dimensions: give one of them, mesh[name]")


def check_module(module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuses what is no layer that a style takes, or is another mesh's."""
    check_mesh(mesh)
    if not isinstance(module, nn.Linear | nn.Embedding):
        raise InputError(
            f"the plan names a {type(module).__name__}: nn.Linear and nn.Embedding are taken"
        )
    for name, param in module.named_parameters(recurse=False):
        if isinstance(param, DTensor) and param.device_mesh != mesh:
            raise InputError(
                f"`{name}` lies on {param.device_mesh}, and the plan is for {mesh}: give one mesh"
            )


def _is_plain(module: object) -> bool:
    """Whether this is a linear layer without a forward of its own, which would be replaced."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


_DISTRIBUTED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What Parameters became, for the layers that share them."""


def keep_ties(
    partition: Callable[..., None], name: str, module: nn.Module, mesh: DeviceMesh
) -> None:
    """Distributes Parameters, those that were done for another layer not anew."""
    before = dict(module.named_parameters(recurse=False))
    partition(name, module, mesh)
    for key, param in before.items():
        made: Any = module.get_parameter(key)
        tied: Any = _DISTRIBUTED.setdefault(param, made)
        if tied.placements != made.placements or tied.device_mesh != mesh:
            raise InputError(
                f"`{key}` is shared with a layer that has it as {tied.placements} on "
                f"{tied.device_mesh}, and is to be {made.placements} on {mesh}: a vocabulary is "
                "cut by a row-wise embedding and a column-wise linear"
            )
        module.register_parameter(key, tied)


def _overlapped(
    module: Any,
    mesh: DeviceMesh,
    partition: Callable[..., None],
    forward: Callable[[Any, Tensor], Tensor],
) -> nn.Module:
    """The layer with distributed Parameters, and another forward, which copies of it keep."""
    distribute_module(module, mesh, partition)
    weight: Any = module.weight
    size, ranks = weight.shape[weight.placements[0].dim], mesh.size()
    if math.ceil(size / ranks) * (ranks - 1) >= size:
        raise InputError(
            f"a layer of {module.in_features} to {module.out_features} features leaves some of "
            f"{ranks} ranks without any: leave it out of the plan"
        )
    module.forward = types.MethodType(forward, module)
    return module


def _local(
    x: Tensor, mesh: DeviceMesh, given: tuple[Placement, ...], wanted: tuple[Placement, ...]
) -> Tensor:
    """This rank's part of an input, which was laid out as told unless it is a DTensor."""
    if not isinstance(x, DTensor):
        if given == wanted:
            return x
        x = DTensor.from_local(x, mesh, given, run_check=False)
    if x.device_mesh != mesh:
        raise InputError(f"`input` lies on {x.device_mesh}, and the layer on {mesh}: give one mesh")
    return x.redistribute(placements=wanted).to_local()


def summed_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """What all ranks have alike, whose gradient is the sum of theirs."""
    whole = DTensor.from_local(x, mesh, ALL, run_check=False)
    return whole.to_local(grad_placements=(Partial(),))


def _local_of(module: nn.Module) -> list[Any]:
    """This rank's part of weight and bias, whose gradients come back as DTensors."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in (module.weight, module.bias)]


def _laid_out(
    style: ColwiseParallel | RowwiseParallel,
    module: Any,
    y: Tensor,
    made: tuple[Placement, ...],
    mesh: DeviceMesh,
) -> Tensor:
    """An output that was made in one layout, as the style wants it."""
    if style.use_local_output and style.output_layouts == made:
        return y
    whole: dict[str, Any] = {}
    if made == FEATURES and module.out_features % mesh.size():  # parts differ, so the sum is told
        y = y.contiguous()
        shape = torch.Size((*y.shape[:-1], module.out_features))
        whole = {"shape": shape, "stride": y.new_empty(shape, device="meta").stride()}
    y = DTensor.from_local(y, mesh, made, run_check=False, **whole)
    return style._prepare_output_fn(style.output_layouts, style.use_local_output, module, y, mesh)
