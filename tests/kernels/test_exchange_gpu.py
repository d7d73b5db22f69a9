"""The exchange kernel on a device: the ranks of a team are streams of one process, on one GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.kernels.exchange_support import exchange_reference
from tests.kernels.test_exchange import FLOATS, KINDS, parts_of, sources_of

from interlace.kernels.exchange.exchange import FLAG_NBYTES, WORDS_NBYTES, PeerExchange

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NBYTES = 8 << 20


def launch(
    bound: PeerExchange, stream: torch.cuda.Stream, x: torch.Tensor, y: torch.Tensor
) -> None:
    """One call of one rank."""
    bound.launch(stream.cuda_stream, x.data_ptr(), y.data_ptr())


class Team:
    """Streams of one device that exchange as ranks do, each with memory of its own."""

    def __init__(self, size: int, nbytes: int = NBYTES) -> None:
        self.size, self.nbytes = size, nbytes
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.streams = [torch.cuda.Stream() for _ in range(size)]

        def memory(n: int, fill: int = 0) -> list[torch.Tensor]:
            return [torch.full((n,), fill, dtype=torch.uint8, device="cuda") for _ in range(size)]

        self.stages = memory(nbytes, 0xFF)  # NaN in every float type
        self.flags, self.words = memory(FLAG_NBYTES), memory(WORDS_NBYTES)

    def bind(self, kind: str, dtype: torch.dtype, parts: Any, **options: Any) -> list[PeerExchange]:
        """The ranks' Exchanges, ready to launch."""
        stages, flags = ([t.data_ptr() for t in ts] for ts in (self.stages, self.flags))
        return [
            PeerExchange(
                *(kind, dtype, parts, rank, self.size, self.device, stages, self.nbytes, flags),
                self.words[rank].data_ptr(),
                **options,
            ).prepare()
            for rank in range(self.size)
        ]

    def launch(
        self, bound: list[PeerExchange], sources: list, made: list, delays: Any = None
    ) -> None:
        """One call, each rank on its stream, after a delay of its own."""
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                if delays is not None:
                    torch.cuda._sleep(delays.randrange(300_000))
                launch(bound[rank], stream, sources[rank], made[rank])

    def run(
        self, kind: str, sources: list[torch.Tensor], parts: Any, delays: Any = None, **options: Any
    ) -> list[torch.Tensor]:
        """One call of all ranks on poisoned destinations."""
        bound = self.bind(kind, sources[0].dtype, parts, **options)
        given = [source.cuda() for source in sources]
        nan = float("nan")
        made = [torch.full((x.moves.taken,), nan, device="cuda").to(x.dtype) for x in bound]
        torch.cuda.synchronize()
        self.launch(bound, given, made, delays)
        torch.cuda.synchronize()
        return [one.cpu() for one in made]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_gives_the_bits_of_its_reference(kind: str, dtype: str, seed: int) -> None:
    rng = random.Random(seed)
    for size in (2, 3, 4):
        team = Team(size)
        for again in range(4):
            most = rng.choice((50, 5000, 60_000))
            parts, root = parts_of(kind, rng, size, most), rng.randrange(size)
            sources = sources_of(kind, parts, size, FLOATS[dtype], seed + again, False)
            wanted = exchange_reference(kind, sources, parts, root=root)
            options = {"one_shot": rng.random() < 0.5, "root": root}
            for found, expected in zip(
                team.run(kind, sources, parts, rng, **options), wanted, strict=True
            ):
                assert torch.equal(found, expected), (size, parts, options)


def test_many_calls_of_changing_size_with_delays(seed: int) -> None:
    """Notes [Two copies of staging suffice] and [Flags that a call does not use], on a device."""
    rng, size = random.Random(seed), 4
    team = Team(size)
    cases = []
    for number in range(8):
        kind = rng.choice(("all_gather", "reduce_scatter", "all_reduce"))
        parts = parts_of(kind, rng, size, rng.choice((40, 100_000)))
        sources = sources_of(kind, parts, size, torch.bfloat16, seed + number, False)
        wanted = exchange_reference(kind, sources, parts)
        bound = team.bind(
            kind, torch.bfloat16, parts, blocks=rng.randrange(1, 33), one_shot=rng.random() < 0.5
        )
        cases.append((bound, [s.cuda() for s in sources], [w.cuda() for w in wanted]))
    torch.cuda.synchronize()
    checks = []
    for _ in range(200):
        bound, sources, wanted = rng.choice(cases)
        made = [torch.full_like(w, float("nan")) for w in wanted]
        for stream in team.streams:
            stream.wait_stream(torch.cuda.current_stream())
        team.launch(bound, sources, made, rng if rng.random() < 0.5 else None)
        checks.append((made, wanted))
    torch.cuda.synchronize()
    assert all(
        torch.equal(m, w) for made, wanted in checks for m, w in zip(made, wanted, strict=True)
    )
