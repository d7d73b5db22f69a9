"""Which parameters Muon updates, and which AdamW: rules, in order, the first that fits decides.

groups = muon_groups(model, {"*.qkv_proj.weight": {"split_sizes": (4096, 1024, 1024)}})
optimizer = Muon(groups, lr=0.02, adamw={"lr": 3e-4})
print(optimizer.explain())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from interlace.optim.loading import Group, ParamGroup
from interlace.torch_private import ConvNd

HEADS = ("lm_head", "head", "output", "output_layer", "embed_out", "classifier", "score")
"""Last parts of the names of output layers."""


def rule_of(
    name: str, shape: tuple[int, ...], module: nn.Module, table: tuple[int, ...]
) -> tuple[bool, str]:
    """Decides if Muon updates a parameter of `module`, and why. `table` is the shape of the model's
    largest embedding, (0, 0) where it has none. The first rule that fits decides.
    """
    path, last = name.split(".")[:-1], name.rpartition(".")[2]
    named = path[-1:] != [] and path[-1] in HEADS and len(path) <= 2
    tied = shape == table and table[0] != table[1]
    if any("Embedding" in kind.__name__ for kind in type(module).__mro__) or "embed" in last:
        return False, "embedding: a table, whose rows are looked up and not multiplied"
    if len(shape) < 2:
        return False, "vector: fewer than 2 dimensions"
    if last.endswith("bias"):
        return False, "bias: a bias of several layers"
    if len(shape) == 2 and (named or tied):
        return False, "head: the output layer, by its name or its shape, the embedding's"
    if isinstance(module, ConvNd):
        return False, "convolution: a convolution's kernel, which is no matrix"
    if min(shape[-2:]) < 2:
        return False, "thin: a vector in the shape of a matrix"
    if len(shape) > 3:
        return False, "other: more than 3 dimensions"
    if len(shape) == 3:
        return True, "experts: a stack of matrices, each made orthogonal for itself"
    return True, "matrix: a weight matrix"


def muon_groups(
    model: nn.Module,
    options: Mapping[str, Group] | None = None,
) -> list[ParamGroup]:
    """Makes parameter groups of `Muon`, with names, for all parameters of a model.

    There is a group for each rule and pattern that fits something. A shared parameter is in the
    first place that it is found in.

    Args:
        model: the model.
        options: options of groups, by patterns of names (`fnmatch`); the first that fits counts,
            and a `use_muon` among them overrules the rules.

    Returns:
        The groups, each with `use_muon` and the reason for it.
    """
    modules = dict(model.named_modules())
    tables = [m.weight.shape for m in modules.values() if isinstance(m, nn.Embedding)]
    table = tuple(max(tables, default=(0, 0)))
    groups: dict[tuple[str, str | None], ParamGroup] = {}
    for name, param in model.named_parameters():
        module = modules[name.rpartition(".")[0]]
        use_muon, why = rule_of(name, tuple(param.shape), module, table)
        pattern = next((p for p in options or () if fnmatchcase(name, p)), None)
        asked = dict(options[pattern]) if options and pattern is not None else {}
        rule = why
        if asked.get("use_muon", use_muon) != use_muon:
            why = f"requested by {pattern!r}; else {why}"
        made = {"params": [], "use_muon": use_muon, "why": why, **asked}
        groups.setdefault((rule, pattern), made)["params"].append((name, param))
    return list(groups.values())


def explain_groups(groups: Sequence[Group], cut: Callable[[Tensor, Group], str]) -> str:
    """A line for each parameter: by what it is updated, its name, shape, how it is cut, and why."""
    rows: list[tuple[str, str, str, str]] = []
    counts = {True: [0, 0], False: [0, 0]}
    for group in groups:
        muon = group["use_muon"]
        why = group.get("why") or f"its group has use_muon={muon}"
        unnamed = [f"parameter {len(rows) + at}" for at in range(len(group["params"]))]
        for name, param in zip(group.get("param_names", unnamed), group["params"], strict=True):
            shape = "x".join(map(str, param.shape)) or "scalar"
            frozen = "" if param.requires_grad else " (frozen)"
            how = cut(param, group) if muon else "AdamW"
            rows.append((how, name, shape, why + frozen))
            counts[muon][0] += 1
            counts[muon][1] += param.numel()
    total = ", ".join(
        f"{'Muon' if muon else 'AdamW'}: {number} parameters, {elements:,} elements"
        for muon, (number, elements) in counts.items()
    )
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(3)]
    lines = [
        f"{how:<{widths[0]}}  {name:<{widths[1]}}  {shape:<{widths[2]}}  {why}"
        for how, name, shape, why in rows
    ]
    return "\n".join([total, *lines])
