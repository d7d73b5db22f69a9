"""Schedules of torch: the default ones are sound, deferred receives are not, mutants are found."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tests.external.pipelining_oracle import plays_right, split
from tests.external.pipelining_schedules import MULTI, make, tokens
from torch.distributed.pipelining import schedules

from interlace import check_pipelining
from interlace.errors import ParseError, SoundnessError, UnsupportedError
from interlace.ir import parse_set, print_set
from interlace_check.pipelining import KINDS, MODELS
from interlace_check.pipelining.live import take
from interlace_check.pipelining.programs import to_programs
from interlace_check.pipelining.schedule import Layout

Rows = list[list[str]]
SIZES: list[Any] = [(2, 4), (3, 6)]
SIZES += [
    pytest.param(n, m, marks=pytest.mark.slow) for n in range(2, 9) for m in (n, 2 * n, 3 * n)
]


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_default_schedules_are_sound(name: str, ranks: int, microbatches: int) -> None:
    """As an object and as what it writes."""
    if name == "DualPipeV" and microbatches < 2 * ranks:
        pytest.skip("torch refuses so few microbatches")
    schedule = make(name, ranks, microbatches)
    report = check_pipelining(schedule)
    assert report.sound, report
    assert report.verdicts == dict.fromkeys(MODELS, True)
    assert not report.findings
    again = check_pipelining(tokens(schedule))
    assert again.sound, again
    assert again.num_stages == report.num_stages == 2 * ranks
    assert again.num_microbatches == report.num_microbatches == microbatches


def test_more_stages_a_rank() -> None:
    for name in ("Interleaved1F1B", "LoopedBFS"):
        report = check_pipelining(make(name, 3, 6, per_rank=3))
        assert (report.sound, report.num_stages) == (True, 9), report


DEFERRED = {
    # name, ranks, microbatches: sound with one queue a rank, a pair, a pair and direction
    ("Interleaved1F1B", 2, 4): (False, False, True),
    ("LoopedBFS", 4, 8): (False, True, True),
    ("InterleavedZeroBubble", 2, 4): (False, False, False),
    ("ZBVZeroBubble", 2, 4): (False, False, False),
    ("DualPipeV", 2, 4): (False, False, True),
    ("DualPipeV", 3, 6): (False, False, False),
}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), DEFERRED)
def test_deferred_receives(name: str, ranks: int, microbatches: int) -> None:
    """The verdicts that test_pipelining_run.py compares with runs."""
    report = check_pipelining(make(name, ranks, microbatches, defer=True))
    assert tuple(report.verdicts.values()) == DEFERRED[name, ranks, microbatches], report
    silent = not report.verdicts["direction"]
    assert ("exchanged" in report.kinds()) == silent
    assert "deadlock" in report.kinds()


def test_the_verdict_names_what_is_exchanged() -> None:
    report = check_pipelining(make("ZBVZeroBubble", 2, 4, defer=True))
    found = next(finding for finding in report.findings if finding.kind == "exchanged")
    assert re.search(
        r"rank 0 to rank 1, message 3: rank 0 action \d+ `0SEND_F2` is taken by rank 1 action \d+ "
        r"`2RECV_B0`: the activation of microbatch 2 from stage 0 arrives as the gradient of "
        r"microbatch 0 for stage 2",
        found.message,
    )
    rows = tokens(make("ZBVZeroBubble", 2, 4, defer=True))
    for op in found.ops:
        assert rows[op.rank][op.line] == op.text


def test_the_verdict_names_a_circle_of_actions() -> None:
    """Receives right before their computations: the order that hung in pytorch#172668."""
    report = check_pipelining(deferred_to_the_last(tokens(make("Interleaved1F1B", 2, 4))))
    assert report.verdicts == {"rank": False, "pair": False, "direction": True}
    found = next(finding for finding in report.findings if "pair" in finding.models)
    assert found.kind == "deadlock"
    words = re.findall(r"rank \d action \d+ `\d(?:SEND|RECV)_[FB]\d`", found.message)
    assert words[0] == words[-1]
    assert len(set(words)) == len(words) - 1 >= 4


def deferred_to_the_last(rows: Rows) -> Rows:
    """Each receive moved before the computation that takes it."""
    made: Rows = []
    for row in rows:
        held: dict[tuple[int, str, int], str] = {}
        made.append([])
        for cell in row:
            ((stage, kind, microbatch), *_) = split(cell) or [(0, "", 0)]
            if kind.startswith("RECV"):
                held[stage, kind, microbatch] = cell
                continue
            need = f"RECV_{'F' if kind == 'F' else 'B'}"
            if kind in ("F", "B", "I") and (stage, need, microbatch) in held:
                made[-1].append(held.pop((stage, need, microbatch)))
            made[-1].append(cell)
    return made


def move(row: list[str], token: str, before: str) -> None:
    row.remove(token)
    row.insert(row.index(before), token)


def swap(row: list[str], one: str, other: str) -> None:
    i, k = row.index(one), row.index(other)
    row[i], row[k] = row[k], row[i]


MUTANTS = {
    "dropped receive": (lambda rows: rows[1].remove("1RECV_F2"), "unmatched", "1RECV_F2"),
    "dropped send": (lambda rows: rows[0].remove("0SEND_F2"), "unmatched", "0SEND_F2"),
    "crossed sends": (lambda rows: swap(rows[0], "0SEND_F0", "0SEND_F1"), "order", "0SEND_F1"),
    "crossed receives": (lambda rows: swap(rows[0], "0RECV_B2", "0RECV_B3"), "exchanged", "B2"),
    "late send": (lambda rows: move(rows[0], "0SEND_F0", "0F2"), "exchanged", "0SEND_F1"),
    "forward before its receive": (
        lambda rows: move(rows[1], "1F0", "1RECV_F0"),
        "order",
        "1RECV_F0",
    ),
    "send before its forward": (lambda rows: move(rows[1], "1SEND_F0", "1F0"), "order", "1F0"),
    "backward before its forward": (lambda rows: move(rows[1], "3I0", "3F0"), "order", "3F0"),
    "W before I": (lambda rows: move(rows[1], "3W0", "3I0"), "order", "3I0"),
    "missing forward": (lambda rows: rows[0].remove("2F1"), "missing", "2F1"),
    "missing backward": (lambda rows: rows[0].remove("2I1"), "missing", "2B1"),
    "missing weights": (lambda rows: rows[0].remove("2W1"), "missing", "2W1"),
    "doubled forward": (lambda rows: rows[0].append("2F1"), "duplicate", "2F1"),
    "doubled send": (
        lambda rows: rows[0].insert(rows[0].index("0SEND_F1"), "0SEND_F1"),
        "duplicate",
        "0SEND_F1",
    ),
    "wrong rank": (lambda rows: rows[0].append("3F9"), "placement", "3F9"),
    "message to nobody": (lambda rows: rows[1].append("3SEND_F0"), "placement", "3SEND_F0"),
    "message to itself": (lambda rows: rows[0].append("0RECV_F0"), "placement", "0RECV_F0"),
    "losses out of order": (lambda rows: swap(rows[1], "3F0", "3F1"), "loss-order", "3F0"),
    "rank without stages": (lambda rows: rows.append([]), "missing", "rank 2 computes nothing"),
    "stage out of range": (lambda rows: rows[0].append("9F0"), "missing", "stages 4 to 8"),
    "microbatch out of range": (lambda rows: rows[0].append("0F9"), "missing", "microbatches 4"),
}


@pytest.fixture(scope="module")
def zero_bubble() -> Rows:
    """Two ranks with stages 0, 2 and 1, 3; F, I, W, B and all that torch adds."""
    rows = tokens(make("InterleavedZeroBubble", 2, 4))
    assert {"3I0", "3W0", "2I1", "0W0", "0REDUCE_GRAD"} <= {cell for row in rows for cell in row}
    return rows


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_mutants_are_flagged(mutant: str, zero_bubble: Rows) -> None:
    assert check_pipelining(zero_bubble).sound
    change, kind, told = MUTANTS[mutant]
    rows = [list(row) for row in zero_bubble]
    change(rows)
    report = check_pipelining(rows)
    assert kind in report.kinds() <= KINDS.keys(), report
    assert any(told in finding.message for finding in report.findings if finding.kind == kind), (
        report
    )
    assert not any(report.verdicts.values())


@pytest.mark.parametrize(
    "row", ["0F0 0B0 0W0", "0F0 0W0 0B0", "0F0 0B0 0F1 0I1 0W0 0W1"], ids=lambda row: row
)
def test_weights_beside_a_full_backward(row: str) -> None:
    """torch refuses the W: a B leaves nothing to it."""
    report = check_pipelining([row.split()])
    assert report.kinds() == {"duplicate"}, report
    assert "`0W0`" in report.errors[0].message
    assert check_pipelining([row.replace(" 0W0", "").split()]).sound


def test_forwards_alone_are_one_finding() -> None:
    """torch refuses a schedule without backwards; eval() runs the forwards of one with them."""
    first = [token for m in range(8) for token in (f"0F{m}", f"0SEND_F{m}")]
    second = [token for m in range(8) for token in (f"1RECV_F{m}", f"1F{m}")]
    report = check_pipelining([first, second])
    assert [finding.kind for finding in report.errors] == ["missing"], report
    assert "eval()" in report.findings[0].fix


@pytest.mark.parametrize("tokens", ["0F0 0B0", "0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD"])
def test_one_rank(tokens: str) -> None:
    report = check_pipelining([tokens.split()])
    assert (report.sound, report.findings) == (True, ())


WITH_WAITS = [
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0WAIT_SEND_F0 0RECV_B1 0B1 0WAIT_SEND_F1 "
    "0REDUCE_GRAD 0WAIT_REDUCE_GRAD",
    "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1WAIT_REDUCE_GRAD "
    "1WAIT_SEND_B0 1WAIT_SEND_B1",
]
"""As torch 2.15 writes it, whichever torch is here."""


def test_waits_of_torch_2_15() -> None:
    assert check_pipelining([row.split() for row in WITH_WAITS]).sound


def test_a_wait_for_a_send_before_the_peer_can_receive_it() -> None:
    """Rank 0 awaits its send before it receives what rank 1 sends first."""
    rows = [
        "0F0 0SEND_F0 0WAIT_SEND_F0 0F1 0SEND_F1 0WAIT_SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1".split(),
        "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_SEND_B1".split(),
    ]
    report = check_pipelining(rows)
    assert report.verdicts == dict.fromkeys(MODELS, False)
    assert "0SEND_F1" in report.errors[0].message
    assert "1SEND_B0" in report.errors[0].message


def test_a_schedule_without_messages_is_refused() -> None:
    """torch adds them, and says where it cannot."""
    schedule = make("Interleaved1F1B", 2, 4)
    with pytest.raises(UnsupportedError, match=r"computations alone.*fix: give the object after"):
        check_pipelining(schedule.pipeline_order)


@pytest.mark.parametrize("model", MODELS)
def test_programs_are_texts_like_any_other(model: str) -> None:
    order = take(tokens(make("DualPipeV", 2, 4)))
    layout = Layout.of(order)
    sequences = [list(order.placed(rank)) for rank in range(2)]
    ranks = to_programs(sequences, layout, model)
    for rank in ranks:
        assert len(rank.program.ops) == len(rank.origins)
    programs = tuple(rank.program for rank in ranks)
    assert parse_set(print_set(programs)) == programs


def test_report(tmp_path: Path) -> None:
    rows = tokens(make("ZBVZeroBubble", 2, 4, defer=True))
    (tmp_path / "zbv.csv").write_text("\n".join(map(",".join, rows)))
    report = check_pipelining(tmp_path / "zbv.csv")
    with pytest.raises(SoundnessError, match="unsound: "):
        report.raise_if_unsound()
    plain = json.loads(json.dumps(report.to_json()))
    assert (plain["schema"], plain["sound"]) == (1, False)
    assert {model["name"]: model["sound"] for model in plain["models"]} == report.verdicts
    place = plain["findings"][0]["ops"][0]
    assert (place["rank"], place["line"], place["text"]) == (0, 8, "0SEND_F2")
    assert str(report).startswith("unsound: ")


def test_objects_that_are_no_schedule() -> None:
    for thing in (3, object(), object.__new__(schedules.ScheduleGPipe)):
        with pytest.raises(UnsupportedError, match=r"is no schedule .*give a .*or the actions"):
            check_pipelining(thing)


def test_rows_that_are_no_actions() -> None:
    for rows in (["0F0,0B0"], [1], [None]):
        with pytest.raises(ParseError, match=r"rank 0: its actions are a .*fix: give a list"):
            check_pipelining(rows)
    with pytest.raises(ParseError, match=r"rank 1 action 1 '1B0x': 'x' stands behind"):
        check_pipelining([["0F0", "0B0"], ["1F0", "1B0x"]])
    for by_rank in ({}, {0: ["0F0", "0B0"], 2: ["1F0", "1B0"]}, {"0": ["0F0"]}):
        with pytest.raises(UnsupportedError, match="numbered from 0, without gaps"):
            check_pipelining(by_rank)
    assert not check_pipelining([]).sound


# Against the oracle


def mutated(rows: Rows, rng: random.Random) -> Rows:
    """One change to a schedule, of a kind that is often harmless or often not."""
    rows = [list(row) for row in rows]
    row = rng.choice(rows)
    k, other = rng.randrange(len(row)), rng.randrange(len(row))
    match rng.choice("aaammmnndxsc"):
        case "a" if k + 1 < len(row):
            row[k], row[k + 1] = row[k + 1], row[k]
        case "m":
            row.insert(max(0, k + rng.randrange(-4, 5)), row.pop(k))
        case "n":
            row[k], row[other] = row[other], row[k]
        case "d":
            del row[k]
        case "x":
            row.insert(other, re.sub(r"(?<=\d)B(?=\d+$)", rng.choice("BIW"), row[k]))
        case "s":
            row[k] = re.sub(r"^\d+", str(rng.randrange(6)), row[k])
        case _:
            row[k] = re.sub(r"\d+$", str(rng.randrange(6)), row[k])
    return rows


@pytest.mark.parametrize(
    "count", [120, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_verdicts_are_those_of_the_oracle(seed: int, count: int) -> None:
    """Check and oracle give one verdict for each model."""
    rng = random.Random(seed)
    bases = [
        [[cell for cell in row if split(cell)] for row in tokens(make(name, 2, 4, defer))]
        for name in MULTI
        for defer in (False, True)
    ]
    bases.append(deferred_to_the_last(bases[0]))
    verdicts: set[tuple[str, bool]] = set()
    for _ in range(count):
        rows = rng.choice(bases)
        for _ in range(rng.choice((1, 1, 2))):
            rows = mutated(rows, rng)
        for model, sound in check_pipelining(rows).verdicts.items():
            assert sound == plays_right(rows, model), (model, rows)
            verdicts.add((model, sound))
    assert len(verdicts) == 2 * len(MODELS)
