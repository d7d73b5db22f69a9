"""Styles for `parallelize_module` whose communication runs under their matmuls.

Parameters are DTensors with the placements of torch's styles, under the same names. A
`GradAccumulator` takes them without a buffer.

Note [What overlaps]: the rows of a linear layer's input that are gathered, and those of its output
that are summed. For all else (embeddings, features that are cut or gathered, an input that is the
same on all ranks, a subclass of nn.Linear with its own forward) these classes are torch's own, of
which they inherit. So the gradient of an input that is the same on all ranks is all-reduced by
DTensor, for each layer; `OverlapColwiseGroup` does that once for several.

Note [In a graph]: what torch.compile traces is torch's own as well, without a break of the graph,
and `backend="interlace"` overlaps it. A layer that has a recipe is traced by that backend alone:
Note [In our own graphs] in nn/parallel/traced.py.
"""

from __future__ import annotations

import math
import types
from abc import abstractmethod
from collections.abc import Callable, Mapping
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
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)
from torch.utils.weak import WeakTensorKeyDictionary

from interlace.errors import InputError
from interlace.float8 import Recipe
from interlace.float8.data import ALIGNMENT
from interlace.frontend.backend import options_from
from interlace.nn.functional import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
)
from interlace.nn.parallel.linear import Given

Forward = Callable[[nn.Linear, Tensor], Tensor]
"""The forward of a layer that overlaps, as a function of the layer and its input."""
How = dict[str, Any]
"""The options of a layer's communication, as its function in nn.functional takes them."""

FEATURES, ALL = (Shard(-1),), (Replicate(),)
"""Layouts: cut in the last dimension; the same on all ranks."""


class Checked(ParallelStyle):
    """A style that raises before it changes anything."""

    @abstractmethod
    def why(self, module: nn.Module) -> str | None:
        """Why a module's communication, if it has any, does not overlap; None where it does."""

    @abstractmethod
    def check(self, module: nn.Module, mesh: DeviceMesh, planned: dict[int, Placement]) -> None:
        """Raises what is wrong; `planned` is what Parameters will be, by their ids, and grows."""


class _Overlap(Checked):
    """The part that the styles add to torch's, of which they inherit next."""

    _side: str
    """The layouts whose communication overlaps."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        options: Given = None,
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
        self.how = {"options": options_from(options), "recipe": recipe}
        (layout,) = getattr(self, self._side)
        self.dim = layout.dim if isinstance(layout, Shard) and layout.dim != -1 else None
        """The dimension of rows that is gathered or scattered, if one is."""
        sums = self._side == "output_layouts" and layout == Replicate()
        self._overlaps = sums or self.dim is not None
        if recipe is not None and not self._overlaps:
            raise InputError(
                f"`recipe` is given, and `{self._side}` is {layout!r}, where nothing overlaps: "
                "give a Shard(dim) with `dim` not the last, or leave `recipe` out"
            )

    def why(self, module: nn.Module) -> str | None:
        if not is_plain(module):
            own = " with a forward of its own" if isinstance(module, nn.Linear) else ""
            return f"it is a {type(module).__name__}{own}"
        if self._overlaps:
            return None
        return f"`{self._side}` is {getattr(self, self._side)[0]!r}, where nothing overlaps"

    @abstractmethod
    def placements(self, module: nn.Module) -> dict[str, Placement]:
        """The placements that torch's style gives the Parameters."""

    def check(self, module: nn.Module, mesh: DeviceMesh, planned: dict[int, Placement]) -> None:
        check_mesh(mesh)
        check_layer(module)
        if self.how["recipe"] is not None and not is_plain(module):
            raise InputError(
                f"`recipe` is given for a {type(module).__name__}: FP8 is for nn.Linear, and no "
                "forward of its own"
            )
        self.check_sizes(module, mesh)
        check_parameters(module, self.placements(module), mesh, planned)

    def check_sizes(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Refuses widths that the mesh cannot share, or that FP8's GEMM does not take."""
        weight, ranks = module.get_parameter("weight"), mesh.size()
        cut = self.placements(module)["weight"]
        assert isinstance(cut, Shard)
        size = weight.shape[cut.dim]
        if is_plain(module) and math.ceil(size / ranks) * (ranks - 1) >= size:
            raise InputError(
                f"a layer of {module.in_features} to {module.out_features} features leaves some of "
                f"{ranks} ranks without any: leave it out of the plan"
            )
        if self.how["recipe"] is not None:
            parts = list(weight.shape)
            parts[cut.dim] = size // ranks if size % ranks == 0 else 1
            if any(part % ALIGNMENT for part in parts):
                raise InputError(
                    f"`recipe` is given for a layer of {module.in_features} to "
                    f"{module.out_features} features over {ranks} ranks: FP8's GEMM takes parts "
                    f"that are multiples of {ALIGNMENT}; leave it out of the plan, or `recipe`"
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, device_mesh, {})
        if self.why(module) is not None:
            base: Any = super()
            return base._apply(module, device_mesh)
        self._partition("", module, device_mesh)
        forward = self.forward_on(device_mesh)
        module.forward = types.MethodType(forward, module)  # which copies of the module keep
        return module

    @abstractmethod
    def forward_on(self, mesh: DeviceMesh) -> Forward:
        """The forward of a layer that overlaps."""

    def _partition(self, _: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        distribute(module, self.placements(module), device_mesh, self.src_data_rank)

    _partition_linear_fn = _partition_embedding_fn = _partition

    @property
    def traced(self) -> bool:
        """True where this runs in a graph, as torch's own."""
        return torch.compiler.is_compiling() and self.how["recipe"] is None


class OverlapColwise(_Overlap, ColwiseParallel):
    """torch's `ColwiseParallel`; rows of the input are gathered under the matmul.

    Args:
        input_layouts, output_layouts, use_local_output: as of torch's. A linear layer whose input
            is `Shard(dim)` with `dim` not the last is an `all_gather_linear`: ranks have equal
            parts. Features are the dimension -1.
        options, recipe: as of `interlace.nn.functional.all_gather_linear`. A recipe is for
            layers that gather.

    Raises:
        InputError: an argument, module or mesh is not taken, or layers share a Parameter and would
            have it in two layouts; in forward, an input is of another mesh.

    Examples:
        >>> gathers = OverlapColwise(input_layouts=Shard(0))
        >>> w1 = parallelize_module(nn.Linear(64, 256), mesh, gathers)
        >>> w1(torch.randn(16, 64)).shape  # all 32 rows, half of the columns
        torch.Size([32, 128])
    """

    _side = "input_layouts"

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        cut = Shard(0 if isinstance(module, nn.Linear) else 1)
        return {name: cut for name, _ in module.named_parameters()}

    def forward_on(self, mesh: DeviceMesh) -> Forward:
        dim = self.dim or 0  # where it overlaps there is one

        def forward(self_: nn.Linear, input: Tensor) -> Tensor:
            if self.traced:
                return as_torch(self, ALL, self_, input, mesh)
            x = local(input, mesh, self.input_layouts, self.input_layouts)
            y = all_gather_linear(x, *local_of(self_), group=mesh, dim=dim, **self.how)
            return laid_out(self, self_, y, FEATURES, mesh)

        return forward


class OverlapRowwise(_Overlap, RowwiseParallel):
    """torch's `RowwiseParallel`; the output is summed under the matmul.

    Args:
        input_layouts, output_layouts, use_local_output: as of torch's. A linear layer whose output
            is `Shard(dim)` with `dim` not the last is a `linear_reduce_scatter`, and takes sizes of
            that dimension that are multiples of the mesh's; one whose output is `Replicate()` is a
            `linear_all_reduce`.
        options, recipe: as of `interlace.nn.functional.linear_reduce_scatter`. A recipe is
            for those two.

    Raises:
        InputError: as `OverlapColwise`.
    """

    _side = "output_layouts"

    def placements(self, module: nn.Module) -> dict[str, Placement]:
        cut = Shard(1 if isinstance(module, nn.Linear) else 0)
        names = [name for name, _ in module.named_parameters()]
        return {name: cut if name == "weight" else Replicate() for name in names}

    def forward_on(self, mesh: DeviceMesh) -> Forward:
        dim = self.dim

        def forward(self_: nn.Linear, input: Tensor) -> Tensor:
            if self.traced:
                y = as_torch(self, FEATURES, self_, input, mesh)
                # torch refuses in-place writes to what to_local() gives; a graph drops the clone.
                return y.clone() if dim is None and self.use_local_output else y
            x = local(input, mesh, self.input_layouts, FEATURES)
            given = x, *local_of(self_)
            if dim is None:
                y = linear_all_reduce(*given, group=mesh, **self.how)
            else:
                y = linear_reduce_scatter(*given, group=mesh, dim=dim, **self.how)
            return laid_out(self, self_, y, self.output_layouts, mesh)

        return forward


# what the styles share


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuses meshes of several dimensions."""
    if mesh.ndim != 1:
        raise InputError(f"the mesh has {mesh.ndim} dimensions: give one of them, mesh[name]")


def check_layer(module: nn.Module, name: str = "") -> None:
    """Refuses what is no layer that a style takes."""
    is_layer = isinstance(module, nn.Linear | nn.Embedding) and "weight" in module._parameters
    if is_layer and not any("." in key for key, _ in module.named_parameters()):
        return
    kind, start = type(module), f"{name}: " if name else ""
    fix = "nn.Linear and nn.Embedding are taken, whose weight is a Parameter, with none below them"
    if hasattr(module, "base_layer"):
        fix += (
            "; name the layers inside it in the plan: `base_layer` as it is here, and an adapter's "
            "`lora_B.*` colwise beside a colwise one, its `lora_A.*` rowwise beside a rowwise one"
        )
    raise InputError(f"{start}the plan names a {kind.__module__}.{kind.__qualname__}: {fix}")


def check_parameters(
    module: nn.Module,
    placements: Mapping[str, Placement],
    mesh: DeviceMesh,
    planned: dict[int, Placement],
) -> None:
    """Refuses Parameters that are distributed, or are so elsewhere in another layout."""
    for name, placement in placements.items():
        param = module.get_parameter(name)
        if isinstance(param, DTensor):
            raise InputError(
                f"`{name}` of a {type(module).__name__} is a DTensor, {param.placements} on "
                f"{param.device_mesh}: parallelise a module once, and before fully_shard"
            )
        made = _DISTRIBUTED.get(param)
        tied = planned.setdefault(id(param), placement) if made is None else made.placements[0]
        where = mesh if made is None else made.device_mesh
        if tied != placement or where != mesh:
            raise InputError(
                f"`{name}` is shared with a layer that has it as {tied} on {where}, and is to be "
                f"{placement} on {mesh}: a vocabulary is cut by a row-wise embedding and a "
                "column-wise linear"
            )


def is_plain(module: object) -> bool:
    """Returns true for a linear layer without a forward of its own, which would be replaced."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


_DISTRIBUTED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The DTensors that Parameters became, for the layers that share them."""


def distribute(
    module: nn.Module, placements: Mapping[str, Placement], mesh: DeviceMesh, source: int | None
) -> None:
    """Distributes Parameters from a rank of the mesh, those that another layer shares once."""
    for name, placement in placements.items():
        old = module.get_parameter(name)
        if (made := _DISTRIBUTED.get(old)) is None:
            new = distribute_tensor(old, mesh, [placement], src_data_rank=source)
            made = _DISTRIBUTED[old] = nn.Parameter(new, requires_grad=old.requires_grad)
        module.register_parameter(name, made)


def local(
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
    """A tensor that all ranks have alike, whose gradient is the sum of theirs."""
    whole = DTensor.from_local(x, mesh, ALL, run_check=False)
    return whole.to_local(grad_placements=(Partial(),))


def local_of(module: nn.Module) -> list[Any]:
    """This rank's part of weight and bias, whose gradients come back as DTensors."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in (module.weight, module.bias)]


def as_torch(
    style: ColwiseParallel | RowwiseParallel,
    wanted: tuple[Placement, ...],
    module: nn.Linear,
    input: Tensor,
    mesh: DeviceMesh,
) -> Tensor:
    """A layer's output in torch's style; see Note [In a graph]."""
    x = style._prepare_input_fn(style.input_layouts, wanted, module, (input,), mesh)
    y = nn.functional.linear(x, module.weight, module.bias)
    return style._prepare_output_fn(style.output_layouts, style.use_local_output, module, y, mesh)


def laid_out(
    style: ColwiseParallel | RowwiseParallel,
    module: nn.Linear,
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
