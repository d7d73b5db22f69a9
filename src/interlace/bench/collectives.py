"""Collectives of every backend that is there, each as a Program of a few in a row.

    for figure in measure_collectives(ranks, sizes, step):
        print(figure.backend, figure.kind, figure.nbytes, figure.seconds)

A size is that of the larger of a rank's two tensors. What a run costs besides is spread over the
collectives in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from interlace.bench.links import Figure, attempt, timed
from interlace.bench.ranks import Ranks
from interlace.comm.backends import BACKENDS, require_backend
from interlace.comm.teams import reset_teams
from interlace.cost.samples import Sample
from interlace.errors import BackendError, InterlaceError
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor

KINDS = (
    *("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"),
    *("gather", "scatter", "reduce", "barrier"),
)
REPEATS = 4
TIME_OUT_S = 30.0


def backends(ranks: Ranks) -> tuple[list[str], dict[str, str]]:
    """The backends that serve this device, and why the others do not."""
    there: list[str] = []
    absent: dict[str, str] = {}
    for name in BACKENDS:
        try:
            require_backend(name)
            if name == "nccl" and not ranks.cuda:
                raise BackendError("NCCL moves tensors of GPUs alone")
            there.append(name)
        except BackendError as error:
            absent[name] = str(error)
    return there, absent


def text(kind: str, backend: str, world: int, elements: int) -> str:
    """A Program of a few collectives of that kind; the larger tensor has so many f32."""
    part = elements // world
    x, y = {"all_gather": (part, elements), "gather": (part, elements)}.get(
        kind, (elements, part if kind in ("reduce_scatter", "scatter") else elements)
    )
    words = {
        "barrier": "",
        "all_reduce": 'x, y, reduce="sum", ',
        "reduce_scatter": 'x, y, reduce="sum", ',
        "reduce": 'x, y, reduce="sum", root=0, ',
        "broadcast": "x, y, root=0, ",
        "gather": "x, y, root=0, ",
        "scatter": "x, y, root=0, ",
    }.get(kind, "x, y, ")
    line = f'    main: {kind}({words}team=tp, backend="{backend}")\n'
    return f"def {kind}(tp: Team[{world}], x: f32[{x}], y: f32[{y}]):\n{line * REPEATS}"


def measure_collectives(
    ranks: Ranks, sizes: Sequence[int], step: Callable[[str], None]
) -> Iterator[Figure]:
    """Every kind of every backend over the sizes."""
    for backend in backends(ranks)[0]:
        for kind in KINDS:
            step(f"{backend} {kind}")
            for nbytes in sizes[:1] if kind == "barrier" else sizes:
                figure = _collective(ranks, backend, kind, nbytes)
                yield figure
                if figure.error:
                    break  # larger ones fail as well, and waiting for each takes its time


def _collective(ranks: Ranks, backend: str, kind: str, nbytes: int) -> Figure:
    world = ranks.size
    elements = -(-nbytes // 4 // world) * world
    held: list[Executor] = []

    def measure() -> float:
        program = parse(text(kind, backend, world, elements))
        options = Options(time_out_s=TIME_OUT_S)
        executor = Executor(
            program, groups={"tp": ranks.group}, device=ranks.device, options=options
        )
        held.append(executor)
        executor.prepare()
        inputs = [
            torch.zeros([int(str(size)) for size in buffer.shape], device=ranks.device)
            for buffer in program.params
        ]
        slow = backend == "gloo" or not ranks.cuda
        guess = REPEATS * ((5e-4 + nbytes / 5e8) if slow else (3e-5 + nbytes / 1e11))
        return timed(ranks, lambda: executor.run(inputs), guess) / REPEATS

    nbytes = 4 * elements if kind != "barrier" else 0
    fixed: dict[str, Any] = {"kind": kind, "backend": backend, "pattern": "team"}
    moved = Sample(kind=kind, seconds=1.0, nbytes=nbytes, ranks=world).link_bytes
    figure = attempt(
        ranks, {**fixed, "nbytes": nbytes, "ranks": world, "moved": moved or math.nan}, measure
    )
    for executor in held:
        executor.close()
    if figure.error:
        try:
            reset_teams()
        except InterlaceError as error:
            step_error = str(error).splitlines()[0]
            raise InterlaceError(f"{backend} {kind}: {figure.error}; then {step_error}") from error
    return figure
