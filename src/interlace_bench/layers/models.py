"""Layers of real models' dimensions, under tensor parallelism with sequence parallelism.

    dims = MODELS["llama3-70b"]
    layers = parallelized(dims, 1, 8192, torch.bfloat16, mesh)   # DTensors: eager, or compiled
    maps = Overlapped(group, {})
    layers = on_shards(shards_of(layers), layers, dims, 4, maps)  # the same weights, plain tensors
    flops(dims, layers=1, batch=1, sequence=8192)                # of a forward pass, on all ranks

Every rank has its part of the sequence: [batch, sequence / ranks, dim] goes in and comes out. The
linear maps are exchangeable: `Plain` calls the modules, `Overlapped` gathers and scatters around
them by `interlace.nn.functional`, and `NoCommunication`
computes the same on one rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from interlace.demo.model import Block, Plain, block_plan, rotary_table
from interlace.errors import OptionError
from interlace.float8 import Recipe
from interlace.nn.functional import all_gather_linear, linear_reduce_scatter
from interlace.torch_private.inductor import CustomGraphPass


@dataclass(frozen=True, slots=True)
class LayerDims:
    """The dimensions of one of Llama's layers: RMSNorm, rotary positions, SwiGLU."""

    dim: int
    heads: int
    kv_heads: int
    hidden: int

    def check(self, ranks: int, sequence: int) -> None:
        """Raises OptionError for what cannot be cut over that many ranks."""
        sizes = {"heads": self.heads, "heads of keys": self.kv_heads, "features": self.hidden}
        for what, size in {**sizes, "positions (--sequence)": sequence}.items():
            if size % ranks or size < ranks:
                raise OptionError(f"{size} {what} do not divide over {ranks} ranks")

    @property
    def matmul_parameters(self) -> int:
        """The parameters of the linear maps."""
        heads = self.heads + self.kv_heads
        return self.dim * (2 * self.dim * heads // self.heads + 3 * self.hidden)


MODELS = {
    "llama3-8b": LayerDims(4096, 32, 8, 14336),
    "llama3-70b": LayerDims(8192, 64, 8, 28672),
    "small": LayerDims(512, 8, 4, 1024),
    "tiny": LayerDims(64, 8, 4, 192),
}


def flops(dims: LayerDims, *, layers: int, batch: int, sequence: int) -> int:
    """Floating point operations of a forward pass on all ranks: 2 for each parameter of a linear
    map and token, and causal attention's half of 4 sequence^2 dim. Backward has twice as many."""
    linear = 2 * dims.matmul_parameters * batch * sequence
    return layers * (linear + 2 * batch * sequence**2 * dims.dim)


# -- linear maps -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlapped(Plain):
    """Gathers and scatters of the sequence under the maps, by `interlace.nn.functional`."""

    group: dist.ProcessGroup
    options: dict[str, Any]
    recipe: Recipe | None = None

    def column(self, x: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """Gathers x for all maps."""
        weights, biases = [each.weight for each in linears], [each.bias for each in linears]
        return all_gather_linear(x, weights, biases, **self._how)

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Scatters the sum."""
        return linear_reduce_scatter(x, linear.weight, linear.bias, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        options = {"options": self.options, "recipe": self.recipe}
        return {"group": self.group, "dim": 1, **options}


@dataclass(frozen=True)
class DistGemm(Plain):
    """torchtitan's `dist_gemm`: gathers and scatters of the sequence inside of its matmuls."""

    group: dist.ProcessGroup
    functions: Any
    """The module `torchtitan.distributed.linear`."""

    def column(self, x: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """Gathers x once. torchtitan has one weight for q, k and v, which are three here."""
        weights, rows, how = [each.weight for each in linears], _rows(x), self._how
        if len(weights) == 2:
            made = self.functions.AllGatherLinearMulti.apply(rows, *weights, *how)
        else:
            y = self.functions.AllGatherLinear.apply(rows, torch.cat(weights), None, *how)
            made = y.split([len(weight) for weight in weights], dim=1)
        return [_sequences(y, len(x)) for y in made]

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Scatters the sum."""
        y = self.functions.LinearReduceScatter.apply(_rows(x), linear.weight, None, *self._how)
        return _sequences(y, len(x))

    @property
    def _how(self) -> tuple[dist.ProcessGroup, str]:
        return self.group, self.group.group_name


def _rows(x: Tensor) -> Tensor:
    """[batch, sequence, dim] as rows, the first positions of all sequences first: ranks hold parts
    of the sequence, and what they gather and scatter are blocks of rows."""
    return x.transpose(0, 1).flatten(0, 1)


def _sequences(rows: Tensor, batch: int) -> Tensor:
    return rows.unflatten(0, (-1, batch)).transpose(0, 1)


class NoCommunication(Plain):
    """The same local computation without communication: what a gather would bring is there."""

    def __init__(self, full: Tensor, rows: int) -> None:
        self.full, self.rows = full, rows
        """[batch, sequence, dim], and how many positions of them a rank has."""

    def column(self, x: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """The maps of all rows."""
        full = Widen.apply(x, self.full)
        return [linear(full) for linear in linears]

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """This rank's rows of the map of all."""
        return Narrow.apply(linear(x), self.full, self.rows)


class Widen(torch.autograd.Function):
    """Stands for a gather: all rows are there already, and backward keeps this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, full: Tensor) -> Tensor:
        """The rows that are there."""
        ctx.rows = x.shape[1]
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """This rank's rows of the gradient."""
        return grads[0].narrow(1, 0, ctx.rows), None


@torch.library.custom_op("interlace_bench::gathered", mutates_args=())
def gathered(mine: Tensor, full: Tensor) -> Tensor:
    """All rows, of which these are this rank's; a copy, but where `Gathered` compiles it."""
    return full.clone()


@gathered.register_fake
def _(mine: Tensor, full: Tensor) -> Tensor:
    return torch.empty_like(full)


class Gathered(CustomGraphPass):
    """Leaves the rows of `gathered` where they are, in a graph that Inductor has cut already: what
    follows a gradient's gather stays in backward, and costs what it would behind a gather."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Takes the calls out."""
        target = torch.ops.interlace_bench.gathered.default
        for node in graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)

    def uuid(self) -> str:
        """The pass's identity in Inductor's cache."""
        return "interlace_bench::gathered"


class Narrow(torch.autograd.Function):
    """Stands for a reduce-scatter: keeps this rank's rows, and backward has all there already."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, full: Tensor, rows: int) -> Tensor:
        """This rank's rows."""
        ctx.save_for_backward(full)
        return y.narrow(1, 0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The rows that are there."""
        return gathered(grads[0], ctx.saved_tensors[0]), None, None


# -- layers ----------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers one after another, and the table of positions that they share."""

    table: Tensor | None

    def __init__(self, dims: LayerDims, count: int, table: Tensor | None, parts: int, maps: Plain):
        super().__init__()
        self.register_buffer("table", table, persistent=False)
        self.layers = nn.ModuleList(Block(dims, parts, maps) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """This rank's rows, [batch, sequence / ranks, dim], through all layers."""
        for layer in self.layers:
            x = layer(x, self.table)
        return x

    def mapped(self, change: Callable[[Any], Any]) -> Layers:
        """The same table, and what a function makes of each layer."""
        made = copy.copy(self)
        made._modules = {"layers": nn.ModuleList(map(change, self.layers))}
        return made


class Checkpointed(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, *inputs, use_reentrant=False)


def in_form(layers: Layers, form: str) -> Layers:
    """The layers, with `+checkpoint` each computed again in backward."""
    return layers.mapped(Checkpointed) if form.endswith("+checkpoint") else layers


def parallelized(
    dims: LayerDims, count: int, sequence: int, dtype: torch.dtype, mesh: DeviceMesh
) -> Layers:
    """Layers of DTensors on a mesh of one axis, with the same weights on every call."""
    torch.manual_seed(0)
    table = rotary_table(sequence, dims.dim // dims.heads).to(dtype)
    module = Layers(dims, count, table, 1, Plain()).to(dtype)
    for layer in module.layers:
        parallelize_module(layer, mesh, block_plan(Shard(1)))
    return module


def shards_of(layers: Layers) -> dict[str, nn.Parameter]:
    """This rank's shards of the weights of layers on DTensors, as parameters in the same memory."""
    named: Any = layers.named_parameters()  # DTensors
    return {name: nn.Parameter(weight.to_local().detach()) for name, weight in named}


def on_shards(
    weights: dict[str, nn.Parameter], layers: Layers, dims: LayerDims, parts: int, maps: Plain
) -> Layers:
    """Layers of these parameters, which are those of `parts` ranks' shards of `layers`."""
    with torch.device("meta"):
        module = Layers(dims, len(layers.layers), None, parts, maps)
    module.load_state_dict(weights, assign=True)
    module.table = layers.table
    return module
