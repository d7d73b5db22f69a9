"""Candidates against one another: interleaved, the slowest rank counts, failures stay alone."""

from __future__ import annotations

import contextlib
import time
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool

from interlace.cost import default_machine, fingerprint
from interlace_bench import overlap
from interlace_bench.candidates import candidate
from interlace_bench.race import LEAD_CYCLES, Opened, Racer, Variant, burst, percentile, race
from interlace_bench.ranks import here
from interlace_bench.settings import OverlapSettings

CPU = torch.device("cpu")


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(i) for i in range(1, 11)], 0.9) == 9.0
    racer = Racer(Variant("one", lambda: Opened(int, lambda: 0.0)), rounds=[4.0, 1.0])
    assert racer.median == 2.5


def racers_of(runs: dict[str, Any], sets: Any) -> dict[str, Racer]:
    """Variants that are open, by name."""
    found: dict[str, Racer] = {}
    for name, run in runs.items():
        opened = Opened(run, lambda: 0.0)
        found[name] = Racer(Variant(name, lambda opened=opened: opened, sets=sets), opened)
    return found


def raced() -> dict[str, Any]:
    """A race on one rank: rank 1 is slow in one candidate, and fails in another."""
    ranks = here(CPU)
    order: list[str] = []
    seen: list[int] = []

    def quick(number: int) -> None:
        order.append("quick")
        seen.append(number)

    def uneven(number: int) -> None:
        order.append("uneven")
        time.sleep(0.002 if ranks.me == 1 else 0)

    def broken(number: int) -> None:
        if ranks.me == 1:
            raise ValueError("this rank alone")

    runs = {"quick": quick, "uneven": uneven, "broken": broken}
    timed = racers_of(runs, [(0,), (1,), (2,)])
    race(ranks, [*timed.values()], seconds=0.1, rounds=(3, 3), ahead=1)
    firsts = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    return {
        "rounds": {name: one.rounds for name, one in timed.items()},
        "problems": {name: one.problem for name, one in timed.items()},
        "turns": firsts,
        "seen": sorted(set(seen)),
    }


def test_a_race(pool: Pool) -> None:
    first, second = pool(2).run(raced)
    assert first["rounds"] == second["rounds"], "of all ranks the slowest"
    assert min(first["rounds"]["uneven"]) >= 0.002
    assert len(first["rounds"]["quick"]) == 3
    assert first["problems"] == {
        "quick": None,
        "uneven": None,
        "broken": "rank 1: ValueError: this rank alone",
    }
    # Before the race a short burst each; then all in every round, in its order.
    assert first["turns"] == ["quick", "uneven", "quick", "uneven", "quick", "uneven"]
    assert first["seen"] == [0, 1, 2]


class FakeEvent:
    def __init__(self, **_: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return 6.0


class FakeRanks:
    """This rank's host is quick; the slowest asks its device to wait for 7,000,000 cycles."""

    cuda, device = True, CPU

    def synchronize(self) -> None: ...

    def align(self) -> None: ...

    def maximum(self, values: list[float]) -> list[float]:
        return [max(7e6, value) for value in values]


def test_every_device_waits_for_the_slowest_host(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", waited.append)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    ranks: Any = FakeRanks()
    burst(ranks, lambda: None, [()], 3, ahead=1)
    burst(ranks, lambda: None, [()], 3)
    assert waited == [7_000_000, LEAD_CYCLES]


def ordered() -> list[str]:
    """The candidates of several rounds, in the order in which they ran."""
    order: list[str] = []
    runs = {name: lambda number, name=name: order.append(name) for name in "abc"}
    race(here(CPU), [*racers_of(runs, [(0,)]).values()], seconds=0.1, rounds=(8, 8))
    return [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]


def test_every_candidate_follows_every_other(pool: Pool) -> None:
    """Else one would always meet the clocks that the same other leaves."""
    first, second = pool(2).run(ordered)
    assert first == second, "ranks run the same together"
    assert set(pairwise(first)) == set(permutations("abc", 2))


def odd(name: str, closed: list[str], case: Any, inputs: Any) -> Variant:
    """A candidate that is right, wrong, or raises; or cannot be opened at all."""

    def launch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        dist.all_reduce(y)
        if name == "wrong" and dist.get_rank() == 1:
            y[3, 2] += 100
        if name == "raises":
            raise RuntimeError("in the middle")
        return y

    def start(facts: Any, held: contextlib.ExitStack) -> Any:
        held.callback(closed.append, name)
        if name == "unfit":
            raise RuntimeError("cannot serve this")
        return launch

    return candidate(case, inputs, name, start)


def seven_calls(ranks: Any, racers: list[Racer], seconds: float) -> None:
    """Stands for `race_hosts`."""
    for racer in racers:
        racer.host = [1e-6] * 7


def measured(names: list[str], rows: tuple[int, ...] = (8,), brief_s: float = 0.0) -> Any:
    """The report of a run with odd candidates, and which of them were closed."""
    overlap.BRIEF_S = brief_s
    overlap.race_hosts = seven_calls
    closed: list[str] = []
    overlap.ours = lambda case, ranks, inputs, *_: [odd(n, closed, case, inputs) for n in names]
    settings = OverlapSettings(
        shapes=" ".join(f"gemm_ar:{m},4,6" for m in rows),
        dtype="f32",
        only="sequential",
        seconds=20,  # more than they take, beside other tests too
    )
    events: list[dict[str, Any]] = []
    report = overlap.work(settings, here(CPU), events.append)
    if report is not None:
        steps = [event["doing"] for event in events if event["event"] == "step"]
        report["steps"] = [step for step in steps if ":" not in step]
    return report, closed


def test_what_is_wrong_or_raises_is_a_row_without_a_time(pool: Pool) -> None:
    names = ["right", "wrong", "raises", "unfit"]
    (report, closed), (nothing, _) = pool(2).run(measured, names, replace=True)
    assert nothing is None
    rows = {row["strategy"]: row for row in report["rows"]}
    assert rows["right"]["median_us"] > 0
    assert rows["right"]["error"] == ""
    assert rows["right"]["host_runs"] > 7, "those of the bursts"
    assert "off by" in rows["wrong"]["error"]
    assert "in the middle" in rows["raises"]["error"]
    assert "cannot serve this" in rows["unfit"]["error"]
    assert all(rows[name]["median_us"] != rows[name]["median_us"] for name in names[1:])
    assert set(closed) == set(names)
    assert rows["gemm torch"]["r"] == pytest.approx(1.0, abs=1.0)


def host_runs(report: Any) -> dict[int, int]:
    return {row["m"]: row["host_runs"] for row in report["rows"] if row["strategy"] == "right"}


def test_the_hosts_time_of_brief_sites_is_that_of_many_calls(pool: Pool) -> None:
    (report, _), _ = pool(2).run(measured, ["right"], (8, 16), 3600.0, replace=True)
    assert host_runs(report) == {8: 7, 16: 7}


def test_the_largest_case_comes_last_and_gets_the_time_that_is_left(pool: Pool) -> None:
    (report, _), _ = pool(2).run(measured, ["right"], (64, 8, 16), replace=True)
    assert [step.split()[1] for step in report["steps"]] == ["8,4,6", "16,4,6", "64,4,6"]


def test_what_auto_chose_is_timed_once() -> None:
    """A Program is a twin only of one that reads the same, in the same mode."""

    def entry(name: str, text: str, mode: str = "eager") -> Variant:
        known: Any = {"strategy": name, "mode": mode, "text": text}
        return Variant(f"{name}/{mode}", lambda: Opened(int, lambda: 0.0), facts=known)

    put, fused = entry("put", "one"), entry("fused", "two")
    others = [put, fused, entry("put", "one", "graph"), entry("sequential", "")]
    assert overlap._twins([*others, entry("auto", "two")]) == {"auto/eager": "fused/eager"}
    assert overlap._twins([*others, entry("auto", "two", "graph")]) == {}
    assert overlap._twins([*others, entry("auto", "")]) == {}
    assert overlap._twins([put, entry("get", "one")]) == {}


def without_time(calibration: str) -> Any:
    """The report of a run that has no time left after its set-up."""
    given: Any = {"preset": "tiny", "dtype": "f32", "seconds": 1e-3}
    settings = OverlapSettings(**given, calibration=Path(calibration))
    return overlap.work(settings, here(CPU), lambda event: None)


def test_what_has_no_time_is_left_out(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    default_machine("cpu").replace(host=fingerprint()).save(file)
    report, _ = pool(2).run(without_time, str(file))
    assert report["facts"]["calibrated"] == "yes"
    assert len(report["skipped"]) == 3
    assert report["rows"] == []
