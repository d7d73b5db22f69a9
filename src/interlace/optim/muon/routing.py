"""Which parameters Muon updates, and which AdamW: rules, in order, the first that fits decides.

groups = muon_groups(model, {"*.qkv_proj.weight": {"split_sizes": (4096, 1024, 1024)}})
optimizer = Muon(groups, lr=0.02, adamw={"lr": 3e-4})
print(optimizer.explain())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

HEADS = ("lm_head", "head", "output", "output_layer", "embed_out", "classifier", "score")
"""Last parts of the names of output layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamFacts:
    """What rules look at."""

    name: str
    """With the module's path."""
    shape: tuple[int, ...]
    module: nn.Module
    """The module that the parameter belongs to."""
    table: tuple[int, ...]
    """The shape of the model's largest embedding, (0, 0) where it has none."""

    @property
    def last(self) -> str:
        """The parameter's own name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """What is done with the parameters that it fits, and why."""

    name: str
    use_muon: bool
    why: str
    fits: Callable[[ParamFacts], bool]


def _is_embedding(facts: ParamFacts) -> bool:
    kinds = type(facts.module).__mro__
    return any("Embedding" in kind.__name__ for kind in kinds) or "embed" in facts.last


def _is_head(facts: ParamFacts) -> bool:
    path = facts.name.split(".")[:-1]
    named = path[-1:] != [] and path[-1] in HEADS and len(path) <= 2
    rows, columns = facts.table
    return len(facts.shape) == 2 and (named or (facts.shape == facts.table and rows != columns))


RULES: tuple[RoutingRule, ...] = (
    RoutingRule(
        "embedding", False, "a table, whose rows are looked up and not multiplied", _is_embedding
    ),
    RoutingRule("vector", False, "fewer than 2 dimensions", lambda facts: len(facts.shape) < 2),
    RoutingRule(
        "bias", False, "a bias of several layers", lambda facts: facts.last.endswith("bias")
    ),
    RoutingRule(
        "head", False, "the output layer, by its name or its shape, the embedding's", _is_head
    ),
    RoutingRule(
        "convolution", False, "a convolution's kernel, which is no matrix",
        lambda facts: isinstance(facts.module, nn.modules.conv._ConvNd),
    ),
    RoutingRule(
        "thin", False, "a vector in the shape of a matrix",
        lambda facts: min(facts.shape[-2:]) < 2,
    ),
    RoutingRule(
        "experts", True, "a stack of matrices, each made orthogonal for itself",
        lambda facts: len(facts.shape) == 3,
    ),
    RoutingRule("matrix", True, "a weight matrix", lambda facts: len(facts.shape) == 2),
    RoutingRule("other", False, "more than 3 dimensions", lambda facts: True),
)  # fmt: skip
"""In order: the first that fits decides."""


def muon_groups(
    model: nn.Module,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    rules: Sequence[RoutingRule] = RULES,
) -> list[dict[str, Any]]:
    """Parameter groups of `Muon` with the names of all parameters of a model; a shared parameter
    is in the first place that it is found in.

    `options` are of groups, by patterns of names (`fnmatch`); the first that fits counts, and a
    `use_muon` among them overrules the rules. There is a group for each rule and pattern that fits
    something, so each can have options, such as a learning rate, of its own.
    """
    modules = dict(model.named_modules())
    tables = [m.weight.shape for m in modules.values() if isinstance(m, nn.Embedding)]
    table = tuple(max(tables, default=(0, 0)))
    groups: dict[tuple[str, str | None], dict[str, Any]] = {}
    for name, param in model.named_parameters():
        facts = ParamFacts(
            name=name,
            shape=tuple(param.shape),
            module=modules[name.rpartition(".")[0]],
            table=table,
        )
        rule = next(rule for rule in rules if rule.fits(facts))
        pattern = next((p for p in options or () if fnmatchcase(name, p)), None)
        asked = dict(options[pattern]) if options and pattern is not None else {}
        why = f"{rule.name}: {rule.why}"
        if asked.get("use_muon", rule.use_muon) != rule.use_muon:
            why = f"requested by {pattern!r}; else {why}"
        made = {"params": [], "use_muon": rule.use_muon, "why": why, **asked}
        groups.setdefault((rule.name, pattern), made)["params"].append((name, param))
    return list(groups.values())


def explain_groups(
    groups: Sequence[Mapping[str, Any]], cut: Callable[[Tensor, Mapping[str, Any]], str]
) -> str:
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
