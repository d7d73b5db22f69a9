"""Words of the plans that transformers' models bring, as styles.

A plan gives what all ranks have alike between layers, so what overlaps is the sum of each
row-parallel layer; see Note [What overlaps] in styles.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from interlace.errors import InputError, UnsupportedError
from interlace.float8 import Recipe
from interlace.tensor_parallel.styles import (
    Checked,
    How,
    OverlapColwise,
    OverlapRowwise,
    check_layer,
    check_parameters,
    distribute,
    summed_gradient,
)
from interlace.torch_private.distributed import StridedShard

T = TypeVar("T")
LEFT_WHOLE = ("replicate", "keep_full_weight")
"""Words of a plan for what all ranks have."""
SUMMED = ("moe_tp_experts", "all_reduce")
"""Words of modules that have parts of matrices, and whose outputs are summed."""
OF_OWNERS = (*SUMMED, "local_params")
"""Words of modules whose Parameters have words of their own."""
BY_NAME = ("mla_kv_a_proj", "moe_identity_expert", *OF_OWNERS)
"""Words whose style depends on the module, or on the mesh."""


def styles_of_words(
    model: nn.Module,
    words: Mapping[str, str],
    mesh: DeviceMesh,
    how: How,
    recipe: Recipe | None,
) -> dict[str, ParallelStyle]:
    """The style of each module that has a word; the errors of `parallelize` for words."""
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    kinds = _kinds(how, recipe)
    styles: dict[str, ParallelStyle] = {}
    for name, word in words.items():
        owner = name.rpartition(".")[0]
        if word in OF_OWNERS and name in modules:
            styles[name] = _of_parameters(modules[name], name, words, mesh)
        elif word == "moe_identity_expert" and name in modules:
            styles[name] = Local(share=mesh.size())
        elif word == "mla_kv_a_proj" and name in modules:
            styles[name] = Local(rope_dim=_rope_dim(modules[owner], _config(model), name))
        elif word in kinds and name in modules:
            _check_sizes(modules[name], name, word, mesh)
            styles[name] = kinds[word]
        elif word not in LEFT_WHOLE and not (name in params and words.get(owner) in OF_OWNERS):
            raise UnsupportedError(
                f"{name} is {word!r} in the plan, which is not taken for a "
                f"{type(modules.get(name, params.get(name))).__name__}: give a `plan` without it; "
                f"for modules these are taken: {', '.join((*kinds, *BY_NAME, *LEFT_WHOLE))}"
            )
    _check_heads(model, words, mesh)
    return styles


def overlapped_words(how: How, recipe: Recipe | None) -> dict[str, OverlapRowwise]:
    """The words whose communication overlaps, with their styles: those of row-parallel layers."""
    styles = _kinds(how, recipe).items()
    return {
        word: style
        for word, style in styles
        if isinstance(style, OverlapRowwise) and word.startswith("rowwise")
    }


def _kinds(how: How, recipe: Recipe | None) -> dict[str, ParallelStyle]:
    """The styles of a plan's words."""
    whole = Replicate()
    gathered = OverlapColwise(output_layouts=whole, **how)
    split = OverlapRowwise(input_layouts=whole, recipe=recipe, **how)
    return {
        "colwise": OverlapColwise(**how),
        "colwise_gather_output": gathered,
        "colwise_rep": gathered,
        "rowwise": OverlapRowwise(recipe=recipe, **how),
        "rowwise_split_input": split,
        "rowwise_rep": split,
        "embedding_rowwise": OverlapRowwise(input_layouts=whole),
        "embedding_colwise": OverlapColwise(output_layouts=whole),
        "replicated_with_grad_allreduce": Local(sees_heads=True),
    }


def _check_sizes(module: nn.Module, name: str, word: str, mesh: DeviceMesh) -> None:
    """Refuses what is no layer, and widths that the mesh does not divide; a vocabulary may be."""
    if word == "replicated_with_grad_allreduce":
        return
    check_layer(module, name)
    sizes = {"colwise": "out_features", "rowwise": "in_features"}
    size = getattr(module, sizes.get(word, ""), 0)
    if size % mesh.size():
        raise InputError(
            f"{name} has {sizes[word]} {size}, which a mesh of {mesh.size()} does not divide: give "
            "a mesh of another size, or a `plan` without this layer"
        )


def _check_heads(model: nn.Module, words: Mapping[str, str], mesh: DeviceMesh) -> None:
    keys = (".k_proj", ".kv_b_proj")
    if not any(n.endswith(keys) and word == "colwise" for n, word in words.items()):
        return
    config = _config(model)
    layers = [*(getattr(config, "per_layer_config", None) or [config])]  # whose heads may differ
    counts = ("num_attention_heads", "num_key_value_heads")
    for each, key in itertools.product(layers, counts):
        heads = getattr(each, key, None)
        if isinstance(heads, int) and heads % mesh.size():
            raise InputError(
                f"the model has {key} {heads}, which a mesh of {mesh.size()} does not divide: give "
                "a mesh of another size, or a `plan` that leaves attention whole"
            )


def _config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _rope_dim(attention: nn.Module, config: Any, name: str) -> int:
    """The number of rotary features of keys, which all heads share."""
    for holder in (attention, config):
        if isinstance(dim := getattr(holder, "qk_rope_head_dim", None), int):
            return dim
    raise InputError(
        f"{name} is 'mla_kv_a_proj' in the plan, and neither {type(attention).__name__} nor the "
        "model's config has `qk_rope_head_dim`, the count of its rotary features: give the module "
        "that attribute"
    )


class Local(Checked):
    """A module whose Parameters are DTensors, and whose forward finds this rank's parts of them."""

    def __init__(
        self,
        placements: Mapping[str, Placement] | None = None,
        *,
        held: Sequence[tuple[nn.Module, bool]] | None = None,
        sees_heads: bool = False,
        is_partial: bool = False,
        rope_dim: int = 0,
        share: int = 1,
    ) -> None:
        """Parameters that have no placement are whole.

        `held`: the modules whose Parameters the forward finds as local tensors, its own by default,
        each with whether their gradients are summed. A parent may read those of its children.
        `sees_heads`: each rank's rows differ, so the Parameters' gradients are summed.
        `is_partial`: outputs are summed, and so are the gradients of inputs.
        `rope_dim`: so many features of the output, the last, are read by each rank's heads, so
        their gradients are summed: the rotary part of keys in multi-head latent attention.
        `share`: so many ranks have the same output, which a module around this one sums.
        """
        self.placements, self.held = placements or {}, held
        self.sees_heads, self.is_partial, self.rope_dim = sees_heads, is_partial, rope_dim
        self.share = share

    def why(self, module: nn.Module) -> str | None:
        return "its outputs are summed after it" if self.is_partial else "all ranks have it whole"

    def check(self, module: nn.Module, mesh: DeviceMesh, planned: dict[int, Placement]) -> None:
        check_parameters(module, self._placements(module), mesh, planned)

    def _placements(self, module: nn.Module) -> dict[str, Placement]:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        return {name: self.placements.get(name, Replicate()) for name in names}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, self._placements(module), device_mesh, self.src_data_rank)
        given: Any = module.forward
        original: Any = getattr(given, "__func__", lambda _, *args, **kw: given(*args, **kw))
        held = [(module, self.sees_heads)] if self.held is None else [*self.held]
        vars(module)["_interlace_held"] = held  # where copies of the module find copies of these

        @functools.wraps(given)
        def forward(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_partial:
                args = tuple(map(summed, args))
                kwargs = {name: summed(value) for name, value in kwargs.items()}
            with _local_parameters(self_._interlace_held, summed):
                y = original(self_, *args, **kwargs)
            if self.rope_dim:
                rest, rope = y.split([y.shape[-1] - self.rope_dim, self.rope_dim], dim=-1)
                y = torch.cat([rest, summed(rope)], dim=-1)
            if not self.is_partial:
                return y if self.share == 1 else y / self.share
            part = DTensor.from_local(y, device_mesh, [Partial()], run_check=False)
            return part.redistribute(placements=[Replicate()]).to_local()

        def summed(x: T) -> T:
            if isinstance(x, Tensor) and x.is_floating_point():
                return summed_gradient(x, device_mesh)
            return x

        signature = inspect.signature(given)  # by which others choose what they give
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [first, *signature.parameters.values()]
        vars(forward)["__signature__"] = signature.replace(parameters=parameters)
        module.forward = types.MethodType(forward, module)
        return module


def _of_parameters(
    module: nn.Module, name: str, words: Mapping[str, str], mesh: DeviceMesh
) -> Local:
    """Cuts Parameters by their words: vectors, or matrices [experts, out, in] whose sum follows.

    Llama 4's are [experts, in, out].
    """
    summed = words[name] in SUMMED
    allowed: dict[str | None, Shard | StridedShard] = {"colwise": Shard(0)}
    if summed:
        allowed = {
            "packed_colwise": StridedShard(1, split_factor=2),
            "packed_rowwise": StridedShard(2, split_factor=2),
            "colwise": Shard(1),
            "rowwise": Shard(2),
        }
    placements: dict[str, Placement] = {}
    for key, param in module.named_parameters(recurse=summed):
        word, dims = words.get(f"{name}.{key}"), 3 if summed else 1
        if word not in allowed or param.dim() != dims:
            raise UnsupportedError(
                f"{name}.{key}, of shape {list(param.shape)}, is {word!r} in the plan, which has "
                f"{words[name]!r} for {name}: give a `plan` without that; Parameters are taken "
                f"there that have {dims} dimensions and are {', '.join(map(str, allowed))}"
            )
        placement = placements[key] = allowed[word]
        parts = mesh.size() * (2 if isinstance(placement, StridedShard) else 1)
        if param.shape[placement.dim] % parts:
            raise InputError(
                f"{name}.{key} has size {param.shape[placement.dim]} in dimension {placement.dim}: "
                f"a mesh of {mesh.size()} takes multiples of {parts}"
            )
    return Local(placements, is_partial=summed)


@contextlib.contextmanager
def _local_parameters(
    held: Sequence[tuple[Any, bool]], summed: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """This rank's parts in the place of modules' Parameters, where none are yet.

    What fully_shard has sharded lies on two dimensions of a mesh, and is left to its own hooks.
    """
    kept: list[tuple[Any, dict[str, Any]]] = []
    try:
        for module, sums in held:
            used = dict(module._parameters)
            for name, param in used.items():
                if isinstance(param, DTensor) and len(param.placements) == 1:
                    used[name] = summed(param.to_local()) if sums else param.to_local()
            if any(used[name] is not param for name, param in module._parameters.items()):
                kept.append((module, module._parameters))
                _put(module, used)
        yield
    finally:
        for module, params in kept:
            _put(module, params)


def _put(module: Any, parameters: dict[str, Any]) -> None:
    module._parameters = parameters
    if isinstance(module, nn.RNNBase):  # which reads them from a list of its own
        module._flat_weights = [parameters.get(name) for name in module._flat_weights_names]
