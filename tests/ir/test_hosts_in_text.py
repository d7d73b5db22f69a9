"""Teams whose ranks are on several hosts, as text."""

from __future__ import annotations

import pytest

from interlace.errors import ProgramError
from interlace.ir import Team, parse, validate

GATHER = """
def gather({}, x: f32[4], y: out[f32[16]]):
    main: all_gather(x, y, team=tp)
"""


@pytest.mark.parametrize(
    ("written", "team"),
    [
        ("tp: Team[4].on([0, 1], [2, 3])", Team("tp", 4, None, ((0, 1), (2, 3)))),
        (
            "tp: Team[[4, 5, 6, 7]].on([0, 2], [1, 3])",
            Team("tp", 4, ((4, 5, 6, 7),), ((0, 2), (1, 3))),
        ),
    ],
)
def test_the_hosts_of_a_team_are_read_and_printed(written: str, team: Team) -> None:
    program = parse(GATHER.format(written))
    assert program.teams == (team,)
    assert written in str(program)
    assert parse(str(program)) == program
    assert [team.apart(0, other) for other in range(4)] == [
        not any({0, other} <= {*host} for host in team.hosts or ()) for other in range(4)
    ]


@pytest.mark.parametrize("hosts", ["[0, 1], [2]", "[0, 1, 2, 3]", "[0, 1], [1, 2, 3]", "[0], []"])
def test_every_rank_is_on_one_host(hosts: str) -> None:
    with pytest.raises(ProgramError, match=r"do not have each of its 4 ranks once"):
        validate(parse(GATHER.format(f"tp: Team[4].on({hosts})")))


def test_peers_reach_no_memory_of_another_host() -> None:
    text = GATHER.format("tp: Team[4].on([0, 1], [2, 3])")
    slot = "    s = alloc(f32[4], symmetric=tp)\n    main: copy(x, s)\n"
    with pytest.raises(ProgramError, match=r"peers are to reach 's', and team 'tp' spans hosts"):
        validate(parse(text + slot))
