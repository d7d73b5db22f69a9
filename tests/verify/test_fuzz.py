"""The checker against the exhaustive oracle: no fault missed, no false alarm.

python -m tests.fuzzing --programs 100000        # as many as one has patience for
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.fuzzing import Plan, compare, drawn, run
from tests.fuzzing import campaign as campaigns
from tests.fuzzing.compare import header
from tests.fuzzing.shrink import MAX_OPS
from tests.verify.orders import shuffled
from tests.verify.planted import FOLDER, PLANTED, planted

from interlace.ir import Program, parse_set, print_set
from interlace.verify import Report, check
from interlace.verify.build import GraphBuilder

PROGRAMS = 2_000
"""Sets in each `make test`; the command does millions on a machine with time to spare."""
KEPT = sorted(FOLDER.glob("*.ilc"))
SORTS = (
    "sound",
    "race",
    "deadlock",
    "uninitialized",
    "use-after-free",
    "leak",
    "event",
    "mismatch",
)
MET = (
    *("Call", "Copy", "Fused", "Send", "Recv", "Group", "Put", "Get", "Notify", "Expect"),
    *("Alloc", "Free", "Record", "Wait", "HostSync", "Send in Group", "Expect in Fused"),
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "gather"),
    *("scatter", "reduce", "barrier", "table", "SPMD", "set"),
    *("2 ranks", "3 ranks", "1 runs", "2 runs", "3 runs", "1 teams", "2 teams", "3 teams"),
    *("1 streams", "2 streams", "3 streams"),
)


@pytest.mark.timeout(600)
def test_random_programs(seed: int, record_property: Callable[[str, object], None]) -> None:
    tally = run(Plan(PROGRAMS, seed))
    record_property("fuzz", str(tally))
    assert not tally.counts, "\n\n".join(found.text for found in tally.found)
    for sort in SORTS:
        assert tally.kinds[sort] >= 20, f"only {tally.kinds[sort]} of {sort}"
    for sort in MET:
        assert tally.met[sort] >= 20, f"only {tally.met[sort]} with {sort}"


def test_exchanges_whose_counts_are_data(seed: int) -> None:
    """The verdict is for all counts: no draw of them shows a fault that it has not."""
    tally = run(Plan(PROGRAMS // 8, seed, counts=1.0))
    assert not tally.counts, "\n\n".join(found.text for found in tally.found)
    assert tally.met["counts"] >= PROGRAMS // 16
    for sort in ("sound", "race", "uninitialized", "deadlock"):
        assert tally.kinds[sort] >= 10, f"only {tally.kinds[sort]} of {sort}"


def check_in_all_ways(programs: Sequence[Program]) -> None:
    """The checker says the same of every rank, in other orders and one after another."""
    report = check(programs)

    def shown(other: Report) -> str:
        return f"{print_set(programs)}\n{report}\n{other}"

    in_full = check(programs, fold=False)
    assert in_full.kinds() == report.kinds(), shown(in_full)
    for seed, fold in ((0, True), (1, False)):
        with shuffled(seed):
            other = check(programs, fold=fold)
        assert other.kinds() == report.kinds(), shown(other)
    if report.sound:  # one after another, ranks may only wait for what a peer lists later
        in_order = check(programs, in_order=True)
        assert in_order.kinds() <= {"deadlock", "uninitialized"}, shown(in_order)


def test_in_whatever_order_the_checker_walks(seed: int) -> None:
    for number in range(200):
        check_in_all_ways(drawn(seed, number)[0])


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_sets_that_show_a_fault_of_a_checker(path: Path) -> None:
    """A fault of this checker once, or of one that lacks a rule (planted.py): the two agree now."""
    text = path.read_text()
    facts, programs = header(text), parse_set(text, file=path.name)
    assert sum(len(program.ops) for program in programs) <= MAX_OPS
    runs = int(facts["runs"])
    for fold in (False, True):
        found = compare(programs, runs, fold=fold).disagreements
        assert not found, f"{found}\n{text}"
    check_in_all_ways(programs)
    if "planted" in facts:
        with planted(facts["planted"]):
            found = [d for k in (0, 1) for d in compare(programs, runs, fold=k > 0).disagreements]
        assert found, text


def test_each_fault_that_is_planted_has_its_set() -> None:
    assert {header(path.read_text()).get("planted") for path in KEPT} >= {*PLANTED}


# What the campaign does when something is wrong


def fails(*_: object) -> None:
    raise ValueError("planted")


@pytest.mark.parametrize(
    ("sort", "fault"),
    [
        ("false alarm", PLANTED["nobody contributes"]),
        ("miss", PLANTED["what is written is written"]),
        ("crash", (GraphBuilder, "_deliver", fails)),
    ],
)
def test_a_planted_fault_is_found_and_made_small(
    sort: str, fault: tuple[object, str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(*fault)  # pyright: ignore[reportArgumentType, reportCallIssue]
        patch.setattr(campaigns, "SLOWEST", 1)
        tally = run(Plan(80, seed=2))
    assert tally.counts[sort] >= 3
    found = next(found for found in tally.found if found.sort == sort)
    text = found.text
    assert found.num_ops <= MAX_OPS, text
    programs, runs = parse_set(text), int(header(text)["runs"])
    assert not compare(programs, runs).disagreements, text
    with monkeypatch.context() as patch:
        patch.setattr(*fault)  # pyright: ignore[reportArgumentType, reportCallIssue]
        again = compare(programs, runs, fold=found.number % campaigns.UNFOLDED != 0)
    assert sort in {each.sort for each in again.disagreements}, text


def test_it_needs_nothing_but_python(seed: int) -> None:
    """As on a machine where neither torch nor what the command line needs is installed."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "for name in ('torch', 'typer', 'rich', 'numpy'): sys.modules[name] = None\n"
        "import runpy; runpy.run_module('tests.fuzzing', run_name='__main__')\n"
    )
    src = str(Path(campaigns.__file__).parents[3])
    words = [src, "--programs", "60", "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"seed {seed}: 60 sets of Programs" in done.stdout
    assert "misses: 0" in done.stdout
    assert f"seed {seed}" in done.stderr
