"""Dumps that are damaged at random: a typed error or a report, in bounded time and memory."""

from __future__ import annotations

import copy
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.external.recorded_runs import Run

from interlace.errors import InterlaceError, RecordingError
from interlace_check.recorded import reading
from interlace_check.recorded.alignment import align
from interlace_check.recorded.check import explained
from interlace_check.recorded.reading import parse_dump

MAX_S = 2.0
"""For one damaged dump, on a busy machine."""
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 1 << 40, (1 << 63) - 1, 1 << 64, 10**400, 0.5, 1e308),
    *("", "0", "tp", "send 0->1", "recv 9<-9", "nccl:coalesced", "gloo:send 1->0", "a:b:c"),
    *("[0]", "[[", "[0,0]", "[-1]", "nccl:_coalesced", "Float", "completed", "\x1b[31m", "\ud800"),
    *([], {}, [[]], [[[]]], [{}], {"": {}}, [0] * 100, [[1 << 61] * 3], "x" * 5000, float("nan")),
]


def sample() -> list[dict[str, Any]]:
    """Three ranks with groups, messages, batches, stacks, and a rank left behind."""
    run = Run(3)
    tp = run.group("tp", [0, 2], "tp")
    run.each("all_reduce", [4], line=3)
    run.each("all_gather", [4], tp, out=[8])
    run.send(0, 1)
    run.recv(1, 0)
    for rank in range(3):
        run.batch(rank, [("send", (rank + 1) % 3), ("recv", (rank - 1) % 3)])
    for rank in range(2):
        run.call(rank, "all_to_all", [6], line=9)
        run.call(rank, "reduce_scatter", [9], out=[3])
    run.call(2, "all_reduce", [4], tp)
    run.settle()
    dumps = [run.dump(rank) for rank in range(3)]
    dumps[1]["host"] = [{"name": "load", "filename": "data.py", "line": 8}]
    return dumps


def damaged(rng: random.Random, dumps: list[dict[str, Any]]) -> list[bytes]:
    """The files of a run, one of them damaged in one to four places."""
    texts = [json.dumps(dump).encode() for dump in dumps]
    victim = rng.randrange(len(dumps))
    plain = json.loads(texts[victim])
    for _ in range(rng.randint(1, 4)):
        holder, key = somewhere(rng, plain)
        rng.choice((replace, replace, remove, repeat, swap))(rng, holder, key)
    text = json.dumps(plain).encode()
    if rng.random() < 0.2:
        text = bytearray(text)
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(len(text))
            text[at : at + rng.choice((0, 1, 1, 50))] = rng.randbytes(rng.choice((0, 1, 2)))
        text = bytes(text[: rng.choice((len(text), rng.randrange(len(text) + 1)))])
    texts[victim] = text
    return texts


def somewhere(rng: random.Random, plain: Any) -> tuple[Any, Any]:
    """A random place: what holds it, and its key there."""
    holder: Any = {"": plain}
    key: Any = ""
    for _ in range(8):
        value = holder[key]
        if not isinstance(value, dict | list) or not value or (key and rng.random() < 0.15):
            break
        keys = list(value) if isinstance(value, dict) else range(len(value))
        holder, key = value, rng.choice(keys)
    return holder, key


def replace(rng: random.Random, holder: Any, key: Any) -> None:
    holder[key] = copy.deepcopy(rng.choice(VALUES))


def remove(rng: random.Random, holder: Any, key: Any) -> None:
    del rng, holder[key]


def repeat(rng: random.Random, holder: Any, key: Any) -> None:
    if isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice((1, 2, 50)))]


def swap(rng: random.Random, holder: Any, key: Any) -> None:
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    other = rng.choice(keys)
    holder[key], holder[other] = holder[other], holder[key]


def survive(count: int, seed: int) -> tuple[int, int]:
    """Damages `count` runs: how many were refused, and how many reported on."""
    rng, dumps = random.Random(seed), sample()
    refused = reported = 0
    for number in range(count):
        files = damaged(rng, dumps)
        began = time.process_time()
        try:
            read = [parse_dump(text, f"trace_{rank}", rank) for rank, text in enumerate(files)]
            report = explained(align(read), time.perf_counter())
            assert str(report)
            assert json.dumps(report.to_json())
            reported += 1
        except InterlaceError as error:
            if not isinstance(error, RecordingError) or len(str(error)) > 2000:
                raise AssertionError(f"seed {seed}, run {number}: {files}") from error
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, run {number}: {files}") from error
        assert time.process_time() - began < MAX_S, (seed, number)
    return refused, reported


@pytest.mark.parametrize(
    "count", [700, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_damaged_dumps(seed: int, count: int) -> None:
    refused, reported = survive(count, seed)
    assert refused > count // 5
    assert reported > count // 5


LARGE: dict[str, Callable[[], str]] = {
    "lists in lists": lambda: "[" * 3_000_000,
    "sizes": lambda: entry_with('"input_sizes": [' + ",".join(["[1]"] * 200_000) + "]"),
    "huge sizes": lambda: entry_with('"input_sizes": [[' + ",".join([str(1 << 61)] * 60) + "]]"),
    "members": lambda: f'{{"pg_config": {{"0": {{"ranks": "{list(range(300_000))}"}}}}}}',
    "entries": lambda: '{"version": "2", "entries": [' + ",".join(["0"] * 400_000) + "]}",
}


def entry_with(field: str) -> str:
    usual = '"process_group": ["0", ""], "profiling_name": "nccl:all_reduce", "state": "scheduled"'
    return f'{{"version": "2", "entries": [{{"record_id": 0, {usual}, {field}}}]}}'


@pytest.mark.parametrize("name", LARGE)
def test_large_values_are_refused_in_bounded_time_and_memory(name: str) -> None:
    text = LARGE[name]().encode()
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(RecordingError) as refused:
        parse_dump(text, "trace_0", 0)
    seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(refused.value)) < 1000
    assert seconds < 3
    assert peak < 64 * len(text) + (1 << 24)


def many(count: int, group: Callable[[int], str], seq: Callable[[int], int]) -> bytes:
    """A rank's dump with very many entries."""
    entries = [
        {
            "record_id": k,
            "process_group": [group(k), ""],
            "profiling_name": "nccl:all_reduce",
            "state": "scheduled",
            "collective_seq_id": seq(k),
        }
        for k in range(count)
    ]
    config = {group(k): {"ranks": "[0, 1]", "desc": ""} for k in range(count)}
    return json.dumps({"version": "2", "pg_config": config, "entries": entries}).encode()


@pytest.mark.parametrize(
    ("group", "seq"),
    [(str, lambda _: 1), (lambda _: "0", lambda _: 1), (lambda _: "0", lambda k: k)],
    ids=["groups", "one number", "numbers"],
)
def test_very_many_entries_take_bounded_time(
    group: Callable[[int], str], seq: Callable[[int], int]
) -> None:
    data = many(5_000, group, seq)
    began = time.process_time()
    read = [parse_dump(data, "trace_0", 0), parse_dump(b'{"version": "2"}', "trace_1", 1)]
    report = explained(align(read), time.perf_counter())
    assert not report.sound
    assert len(str(report)) < 200_000
    assert time.process_time() - began < 5


def test_files_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace_0").write_text(" " * 2000)
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 1000)
    with pytest.raises(RecordingError, match="more than 1000 bytes"):
        reading.read_folder(tmp_path)
    monkeypatch.setattr(reading, "MAX_FOLDER_BYTES", 1500)
    with pytest.raises(RecordingError, match="more than 1500 bytes in all"):
        reading.read_folder(tmp_path)
