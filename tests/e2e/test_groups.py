"""Process groups made by hand, groups that go away, and what the frontend cannot lower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from tests.frontend.models import Function
from tests.support.pool import Pool

import interlace
from interlace.errors import InterlaceError, UnsupportedError

OPTIONS = {"strategy": "peer", "timeout_s": 20.0}


def integers(seed: int, *sizes: int) -> torch.Tensor:
    """Small integers: sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, sizes, generator=generator).float()


def gather_matmul(group: Any) -> Any:
    """A linear layer on rows gathered in a plain process group."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(funcol.all_gather_tensor(x, 0, group), w)

    return fn


def pairs() -> tuple[bool, list[int], list[str]]:
    """Groups of two of four ranks, known to each rank by its own alone."""
    torch.compiler.reset()
    mine = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    fn, x, w = gather_matmul(mine), integers(dist.get_rank(), 3, 4), integers(9, 5, 4)
    call = interlace.compile(Function(fn), x, w, options=OPTIONS)
    equal = torch.equal(call(x, w), fn(x, w))
    teams = [team.size for team in call.program.teams]
    sites = [site.strategy for site in call.program.sites]
    call.close()
    return equal, teams, sites


def test_groups_made_by_hand(pool: Pool) -> None:
    for equal, teams, sites in pool(4).run(pairs):
        assert equal
        assert teams == [2]
        assert sites == ["peer"]


# -- what cannot be lowered ------------------------------------------------------------------------


def refused(how: str) -> str:
    """A reduction that no collective of the design has, inside a compiled function."""
    torch.compiler.reset()
    world = _world()
    fn = lambda x: funcol.all_reduce(x * 2, "bxor", world) + 1  # noqa: E731
    x = torch.ones(3, dtype=torch.int64)
    try:
        if how == "interlace.compile":
            interlace.compile(Function(fn), x)
        else:
            torch.compile(fn, backend="interlace")(x)
    except UnsupportedError as error:
        return str(error)
    except InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("how", ["torch.compile", "interlace.compile"])
def test_a_reduction_that_cannot_be_lowered_is_a_typed_error(pool: Pool, how: str) -> None:
    for text in pool(2).run(refused, how):
        assert "reduction 'bxor'" in text
        if how == "torch.compile":  # TorchDynamo knows the line
            assert "test_groups.py" in text, "where it is"
        assert "Use one of" in text, "how to mend it"


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
