"""Recorded runs, made op by op: for each class of fault one that hangs and one that does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.external.recorded_runs import Run

import interlace
from interlace.errors import RecordingError
from interlace_check.recorded import KINDS, RecordedFinding, RecordedReport

Make = Callable[[bool], Run]


def only(report: RecordedReport, kind: str) -> RecordedFinding:
    """The one finding that explains a run."""
    roots = [one for one in report.findings if one.level != "follows"]
    assert [one.kind for one in roots] == [kind], report
    return roots[0]


# -- the runs: each is made with its fault, and without --------------------------------------------


def another_kind(fault: bool) -> Run:
    run = Run(4)
    run.each("all_reduce", [8], line=12)
    for rank in range(4):
        kind = "broadcast" if fault and rank == 2 else "all_reduce"
        run.call(rank, kind, [16], line=35 if rank == 2 else 34)
    return run


def another_size(fault: bool) -> Run:
    run = Run(4)
    for rank in range(4):
        run.call(rank, "all_reduce", [7 if fault and rank == 3 else 8])
    return run


def another_dtype(fault: bool) -> Run:
    run = Run(2)
    for rank in range(2):
        run.call(rank, "all_reduce", [8], dtype="BFloat16" if fault and rank else "Float")
    return run


def rank_left_behind(fault: bool) -> Run:
    run = Run(4)
    run.each("all_gather", [4], out=[16], line=20)
    for rank in range(4):
        if not (fault and rank == 1):
            run.call(rank, "all_reduce", [8], line=21)
    return run


def far_ahead(fault: bool) -> Run:
    """Ranks that issue hundreds of calls that do not block, and one that stopped long ago."""
    run = Run(4)
    for k in range(300):
        for rank in range(4):
            if not (fault and rank == 3 and k >= 7):
                run.call(rank, "all_reduce", [k + 1])
    return run


def opposite_order(fault: bool) -> Run:
    """Two groups of the same ranks; each host waits for its first call (torchrec #4149)."""
    run = Run(2)
    tp, dp = run.group("1", [0, 1], "tp"), run.group("2", [0, 1], "dp")
    run.call(0, "all_reduce", [4], tp, line=10)
    run.call(1, "all_to_all", [4], dp, line=20)
    if not fault:
        run.call(0, "all_to_all", [4], dp, line=20)
        run.call(1, "all_reduce", [4], tp, line=10)
    return run


def opposite_launches(fault: bool) -> Run:
    """The same where no host waits: both are launched on both ranks, and neither ends."""
    run = Run(2)
    tp, dp = run.group("1", [0, 1], "tp"), run.group("2", [0, 1], "dp")
    run.call(0, "all_reduce", [4], tp)
    run.call(0, "all_to_all", [4], dp)
    run.call(1, "all_to_all", [4], dp)
    run.call(1, "all_reduce", [4], tp)
    run.settle()
    if fault:
        run.settle = lambda: None  # type: ignore[method-assign]
        for entry in (entry for mine in run.entries.values() for entry in mine):
            entry.update(state="started", retired=False)
    return run


def host_sync(fault: bool) -> Run:
    """torchrec #4149: 62 ranks issued all-to-all 11 of `mesh_shard` and wait on the host for it;
    ranks 6 and 7 wait for their all-reduce on `mesh_replicate`, whose peers are among the 62."""
    run = Run(64)
    shard = run.group("mesh_shard", range(64), "mesh_shard")
    columns = [run.group(f"r{k}", range(k, 64, 8), "mesh_replicate") for k in range(8)]
    for _ in range(10):
        run.each("all_to_all", [64], shard)
    late = (6, 7) if fault else ()
    for rank in range(64):
        if rank not in late:
            run.call(rank, "all_to_all", [64], shard, line=500)
    for rank in (*range(6, 64, 8), *range(7, 64, 8)):
        if rank in late or not fault:
            run.call(rank, "allreduce_coalesced", [128], columns[rank % 8], line=900)
    return run


def crossed_messages(fault: bool) -> Run:
    """Both ranks send before they receive, on the one communicator of the two."""
    run = Run(2)
    for rank in range(2):
        ways = [run.send, run.recv]
        for way in ways if fault or rank == 0 else reversed(ways):
            way(rank, 1 - rank, [1024], line=40 + rank)
    return run


def message_without_receiver(fault: bool) -> Run:
    run = Run(4)
    for rank in range(3):
        run.send(rank, rank + 1)
        if not (fault and rank == 1):
            run.recv(rank + 1, rank)
    return run


def exchanged_messages(fault: bool) -> Run:
    """Activations of two sizes that the receiver takes in the other order (NCCL has no tags)."""
    run = Run(2)
    for size in ([16], [32]):
        run.send(0, 1, size)
    for size in ([32], [16]) if fault else ([16], [32]):
        run.recv(1, 0, size)
    return run


def uneven_all_to_all(fault: bool) -> Run:
    """What the ranks send in all is not what they receive in all."""
    run = Run(2)
    run.call(0, "all_to_all", [6], out=[4])
    run.call(1, "all_to_all", [4], out=[7 if fault else 6])
    return run


def wrapped(fault: bool) -> Run:
    """Buffers that held the last 20 records; rank 1 stopped, and the others went on."""
    run = Run(3)
    for k in range(100):
        run.each("all_reduce", [k + 1])
    for rank in range(3):
        if not (fault and rank == 1):
            run.call(rank, "reduce_scatter", [9], out=[3])
    run.first = {0: 81, 1: 85, 2: 90}
    return run


def coalesced_calls(fault: bool) -> Run:
    """Calls that are coalesced, one more on one rank."""
    run = Run(2)
    for rank in range(2):
        for k in range(3 if fault and rank else 2):
            run.call(rank, "all_reduce", [k + 1], coalesced=k > 0)
        run.add(rank, "0", "coalesced", [], [], "", False, 0)
    return run


def not_ended(fault: bool) -> Run:
    """Issued alike by all, and not ended: one rank has not even started it (nccl #1063)."""
    run = rank_left_behind(False)
    run.settle()
    if fault:
        run.settle = lambda: None  # type: ignore[method-assign]
        for rank in range(4):
            state = "scheduled" if rank == 2 else "started"
            run.entries[rank][-1].update(state=state, retired=False)
    return run


PAIRS: list[tuple[Make, str, tuple[int, ...], str]] = [
    (another_kind, "mismatch", (2,), "disagree on the kind of number 2: rank 2 against"),
    (another_size, "mismatch", (3,), "disagree on the size of number 1"),
    (another_dtype, "mismatch", (1,), "disagree on the element type"),
    (rank_left_behind, "missing", (1,), "rank 1 did not issue all_reduce [8] Float, number 2"),
    (far_ahead, "missing", (3,), "ranks 0 to 2 wait there (292 further numbers"),
    (opposite_order, "cycle", (0, 1), "ranks 0 and 1 wait for each other"),
    (opposite_launches, "launch-order", (0, 1), "in opposite order"),
    (crossed_messages, "cycle", (0, 1), "ranks 0 and 1 wait for each other"),
    (message_without_receiver, "missing", (2,), "rank 2 did not receive what rank 1 waits to send"),
    (exchanged_messages, "mismatch", (), "disagree on the size of message"),
    (uneven_all_to_all, "mismatch", (), "disagree on the size"),
    (wrapped, "missing", (1,), "rank 1 did not issue reduce_scatter [3] Float, number 101"),
    (coalesced_calls, "mismatch", (1,), "disagree on the kind"),
    (not_ended, "unfinished", (), "scheduled on rank 2"),
]


@pytest.mark.parametrize(
    ("make", "kind", "missing", "says"), PAIRS, ids=[make.__name__ for make, *_ in PAIRS]
)
def test_each_fault_is_found_and_its_twin_is_not(
    make: Make, kind: str, missing: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    report = interlace.check_recorded(make(True).write(tmp_path / "bad"))
    finding = only(report, kind)
    assert set(finding.missing) >= set(missing), report
    assert says in finding.message
    assert finding.ops
    assert finding.kind in KINDS
    assert finding.fix
    fixed = interlace.check_recorded(make(False).write(tmp_path / "good"))
    assert fixed.sound, fixed
    assert "nothing to report" in str(fixed)


def test_a_finding_names_record_state_and_source_line(tmp_path: Path) -> None:
    report = interlace.check_recorded(rank_left_behind(True).write(tmp_path))
    finding = only(report, "missing")
    waits, last = finding.ops[0], finding.ops[-1]
    assert (waits.rank, waits.record, waits.state) == (0, 1, "scheduled")
    assert waits.loc == "step (train.py:21)"
    assert "group 0 (default_pg)" in waits.text
    assert last.rank == 1
    assert last.text.startswith("all_gather [4] Float, number 1 of group 0")
    assert "issued this last" in last.role
    assert finding.waiting == (0, 2, 3)
    assert report.to_json()["findings"][0]["ops"][0]["loc"] == waits.loc


def test_the_circle_of_a_host_that_waits(tmp_path: Path) -> None:
    """62 ranks in one group's all-to-all, and two that wait for peers among them."""
    report = interlace.check_recorded(host_sync(True).write(tmp_path / "bad"))
    roots = [one for one in report.findings if one.level != "follows"]
    assert {one.kind for one in roots} == {"cycle"}, report
    said = str(report)
    assert "has not issued this, for which a peer waits" in said
    assert "all_to_all [64] Float, number 11 of group mesh_shard" in said
    assert "allreduce_coalesced [128] Float, number 1 of group" in said
    shard = next(one for one in report.findings if one.kind == "missing" and "11" in one.message)
    assert shard.missing == (6, 7)
    assert len(shard.waiting) == 62
    assert shard.level == "follows"
    assert interlace.check_recorded(host_sync(False).write(tmp_path / "good")).sound


def test_the_straggler_is_told_from_those_that_wait_for_it(tmp_path: Path) -> None:
    """nccl #1911: in a chain of groups all ranks are late, and one of them holds up the rest."""
    run = Run(4)
    for low in range(3):
        run.group(str(low + 1), [low, low + 1])
    for low in range(2):  # rank 0 waits for 1, 1 for 2, and 2 for 3, which issues nothing
        run.call(low, "all_reduce", [4], str(low + 1))
    run.call(2, "all_reduce", [4], "3")
    report = interlace.check_recorded(run.write(tmp_path))
    assert only(report, "missing").missing == (3,)
    assert sorted(one.missing for one in report.findings if one.level == "follows") == [(1,), (2,)]


def test_a_rank_without_a_dump(tmp_path: Path) -> None:
    """pytorch #196968: the rank that raised is in destroy_process_group() and writes no dump."""
    run = rank_left_behind(True)
    finding = only(interlace.check_recorded(run.write(tmp_path / "bad", without=[1])), "no-dump")
    assert finding.missing == (1,)
    assert finding.waiting == (0, 2, 3)
    assert "destroy_process_group" in finding.fix
    done = rank_left_behind(False).write(tmp_path / "good", without=[1])
    report = interlace.check_recorded(done)
    assert report.sound
    assert any("rank 1 left no dump" in one for one in report.assumed)


def test_what_a_wrapped_buffer_leaves_open_is_said(tmp_path: Path) -> None:
    report = interlace.check_recorded(wrapped(True).write(tmp_path / "one"))
    assert any("rank 2: its dump begins with record 90" in one for one in report.assumed)
    run = Run(3)  # rank 1 has used the group, but its dump begins after that
    tp = run.group("tp", range(3))
    run.each("all_reduce", [4], tp)
    for _ in range(30):
        run.each("barrier")
    run.call(0, "all_reduce", [5], tp)
    run.first = {1: 5}
    report = interlace.check_recorded(run.write(tmp_path / "two"))
    finding = only(report, "missing")
    assert finding.missing == (2,)
    assert "of rank 1 it is not known" in finding.message
    assert any("not known how far it came" in one for one in report.assumed)


def test_a_wrapped_buffer_that_begins_within_a_batch(tmp_path: Path) -> None:
    """What is left of the batch, be it its marker alone, is no call that peers do not have."""
    run = Run(2)
    for rank in range(2):
        for k in range(2):
            run.call(rank, "all_reduce", [k + 1], coalesced=k > 0)
        run.add(rank, "0", "coalesced", [], [], "", False, 0)
        run.batch(rank, [("send", 1 - rank), ("recv", 1 - rank)])
        run.call(rank, "all_gather", [4], out=[8])
    run.settle()
    for first in range(1, 7):
        run.first = {0: first}
        report = interlace.check_recorded(run.write(tmp_path / str(first)))
        assert report.sound, (first, report)
    run.call(1, "broadcast", [4])
    finding = only(interlace.check_recorded(run.write(tmp_path / "bad")), "missing")
    assert finding.missing == (0,)


def test_messages_of_wrapped_buffers_are_matched_by_what_has_not_ended(tmp_path: Path) -> None:
    run = Run(2)
    for _ in range(50):
        run.send(0, 1)
        run.recv(1, 0)
    run.first = {0: 13, 1: 20}
    assert interlace.check_recorded(run.write(tmp_path / "good")).sound
    run.send(0, 1, [99])
    finding = only(interlace.check_recorded(run.write(tmp_path / "bad")), "missing")
    assert finding.missing == (1,)
    assert "send [99]" in finding.message


def test_global_ranks_of_groups_that_share_a_name(tmp_path: Path) -> None:
    """Groups that were split apart bear one name; ranks in names are places in the group."""
    run = Run(4)
    run.groups["tp"] = ("tp", [0, 1])
    run.groups["tp "] = ("tp", [2, 3])
    run.each("all_reduce", [4], "tp")
    run.call(3, "all_reduce", [4], "tp ")
    run.send(3, 2, group="tp ")
    run.recv(2, 3, group="tp ")
    folder = run.write(tmp_path)
    for path in folder.iterdir():
        path.write_text(path.read_text().replace('"tp "', '"tp"'))
    report = interlace.check_recorded(folder)
    assert only(report, "missing").missing == (2,)
    assert report.programs[0].teams[0].groups == ((2, 3),)


def test_gloo_groups_of_unknown_ranks_are_left_out_where_all_had_ended(tmp_path: Path) -> None:
    """gloo records no ranks, and torch's own dump of it no groups but the default one."""

    def dumped(
        folder: str, *ended: bool, ranks: Sequence[Sequence[int]] = (), goes_on: bool = True
    ) -> Path:
        run = Run(2, backend="gloo")
        run.group("tp", [0, 1])
        for _ in ended:
            run.each("all_reduce", [4], "tp")
        if goes_on:
            run.each("barrier")
        written = run.write(tmp_path / folder)
        for path in written.iterdir():
            plain = json.loads(path.read_text())
            plain["pg_config"].pop("tp")
            for entry, done in zip(plain["entries"], ended, strict=False):
                entry.update(state="scheduled", retired=done)
            path.write_text(json.dumps(plain))
        for number, each in enumerate(ranks):
            config = {"tp": {"desc": "undefined", "ranks": list(each)}}
            other = {"version": "2.10", "rank": 2 + number, "pg_config": config, "entries": []}
            (written / f"trace_rank_{2 + number}.json").write_text(json.dumps(other))
        return written

    report = interlace.check_recorded(dumped("good", True, True))
    assert report.sound
    assert any("tp: it is unclear which ranks it has; 4 records" in one for one in report.assumed)
    for bad in (dumped("open", True, False), dumped("last", True, True, goes_on=False)):
        with pytest.raises(RecordingError, match="no dump says which ranks group tp has"):
            interlace.check_recorded(bad)
    with pytest.raises(RecordingError, match="2 groups of the name tp hold rank 0: ranks 0 to 2"):
        interlace.check_recorded(dumped("two", False, ranks=([0, 1, 2], [0, 1, 3])))


def test_the_programs_say_what_the_report_says(tmp_path: Path) -> None:
    """They are valid, they are text, and the verifier finds the same fault in them."""
    for make, kind, *_ in PAIRS:
        report = interlace.check_recorded(make(True).write(tmp_path / make.__name__))
        programs = list(report.programs)
        for program in programs:
            assert interlace.parse(str(program)) == program
        kinds = interlace.check(programs).kinds()
        if kind == "cycle":
            assert kinds == {"deadlock"}, (make, kinds)
        if kind in ("missing", "unfinished", "launch-order"):
            assert not kinds, make


def test_dumps_that_hold_active_ops_alone(tmp_path: Path) -> None:
    run = far_ahead(True)
    run.settle()
    run.settle = lambda: None  # type: ignore[method-assign]
    for rank in range(4):
        run.entries[rank] = [one for one in run.entries[rank] if one["state"] != "completed"]
    report = interlace.check_recorded(run.write(tmp_path))
    assert not report.sound
    assert "number 8" in report.findings[0].message, report
    assert 3 in report.findings[0].missing


# -- what NCCL really wrote: torch 2.11, two H100s, 64 MB a call ---------------------------------

NCCL = Path(__file__).parent / "nccl"
WRITTEN = {
    "miss": ("missing", "rank 1 did not issue all_reduce [16777216] Float, number 2 of group 0"),
    "order": ("cycle", "ranks 0 and 1 wait for each other: each waits in an op"),
    "cross": ("cycle", "ranks 0 and 1 wait for each other"),
    "batch": ("missing", "rank 1 did not receive what rank 0 waits to send"),
    "size": ("mismatch", "disagree on the size of number 2: rank 1 against rank 0"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_runs_that_hung_on_nccl(name: str) -> None:
    kind, says = WRITTEN[name]
    report = interlace.check_recorded(NCCL / name)
    assert report.kinds() == {kind}, report
    assert any(says in one.message for one in report.findings), report
    assert not report.assumed


def test_a_run_that_ended_on_nccl() -> None:
    """With a batch of messages, coalesced reductions, and every usual collective."""
    report = interlace.check_recorded(NCCL / "sound")
    assert report.sound, report
    assert report.num_ops == 26


# -- groups that were made again, and two libraries in one process -------------------------------


def test_a_group_that_was_destroyed_and_made_again(tmp_path: Path) -> None:
    """Its numbers begin anew; what was before is past."""
    old, new = rank_left_behind(True), rank_left_behind(False)
    old.settle()
    new.settle()
    for rank in range(4):
        again = [dict(entry) for entry in new.entries[rank]]
        new.entries[rank] = [*old.entries[rank], *again]
        for number, entry in enumerate(new.entries[rank]):
            entry["record_id"] = number
    new.settle = lambda: None  # type: ignore[method-assign]
    assert interlace.check_recorded(new.write(tmp_path / "good")).sound
    for rank in range(4):  # the other way round: the second time a rank is left behind
        last = new.entries[rank]
        new.entries[rank] = [*last[len(old.entries[rank]) :], *last[: len(old.entries[rank])]]
        for number, entry in enumerate(new.entries[rank]):
            entry["record_id"] = number
    assert only(interlace.check_recorded(new.write(tmp_path / "bad")), "missing").missing == (1,)


def test_records_of_two_libraries_are_put_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that NCCL and gloo both serve has two numberings: that of gloo is kept apart."""
    from interlace_check.recorded import saving

    nccl, gloo = Run(1), Run(1, "gloo")
    for run, kind in (nccl, "all_reduce"), (gloo, "barrier"):
        for _ in range(2):
            run.call(0, kind)
    for number, entry in enumerate([*nccl.entries[0], *gloo.entries[0]]):
        entry["time_created_ns"] = (0, 20, 10, 30)[number]
    bound = {"_dump_nccl_trace_json": nccl, "_dump_fr_trace_json": gloo}
    for name, run in bound.items():
        text = json.dumps(run.dump(0))
        monkeypatch.setattr(f"torch._C._distributed_c10d.{name}", lambda t=text: t, raising=False)
    config = dict(nccl.dump(0)["pg_config"])
    entries = saving._entries(config)
    assert [(one["record_id"], *one["process_group"]) for one in entries] == [
        (0, "0", "default_pg"),
        (1, "0/gloo", "default_pg"),
        (2, "0", "default_pg"),
        (3, "0/gloo", "default_pg"),
    ]
    assert config["0/gloo"]["ranks"] == config["0"]["ranks"]
