"""The registry of registered tensors on CUDA, with a driver that only keeps books: ranks are
threads of one process, so that what one rank "maps" is the other's own memory."""

from __future__ import annotations

import itertools
import re
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from interlace.comm.cuda import registry as registry_file
from interlace.comm.cuda.registry import Registry
from interlace.comm.host.registered import Registered
from interlace.comm.rendezvous.board import Board
from interlace.errors import BackendError, ExecutorError, InterlaceError, PeerError

pytestmark = pytest.mark.timeout(60)

T = TypeVar("T")
LIMIT = 10.0


class Driver:
    """One rank's driver: allocations with numbers that are never used again, and open mappings."""

    numbers = itertools.count(1)

    def __init__(self) -> None:
        self.there: dict[int, tuple[int, int]] = {}
        self.open_now: list[int] = []
        self.num_opened = 0
        self.shareable, self.mappable = True, True

    def alloc(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a tensor's storage an allocation."""
        storage = tensor.untyped_storage()
        self.there[storage.data_ptr()] = storage.nbytes(), next(self.numbers)
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        del self.there[tensor.untyped_storage().data_ptr()]

    def can_share(self, address: int) -> bool:
        return self.shareable and bool(self.buffer_id(address))

    def allocation(self, address: int) -> tuple[int, int]:
        found = ((b, size) for b, (size, _) in self.there.items() if b <= address < b + size)
        return next(found)

    def buffer_id(self, address: int) -> int:
        found = (n for b, (size, n) in self.there.items() if b <= address < b + size)
        return next(found, 0)

    def handle(self, base: int) -> str:
        return f"{base:x}"

    def open(self, handle: str) -> int:
        if not self.mappable:
            raise BackendError("cuIpcOpenMemHandle (the GPUs need peer access) failed")
        base = int(handle, 16)
        self.open_now.append(base)
        self.num_opened += 1
        return base

    def close(self, base: int) -> None:
        self.open_now.remove(base)


class Team:
    """Ranks with a registry each."""

    def __init__(self, size: int = 2) -> None:
        store = dist.HashStore()
        self.drivers = [Driver() for _ in range(size)]
        self.registries: list[Registry] = []
        for me, driver in enumerate(self.drivers):
            board = Board(store, range(size), me)
            team: Any = types.SimpleNamespace(topic="t", board=board, ranks=board.ranks, me=me)
            fake: Any = driver
            self.registries.append(Registry(team, fake, torch.device("cpu")))
        self._topics = itertools.count()

    def each(self, function: Callable[[int], T]) -> list[T | InterlaceError]:
        """The function on every rank at once: what it gives, or its error."""

        def guarded(rank: int) -> T | InterlaceError:
            try:
                return function(rank)
            except InterlaceError as error:
                return error

        with ThreadPoolExecutor(len(self.drivers)) as threads:
            return list(threads.map(guarded, range(len(self.drivers))))

    def register(
        self, tensors: list[dict[str, torch.Tensor]], problem: InterlaceError | None = None
    ) -> list[Any]:
        """Registers on all ranks; `problem` is what rank 0 finds wrong with its tensors."""
        topic = str(next(self._topics))

        def one(rank: int) -> dict[str, Registered]:
            wanted = {n: (t, t.numel() * t.itemsize) for n, t in tensors[rank].items()}
            return self.registries[rank].register(topic, wanted, ("w",), ("w",), LIMIT)

        if problem is None:
            return self.each(one)
        with mock.patch.object(self.registries[0], "_describe", side_effect=problem):
            return self.each(one)

    def let_go(self, held: list[dict[str, Registered]]) -> None:
        for registry, mine in zip(self.registries, held, strict=True):
            for one in mine.values():
                registry.let_go(one)


def tensors_of(team: Team, *sizes: int) -> list[torch.Tensor]:
    """A tensor on each rank, each an allocation of its own, that holds the rank's number."""
    return [
        driver.alloc(torch.full(sizes or (8,), float(rank)))
        for rank, driver in enumerate(team.drivers)
    ]


def test_every_rank_reaches_every_tensor_where_it_lies() -> None:
    team = Team(3)
    whole = tensors_of(team, 4, 8)
    held = team.register([{"w": t[rank]} for rank, t in enumerate(whole)])
    for rank, mine in enumerate(held):
        w = mine["w"]
        assert w.tensor.data_ptr() == whole[rank][rank].data_ptr()
        assert (w.written, w.input, w.staged) == (True, True, None)
        for member, copy in enumerate(w.copies):
            assert copy.data_ptr() == whole[member][member].data_ptr(), "at another offset each"
            assert copy.view(torch.float32).eq(member).all()
        assert len(set(w.mappings)) == 2, "its own is not mapped"


def test_two_tensors_of_one_allocation_are_mapped_once() -> None:
    team = Team()
    whole = tensors_of(team, 2, 8)
    held = team.register([{"a": t[0], "b": t[1]} for t in whole])
    assert [driver.num_opened for driver in team.drivers] == [1, 1]
    again = team.register([{"w": t[1]} for t in whole])
    assert [driver.num_opened for driver in team.drivers] == [1, 1], "nor for another Program"
    team.let_go(held)
    assert [len(registry.mapped) for registry in team.registries] == [1, 1]
    for _ in range(2):
        team.let_go(again)
        assert [driver.open_now for driver in team.drivers] == [[], []]


def test_memory_that_was_freed_and_allocated_anew_is_mapped_anew() -> None:
    team = Team()
    first = tensors_of(team)
    held = team.register([{"w": t} for t in first])
    for driver, tensor in zip(team.drivers, first, strict=True):
        driver.free(tensor)
        driver.alloc(tensor)  # the same address, another allocation
    more = team.register([{"w": t} for t in first])
    assert [len(driver.open_now) for driver in team.drivers] == [2, 2], "the old one is in use"
    team.let_go(held)
    assert [len(driver.open_now) for driver in team.drivers] == [1, 1]
    team.let_go(more)


@pytest.mark.parametrize("broken", ["handle", "tensor_at"])
def test_any_error_is_told_to_every_rank_and_leaves_no_use(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = Team()
    wanted = [{"v": t, "w": u} for t, u in zip(tensors_of(team), tensors_of(team), strict=True)]
    threads: dict[int, int] = {}
    plain = team.each

    def each(function: Callable[[int], T]) -> list[T | InterlaceError]:
        def known(rank: int) -> T:
            threads[threading.get_ident()] = rank
            return function(rank)

        return plain(known)

    monkeypatch.setattr(team, "each", each)
    made = itertools.count()

    def tensor_at(*args: Any) -> torch.Tensor:
        if threads[threading.get_ident()] == 1 and next(made) == 2:
            raise RuntimeError("as planned")
        return real(*args)

    def handle(base: int) -> str:
        raise RuntimeError("as planned")

    real = registry_file.tensor_at
    if broken == "handle":
        monkeypatch.setattr(team.drivers[1], "handle", handle)
    else:
        monkeypatch.setattr(registry_file, "tensor_at", tensor_at)
    other, mine = team.register(wanted)
    assert isinstance(mine, BackendError)
    assert isinstance(mine.__cause__, RuntimeError)
    assert isinstance(other, BackendError), "at once, not after the time-out"
    assert str(other).endswith("RuntimeError: as planned")
    assert [driver.open_now for driver in team.drivers] == [[], []]


def test_what_ends_in_the_midst_of_another_thing_keeps_the_books_right() -> None:
    """As a finalizer does, which the collector starts wherever it likes."""
    team = Team()
    first, second = tensors_of(team), tensors_of(team)
    held, more = (team.register([{"w": t} for t in one]) for one in (first, second))
    for driver, registry, mine, other in zip(
        team.drivers, team.registries, held, more, strict=True
    ):
        plain = driver.close

        def close(
            base: int,
            plain: Callable[[int], None] = plain,
            registry: Registry = registry,
            rest: list[Registered] = [other["w"]],  # noqa: B006
        ) -> None:
            plain(base)
            if rest:
                registry.let_go(rest.pop())

        driver.close = close  # pyright: ignore[reportAttributeAccessIssue]
        registry.let_go(mine["w"])
        assert driver.open_now == []
        assert len(registry.mapped) == 0


def test_threads_let_go_while_another_registers() -> None:
    team = Team()
    tensors = tensors_of(team)
    with ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(team.let_go, team.register([{"w": t} for t in tensors]))
            for _ in range(24)
        ]
        for end in ends:
            end.result()
    assert [driver.open_now for driver in team.drivers] == [[], []]


def two_allocations(team: Team, base: int) -> None:
    team.drivers[1].there[base] = 16, 99


FAULTS: dict[str, tuple[Callable[[Team, int], object], str]] = {
    "shared": (
        lambda team, _: setattr(team.drivers[1], "shareable", False),
        "rank 1: the registered parameter 'w' lies in memory that.*expandable_segments:False",
    ),
    "spanning": (two_allocations, "rank 1: .*spans several allocations"),
    "mapped": (
        lambda team, _: setattr(team.drivers[1], "mappable", False),
        "rank 1: .*peer access",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_memory_that_does_not_serve_is_told_to_every_rank_and_leaves_no_mapping(fault: str) -> None:
    team = Team(3)
    tensors = tensors_of(team)
    plant, told = FAULTS[fault]
    plant(team, tensors[1].data_ptr())
    errors = team.register([{"w": t} for t in tensors])
    assert all(isinstance(error, BackendError) for error in errors)
    assert re.match(told, str(errors[0]))
    assert [driver.open_now for driver in team.drivers] == [[], [], []]
    if fault == "mapped":
        team.drivers[1].mappable = True
        held = team.register([{"w": t} for t in tensors])
        assert [len(mine["w"].mappings) for mine in held] == [2, 2, 2]


def test_what_a_rank_finds_wrong_is_told_to_every_rank() -> None:
    team = Team()
    tensors = tensors_of(team)
    mine, other = team.register([{"w": t} for t in tensors], ExecutorError("it has no shape"))
    assert isinstance(mine, ExecutorError)
    assert isinstance(other, PeerError)
    assert "rank 0: it has no shape" in str(other)


def test_nothing_is_mapped_for_a_tensor_without_elements() -> None:
    team = Team()
    held = team.register([{"w": torch.empty(0, 4)} for _ in range(2)])
    assert [mine["w"].copies[1].numel() for mine in held] == [0, 0]
    assert not team.drivers[0].num_opened
