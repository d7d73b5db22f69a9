"""Every strategy on real GPUs gives the bits of its own Program in order, and the right numbers."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import DTYPES, KINDS, SHAPES, STRATEGIES, Case, prepared, run
from tests.support.pool import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

SLACK = {"bf16": 1.05, "f16": 1.05, "f32": 2.0}
"""How much larger the mean error may be than NCCL's. Chunks of an fp32 matmul may take another
kernel, whose own rounding is all the error there is."""
RING = 1.5
"""The same for `ring`, which rounds after each step, as NCCL's ring does in another order."""
BINADE = 2.0
"""How much larger the largest error may be: one element just above a power of two decides it."""
TINY = 1e-9
ROUNDED_ONCE = ("peer-get", "peer-put", "fused", "beside", "exchange", "copies")
"""Strategies that round each partial result once and their sum once. The others, like NCCL, may
round the sum at each of the ranks that it passes."""


def off(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The absolute error; infinite where there is NaN."""
    return (found.double() - wanted).abs().nan_to_num(nan=torch.inf)


def verify(case: Case, strategy: str, seed: int) -> list[str]:
    """What is wrong with one case on this rank."""
    wrong: list[str] = []
    with ExitStack() as stack:
        executor = stack.enter_context(prepared(case, strategy))
        twin = stack.enter_context(prepared(case, strategy, in_order=True))
        for number in range(3):  # the slots are used in turn
            exact, drawn = number == 0, seed + number
            inputs = case.inputs(drawn, exact)
            found, ordered = run(executor, case, inputs), run(twin, case, inputs)
            executor.synchronize()
            twin.synchronize()
            torch.cuda.synchronize()
            by_nccl = case.by_nccl(inputs[0], inputs[1])
            wanted, allowed = case.reference(drawn, exact)
            if found.isnan().any():
                wrong.append(f"{case} run {number}: NaN remains")
            if not torch.equal(found, ordered):
                wrong.append(f"{case} run {number}: not the bits of the Program in order")
            error, theirs = off(found, wanted), off(by_nccl, wanted)
            if exact and not torch.equal(found, by_nccl):
                wrong.append(f"{case}: exact sums differ by {error.max():g}")
            if strategy not in ROUNDED_ONCE:
                allowed = allowed * case.world
            if (error > allowed).any():
                worst = (error / allowed).max()
                wrong.append(f"{case} run {number}: {worst:.2f} times what is allowed")
            slack = max(SLACK[case.dtype], RING if strategy == "ring" else 0.0)
            if error.mean() > slack * theirs.mean() + TINY:
                wrong.append(f"{case}: mean error {error.mean():g}, NCCL's {theirs.mean():g}")
            if error.max() > BINADE * slack * theirs.max() + TINY:
                wrong.append(f"{case}: largest error {error.max():g}, NCCL's {theirs.max():g}")
    return wrong


def verify_all(kind: str, strategy: str, seed: int) -> list[str]:
    """All shapes and element types of a site and a strategy."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    wrong: list[str] = []
    for dtype in DTYPES:
        for shape in SHAPES:
            wrong += verify(Case(kind, dist.get_world_size(), dtype, shape), strategy, seed)
    return wrong


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_is_right_and_equal_to_in_order(gpus: Ranks, kind: str, strategy: str, seed: int) -> None:
    for wrong in gpus.run(verify_all, kind, strategy, seed, timeout_s=120):
        assert not wrong, "\n".join(wrong)
