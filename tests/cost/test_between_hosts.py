"""Links between hosts: what crosses, by hand on a machine of round figures, and who shares it."""

from __future__ import annotations

import pytest
from tests.cost.test_simulate import ROUND, times

from interlace.cost import Machine, Timeline, default_machine, simulate
from interlace.cost.machine import Link, crossings, interface_bytes
from interlace.errors import SoundnessError
from interlace.ir import parse
from interlace_bench.calibration.fit import Sample, fit

APART = ROUND.replace(between=(("gloo", Link(latency_s=0.0, bandwidth=8.0)),))
"""8 bytes travel between hosts in a second, 16 inside."""
SHARED = ROUND.replace(between=(("gloo", Link(latency_s=0.0, bandwidth=8.0, shared=True)),))


def played(teams: str, *lines: str, machine: Machine = APART) -> Timeline:
    head = f"def p({teams}, x: f32[4], y: f32[4], z: f32[16], v: f32[16], s: f32[4]):\n"
    return simulate(parse(head + "".join(f"    {line}\n" for line in lines)), machine)


FLAT = "tp: Team[4].on([0, 1], [2, 3])"
COLLECTIVES = {  # bytes through an interface that two ranks share, and through one of their own
    "all_gather": ("all_gather(x, z, team=tp)", 48, 24),
    "reduce_scatter": ('reduce_scatter(z, x, reduce="sum", team=tp)', 48, 24),
    "all_reduce": ('all_reduce(z, z, reduce="sum", team=tp)', 96, 48),
    "broadcast": ("broadcast(z, z, root=0, team=tp)", 64, 32),
    "reduce": ('reduce(z, v, reduce="sum", root=0, team=tp)', 64, 32),
    "all_to_all": ("all_to_all(z, v, team=tp)", 64, 32),
    "gather": ("gather(x, z, root=0, team=tp)", 32, 32),
    "barrier": ("barrier(team=tp)", 0, 0),
}


@pytest.mark.parametrize(("text", "shared", "own"), COLLECTIVES.values(), ids=COLLECTIVES)
def test_bytes_that_cross(text: str, shared: float, own: float) -> None:
    slow = (("gloo", Link(latency_s=0.0, bandwidth=1.0)),)  # so that it is not what is inside
    assert played(FLAT, f"main: {text}", machine=APART.replace(between=slow)).makespan_s == own
    assert played(FLAT, f"main: {text}", machine=SHARED).makespan_s == shared / 8


def test_hosts_that_differ_wait_for_the_smallest() -> None:
    assert interface_bytes("all_gather", 40.0, (3, 1), shared=False) == 30
    assert interface_bytes("all_to_all", 40.0, (3, 1), shared=False) == 30
    assert interface_bytes("all_to_all", 40.0, (3, 1), shared=True) == 30


def test_a_collective_takes_as_long_as_its_slower_part() -> None:
    quick = APART.replace(between=(("gloo", Link(latency_s=0.0, bandwidth=1e9)),))
    assert played(FLAT, "main: all_gather(x, z, team=tp)", machine=quick).makespan_s == 48 / 16
    lone = "tp: Team[4].on([0], [1], [2], [3])"  # nothing is inside
    timeline = played(lone, "main: all_gather(x, z, team=tp)", machine=quick)
    assert timeline.makespan_s == pytest.approx(48 / 1e9)


def test_latency_is_of_each_crossing() -> None:
    machine = APART.replace(between=(("gloo", Link(latency_s=1.0, bandwidth=1e9)),))
    lone = "tp: Team[4].on([0], [1], [2], [3])"
    for text, count in {
        "all_gather(x, z, team=tp)": 3,
        'all_reduce(z, z, reduce="sum", team=tp)': 4,
        "broadcast(z, z, root=0, team=tp)": 2,
        "all_to_all(z, v, team=tp)": 1,
        "barrier(team=tp)": 2,
    }.items():
        took = played(lone, f"main: {text}", machine=machine).makespan_s
        assert took == pytest.approx(count, abs=1e-6), text


def test_messages_take_the_link_that_is_between_their_ends() -> None:
    teams = "near: Team[[0, 1], [2, 3]], far: Team[[0, 2], [1, 3]].on([0], [1])"
    for team, seconds in (("near", 1), ("far", 2)):
        line = f"main: group(send(x, peer={team}.rank + 1), recv(y, peer={team}.rank - 1))"
        assert played(teams, line).makespan_s == seconds
    line = "main: group(send(x, peer=tp.rank + 1), recv(y, peer=tp.rank - 1))"
    assert {end for _, _, end in times(played(FLAT, line))} == {2}, "some of them cross"


def test_ranks_that_share_an_interface_slow_each_other_down() -> None:
    both = "dp: Team[2].on([0], [1]), tp: Team[2]"
    line = "main: group(send(x, peer=dp.rank + 1), recv(y, peer=dp.rank - 1))"
    reduce = 'main: all_reduce(z, z, reduce="sum", team=dp)'
    assert played(both, line).makespan_s == 16 / 8
    assert played(both, line, machine=SHARED).makespan_s == 2 * 16 / 8
    assert played(both, reduce).makespan_s == 64 / 8
    assert played(both, reduce, machine=SHARED).makespan_s == 2 * 64 / 8


def test_a_rank_on_another_host_that_never_comes() -> None:
    text = """def p(tp: Team[[0, 1]].on([0], [1]), x: f32[4]):
    ranks(0)
    main: all_reduce(x, x, reduce="sum", team=tp)
"""
    with pytest.raises(SoundnessError, match="for ever"):
        simulate(parse(text), SHARED)


def test_what_is_inside_does_not_slow_what_is_between() -> None:
    both = "dp: Team[2].on([0], [1]), tp: Team[2]"
    lines = ("main: all_to_all(z, v, team=tp)", "side: all_to_all(z, v, team=dp)")
    assert [end for *_, end in times(played(both, *lines))] == [32 / 16, 32 / 8]


def samples(kind: str, latency: float, rate: float, ranks: int, hosts: int) -> list[Sample]:
    blank = Sample(kind=kind, seconds=1.0, nbytes=1, ranks=ranks, hosts=hosts)
    per_byte = blank.interface_bytes(shared=True) / rate
    return [
        Sample(
            kind=kind,
            backend="gloo",
            seconds=latency * crossings(kind, hosts) + n * per_byte,
            nbytes=n,
            ranks=ranks,
            hosts=hosts,
        )
        for n in (1, 1 << 16, 1 << 20, 1 << 24)
    ]


def test_samples_between_hosts_make_its_link_and_leave_that_inside(seed: int) -> None:
    base = default_machine("cpu")
    found = [*samples("send", 1e-4, 1e9, 4, 2), *samples("all_reduce", 1e-4, 2e9, 8, 4)]
    machine = fit(found, base)
    link = machine.link("gloo", between=True)
    assert link.shared
    assert machine.links == base.links
    assert sum(link.times("send", 3e6)) == pytest.approx(1e-4 + 3e6 / 1e9, rel=0.05)
    fixed, work = link.times("all_reduce", 3e7)
    assert (fixed, work) == pytest.approx((1e-4, 3e7 / 2e9), rel=0.05), "of one crossing"
