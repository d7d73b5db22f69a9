"""Models of Hugging Face's transformers over a mesh, by the plan that they bring.

    done = parallelize(model, mesh["tp"])      # model.tp_plan: "...q_proj": "colwise", ...
    print(done.replicated)

The plan gives what all ranks have alike between layers, so what overlaps is the sum of each
row-parallel layer; see Note [What overlaps] in styles.py.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from interlace.errors import InputError, UnsupportedError
from interlace.float8 import Recipe
from interlace.nn.parallel.linear import Given
from interlace.tensor_parallel.styles import (
    OverlapColwise,
    OverlapColwiseGroup,
    OverlapRowwise,
    check_mesh,
    check_module,
    keep_ties,
    summed_gradient,
)

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers that are given one input, by the names that models have for them."""
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
WHOLE = ("replicate", "keep_full_weight")
"""Words of a plan for what all ranks have."""


@dataclass(frozen=True, slots=True)
class Parallelized:
    """What a plan did to a model."""

    applied: dict[str, str]
    """The plan's word for each module or Parameter that it names."""
    replicated: tuple[str, ...]
    """Parameters that all ranks have whole, the plan's and those that it does not name."""
    unmatched: tuple[str, ...]
    """Entries of the plan that name nothing in this model."""


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, str] | None = None,
    sum_gradients: bool = False,
    options: Given = None,
    overlap: bool = True,
    recipe: Recipe | None = None,
) -> Parallelized:
    """Distributes a model over a mesh, in place, from the first rank's Parameters.

    All Parameters become DTensors, under the same names, so that optimizers and
    `clip_grad_norm_` take them together; modules that the plan leaves whole see local tensors.

    Args:
        model: one of transformers, or any module where `plan` is given.
        mesh: of one dimension. Its size divides the counts of heads, and the widths of layers.
        plan: words for names, in which `*` is for numbers; by default `model.tp_plan`. Taken are
            "colwise", "colwise_gather_output" ("colwise_rep"), "rowwise", "rowwise_split_input"
            ("rowwise_rep"), "embedding_rowwise", "embedding_colwise",
            "replicated_with_grad_allreduce", "replicate", and "moe_tp_experts" with its Parameters'
            "packed_colwise", "colwise" and "rowwise".
        sum_gradients: one `OverlapColwiseGroup` for q_proj, k_proj and v_proj, and for gate_proj
            and up_proj: the gradients that they give their input are summed before one all-reduce.
        options, overlap, recipe: as of `OverlapRowwise`, for row-parallel layers.

    `InputError` for sizes that the mesh does not divide, and `UnsupportedError` for other words of
    a plan, before anything is changed; `InputError` as of the styles.
    """
    check_mesh(mesh)
    given: Any = getattr(model, "tp_plan", None) if plan is None else plan
    if not given:
        raise InputError(f"{type(model).__name__} has no `tp_plan`: give `plan`")
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    pattern = {name: NUMBER.sub("*", name) for name in (*modules, *params)}
    words = {n: given.get(n, given.get(p)) for n, p in pattern.items() if {n, p} & given.keys()}
    how = {"options": options, "overlap": overlap}
    kinds = _kinds(how, recipe)
    styles: dict[str, ParallelStyle] = {}
    for name, word in words.items():
        owner = name.rpartition(".")[0]
        if word == "moe_tp_experts" and name in modules:
            styles[name] = _experts(modules[name], name, words, mesh)
        elif word in kinds and name in modules:
            _check_sizes(modules[name], name, word, mesh)
            styles[name] = kinds[word]
        elif word not in WHOLE and not (name in params and words.get(owner) == "moe_tp_experts"):
            raise UnsupportedError(
                f"{name} is {word!r} in the plan, which is not taken for a "
                f"{type(modules.get(name, params.get(name))).__name__}: give a `plan` without it; "
                f"for modules these are taken: {', '.join((*kinds, 'moe_tp_experts', *WHOLE))}"
            )
    _check_heads(model, words, mesh)
    if sum_gradients:
        _group(modules, words, styles, how)
    for name, style in styles.items():
        parallelize_module(modules[name], mesh, style)
    whole = _Local()
    for module in modules.values():
        own = module.named_parameters(recurse=False)
        if any(not isinstance(param, DTensor) for _, param in own):
            parallelize_module(module, mesh, whole)
    params = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    replicated = [n for n, p in params.items() if p.placements == (Replicate(),)]
    unmatched = given.keys() - {*pattern, *pattern.values()}
    return Parallelized(words, tuple(replicated), tuple(sorted(unmatched)))


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


def _group(
    modules: dict[str, nn.Module],
    words: dict[str, str],
    styles: dict[str, ParallelStyle],
    how: dict[str, Any],
) -> None:
    """Gives layers of one input to a style of their parent."""
    for parent in modules:
        for group in GROUPS:
            names = [f"{parent}.{name}".removeprefix(".") for name in group]
            if parent not in styles and all(words.get(name) == "colwise" for name in names):
                styles[parent] = OverlapColwiseGroup(group, **how)
                for name in names:
                    del styles[name]


def _check_sizes(module: nn.Module, name: str, word: str, mesh: DeviceMesh) -> None:
    """Refuses what is no layer, and widths that the mesh does not divide; a vocabulary may be."""
    if word == "replicated_with_grad_allreduce":
        return
    check_module(module, mesh)
    sizes = {"colwise": "out_features", "rowwise": "in_features"}
    size = getattr(module, sizes.get(word, ""), 0)
    if size % mesh.size():
        raise InputError(
            f"{name} has {sizes[word]} {size}, which a mesh of {mesh.size()} does not divide: give "
            "a mesh of another size, or a `plan` without this layer"
        )


def _check_heads(model: nn.Module, words: dict[str, str], mesh: DeviceMesh) -> None:
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


class _Local(ParallelStyle):
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

    def _partition(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, old in module.named_parameters(recurse=False):
            placement = self.placements.get(name, Replicate())
            new = distribute_tensor(old, mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        keep_ties(self._partition, "", module, device_mesh)
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


def _experts(module: nn.Module, name: str, words: dict[str, str], mesh: DeviceMesh) -> _Local:
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
