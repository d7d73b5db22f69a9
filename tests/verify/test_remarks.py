"""A remark reports what the model leaves out, and the schedule stays sound."""

from __future__ import annotations

from interlace.ir import parse
from interlace.verify import Report, check

HEAD = "(a: Team[2], b: Team[[0, 1]], x: f32[4], y: out[f32[4]], z: out[f32[4]])"
INPUTS = "(a: Team[2], x: f32[4], y: f32[4], z: f32[4])"
ONE = '    main: all_reduce(x, y, reduce="sum", team=a)\n'
TWO = '    comm: all_reduce(x, z, reduce="sum", team=b)\n'


def remarks(report: Report) -> list[str]:
    assert report.sound, report
    return [finding.kind for finding in report.findings]


def launched(first: str, second: str) -> Report:
    """Rank 0 launches team a's and then team b's; rank 1 as given."""
    texts = (f"def f{HEAD}:\n{ONE}{TWO}", f"def g{HEAD}:\n{first}{second}")
    programs = [parse(text).instantiate(rank) for rank, text in enumerate(texts)]
    return check(programs)


def test_two_communicators_in_opposite_order() -> None:
    assert remarks(launched(TWO, ONE)) == ["launch-order"]
    assert "team=a" in str(launched(TWO, ONE))


def test_nor_where_an_event_orders_them_on_one_rank() -> None:
    ordered = "    comm: record(e)\n    main: wait(e)\n"
    assert remarks(launched(TWO, ordered + ONE)) == ["launch-order"]  # rank 0 leaves it open
    texts = (
        f"def f{HEAD}:\n{ONE}    main: record(e)\n    comm: wait(e)\n{TWO}",
        f"def g{HEAD}:\n{TWO}{ordered}{ONE}",
    )
    programs = [parse(text).instantiate(rank) for rank, text in enumerate(texts)]
    assert check(programs).kinds() == {"deadlock"}


def test_it_is_said_where_streams_order_them_on_one_rank_alone() -> None:
    ordered = f"    comm: record(e)\n    main: wait(e)\n{ONE}"
    for first, second in ((TWO + ordered, ONE + TWO), (ONE + TWO, TWO + ordered)):
        texts = f"def f{HEAD}:\n{first}", f"def g{HEAD}:\n{second}"
        programs = [parse(text).instantiate(rank) for rank, text in enumerate(texts)]
        assert remarks(check(programs)) == ["launch-order"]


def messages(send: str, recv: str, more: str = "") -> Report:
    return check(parse(f"def f{INPUTS}:\n    {send}\n    {recv}\n{more}"))


def test_messages_that_nccl_runs_one_after_another() -> None:
    send, recv = "send(x, peer=a.rank + 1{})", "recv(y, peer=a.rank - 1{})"
    split = "main: " + send, "comm: " + recv
    assert remarks(messages(*(each.format("") for each in split))) == ["launch-order"]
    assert remarks(messages(*(each.format(', backend="nccl"') for each in split))) == [
        "launch-order"
    ]
    assert remarks(messages(*(each.format(', backend="gloo"') for each in split))) == []
    group = f"main: group({send.format('')}, {recv.format('')})"
    assert remarks(messages(group, "main: copy(x, z)")) == []


def test_a_message_and_a_collective_of_one_team() -> None:
    texts = (
        f"def f{INPUTS}:\n    main: send(x, peer=1, team=a)\n{TWO.replace('team=b', 'team=a')}",
        f"def g{INPUTS}:\n{TWO.replace('team=b', 'team=a')}    main: recv(y, peer=0, team=a)\n",
    )
    programs = [parse(text).instantiate(rank) for rank, text in enumerate(texts)]
    assert remarks(check(programs)) == ["launch-order"]
    first = parse(texts[0]).instantiate(0)
    after = "    main: record(e)\n    comm: wait(e)\n"
    twin = (
        f"def h{INPUTS}:\n    main: recv(y, peer=0, team=a)\n{after}{texts[0].splitlines()[-1]}\n"
    )
    assert remarks(check([first, parse(twin).instantiate(1)])) == []
