"""What the CUDA engines of all ranks issue, done by simulated devices whose streams are now far
behind and now far ahead: nobody waits for ever, and nobody writes what a peer still uses."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from tests.runtime.cuda_sites import OPEN, WORLD, logs_of, program, writes_what_peers_use
from tests.support.fake_cuda import Fake, fake_engine, word
from tests.support.fake_device import Entry, simulate

from interlace.ir import Get, parse
from interlace.options import Options


@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
@pytest.mark.parametrize("strategy", ["put", "get", "fused", "ranges"])
@pytest.mark.parametrize("site", ["gather", "scatter"])
def test_no_rank_waits_for_ever_nor_writes_too_early(
    site: str, strategy: str, in_order: bool, seed: int
) -> None:
    """Simulated, with ranks and streams far apart: all ends, and whoever writes what peers use in
    run n does so after they have ended run n - 2."""
    lowered = program(site, strategy)
    gotten = any(isinstance(op, Get) for op in lowered.ops)
    with contextlib.ExitStack() as stack:
        options = Options(in_order=in_order)
        fakes = [stack.enter_context(fake_engine(lowered, r, options)) for r in range(WORLD)]
        logs = [logs_of(fake, site, 6) for fake in fakes]

        def look(rank: int, run: int, entry: Entry, over: Any) -> None:
            if writes_what_peers_use(fakes[rank], entry, gotten):
                assert min(over(peer) for peer in range(WORLD)) >= run - 2

        for number in range(5):
            assert not simulate(logs, random.Random(seed + number), look)
        # The simulation tells: without one signal it does not end.
        last = logs[2][-1]
        word = next(entry[2] for entry in last if entry[0] == "write")
        last[:] = [entry for entry in last if entry[0::2][:2] != ("write", word)]
        assert simulate(logs, random.Random(seed))


def test_executors_of_one_team_in_any_order(seed: int) -> None:
    """Runs that hear of every rank among runs that do not."""
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        pairs: list[tuple[Fake, Fake]] = []
        for rank in range(WORLD):
            first = stack.enter_context(fake_engine(program("gather", "fused"), rank))
            pairs.append((first, stack.enter_context(fake_engine(parse(OPEN), rank, None, first))))
        turns = [rng.random() < 0.6 for _ in range(10)]
        x, y = torch.randn(8, 16).bfloat16(), torch.empty(8, 16, dtype=torch.bfloat16)
        logs: list[list[list[Entry]]] = []
        for pair in pairs:
            logs.append([])
            for is_open in turns:
                if is_open:
                    pair[1].run([x], [y])
                    logs[-1].append(list(pair[1].log))
                else:
                    logs[-1] += logs_of(pair[0], "gather", 1)

        def look(rank: int, run: int, entry: Entry, over: Any) -> None:
            if any(writes_what_peers_use(fake, entry, False) for fake in pairs[rank]):
                assert min(over(peer) for peer in range(WORLD)) >= run - 2

        for number in range(10):
            assert not simulate(logs, random.Random(seed + number), look)


def test_the_simulation_tells_what_is_written_too_early(seed: int) -> None:
    """Runs that wait for one neighbour alone, with and without what makes them wait for all."""
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(fake_engine(parse(OPEN), rank)) for rank in range(WORLD)]
        x, y = torch.randn(8, 16).bfloat16(), torch.empty(8, 16, dtype=torch.bfloat16)
        logs: list[list[list[Entry]]] = [[] for _ in fakes]
        for fake, mine in zip(fakes, logs, strict=True):
            for _ in range(8):
                fake.run([x], [y])
                mine.append(list(fake.log))
        early: list[int] = []

        def look(rank: int, run: int, entry: Entry, over: Any) -> None:
            if writes_what_peers_use(fakes[rank], entry, False):
                early.extend([run] * (min(over(peer) for peer in range(WORLD)) < run - 2))

        for number in range(20):
            assert not simulate(logs, random.Random(seed + number), look)
        assert not early
        takes = {
            word("ended", reader, writer) for reader in range(WORLD) for writer in range(WORLD)
        }
        bare = [
            [[e for e in log if e[0] != "wait" or e[2] not in takes] for log in runs]
            for runs in logs
        ]
        for number in range(200):
            simulate(bare, random.Random(seed + number), look)
        assert early
