"""A mirror team on CUDA, without a GPU: whose words a rank raises, which blocks it maps, and that
all ends that its engine issues on one GPU."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tests.comm.test_device_memory import Blocks
from tests.runtime import test_cuda_graphs_simulated as simulated_graphs
from tests.runtime.cuda_sites import SERVED, SIMULATED, WORLD, logs_of, program
from tests.support import fake_cuda
from tests.support.fake_cuda import fake_engine
from tests.support.fake_device import simulate

from interlace.comm.cuda import side as side_file
from interlace.comm.cuda.side import CudaSide
from interlace.comm.cuda.words import CudaSpace
from interlace.comm.mirror import MirrorGroup, seen_by
from interlace.comm.teams import team_of
from interlace.ir.mirror import mirrored
from interlace.options import Options
from interlace_bench.mirror import mirror


@pytest.fixture
def _own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of all members are rank 0's, each for the member on the other side."""
    word = fake_cuda.word

    def own(signal: str, reader: int, writer: int, space: int = 0) -> int:
        return word(signal, 0, seen_by(0, reader, WORLD) if reader else writer, space)

    monkeypatch.setattr(fake_cuda, "word", own)
    monkeypatch.setattr(fake_cuda.FakeSide, "shares_gpu", True)


@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
@pytest.mark.parametrize(("site", "strategy"), SIMULATED)
@pytest.mark.usefixtures("_own_words")
def test_no_stream_waits_for_ever(site: str, strategy: str, in_order: bool, seed: int) -> None:
    """Copies to itself need a processor, of which a kernel that waits for them leaves none."""
    mirrors = mirrored(program(site, strategy))
    with fake_engine(mirrors, 0, Options(in_order=in_order)) as fake:
        logs = logs_of(fake, site, 6)
        for number in range(5):
            assert not simulate([logs], random.Random(seed + number), one_gpu=True)


def test_one_whose_words_are_its_peers_waits_for_ever(seed: int) -> None:
    with fake_engine(mirrored(program("gather", "put")), 0) as fake:
        assert simulate([logs_of(fake, "gather", 2)], random.Random(seed), one_gpu=True)


@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
@pytest.mark.parametrize(("site", "strategy"), SERVED)
@pytest.mark.usefixtures("_own_words")
def test_graphs_replayed_in_turn_end(
    site: str, strategy: str, in_order: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Words that a graph raises, and takes back from the other, are its own."""
    monkeypatch.setattr(simulated_graphs, "check", lambda made: SimpleNamespace(sound=True))
    with contextlib.ExitStack() as stack:
        mirrors = mirrored(program(site, strategy))
        replays = simulated_graphs.Replays(mirrors, stack, in_order=in_order)
        for number in range(5):
            assert not simulate([replays.logs[0]], random.Random(seed + number), one_gpu=True)


class Words(Blocks):
    """A driver of blocks that takes words too."""

    def alloc(self, nbytes: int, timeout_s: float) -> int:
        base = super().alloc(nbytes, timeout_s) * (1 + len(self.log)) * 1000
        return base

    def handle(self, base: int) -> str:
        return str(base)


@pytest.mark.parametrize("size", [2, 4])
def test_what_a_rank_raises_it_awaits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word that it raises as a peer's is one that it awaits of the peer on the other side;
    its own block is mapped once, and none is closed."""
    driver = Words()
    monkeypatch.setattr(side_file, "Driver", lambda: driver)
    gpu = SimpleNamespace(uuid="a GPU")
    cpu = torch.device("cpu")
    with mirror(size) as group, mock.patch("torch.cuda.get_device_properties", return_value=gpu):
        assert isinstance(group, MirrorGroup)
        team = team_of(group, "tp")
        team.setup(5.0)
        side = CudaSide(team, cpu, 5.0)
        assert side.shares_gpu
        assert sorted(side.told) == sorted(side.heard)
        assert len({*side.told}) == size - 1
        raises = {"ready": [0, *range(1, size)]}
        space = CudaSpace(side, "t", ("ready",), 2, True, (), 5.0, raises)
        for member in range(1, size):
            other = size - member
            assert space.theirs("ready", [member]) == [space.own("ready", other)]
            assert space.last("ready", other) == member, "what it raises on the member"
        memory = side.heap.memory
        assert len({*memory.bases}) == 1
        memory.unmap()
        assert {what for what, _ in driver.log} == {"alloc"}
