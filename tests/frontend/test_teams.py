"""Process groups as teams: mesh axes, groups made by hand, connected ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.captured import capture
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh

from interlace.errors import TeamError
from interlace.frontend import Teams, backend
from interlace.frontend.teams import as_axes, connected
from interlace.ir import Team


def test_connected_ranks_are_the_program() -> None:
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert connected(0, [rows]) == {0, 1}
    assert connected(3, [rows, columns]) == {0, 1, 2, 3}
    assert connected(5, [rows]) == {5}


def test_mesh_axes_need_no_groups() -> None:
    dp, tp = Team("dp", 2, ((0, 2), (1, 3))), Team("tp", 2, ((0, 1), (2, 3)))
    assert as_axes((tp, dp), (0, 1, 2, 3)) == ((Team("dp", 2), Team("tp", 2)), None)
    assert as_axes((Team("tp", 2, ((2, 3),)),), (2, 3)) == ((Team("tp", 2),), (2, 3))
    odd = (Team("a", 2, ((0, 3), (1, 2))), Team("b", 2, ((0, 1), (2, 3))))
    assert as_axes(odd, (0, 1, 2, 3)) == (odd, None)
    assert as_axes((), (0,)) == ((), None)
    assert as_axes((), (7,)) == ((), (7,))


def test_group_without_process_group_is_a_typed_error() -> None:
    with pytest.raises(TeamError, match="init_process_group"):
        Teams.of_torch().team("0")


def names_and_groups() -> list[Any]:
    """The teams of a few graphs on four ranks."""
    import torch.distributed._functional_collectives as funcol

    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    thick = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat, rank = thick["dp", "cp"]._flatten("dp_cp"), dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine, other = pairs[rank // 2], across[0 if rank in (0, 3) else 1]
    found: list[Any] = []
    choices: list[list[Any]] = [
        [mesh["tp"]],
        [mesh["dp"], mesh["tp"]],
        [dist.group.WORLD],
        [mine],
        [mine, other],
        [flat, thick["tp"]],
    ]
    for groups in choices:

        def fn(x: torch.Tensor, groups: Any = groups) -> torch.Tensor:
            for group in groups:
                x = funcol.all_reduce(x, "sum", group)
            return x

        torch.compiler.reset()
        x = torch.full((2,), float(rank))
        with capture() as captured:
            try:
                result = torch.compile(fn, backend=backend)(x)
            except TeamError as error:
                found.append(str(error))
                continue
        assert torch.equal(result, fn(x))
        (program,) = captured.programs
        found.append(([(t.name, t.size, t.groups) for t in program.teams], program.ranks))
    return found


def test_names_and_groups(pool: Pool) -> None:
    results = pool(4).run(names_and_groups)
    for rank, (tp, both, world, pair, crossed, flattened) in enumerate(results):
        here = None if rank < 2 else (2, 3)
        assert tp == ([("tp", 2, None)], here)
        assert both == ([("dp", 2, None), ("tp", 2, None)], None)
        assert world == ([("world", 4, None)], None)
        assert pair[1] == here
        assert pair[0][0][1:] == (2, None)
        assert flattened == ([("dp_cp", 2, None), ("tp", 2, None)], None)
        assert "which join ranks" in crossed
        assert "fix: take all of them from one DeviceMesh" in crossed
