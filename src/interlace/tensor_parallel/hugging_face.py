"""Words of the plans that transformers' models bring, as styles.

A plan gives what all ranks have alike between layers, so what overlaps is the sum of each
row-parallel layer; see Note [What overlaps] in styles.py.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from interlace.errors import InputError, UnsupportedError
from interlace.float8 import Recipe
from interlace.tensor_parallel.styles import (
    Checked,
    OverlapColwise,
    OverlapRowwise,
    check_layer,
    check_parameters,
    distribute,
    summed_gradient,
)

LEFT_WHOLE = ("replicate", "keep_full_weight")
"""Words of a plan for what all ranks have."""


def styles_of_words(
    model: nn.Module,
    words: Mapping[str, str],
    mesh: DeviceMesh,
    how: dict[str, Any],
    recipe: Recipe | None,
) -> dict[str, ParallelStyle]:
    """The style of each module that has a word; the errors of `parallelize` for words."""
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    kinds = _kinds(how, recipe)
    styles: dict[str, ParallelStyle] = {}
    for name, word in words.items():
        owner = name.rpartition(".")[0]
        if word == "moe_tp_experts" and name in modules:
            styles[name] = _experts(modules[name], name, words, mesh)
        elif word in kinds and name in modules:
            _check_sizes(modules[name], name, word, mesh)
            styles[name] = kinds[word]
        elif word not in LEFT_WHOLE and not (
            name in params and words.get(owner) == "moe_tp_experts"
        ):
            raise UnsupportedError(
                f"{name} is {word!r} in the plan, which is not taken for a "
                f"{type(modules.get(name, params.get(name))).__name__}: give a `plan` without it; "
                f"for modules these are taken: {', '.join((*kinds, 'moe_tp_experts', *LEFT_WHOLE))}"
            )
    _check_heads(model, words, mesh)
    return styles


def _kinds(how: dict[str, Any], recipe: Recipe | None) -> dict[str, ParallelStyle]:
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
        "replicated_with_grad_allreduce": _Local(sees_heads=True),
    }


def _check_sizes(module: nn.Module, name: str, word: str, mesh: DeviceMesh) -> None:
    """Refuses what is no layer, and widths that the mesh does not divide; a vocabulary may be."""
    if word == "replicated_with_grad_allreduce":
        return
    check_layer(module)
    sizes = {"colwise": "out_features", "rowwise": "in_features"}
    size = getattr(module, sizes.get(word, ""), 0)
    if size % mesh.size():
        raise InputError(
            f"{name} has {sizes[word]} {size}, which a mesh of {mesh.size()} does not divide: give "
            "a mesh of another size, or a `plan` without this layer"
        )


def _check_heads(model: nn.Module, words: Mapping[str, str], mesh: DeviceMesh) -> None:
    if not any(n.endswith(".k_proj") and word == "colwise" for n, word in words.items()):
        return
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % mesh.size():
            raise InputError(
                f"the model has {key} {heads}, which a mesh of {mesh.size()} does not divide: give "
                "a mesh of another size, or a `plan` that leaves attention whole"
            )


class _Local(Checked):
    """A module whose Parameters are DTensors, and whose forward is given this rank's parts."""

    def __init__(
        self,
        placements: Mapping[str, Placement] | None = None,
        *,
        sees_heads: bool = False,
        is_partial: bool = False,
    ) -> None:
        """Those that have no placement are whole.

        `sees_heads`: each rank's rows differ, so the Parameters' gradients are summed.
        `is_partial`: outputs are summed, and so are the gradients of inputs.
        """
        self.placements = placements or {}
        self.sees_heads, self.is_partial = sees_heads, is_partial

    def why(self, module: nn.Module) -> str | None:
        return "its outputs are summed after it" if self.is_partial else "all ranks have it whole"

    def check(self, module: nn.Module, mesh: DeviceMesh, planned: dict[int, Placement]) -> None:
        check_parameters(module, self._placements(module), mesh, planned)

    def _placements(self, module: nn.Module) -> dict[str, Placement]:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        return {name: self.placements.get(name, Replicate()) for name in names}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute(module, self._placements(module), device_mesh, self.src_data_rank)
        original: Any = getattr(module.forward, "__func__", type(module).forward)

        @functools.wraps(original)
        def forward(self_: Any, *args: Any, **kwargs: Any) -> Any:
            used = {n: p if p is None else p.to_local() for n, p in self_._parameters.items()}
            if self.sees_heads:
                used = {name: summed(value) for name, value in used.items()}
            if self.is_partial:
                args = tuple(map(summed, args))
                kwargs = {name: summed(value) for name, value in kwargs.items()}
            with _parameters(self_, used):
                y = original(self_, *args, **kwargs)
            if not self.is_partial:
                return y
            part = DTensor.from_local(y, device_mesh, [Partial()], run_check=False)
            return part.redistribute(placements=[Replicate()]).to_local()

        def summed(x: Any) -> Any:
            floats = isinstance(x, Tensor) and x.is_floating_point()
            return summed_gradient(x, device_mesh) if floats else x

        module.forward = types.MethodType(forward, module)
        return module


WHOLE = _Local()
"""For modules that a plan does not name."""


def _experts(module: nn.Module, name: str, words: Mapping[str, str], mesh: DeviceMesh) -> _Local:
    """How experts' Parameters [experts, out, in] are cut."""
    allowed = {
        "packed_colwise": _StridedShard(1, split_factor=2),
        "colwise": Shard(1),
        "rowwise": Shard(2),
    }
    placements: dict[str, Placement] = {}
    for key, param in module.named_parameters():
        word = words.get(f"{name}.{key}")
        if word not in allowed or param.dim() != 3:
            raise UnsupportedError(
                f"{name}.{key}, of shape {list(param.shape)}, is {word!r} in the plan: Parameters "
                f"of experts are taken that have 3 dimensions and are {', '.join(allowed)}"
            )
        placements[key] = placement = allowed[word]
        parts = mesh.size() * (2 if word == "packed_colwise" else 1)
        if param.shape[placement.dim] % parts:
            raise InputError(
                f"{name}.{key} has size {param.shape[placement.dim]} in dimension {placement.dim}: "
                f"a mesh of {mesh.size()} takes multiples of {parts}"
            )
    return _Local(placements, is_partial=True)


@contextlib.contextmanager
def _parameters(module: Any, used: dict[str, Tensor | None]) -> Iterator[None]:
    """Other tensors in the place of a module's Parameters."""
    kept, module._parameters = module._parameters, used
    try:
        yield
    finally:
        module._parameters = kept
