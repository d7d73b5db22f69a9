"""What the CUDA engine issues, on which stream and in which order, as a driver that does nothing
notes it: no GPU is needed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from tests.runtime.cuda_sites import (
    SERVED,
    WORLD,
    bound,
    logs_of,
    program,
    tensors,
)
from tests.runtime.test_hot_path import Count
from tests.support.fake_cuda import MAIN, TILES, WORD, Launch, fake_engine, word
from tests.support.fake_device import Entry, Order, ranges

from interlace.errors import BackendError, ExecutorError, ProgramError, TeamError
from interlace.ir import FusedKernel, parse
from interlace.ir.kernels import own_ranges
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime import executor as executor_file
from interlace.runtime.host.engine import CpuEngine

sites = pytest.mark.parametrize("site", ["gather", "scatter"])
served = pytest.mark.parametrize(("site", "strategy"), SERVED)


def ended(reader: int, writer: int) -> int:
    return word("ended", reader, writer)


def over_of(log: list[Entry]) -> int:
    """The event of the end of a run."""
    (found,) = (entry[2] for entry in log if entry[3:] == ("over",))
    return found


def launch_of(log: list[Entry]) -> Launch:
    (found,) = (entry[2] for entry in log if entry[0] == "launch")
    return found


@served
def test_a_run_begins_and_ends_on_the_callers_stream(site: str, strategy: str) -> None:
    with bound(site, strategy) as fake:
        for number, log in enumerate(logs_of(fake, site, 3), start=1):
            order = Order(log)
            assert log[0][:2] == ("record", MAIN)
            over = order.one("record", MAIN, over_of(log))
            sides = {entry[1] for entry in log} - {MAIN}
            assert sides == {lane.handle for lane in fake.engine.binding.sides}
            for side in sides:
                first, *_ = order.find(None, side)
                assert log[first] == ("wait_event", side, log[0][2])
            assert all(order.before(index, over) for index in range(over))
            # Last of all, off the caller's stream, the peers are told.
            tells = order.find("write")[-(WORLD - 1) :]
            assert [log[tell][2:] for tell in tells] == [
                (ended(peer, 1), number) for peer in (0, 2, 3)
            ]
            assert all(order.before(over, tell) for tell in tells)
            assert {log[tell][1] for tell in tells} <= sides
            assert set(order.find("copy") + order.find("call") + order.find("wait")) < set(
                range(over)
            )


@pytest.mark.parametrize("strategy", ["put", "fused"])
@sites
def test_a_chunk_is_put_before_its_reader_is_told(site: str, strategy: str) -> None:
    with bound(site, strategy) as fake:
        log = logs_of(fake, site, 1)[0]
        order, moved = Order(log), list[int]()
        signal = next(iter(fake.engine.context.plan.takes)) + "_arrived"
        for index in order.find("copy"):
            peer, _ = fake.place(log[index][2]) or (1, 0)
            if peer != 1:
                moved.append(peer)
                told = order.one("write", None, word(signal, peer, 1, fake.space.number))
                assert order.before(index, told)
        assert sorted(moved) == [0, 2, 3]


@sites
def test_a_chunk_is_got_after_its_writer_has_told(site: str) -> None:
    with bound(site, "get") as fake:
        log = logs_of(fake, site, 1)[0]
        order, moved = Order(log), list[int]()
        signal = next(iter(fake.engine.context.plan.takes)) + "_ready"
        for index in order.find("copy"):
            peer, _ = fake.place(log[index][3]) or (1, 0)
            if peer != 1:
                moved.append(peer)
                heard = order.one("wait", None, word(signal, 1, peer, fake.space.number))
                assert order.before(heard, index)
                calls = [i for i in order.find("call") if log[index][2] in log[i][3]]
                assert all(order.before(index, call) for call in calls)
        assert sorted(moved) == [0, 2, 3]


def test_chunks_are_multiplied_once_they_are_there() -> None:
    with bound("gather", "put") as fake:
        log = logs_of(fake, "gather", 1)[0]
        order = Order(log)
        calls = order.find("call", MAIN, "aten.mm.out")
        for k, call in enumerate(calls):
            heard = word("full_slots_arrived", 1, (1 + k) % WORLD, fake.space.number)
            assert k == 0 or order.before(order.one("wait", MAIN, heard), call)
        assert len(calls) == WORLD
    with bound("scatter", "put") as fake:
        log = logs_of(fake, "scatter", 1)[0]
        order = Order(log)
        products = order.find("call", MAIN, "aten.mm.out")
        for copy in order.find("copy"):
            (product,) = (i for i in products if log[copy][3] in log[i][4])
            assert order.before(product, copy)
        total = order.one("call", MAIN, "interlace.sum_slots")
        for peer in (0, 2, 3):
            heard = word("t_slots_arrived", 1, peer, fake.space.number)
            came = order.one("wait", MAIN, heard)
            assert order.before(came, total)
            assert order.before(max(products), came)  # waiting for a word keeps a stream


@pytest.mark.parametrize(("strategy", "subs"), [("fused", 1), ("beside", 4)])
def test_a_gathers_kernel_waits_for_the_words_of_this_rank(strategy: str, subs: int) -> None:
    with bound("gather", strategy) as fake:
        inputs, (y,) = tensors("gather")
        for number in (1, 2, 3):
            fake.run(inputs, [y])
            order = Order(fake.log)
            launch = launch_of(fake.log)
            assert order.find("launch") == order.find("launch", MAIN)
            assert launch.gates == fake.space.own("full_slots_arrived", 0) >= WORD
            assert launch.subs == subs
            assert launch.expected == fake.space.base + subs == number * fake.space.span + subs
            slots = launch.tensors["slots"]
            assert slots is not None
            assert fake.place(slots.data_ptr()) == (1, number % 2)
            assert launch.tensors["x"] is inputs[0]
            assert launch.tensors["w"] is inputs[1]
            assert launch.tensors["y"] is y
            # Nothing that the kernel waits for stands behind it.
            assert not any(order.before(order.one("launch"), put) for put in order.find("copy"))


@pytest.mark.parametrize(("strategy", "subs"), [("fused", 1), ("ranges", 2)])
def test_a_scatters_chunks_leave_when_their_tiles_are_made(strategy: str, subs: int) -> None:
    with bound("scatter", strategy) as fake:
        inputs, (y,) = tensors("scatter")
        lanes = set[int]()
        for number in (1, 2, 3):
            fake.run(inputs, [y])
            log, order, launch = list(fake.log), Order(fake.log), launch_of(fake.log)
            assert (launch.subs, launch.counters < WORD) == (subs, True)
            own, stage = launch.tensors["own"], launch.tensors["stage"]
            assert own is not None
            assert fake.place(own.data_ptr()) == (1, number % 2)
            moved = list[tuple[int, int]]()
            for copy in order.find("copy"):
                _, stream, dst, src, nbytes = log[copy]
                peer, parity = fake.place(dst) or (1, 0)
                assert parity == number % 2
                assert stage is not None
                which, inside = divmod(src - stage.data_ptr(), y.nbytes)
                assert which == peer
                assert nbytes == y.nbytes // subs
                moved.append((peer, inside // nbytes))
                address = launch.counters + 4 * (peer * subs + moved[-1][1])
                count = order.one("wait", stream, address)
                assert log[count][3] == number * TILES
                assert order.before(count, copy)
                assert not order.before(order.one("launch"), count)
                lanes.add(stream)
            assert moved == [(peer, sub) for peer in (2, 3, 0) for sub in range(subs)]
            sums = order.find("call", MAIN, "interlace.sum_slots")
            assert all(fake.place(log[one][3][0]) == (1, number % 2) for one in sums)
            assert len(sums) == subs
            for sub, total in enumerate(sums):
                assert log[total][4] == (y.data_ptr() + sub * y.nbytes // subs,)
                for peer in (0, 2, 3):
                    heard = word("t_slots_arrived", 1, peer, fake.space.number)
                    came = order.one("wait", None, heard, fake.space.base + 1 + sub)
                    assert log[came][1] not in lanes
                    assert (log[came][1] == MAIN) == (sub == subs - 1)
                    assert order.before(came, total)
                assert order.before(order.one("launch"), total)
        assert len(lanes) == 1
        assert MAIN not in lanes


def test_own_ranges_are_summed_beside_the_kernel() -> None:
    """All but the last as soon as the own rows and the peers' are there, on the stream that waits
    for these; the kernel's turns are those of the Program."""
    with bound("scatter", "beside") as fake:
        inputs, (y,) = tensors("scatter")
        for number in (1, 2, 3):
            fake.run(inputs, [y])
            log, order, launch = list(fake.log), Order(fake.log), launch_of(fake.log)
            assert (launch.subs, launch.own) == (4, 5)
            totals = sorted(
                order.find("call", None, "interlace.sum_slots"), key=lambda i: log[i][4]
            )
            streams = [log[total][1] for total in totals]
            assert streams[-1] == MAIN
            assert len({*streams}) == 2
            assert streams[:-1] == [streams[0]] * 4
            for part, total in enumerate(totals):
                sub = min(part, 3)  # the last is made in halves
                assert log[total][4] == (y.data_ptr() + (part + sub) * y.nbytes // 8,)
                for peer in (0, 2, 3):
                    heard = word("t_slots_arrived", 1, peer, fake.space.number)
                    came = order.one("wait", streams[part], heard, fake.space.base + 1 + sub)
                    assert order.before(came, total)
                own = order.find("wait", streams[0], launch.counters + 4 * (4 + sub))
                assert len(own) == 1
                if part < 4:
                    assert log[own[0]][3] == number * TILES // (2 if sub == 3 else 1)
                    assert order.before(own[0], total)
                assert order.before(order.one("launch"), total) == (part == 4)
            assert fake.space.local(0) == launch.counters + 4 * (4 * WORLD + 1)


def test_the_second_half_of_the_own_rows_has_a_word_of_its_own() -> None:
    """Behind all others, as a Program by hand may wait for it."""
    text = str(program("scatter", "beside"))
    part = "out=t_slots[tp.rank].view(8, 8)[7:8]))"
    last = "    arrivals: wait(e16, site=1)\n"  # for the first half
    assert part in text
    assert last in text
    edited = text.replace(part, f"{part[:-1]}, record(half))")
    edited = edited.replace(last, f"{last}    arrivals: wait(half)\n")
    with fake_engine(parse(edited), 1) as fake:
        inputs, (y,) = tensors("scatter")
        for number in (1, 2, 3):
            fake.run(inputs, [y])
            log, order, launch = list(fake.log), Order(fake.log), launch_of(fake.log)
            wait = order.one("wait", None, launch.counters + 4 * 4 * WORLD)
            assert log[wait][3] == number * TILES // 2


def test_slabs_are_summed_and_fetched_while_the_next_is_computed() -> None:
    """The kernel has the turns of the Program; sums of a slab are fetched once they are there."""
    with bound("reduce", "slabs") as fake:
        inputs, (y,) = tensors("reduce")
        for number in (1, 2, 3):
            fake.run(inputs, [y])
            log, order, launch = list(fake.log), Order(fake.log), launch_of(fake.log)
            assert (launch.subs, launch.own) == (4, 0)
            shapes = [t.shape for t in map(launch.tensors.get, ("x", "own")) if t is not None]
            assert shapes == [(64, 16), (16, 8)]
            base = fake.space.base
            totals = order.find("call", None, "interlace.sum_slots")
            assert len(totals) == 4
            aside = log[totals[0]][1]
            assert [log[total][1] for total in totals] == [aside] * 3 + [MAIN]
            for slab, total in enumerate(totals):
                own = order.find("wait", aside, launch.counters + 4 * (4 + slab))
                assert [log[count][3] for count in own] == [number * TILES] * (slab < 3)
                for peer in (0, 2, 3):
                    heard = word("t_slots_arrived", 1, peer, fake.space.number)
                    came = order.one("wait", log[total][1], heard, base + 1 + slab)
                    assert order.before(came, total)
                    told = word("t_sums_ready", peer, 1, fake.space.number)
                    tell = order.one("write", log[total][1], told, base + 1 + slab)
                    assert order.before(total, tell)
                    ready = word("t_sums_ready", 1, peer, fake.space.number)
                    came = order.one("wait", None, ready, base + 1 + slab)
                    rows = 64 // 4 * slab + 4 * peer  # each slab has 4 rows of every rank
                    (fetched,) = order.find("copy", log[came][1], y.data_ptr() + rows * 16)
                    assert order.before(came, fetched)


@pytest.mark.kernels
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_kernels_take_their_turns_as_parts_say(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Range by range, each all of its tiles: rows of x, and the counter that tells."""
    from interlace.kernels.gemm import device, scatter_kernel, specialized

    scatter_place: Any = scatter_kernel.scatter_place
    special: Any = specialized.scatter_place
    place: Any = device.place
    assert special.fn is scatter_place.fn
    monkeypatch.setattr(scatter_kernel, "place", place.fn)
    rank, tile, columns = size - 2, 16, 3
    for subs in range(1, 5):
        m_tiles = 6 * subs
        rows, height = m_tiles * tile, m_tiles // subs * tile
        for own in sorted({0, 1, subs, subs + 1}):
            kernel = FusedKernel(kind="scatter_matmul", pieces=subs, own=own)
            wanted = list[tuple[int, set[tuple[Any, int]]]]()
            for part, sub in ranges(size, subs, own):
                chunk = (rank + 1 + part) % size
                start, count = sub * height, height
                if chunk == rank and own > 1:
                    start, count = own_ranges(kernel, rows)[sub]
                start += chunk * rows if own else (sub * (size - 1) + chunk) * height
                spots = {(start + m, n) for m in range(0, count, tile) for n in range(columns)}
                wanted.append((size * subs if sub == subs else chunk * subs + sub, spots))
            found = list[tuple[int, set[tuple[int, int]]]]()
            for number in range(m_tiles * columns * size):
                chunk, row, behind, n, counter = scatter_place.fn(
                    number, rows, m_tiles, columns, size, rank, subs, own, tile, 4
                )
                assert counter in (size * subs, chunk * subs + row // height)
                if not found or found[-1][0] != counter:
                    found.append((counter, set()))
                found[-1][1].add((behind + row, n))
            assert found == wanted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("out=t_slots[tp.rank].view(8, 8)[2:4]", "out=t_slots[tp.rank].view(8, 8)[4:6]"),
        ("x[tp.rank][2:4]", "x[tp.rank][4:6]"),
        ("x[tp.rank + 3][4:6]", "x[tp.rank + 3][6:8]"),
    ],
)
def test_own_ranges_elsewhere_have_no_kernel(old: str, new: str) -> None:
    text = str(program("scatter", "beside"))
    assert old in text
    edited = text.replace(old, new, 1)
    with pytest.raises(ProgramError, match="its parts have not the rows of one matrix"):
        with fake_engine(parse(edited), 1):
            pass
    with fake_engine(
        parse(edited.replace("kernel=scatter_matmul(pieces=4, own=5), ", "")), 1
    ) as fake:
        assert not fake.engine.binding.binder.kernels
    with fake_engine(parse(text), 1) as fake:
        assert fake.engine.binding.binder.kernels


@served
def test_runs_take_turns_with_the_copies_of_slots(site: str, strategy: str) -> None:
    with bound(site, strategy) as fake:
        for number, log in enumerate(logs_of(fake, site, 4), start=1):
            found = {
                place[1]
                for entry in log
                if entry[0] == "copy"
                for place in map(fake.place, entry[2:4])
                if place is not None
            }
            assert found == {number % 2}


OWN_ROWS = """
def f(tp: Team[2], x: f32[4, 8], y: out[f32[4, 8]]):
    slot = alloc(f32[4, 8], symmetric=tp)
    main: copy(x, slot)
    main: copy(slot, y)
    main: free(slot)
"""


@pytest.mark.parametrize("inference", [False, True])
def test_what_a_run_writes_of_the_callers_is_seen_by_autograd(inference: bool) -> None:
    """Copies of the driver and kernels are none of torch's ops."""
    with fake_engine(parse(OWN_ROWS), 1) as fake, torch.inference_mode(inference):
        given, out = [torch.ones(4, 8)], [torch.zeros(4, 8)]
        fake.run(given, out)
        assert fake.attempt(given, None) is not None
        if not inference:
            assert (given[0]._version, out[0]._version) == (0, 1)
    changed = OWN_ROWS.replace("    main: free", "    main: copy(slot, x)\n    main: free")
    plain = "def f(x: f32[4, 8], y: out[f32[4, 8]]):\n    main: copy(x, y)\n    main: copy(y, x)\n"
    for text in (changed, plain):
        with fake_engine(parse(text), 1 if text is changed else 0) as fake:
            assert fake.engine.plain == (text is plain)
            given, out = [torch.ones(4, 8)], [torch.zeros(4, 8)]
            fake.run(given, None)
            assert given[0]._version == 1
            fake.run(given, out)
            assert (given[0]._version, out[0]._version) == (2, 1)


GOTTEN_ROWS = """
def g(tp: Team[2], x: f32[2, 8], y: out[f32[4, 8]]):
    slot = alloc(f32[4, 8], symmetric=tp)
    main: copy(x, slot[tp.rank])
    main: notify(ready, to=tp.rank + 1)
    main: expect(ready, tp.rank + 1)
    main: get(slot[tp.rank + 1], peer=tp.rank + 1)
    main: copy(slot, y)
    main: free(slot)
"""


def test_a_slot_that_another_executors_peers_get_is_taken_before_it_is_written() -> None:
    """Of this one nobody gets it, so it need not wait, until there is another that shares it."""
    heard = ended(1, 0)
    with fake_engine(parse(OWN_ROWS), 1) as fake:
        given, out = [torch.ones(4, 8)], [torch.zeros(4, 8)]
        for _ in range(3):
            fake.run(given, out)
            assert not [entry for entry in fake.log if entry[0] == "wait"]
        with fake_engine(parse(GOTTEN_ROWS), 1, beside=fake) as other:
            other.run([torch.ones(2, 8)], [torch.zeros(4, 8)])  # its peers may be at it for long
            assert fake.side.closed == fake.side.run == 4
            fake.run(given, out)
            assert not [entry for entry in fake.log if entry[0] == "wait"], "that one heard of all"
            fake.run(given, out)
        waits = [i for i, entry in enumerate(fake.log) if entry == ("wait", MAIN, heard, 6 - 2)]
        copies = [i for i, entry in enumerate(fake.log) if entry[0] == "copy"]
        assert len(waits) == 1
        assert waits[0] < min(copies)


class NotNow(CpuEngine):
    """An engine whose caller may be in a capture."""

    captured, issued = True, 0

    def admit(self, *_: Any) -> None:
        """The Executor has to look."""

    def look(self) -> None:
        if self.captured:
            raise ExecutorError("inside a CUDA graph capture")

    def issue(self, *given: Any) -> tuple[Any, ...]:
        NotNow.issued += 1
        return super().issue(*given)


def test_an_executor_asks_before_it_issues_and_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor_file, "engine_for", lambda *_: (NotNow, torch.device("cpu")))
    monkeypatch.setattr(NotNow, "issued", 0)
    text = "def f(x: f32[4], y: out[f32[4]]):\n    main: copy(x, y)\n    return y"
    with Executor(parse(text)).prepare() as executor:
        with pytest.raises(ExecutorError, match="inside a CUDA graph capture"):
            executor.run([torch.ones(4)])
        assert not NotNow.issued
        monkeypatch.setattr(NotNow, "captured", False)
        assert executor.run([torch.ones(4)])[0].eq(1).all()
        assert NotNow.issued == 1


@served
def test_a_call_in_a_capture_does_nothing(
    site: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that teams are as they were: it is found before the run enters."""
    with bound(site, strategy) as fake:
        logs_of(fake, site, 1)
        inputs, out = tensors(site)
        (team,) = fake.engine.context.resources.teams.values()
        entered = mock.Mock(wraps=team.control.enter)
        monkeypatch.setattr(team.control, "enter", entered)
        fake.capturing.return_value = True
        fake.on(900)
        fake.log.clear()
        assert fake.attempt(inputs, out) is None
        with pytest.raises(ExecutorError, match="inside a CUDA graph capture"):
            fake.engine.look()
        assert fake.log == []
        assert not entered.called
        assert fake.engine.issued == fake.engine.entered == 1
        fake.capturing.return_value = False
        fake.engine.look()
        assert logs_of(fake, site, 1)


def test_an_op_that_fails_on_a_dead_device_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that its streams cannot be joined; what was counted as entered is taken back."""
    with bound("gather", "fused") as fake:
        logs_of(fake, "gather", 1)
        steps = fake.engine.binding.steps
        steps[-1] = failing = mock.Mock(side_effect=ValueError("as planned"))
        watched: Any = mock.Mock(failure=None)
        monkeypatch.setattr(fake.engine, "watched", watched)
        broken = mock.Mock(side_effect=BackendError("past asking"))
        monkeypatch.setattr(fake.engine.binding, "join", broken)
        real = fake.driver.record

        def record(stream: int, event: int) -> None:
            if failing.called:
                broken()
            real(stream, event)

        monkeypatch.setattr(fake.driver, "record", record)
        inputs, out = tensors("gather")
        with pytest.raises(ValueError, match="as planned"):
            fake.attempt(inputs, out)
        assert broken.called
        assert fake.engine.issued == fake.engine.entered == 1
        (told,) = watched.fail.call_args.args
        assert str(told) == "as planned"


def test_a_caller_on_another_stream_waits_for_the_last_run() -> None:
    with bound("gather", "fused") as fake:
        _, second = logs_of(fake, "gather", 2)
        assert second[0][:2] == ("record", MAIN)
        over = over_of(second)
        fake.on(900)
        (log,) = logs_of(fake, "gather", 1)
        assert log[0] == ("wait_event", 900, over)
        assert log[1][:2] == ("record", 900)
        assert MAIN not in {entry[1] for entry in log}
        (log,) = logs_of(fake, "gather", 1)
        assert log[0][:2] == ("record", 900)
        fake.side.last = (MAIN, 12345)  # another Executor's run
        (log,) = logs_of(fake, "gather", 1)
        assert log[0] == ("wait_event", 900, 12345)


@served
def test_in_order_all_is_on_one_stream(site: str, strategy: str) -> None:
    with bound(site, strategy, in_order=True) as fake:
        (log,) = logs_of(fake, site, 1)
        assert {entry[1] for entry in log} == {MAIN}
        # Kernels then do one part each, and wait for nothing.
        launches = [entry[2] for entry in log if entry[0] == "launch"]
        parts = {"fused": WORLD, "ranges": 2 * (WORLD - 1) + 1, "beside": 4 * WORLD + 1}
        if site == "gather":
            parts |= {"ranges": WORLD, "beside": 4 * (WORLD - 1) + 1}
        parts["slabs"] = 4 * WORLD
        assert len(launches) == parts.get(strategy, 0)
        assert not any(launch.gates or launch.counters for launch in launches)


SUMMED = {
    *("aten.unbind.int", "aten.slice.Tensor", "aten.select.int"),
    *("aten._to_copy.default", "aten.copy_.default", "aten.add_.Tensor"),
}
"""What the sum of slots does on a CPU."""


@pytest.mark.parametrize(
    ("site", "strategy", "ops"),
    [
        ("gather", "fused", set[str]()),
        ("scatter", "fused", SUMMED),
        ("gather", "put", {"aten.mm.out", "aten.as_strided.default"}),
        ("gather", "get", {"aten.mm.out", "aten.as_strided.default"}),
    ],
)
def test_a_run_makes_no_events_and_no_tensors(site: str, strategy: str, ops: set[str]) -> None:
    """But views of what the caller gives."""
    with bound(site, strategy) as fake:
        inputs, out = tensors(site)
        fake.run(inputs, out)
        events = fake.driver.events
        for _ in range(3):
            with Count() as asked:
                fake.run(inputs, out)
            assert {*asked.seen} == ops
        assert fake.driver.events == events


@sites
def test_tensors_that_kernels_cannot_address_are_copied(site: str) -> None:
    with bound(site, "fused") as fake:
        (x, w), (y,) = tensors(site)
        odd = [torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view_as(t) for t in (x, y)]
        odd[0].copy_(x)
        fake.run([odd[0], w], [odd[1]])
        given = launch_of(fake.log).tensors
        assert given["x"] is not None
        if site == "scatter":  # its kernel writes no tensor of the caller's
            return
        assert given["y"] is not None
        assert not given["x"].data_ptr() % 16
        assert torch.equal(given["x"], x)
        assert not given["y"].data_ptr() % 16
        assert torch.equal(given["y"].view(torch.int16), odd[1].view(torch.int16))


LEFT = """
def f(tp: Team[4], x: bf16[8, 16], y: out[bf16[32, 16]], z: out[bf16[8, 16]]):
    main: call("aten.mul.Tensor", x, 2.0, out=(h := bf16[8, 16]))
    main: call("aten.mul.Tensor", h, 2.0, out=(g := bf16[8, 16]))
    main: free(h)
    main: record(made)
    comm: wait(made)
    comm: copy(g, y[0:8])
    comm: free(g)
    main: call("aten.mul.Tensor", x, 3.0, out=(k := bf16[8, 16]))
    main: copy(k, z)
"""


def test_memory_goes_back_when_all_streams_have_done_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next op of its own stream may be given it, and write, while another still reads."""
    known: list[tuple[torch.Tensor, Any]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: known.append((tensor, stream))
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "a stream")
    for in_order in (False, True):
        with fake_engine(parse(LEFT), 1, Options(in_order=in_order)) as fake:
            x = torch.randn(8, 16, dtype=torch.bfloat16)
            y, z = (torch.zeros(rows, 16, dtype=torch.bfloat16) for rows in (32, 8))
            known.clear()
            fake.run([x], [y, z])
            assert [stream for _, stream in known] == ([] if in_order else ["a stream"])
            assert all(torch.equal(tensor, 4 * x) for tensor, _ in known)


MADE_ASIDE = """
def f(x: bf16[8, 16]):
    comm: call("aten.mul.Tensor", x, 2.0, out=(h := bf16[8, 16]))
    main: call("aten.mul.Tensor", x, 3.0, out=(k := bf16[8, 16]))
    comm: call("aten.mul.Tensor", h, 2.0, out=(g := bf16[8, 16]))
    return k, h.view(128), (g, h)
"""


@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
def test_results_that_another_stream_made_are_the_callers_too(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that stream would be given their memory again while the caller still reads."""
    known: list[tuple[float, Any]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, stream: known.append((t[0, 0].item(), stream))
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    with fake_engine(parse(MADE_ASIDE), 0, Options(in_order=in_order)) as fake:
        for _ in range(2):
            known.clear()
            fake.run([torch.ones(8, 16, dtype=torch.bfloat16)])
            aside = [(2.0, "the caller's"), (4.0, "the caller's")]
            assert sorted(known) == ([] if in_order else aside)


def test_a_kernel_that_waits_begins_when_this_ranks_puts_wait_for_nothing() -> None:
    """Else what stands before them might need a processor, and the kernel has all."""
    text = str(program("gather", "fused"))
    for busy in (False, True):
        before, first, after = text.partition("    comm: ")
        text_of = before + ("    comm: copy(w, w2)\n" if busy else "") + first + after
        made = parse(text_of.replace(", y: out[", ", w2: out[bf16[16, 8]], y: out["))
        with fake_engine(made, 1) as fake:
            (x, w), (y,) = tensors("gather")
            fake.run([x, w], [torch.zeros_like(w), y])
            order, log = Order(fake.log), fake.log
            puts = [i for i in order.find("copy") if (fake.place(log[i][2]) or (1, 0))[0] != 1]
            assert len(puts) == WORLD - 1
            aside = [i for i in order.find("copy") if i not in puts]
            assert len(aside) == busy
            for index in aside:
                assert order.before(index, order.one("launch"))
            assert not any(order.before(put, order.one("launch")) for put in puts)


def test_runs_under_way_when_their_team_goes_are_an_error_not_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bound("gather", "put") as fake:
        logs_of(fake, "gather", 2)
        watched, (team,) = fake.engine.watched, fake.engine.context.resources.teams.values()
        assert not watched.past
        for done in (True, False):
            monkeypatch.setattr(fake.driver, "done", lambda event, done=done: done, raising=False)
            monkeypatch.setattr(team, "is_set_up", False)
            assert watched.past
            watched.look()  # the watchdog has nothing to do with it any more
            assert watched.failure is None
            if done:
                watched.finish()
                logs_of(fake, "gather", 1)  # one more that does not end
                continue
            with pytest.raises(TeamError, match="under way when their team was reset or released"):
                watched.finish()
