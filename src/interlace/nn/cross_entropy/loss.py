"""Cross-entropy over logits that may be cut over ranks: the function, and its place in autograd.

    loss = cross_entropy(logits, target, label_smoothing=0.1, z_loss=1e-4)
    loss = cross_entropy(local_logits, target, group=tp)     # each rank has some of the classes
    raise_pending()                          # TargetError, if a target was no class

Note [Two reads and one write]: forward reads the logits once and keeps two numbers a row (more with
smoothing or class weights); backward reads them again and writes their gradient, in their type.
Nothing else of their size is ever held, and the logits are left as they are, so that a second
backward is as right as the first.

Note [Targets that are no class]: the kernels write the first that they find to host memory that the
device sees, so that nothing is copied and nobody waits; every call of a loss looks there first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, SupportsIndex, get_args

import torch

from interlace.errors import InputError, TargetError, refuse_removed
from interlace.nn.autograd import first_order
from interlace.nn.cross_entropy.steps import Problem, Shards, Terms, new_word, steps_for
from interlace.nn.cross_entropy.vocabulary import Waiting, find_shards, gather, refuse_dtensors
from interlace.nn.groups import group_of
from interlace.optim.untraced import eager

Reduction = Literal["none", "mean", "sum"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
LOGITS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
REMOVED = {
    "shard_sizes": "leave it out: each call gathers the ranks' numbers of classes, with what shows "
    "that all give the same arguments",
    "softcap": "give cross_entropy logits that are capped: softcap * torch.tanh(logits / softcap)",
    "check_targets": "call raise_pending() after the loss (on CUDA, synchronize before)",
}
"""Options of former releases, and what serves instead."""


@eager
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    group: Any = None,
    z_loss: float = 0.0,
    denominator: torch.Tensor | float | None = None,
    **removed: object,
) -> torch.Tensor:
    """The cross-entropy between logits and the indices of classes.

    A target that is no class (below 0, too large, and not `ignore_index`) does not raise at once,
    as in torch on the CPU, since the host would wait for the device: the loss and the gradient of
    its row are NaN, and a later call, or `raise_pending`, raises TargetError.

    Args:
        logits: (..., classes), bfloat16, float16, float32 or float64; they are never written to,
            and on CUDA copied where the classes do not lie side by side, or two strides do not say
            where rows begin. No kernel takes float64: on CUDA, the host then waits for the device.
            With `group`, this rank's classes: those of rank 0 come first. (Of a DTensor give
            `to_local()`, here and below.)
        target: (...), int64 or int32, of any strides; the same on all ranks of the group.
        weight: (classes,), the weight of each class; with `group`, of this rank's classes.
        ignore_index: rows with this target have loss and gradient 0, and are not counted.
        reduction: "none": a loss for each row; "sum"; "mean": the sum, divided by the sum of the
            weights of the targets that count (their number, without weights; NaN if none does).
        label_smoothing: the part of a target that all classes share, as in torch, in [0, 1].
        group: a process group, or a mesh of one dimension, over which the classes are cut, evenly
            or not. All of its ranks call with the same arguments, and get the same bits.
        z_loss: adds z_loss * logsumexp(row)^2 to the loss of each row that counts ("ST-MoE",
            arXiv:2202.08906); class weights do not scale it.
        denominator: replaces the divisor of "mean" and "sum": a number, or a tensor of one element
            (no gradient flows to it). Under data parallelism, the number of tokens of all ranks
            over the number of ranks makes the averaged gradients exact.

    Returns:
        The loss in float32 (float64 for float64 logits): a scalar, or (...) for "none".

    Raises:
        TargetError: a target is not a class. The loss and the gradient of its row are NaN, and
            the next call of a loss or of `raise_pending` raises, once the device has computed
            this one.
        InputError: shapes, dtypes or options do not fit.
        AgreementError: ranks of the group give other arguments (on CUDA, once for each set).
    """
    refuse_removed("cross_entropy", removed, REMOVED)
    refuse_dtensors(logits=logits, target=target, weight=weight, denominator=denominator)
    check_inputs(logits, target, weight)
    terms = terms_of(target, ignore_index, reduction, label_smoothing, z_loss, denominator)
    facts = facts_of(logits, target, weight, terms, reduction)
    setup = LossSetup.of(logits.device, logits.shape[-1], terms, group, facts)
    return CrossEntropy.apply(logits, target.contiguous(), weight, setup, reduction, denominator)


@dataclass(frozen=True, slots=True)
class LossSetup:
    """The facts that all rows of a call share: the loss's terms, the classes' layout, the note."""

    terms: Terms
    shards: Shards
    ready: Waiting
    """To be called before `shards.sizes` is read."""
    group: Any
    word: torch.Tensor

    @classmethod
    def of(
        cls,
        device: torch.device,
        classes: int,
        terms: Terms,
        group: Any,
        facts: Mapping[str, int],
    ) -> LossSetup:
        """Raises what earlier calls noted; starts to gather the ranks' numbers of `classes`, and
        their `facts`.
        """
        notes = notes_of("cuda" if device.type == "cuda" else "cpu")
        notes.check()
        group = group_of(group)
        shards, ready = find_shards(group, classes, facts, device)
        return cls(terms, shards, ready, group, notes.word)

    def problem(self, logits: torch.Tensor, target: torch.Tensor, weight: Any, row: int) -> Problem:
        """Some rows of the call, from `row` on."""
        return Problem(logits, target, weight, self.terms, self.shards, self.word, row)


class CrossEntropy(torch.autograd.Function):
    """See Note [Two reads and one write]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        setup: LossSetup,
        reduction: str,
        denominator: torch.Tensor | float | None,
    ) -> torch.Tensor:
        steps = steps_for(logits)
        problem = setup.problem(logits, target, weight, 0)
        if setup.group is None:
            loss, kept = steps.alone(problem)
        else:
            found = steps.stats(problem)
            setup.ready()
            loss, kept = steps.losses(problem, gather(steps.pack(problem, found), setup.group))
        divisor = None
        if reduction != "none":
            weighted, mean = weight is not None, reduction == "mean"
            loss, divisor = steps.total(loss, kept, weighted, mean, denominator)
        ctx.setup = setup
        ctx.save_for_backward(logits, target, weight, kept, divisor)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, weight, kept, divisor = ctx.saved_tensors
        problem = ctx.setup.problem(logits, target, weight, 0)
        with torch.no_grad():
            grad = steps_for(logits).gradient(problem, kept, upstream, divisor)
        return (first_order(grad), *(None,) * 5)


def facts_of(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    terms: Terms,
    reduction: str,
    **more: int,
) -> dict[str, int]:
    """Arguments that all ranks of a group give alike, as numbers: vocabulary.py's FACTS."""
    return {
        "rows": target.numel(),
        "chunk_size": 0,
        "dtype": LOGITS.index(logits.dtype),
        "reduction='none'": reduction == "none",
        "overlap": 0,
        "label_smoothing": terms.smoothing != 0.0,
        "class weights": weight is not None,
        "z_loss": terms.z_loss != 0.0,
        "requires_grad of hidden": 0,
        **more,
    }


def check_inputs(logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Raises `InputError` where these do not fit together."""
    if logits.dtype not in LOGITS:
        raise InputError(f"logits are {logits.dtype}: take one of {LOGITS}")
    if logits.shape[:-1] != target.shape or not logits.dim():
        raise InputError(
            f"logits are {tuple(logits.shape)} and targets {tuple(target.shape)}: for logits "
            "(..., classes) targets are (...) (torch has classes in dimension 1: move them last)"
        )
    if target.device != logits.device:
        raise InputError(f"logits are on {logits.device} and targets on {target.device}")
    if weight is not None:
        if weight.shape != logits.shape[-1:] or weight.device != logits.device:
            raise InputError(
                f"weight is {tuple(weight.shape)} on {weight.device}: logits have "
                f"{logits.shape[-1]} classes here, on {logits.device}"
            )
        if weight.requires_grad:
            raise InputError("no gradient flows to class weights: detach them")


def terms_of(
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    denominator: torch.Tensor | float | None,
) -> Terms:
    """The terms of a loss; raises `InputError` for a value that an option cannot have."""
    if target.dtype not in (torch.int64, torch.int32):
        raise InputError(f"targets are {target.dtype}: take int64 or int32 indices of classes")
    if not isinstance(ignore_index, SupportsIndex):
        raise InputError(
            f"ignore_index is {ignore_index!r}: take an integer (no class, to ignore none)"
        )
    if reduction not in REDUCTIONS:
        raise InputError(f"reduction is {reduction!r}: take one of {REDUCTIONS}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise InputError(f"label_smoothing is {label_smoothing}: take a number from 0 to 1")
    if denominator is not None:
        if reduction == "none":
            raise InputError("a denominator divides the sum: take reduction 'mean' or 'sum'")
        if not isinstance(denominator, torch.Tensor | Real):
            raise InputError(f"denominator is {denominator!r}: take a number, or a tensor of one")
        if isinstance(denominator, torch.Tensor) and denominator.numel() != 1:
            raise InputError(f"denominator is {tuple(denominator.shape)}: take one number")
    return Terms(ignore_index, float(label_smoothing), float(z_loss))


# -- targets that are no class ---------------------------------------------------------------------


class Notes:
    """The word of one kind of device, and the host's view of it."""

    def __init__(self, kind: str) -> None:
        self.word = new_word(kind)
        self._seen = (ctypes.c_int64 * 3).from_address(self.word.data_ptr())

    def check(self) -> None:
        """Raises what was noted, once."""
        if self._seen[0]:
            row, target, classes = self._seen[0] - 1, self._seen[1], self._seen[2]
            self._seen[0] = 0
            raise TargetError(
                f"the target of row {row} is {target}, where there are classes 0 to {classes - 1}; "
                "mark rows that do not count with `ignore_index`; its loss and gradient were NaN"
            )


@lru_cache(maxsize=2)
def notes_of(kind: str) -> Notes:
    """The notes of "cpu" or of "cuda"."""
    return Notes(kind)


def raise_pending() -> None:
    """Raises `TargetError` if a loss met a target that is no class since this was last asked.

    Each call of a loss asks as well. On CUDA what has not run yet is not known: to be sure that
    all is, call `torch.cuda.synchronize()` before.
    """
    notes_of("cpu").check()
    if torch.cuda.is_initialized():
        notes_of("cuda").check()
