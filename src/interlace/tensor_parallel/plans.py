"""Plans of modules, applied so that their communication overlaps: torch's styles, or words.

Note [What a plan becomes]: `ColwiseParallel` and `RowwiseParallel` become `OverlapColwise` and
`OverlapRowwise` of the same layouts. Where `PrepareModuleInput` gathers rows for column-parallel
layers below it, they become an `OverlapColwiseGroup`, which gathers under their matmuls. All else
is applied as it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from interlace.errors import InputError
from interlace.float8 import Recipe
from interlace.nn.parallel.linear import Given
from interlace.tensor_parallel.group import OverlapColwiseGroup, is_gathered
from interlace.tensor_parallel.hugging_face import Local, styles_of_words
from interlace.tensor_parallel.styles import (
    ALL,
    FEATURES,
    Checked,
    How,
    OverlapColwise,
    OverlapRowwise,
    check_mesh,
    is_plain,
)

OF_ROWS = (ColwiseParallel, RowwiseParallel, SequenceParallel, OverlapRowwise)
"""Styles below a module that are right whether its input is in parts or whole."""


@dataclass(frozen=True, slots=True)
class Parallelized:
    """The effect of a plan on a model."""

    applied: dict[str, str]
    """For each module or Parameter that the plan names, its word, or the style that it got."""
    plain: dict[str, str]
    """Modules of the plan whose communication, if they have any, does not overlap; and why."""
    replicated: tuple[str, ...]
    """Parameters that all ranks have whole: the plan's, and with words those that it leaves out."""
    unmatched: tuple[str, ...]
    """Entries of the plan that name nothing in this model."""


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | Mapping[str, ParallelStyle] | None = None,
    *,
    options: Given = None,
    recipe: Recipe | None = None,
) -> Parallelized:
    """Distributes a model, or a block of one, in place, from the first rank's Parameters.

    With words, all Parameters become DTensors, under the same names, so that optimizers and
    `clip_grad_norm_` take them together; modules that the plan leaves whole, and those around them,
    see local tensors of theirs. A module whose input is left in parts is given a DTensor of the
    same shape as ever, in another layout.

    Args:
        model: one of transformers, or any module where `plan` is given.
        mesh: of one dimension. Of words, its size divides the counts of heads, and the widths of
            layers.
        plan: styles of torch, as for `parallelize_module`, or words, for names of modules, in
            which `*` stands for a part without dots; a name itself goes before such a pattern. By
            default `model.tp_plan`. Words that are taken are "colwise", "colwise_gather_output"
            ("colwise_rep"), "rowwise", "rowwise_split_input" ("rowwise_rep"), "embedding_rowwise",
            "embedding_colwise", "replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate",
            "moe_identity_expert", "local_params" with its Parameters' "colwise", and
            "moe_tp_experts" and "all_reduce" with their Parameters' "packed_colwise",
            "packed_rowwise", "colwise" and "rowwise".
        options, recipe: as of `OverlapColwise` and `OverlapRowwise`, for the layers that
            overlap; of words, for row-parallel ones.

    Returns:
        The effect of the plan, by names of modules.

    Raises:
        InputError: sizes that the mesh does not divide, a model without a plan or parallelised
            already, layers that share a Parameter and would have it in two layouts, and whatever
            else a style refuses; nothing was changed.
        UnsupportedError: a plan has another word; nothing was changed.

    Examples:
        >>> block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> parallelize(block, mesh, plan).plain  # of torch's styles; nothing is left as it is
        {}
    """
    check_mesh(mesh)
    given: Mapping[str, str | ParallelStyle] | None
    given = getattr(model, "tp_plan", None) if plan is None else {**plan}
    if not given:
        raise InputError(f"{type(model).__name__} has no `tp_plan`: give `plan`")
    modules = dict(model.named_modules())
    names = dict.fromkeys([*modules, *dict(model.named_parameters())])  # in order, on all ranks
    named = {p: [n for n in names if _matches(n, p)] for p in sorted(given, key=names.__contains__)}
    found = {name: given[p] for p in named for name in named[p]}
    if not found:
        names_of = "', '".join([*modules][1:4])
        raise InputError(
            f"the plan names nothing of this {type(model).__name__}, whose modules are called "
            f"'{names_of}', ...: give the module that the plan is for, or a plan of these names"
        )
    words = {name: word for name, word in found.items() if not isinstance(word, ParallelStyle)}
    theirs = {name: style for name, style in found.items() if isinstance(style, ParallelStyle)}
    how: How = {"options": options}
    styles = styles_of_words(model, words, mesh, how, recipe)
    kept = _rewrite(theirs, modules, styles, how, recipe)
    plain = {n: kept.get(n) or _why(styles[n], modules[n]) for n in found if n in styles}
    groups = {n: s for n, s in styles.items() if isinstance(s, OverlapColwiseGroup)}
    members = {_below(parent, name) for parent, s in groups.items() for name in s.names}
    if twice := members & styles.keys():
        raise InputError(f"{min(twice)} is in its parent's group: give it no style of its own")
    steps = [*styles.items()]
    if words:
        rest = modules.keys() - (styles.keys() - groups.keys()) - members
        steps += _whole(modules, rest, styles)
    planned: dict[int, Placement] = {}
    for name, style in steps:
        if isinstance(style, Checked):
            try:
                style.check(modules[name], mesh, planned)
            except InputError as error:
                raise InputError(f"{name or 'the model'}: {error}") from None
    for name, style in steps:
        parallelize_module(modules[name], mesh, style)
    made = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    return Parallelized(
        {name: words.get(name) or _applied(name, styles) for name in found},
        {name: why for name, why in plain.items() if why is not None},
        tuple(name for name, p in made.items() if p.placements == ALL),
        tuple(sorted(pattern for pattern, names in named.items() if not names)),
    )


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _applied(name: str, styles: Mapping[str, ParallelStyle]) -> str:
    """The style of a module, which may be one of a group that its parent has."""
    return type(styles.get(name) or styles[_parent(name)]).__name__


def _why(style: ParallelStyle, module: nn.Module) -> str | None:
    """Why a style does not overlap; None where it does."""
    if isinstance(style, Checked):
        return style.why(module)
    return f"{type(style).__name__} is applied as it is given"


def _whole(
    modules: Mapping[str, nn.Module], rest: Set[str], styles: Mapping[str, ParallelStyle]
) -> list[tuple[str, ParallelStyle]]:
    """Styles of modules that a plan leaves whole, and of those around them, which may read them."""
    sums = {
        id(module): getattr(styles.get(name), "sees_heads", False)
        for name, module in modules.items()
        if _is_left(module)
        and (name in rest or getattr(styles.get(name), "is_partial", None) is False)
    }
    found: list[tuple[str, ParallelStyle]] = []
    for name in filter(rest.__contains__, modules):
        held = [(part, sums[id(part)]) for part in modules[name].modules() if id(part) in sums]
        if held and (_is_left(modules[name]) or _is_called(modules[name])):
            found.append((name, Local(held=held)))
    return found


def _is_left(module: nn.Module) -> bool:
    """Returns true where a module has Parameters of its own that are not distributed."""
    return any(not isinstance(param, DTensor) for param in module.parameters(recurse=False))


def _is_called(module: nn.Module) -> bool:
    """Returns true where a module has a forward, as a ModuleList has not."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _below(parent: str, name: str) -> str:
    return f"{parent}.{name}".removeprefix(".")


# torch's styles


def _rewrite(
    given: Mapping[str, ParallelStyle],
    modules: Mapping[str, nn.Module],
    styles: dict[str, ParallelStyle],
    how: How,
    recipe: Recipe | None,
) -> dict[str, str]:
    """Adds styles that overlap in the place of torch's; why inputs are gathered as ever."""
    kept: dict[str, str] = {}
    for name, style in given.items():
        if name not in modules:
            raise InputError(f"{name} is a Parameter: {type(style).__name__} is for a module")
        styles[name] = _overlapping(style, modules[name], how, recipe)
    for name, style in given.items():
        if type(style) is not PrepareModuleInput:
            continue
        start = f"{name}." if name else ""
        below = {n.removeprefix(start): n for n in given if n.startswith(start) and n != name}
        found = _gathered(style, {k: (given[n], modules[n]) for k, n in below.items()})
        if isinstance(found, str):
            kept[name] = found
            continue
        layout, layers = found
        group = OverlapColwiseGroup(
            [*layers],
            input_layouts=layout,
            use_local_output=next(iter(layers.values())).use_local_output,
            recipe=recipe,
            **how,
        )
        group.prepare = style
        styles[name] = group
        for layer in layers:
            del styles[below[layer]]
    return kept


def _overlapping(
    style: ParallelStyle, module: nn.Module, how: How, recipe: Recipe | None
) -> ParallelStyle:
    """The style in the place of torch's, or else itself."""
    if type(style) is ColwiseParallel:
        kind = OverlapColwise
    elif type(style) is RowwiseParallel:
        kind = OverlapRowwise
    else:
        return style
    layouts = {key: getattr(style, key)[0] for key in ("input_layouts", "output_layouts")}
    if not all(isinstance(layout, Shard | Replicate) for layout in layouts.values()):
        return style
    given = {**layouts, **how, "use_local_output": style.use_local_output}
    made = kind(**given)
    return made if recipe is None or made.why(module) else kind(**given, recipe=recipe)


def _gathered(
    style: PrepareModuleInput, below: Mapping[str, tuple[ParallelStyle, nn.Module]]
) -> tuple[Placement, dict[str, ColwiseParallel]] | str:
    """The layout of the rows that are gathered for a module, and the layers that are to do that; or
    why they are not."""
    pairs = [*zip(style.input_layouts or (), style.desired_input_layouts or (), strict=True)]
    for key, layout in style.input_kwarg_layouts.items():
        pairs.append((layout, style.desired_input_kwarg_layouts.get(key)))
    rows = [layout for layout, desired in pairs if is_gathered(layout, desired)]
    if len(rows) != 1 or rows[0] is None or style.use_local_output:
        return f"it gathers {len(rows)} inputs: one is taken, of use_local_output=False"
    for name, (other, _) in below.items():
        if type(other) not in OF_ROWS:
            return f"{name} has {type(other).__name__}, which may want whole rows"
    columns = {
        name: layer
        for name, (layer, _) in below.items()
        if type(layer) is ColwiseParallel and layer.input_layouts == ALL
    }
    for name, layer in columns.items():
        if "." in name or not is_plain(below[name][1]) or layer.output_layouts != FEATURES:
            return f"{name} is no linear layer right below it, of output_layouts=Shard(-1)"
    if len({layer.use_local_output for layer in columns.values()}) != 1:
        return "it has no ColwiseParallel below it, or some with use_local_output and some without"
    return rows[0], columns
