"""Overrides and a pass pipeline for torchtitan 0.3.0: `pip install torchtitan==0.3.0`.

    --override.imports interlace.integrations.torchtitan.feed_forward
    --override.imports interlace.integrations.torchtitan.attention
    --compile.pass_pipeline interlace --override.imports interlace.integrations.torchtitan.pipeline

The first two exchange configs of a model, once its sharding is set:

    FeedForward   w1, w3 share one all-gather of the rows of x, which runs under their matmuls
    GQAttention   so do wq, wk, wv, or wqkv
                  w2 and wo are a `RowLinear`, whose sum is scattered under its matmul

Parameters have the names, the layouts and the initial values of the stock modules, so checkpoints
of either are those of the other.

Note [Two backends]: with `spmd_types` activations and Parameters are plain local tensors, and the
current mesh says which ranks hold the rest; with `partial_dtensor` they are DTensors on the mesh
`tp` alone. Where TP is off, either gives no group, and a module runs as the stock one does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.experiments.graph_trainer.registry import register_pass_pipeline
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention, QKVLinear
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

import interlace
from interlace.errors import UnsupportedError
from interlace.frontend.backend import options_from
from interlace.nn.functional import all_gather_linear, linear_reduce_scatter
from interlace.torch_private import FakeTensor

TP = MeshAxisName.TP
ROWS, FEATURES = 1, 2
"""Dimensions of activations that ranks share: of the sequence, and of features or heads."""


# Modules


class _Overlapping(Module):
    """Keeps the options of a module's communication, which its override was given."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.options: dict[str, Any] = config.options


class OverlapFeedForward(_Overlapping, FeedForward):
    """torchtitan's feed-forward, whose communication runs under its matmuls."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        options: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        layers = _columns(self, x, self.w1, self.w3)
        if layers is None:
            return super().forward(x)
        gate, up = layers
        return self.w2(F.silu(gate) * up)


class OverlapQKVLinear(_Overlapping, QKVLinear):
    """torchtitan's three projections, which gather the rows of x once."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        options: dict[str, Any]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = _columns(self, x, self.wq, self.wk, self.wv)
        if layers is None:
            return super().forward(x)
        return tuple([y.unflatten(FEATURES, (-1, self.head_dim)) for y in layers])


class OverlapFusedQKVLinear(_Overlapping, FusedQKVLinear):
    """torchtitan's fused projection, which gathers the rows of x under its matmul."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedQKVLinear.Config):
        options: dict[str, Any]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = _columns(self, x, self.wqkv)
        if layers is None:
            return super().forward(x)
        parts = layers[0].unflatten(FEATURES, (-1, self.r_dim, self.head_dim))
        q, k, v = parts.split([self.heads_per_kv, 1, 1], dim=-2)
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


class RowLinear(_Overlapping, Linear):
    """torchtitan's linear layer of a part of the features, which scatters the sum of its rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        options: dict[str, Any]

    def forward(self, input: Tensor) -> Tensor:
        group = _group(self.weight)
        if group is None:
            return super().forward(input)
        x, weight = _local(input), _local(self.weight)
        with spmd.no_typecheck():
            y = linear_reduce_scatter(x, weight, group=group, dim=ROWS, options=self.options)
        return _global(y, input, self.weight, ROWS)


# What they share


def _columns(module: _Overlapping, x: Tensor, *layers: Linear) -> list[Tensor] | None:
    """Outputs of layers that hold a part of the features; None where TP is off."""
    group = _group(layers[0].weight)
    if group is None:
        return None
    weights = [_local(layer.weight) for layer in layers]
    biases = [None if layer.bias is None else _local(layer.bias) for layer in layers]
    given = _local(x), weights, biases
    with spmd.no_typecheck():
        outputs = all_gather_linear(*given, group=group, dim=ROWS, options=module.options)
    return [_global(y, x, layers[0].weight, FEATURES) for y in outputs]


def _group(weight: Tensor) -> dist.ProcessGroup | DeviceMesh | None:
    """The ranks that share a layer; None where TP is off. Note [Two backends]."""
    if not torch.compiler.is_compiling() and isinstance(_local(weight), FakeTensor):
        raise UnsupportedError(
            "GraphTrainer traces this layer, which runs a schedule of its own: leave Interlace's "
            "overrides out of --override.imports there"
        )
    if isinstance(weight, DTensor):
        return weight.device_mesh
    mesh = current_spmd_mesh()
    if mesh is None or TP.value not in (mesh.mesh_dim_names or ()):
        return None
    group = mesh.get_group(TP.value)
    return group if group.size() > 1 else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _global(y: Tensor, x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """An output, of which each rank has its part of a dimension, as the backend has it."""
    if isinstance(weight, DTensor):
        return DTensor.from_local(y, weight.device_mesh, [Shard(dim)], run_check=False)
    if spmd.is_type_checking():
        types: dict[Any, Any] = {**spmd.get_local_type(x), _group(weight): spmd.S(dim)}
        spmd.assert_type(y, types)
    return y


# Overrides


@override(target=FeedForward.Config, exact=True, description="Overlap TP in the feed-forward")
def feed_forward(config: FeedForward.Config, **options: Any) -> FeedForward.Config:
    """Replaces a feed-forward whose input is cut along the sequence.

    Args:
        config: the stock config, with its sharding.
        options: of its communication, as fields of `interlace.Options`.

    Returns:
        The config of the module that overlaps; the stock one where its input is not cut.

    Raises:
        UnsupportedError: the settings or the layers are none that overlap; it says which.
        OptionError: an option has an invalid value.

    Example:
        --override.imports 'interlace.integrations.torchtitan.feed_forward={"strategy": "ring"}'
    """
    sharding = _left_rows(config, "x", options)
    if sharding is None:
        return config
    _check_plain(w1=config.w1, w3=config.w3)
    given = {"sharding_config": sharding, "options": options}
    return derive(
        config, OverlapFeedForward.Config, w2=_row_linear("w2", config.w2, options), **given
    )


@override(target=GQAttention.Config, exact=True, description="Overlap TP in attention")
def attention(config: GQAttention.Config, **options: Any) -> GQAttention.Config:
    """Replaces the projections of an attention whose input is cut along the sequence.

    Args, Returns, Raises: as of `feed_forward`.

    Example:
        --override.imports interlace.integrations.torchtitan.attention
    """
    sharding = _left_rows(config, "x_BLD", options)
    if sharding is None:
        return config
    projections = config.qkv_linear
    if type(projections) is FusedQKVLinear.Config:
        _check_plain(wqkv=projections.wqkv)
        overlapped = derive(projections, OverlapFusedQKVLinear.Config, options=options)
    elif type(projections) is QKVLinear.Config:
        _check_plain(wq=projections.wq, wkv=projections.wkv)
        overlapped = derive(projections, OverlapQKVLinear.Config, options=options)
    else:
        raise UnsupportedError(
            f"`qkv_linear` is a {_name(projections)}: QKVLinear and FusedQKVLinear are taken; "
            "leave interlace.integrations.torchtitan.attention out of --override.imports"
        )
    wo = _row_linear("wo", config.wo, options)
    return dataclasses.replace(config, qkv_linear=overlapped, wo=wo, sharding_config=sharding)


def _left_rows(
    config: Module.Config, argument: str, options: dict[str, Any]
) -> ShardingConfig | None:
    """The sharding of a module that gathers its input itself; None: what it is given is whole, so
    nothing is gathered that could overlap."""
    options_from(options)
    backend = get_spmd_backend()
    if backend == "full_dtensor":
        raise UnsupportedError(
            "--parallelism.spmd_backend is full_dtensor, whose tensors lie on meshes of several "
            "dimensions: give spmd_types or partial_dtensor"
        )
    given = config.sharding_config
    layouts = {} if given is None else given.in_src_shardings or {}
    layout = None if argument not in layouts else layouts[argument].per_axis_spmd_types()[TP]
    if layout == spmd.I:
        raise UnsupportedError(
            f"`{argument}` of a {_name(config)} is the same on all ranks: the overrides overlap "
            "the collectives of sequence parallelism; give --parallelism.enable_sequence_parallel"
        )
    if given is None or layout != spmd.S(ROWS):
        return None
    return dataclasses.replace(given, in_dst_shardings=None)


def _row_linear(name: str, config: Linear.Config, options: dict[str, Any]) -> RowLinear.Config:
    """A linear layer that scatters its rows itself, and so has its output as it is to be."""
    _check_plain(**{name: config})
    given = config.sharding_config
    if config.bias or given is None:
        raise UnsupportedError(
            f"`{name}` has {'a bias' if config.bias else 'no sharding'}, which is not taken: leave "
            "the override out of --override.imports"
        )
    sharding = dataclasses.replace(
        given, out_src_shardings=given.out_dst_shardings, out_dst_shardings=None
    )
    return derive(config, RowLinear.Config, sharding_config=sharding, options=options)


def _check_plain(**layers: Linear.Config) -> None:
    """Refuses layers that multiply in a way of their own (FP8, adapters)."""
    for name, config in layers.items():
        if type(config) is not Linear.Config:
            raise UnsupportedError(
                f"`{name}` is a {_name(config)}, with a forward of its own: the overrides take "
                "torchtitan's Linear; leave out either it or the override"
            )


def _name(config: Any) -> str:
    return type(config).__qualname__.removesuffix(".Config")


# The pass pipeline


def interlace_check_pass(gm: fx.GraphModule, example_inputs: Sequence[object]) -> fx.GraphModule:
    """Raises SoundnessError for a graph with a race, and else gives it back as it is.

    Example:
        gm = interlace_check_pass(gm, example_inputs)
    """
    interlace.check_graph(gm).raise_if_unsound()
    return gm


@register_pass_pipeline("interlace")
def interlace_passes(traced: Any, config: Any, *, parallel_dims: Any = None) -> list[Callable]:
    """GraphTrainer's default passes, with a check of the graph before the first of them."""
    from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes

    default = construct_default_graph_passes(traced, config, parallel_dims=parallel_dims)
    return [interlace_check_pass, *default]


@override(target=Module.Config, fqns=[], description="Register the pass pipeline `interlace`")
def pipeline(config: Module.Config) -> Module.Config:
    """Replaces nothing: torchtitan imports this module for it, which registers the pipeline.

    Example:
        --override.imports interlace.integrations.torchtitan.pipeline
    """
    return config
