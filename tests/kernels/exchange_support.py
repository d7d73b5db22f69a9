"""Plays all ranks of an exchange in one process, on Triton's interpreter, step by step.

    team = Emulated(size=4, staging_nbytes=1 << 16)
    results = team.run("all_reduce", sources, parts=(1000,))

Steps are the kernel's own: all ranks push, then all finish, then (in two shots) all copy. What the
kernel would wait for is checked between the steps instead: the flags of exactly the CTAs in use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from interlace.comm.collectives import reduce_into
from interlace.kernels.exchange.exchange import (
    FLAG_NBYTES,
    LINE,
    MAX_BLOCKS,
    WORDS_NBYTES,
    PeerExchange,
)
from interlace.kernels.exchange.moves import Moves

KERNEL = Path(importlib.util.find_spec("interlace.kernels.exchange").origin or "").parent  # pyright: ignore
POISON = 0x7F


def interpreted() -> ModuleType:
    """The module of the kernel, loaded anew for Triton's interpreter."""
    from tests.support import interpreting  # which mends the interpreter
    from triton import knobs

    assert interpreting is not None
    spec = importlib.util.spec_from_file_location("x_kernel", KERNEL / "kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    return module


def reduced(parts: Sequence[torch.Tensor], reduce: str) -> torch.Tensor:
    """In rank order, as every transport reduces."""
    out = torch.empty_like(parts[0])
    reduce_into(parts, reduce, out=out)
    return out


def exchange_reference(
    kind: str,
    sources: Sequence[torch.Tensor],
    parts: Sequence[int],
    *,
    reduce: str = "sum",
    root: int = 0,
    merges: bool = False,
) -> list[torch.Tensor]:
    """Each rank's destination, flat; empty where a rank gets nothing."""
    size = len(sources)
    flat = [source.reshape(-1) for source in sources]
    nothing = flat[0].new_empty(0)

    def cut(source: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return list(source.split(list(sizes)))

    match kind:
        case "all_gather":
            return [torch.cat(flat)] * size
        case "gather":
            return [torch.cat(flat) if rank == root else nothing for rank in range(size)]
        case "broadcast":
            return [flat[root]] * size
        case "scatter":
            return cut(flat[root], parts)
        case "all_to_all":
            sizes = [[parts[rank]] * size if merges else parts for rank in range(size)]
            pieces = [cut(flat[rank], sizes[rank]) for rank in range(size)]
            return [torch.cat([pieces[s][rank] for s in range(size)]) for rank in range(size)]
        case "reduce_scatter":
            return cut(reduced(flat, reduce), parts)
        case "reduce":
            total = reduced(flat, reduce)
            return [total if rank == root else nothing for rank in range(size)]
        case "all_reduce":
            return [reduced(flat, reduce)] * size
        case _:
            return [nothing] * size


def late(flags: Sequence[int], calls: int, moves: Moves, blocks: int) -> list[int]:
    """The ranks that a stuck call waits for, from this rank's flags and its number of calls ended.

    A rank counts as late where any of its CTAs has not raised the flag of the first step.
    """
    call = calls + 1
    behind = {
        writer
        for writer in range(moves.size)
        for block in range(blocks)
        if writer != moves.rank and (int(flags[block * LINE + writer]) - call) & 0xFFFFFFFF > 1
    }
    return sorted(behind)


class Emulated:
    """The ranks of a team with their staging, flags and words."""

    def __init__(self, size: int, staging_nbytes: int) -> None:
        self.size = size
        self.nbytes = staging_nbytes
        self.kernel = interpreted().exchange_kernel

        def memory(elements: int, dtype: torch.dtype, fill: int = 0) -> list[torch.Tensor]:
            return [torch.full((elements,), fill, dtype=dtype) for _ in range(size)]

        self.stages = memory(staging_nbytes, torch.uint8, POISON)
        self.flags = memory(FLAG_NBYTES // 4, torch.int32)
        self.words = memory(WORDS_NBYTES // 4, torch.int32)
        self.blocks: list[int] = []

    def exchange(self, rank: int, kind: str, dtype: torch.dtype, parts: Any, **options: Any) -> Any:
        """One rank's PeerExchange; addresses do not matter here."""
        nothing = [0] * self.size
        return PeerExchange(
            *(kind, dtype, parts, rank, self.size, torch.device("cpu")),
            *(nothing, self.nbytes, nothing, 0),
            **options,
        )

    def run(
        self,
        kind: str,
        sources: Sequence[torch.Tensor],
        parts: Sequence[int],
        in_place: bool = False,
        **options: Any,
    ) -> list[torch.Tensor]:
        """One call of all ranks; their destinations, NaN (or 127) where nothing was written."""
        size, dtype = self.size, sources[0].dtype
        bound = [self.exchange(r, kind, dtype, parts, **options) for r in range(size)]
        scale = 2 if dtype.itemsize == 16 else 1
        made = [torch.full((x.moves.taken // scale + 7,), POISON).to(dtype) for x in bound]
        made = list(sources) if in_place else made
        calls = [words[0] + 1 for words in self.words]  # which wrap around as the kernel's do
        self.blocks.append(bound[0].blocks)
        for step in range(3):
            for rank, one in enumerate(bound):
                self._step(one, step, sources[rank], made[rank])
            for rank, one in enumerate(bound):
                self._check_flags(rank, step, calls[rank], one)
        assert [words[0] for words in self.words] == calls
        assert not any(int(words[1]) for words in self.words)
        return [dst[: x.moves.taken // scale] for x, dst in zip(bound, made, strict=True)]

    def _step(self, one: PeerExchange, step: int, src: torch.Tensor, dst: torch.Tensor) -> None:
        constants = {**one.source(aligned=False).constants, "FIRST": step, "LAST": step}
        view = one.dtype if one.op else getattr(torch, "int" + one.element[1:])
        view = torch.uint8 if view == torch.bool else view
        moves = one.moves
        self.kernel[(one.blocks,)](
            src.view(view),
            dst.view(view),
            self.words[moves.rank],
            tuple(stage.view(view) for stage in self.stages),
            tuple(self.flags),
            *one.arguments[3:],
            **constants,
        )

    def _check_flags(self, rank: int, step: int, call: torch.Tensor, one: PeerExchange) -> None:
        flags = self.flags[rank].view(2, MAX_BLOCKS, LINE)
        others = [other for other in range(self.size) if other != rank]
        if step == 0 or (step == 1 and one.moves.twice):
            assert (flags[step, : one.blocks, others] == call).all()
        assert (flags[:, one.blocks :] - call < 0).all(), "behind, compared around"
        assert (flags[:, :, rank] - call < 0).all(), "nobody raises its own"
