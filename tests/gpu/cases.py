"""The sites that the GPU tests run: Programs, inputs of all ranks, and what must come of them.

    case = Case("matmul_reduce_scatter", dist.get_world_size(), "bf16", "odd")
    executor = prepared(case, "fused")
    y = case.output()
    executor.run(case.inputs(seed), out=[y])

Every rank draws the inputs of all ranks, so each computes its reference alone, in fp64 on its GPU.
With another device than "cuda" they are cases for the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache, reduce
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import Outcome, attempt, world_group

from interlace.ir import Program, parse
from interlace.options import Options
from interlace.passes import lower, take_turns
from interlace.passes.strategies import pieces
from interlace.runtime import Executor
from interlace.runtime.engine import BeforeOp

KINDS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
EPS = {"bf16": 2.0**-8, "f16": 2.0**-10, "f32": 2.0**-20}
"""How far a result may be off, as a part of the sizes of what was rounded for it."""
SHAPES = {"even": (512, 256, 192), "odd": (37, 120, 72), "uneven": (48, 128, 40)}
"""Rows of a rank, K and N; `uneven` gives the last rank fewer rows."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "serial": {"strategy": "serial"},
    "pipeline": {"strategy": "pipeline"},
    "ring": {"strategy": "ring"},
    "peer-get": {"strategy": "peer"},
    "peer-put": {"strategy": "peer"},
    "fused": {"strategy": "fused"},
    "beside": {"strategy": "fused"},
    "exchange": {"strategy": "exchange"},
    "copies": {"strategy": "copies"},
}
"""Options of each. `beside`: rows are cut as large ones are, so that own ones are summed beside the
kernel and others come piece by piece; so are all-reduces, which go in slabs."""
HOW: dict[str, dict[str, Any]] = {
    "pipeline": {"chunks": 2},
    "peer-get": {"protocol": "get"},
    "peer-put": {"protocol": "put"},
}
"""What `lower` is told beside the options."""

BY_MESSAGES = ("ring",)
"""Those that send messages, which on CUDA are NCCL's."""


@dataclass(frozen=True)
class Case:
    """One site on `world` ranks."""

    kind: str
    world: int
    dtype: str = "bf16"
    shape: str = "even"
    device: str = "cuda"

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each rank's part."""
        each = SHAPES[self.shape][0]
        if self.shape == "uneven":
            return (*(each,) * (self.world - 1), each - 11)
        return (each,) * self.world

    @property
    def type(self) -> torch.dtype:
        """The element type, for torch."""
        return DTYPES[self.dtype]

    @property
    def text(self) -> str:
        """The serial Program."""
        rows, total = self.rows, sum(self.rows)
        _, k, n = SHAPES[self.shape]
        even, t = len(set(rows)) == 1, self.dtype
        mine = rows[0] if even else "rows[tp.rank]"
        table = "" if even else f"    rows = table(tp, {', '.join(map(str, rows))})"
        splits = "" if even else ", splits=rows"
        head = f"def {self.kind}_{self.shape}_{t}(tp: Team[{self.world}]"
        match self.kind:
            case "all_gather_matmul":
                lines = [
                    f"{head}, x: {t}[{mine}, {k}], w: {t}[{k}, {n}], y: out[{t}[{total}, {n}]]):",
                    table,
                    f"    full = empty({t}[{total}, {k}])",
                    f"    main: all_gather(x, full, team=tp{splits})",
                    '    main: call("aten.mm.out", full, w, out=y)',
                ]
            case "matmul_reduce_scatter":
                lines = [
                    f"{head}, x: {t}[{total}, {k}], w: {t}[{k}, {n}], y: out[{t}[{mine}, {n}]]):",
                    table,
                    f'    main: call("aten.mm.default", x, w, out=(p := {t}[{total}, {n}]))',
                    f'    main: reduce_scatter(p, y, reduce="sum", team=tp{splits})',
                ]
            case _:
                lines = [
                    f"{head}, x: {t}[{total}, {k}], w: {t}[{k}, {n}], y: out[{t}[{total}, {n}]]):",
                    f'    main: call("aten.mm.default", x, w, out=(p := {t}[{total}, {n}]))',
                    '    main: all_reduce(p, y, reduce="sum", team=tp)',
                ]
        return "\n".join(line for line in lines if line) + "\n"

    def program(self, strategy: str) -> Program:
        """The Program lowered by a strategy, which must have been able to serve it.

        The fused kernels take neither fp32 nor uneven rows: `peer` stands in for them there, and
        slices of uneven rows stay serial.
        """
        least = "BESIDE_BYTES", "PIECE_BYTES", "SLAB_FLOPS", "SLAB_BYTES"
        small: dict[str, Any] = dict.fromkeys(least, 1)
        small |= {"GROUP_ROWS": pieces.TILE_ROWS, "TIMELY_COLUMNS": range(1 << 31)}
        cut = mock.patch.multiple(pieces, **small) if strategy == "beside" else nullcontext()
        turns = 1 if strategy in ("beside", "peer-put") else 1 << 40
        with cut, mock.patch.object(take_turns, "TURN_BYTES", turns):
            program = lower(
                parse(self.text), Options(**STRATEGIES[strategy]), **HOW.get(strategy, {})
            )
        taken = [site.strategy for site in program.sites]
        wanted = STRATEGIES[strategy]["strategy"]
        if wanted == "fused" and (self.dtype == "f32" or self.shape == "uneven"):
            wanted = "peer"
        if wanted == "pipeline" and self.shape == "uneven" and self.kind != "matmul_all_reduce":
            wanted = "serial"
        assert taken == [wanted], f"{strategy} was not taken: {program.remarks}"
        if strategy == "beside" and wanted == "fused" and self.shape == "even":
            assert (program.sites[0].chunks or 0) > self.world, "rows go whole"
        return program

    def output(self, rank: int | None = None) -> torch.Tensor:
        """A result of this rank, full of NaN."""
        rank = dist.get_rank() if rank is None else rank
        tall = self.rows[rank] if self.kind == "matmul_reduce_scatter" else sum(self.rows)
        shape = tall, SHAPES[self.shape][2]
        return torch.full(shape, torch.nan, dtype=self.type, device=self.device)

    @lru_cache(maxsize=16)  # noqa: B019
    def all_inputs(self, seed: int, exact: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """x and w of every rank; `exact` ones are so small that every sum is exact."""
        _, k, n = SHAPES[self.shape]
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            if exact:
                found = torch.randint(-1, 2, shape, generator=generator).float()
            else:
                found = torch.randn(shape, generator=generator)
            return found.to(self.type)

        tall = self.rows if self.kind == "all_gather_matmul" else (sum(self.rows),) * self.world
        return [(draw(rows, k), draw(k, n)) for rows in tall]

    def inputs(self, seed: int, exact: bool = False) -> list[torch.Tensor]:
        """This rank's inputs, on its GPU."""
        return [x.to(self.device) for x in self.all_inputs(seed, exact)[dist.get_rank()]]

    def reference(self, seed: int, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's result in fp64, and how much it may be off, element by element."""
        rank, everyone = dist.get_rank(), self.all_inputs(seed, exact)
        pairs = [(x.to(self.device).double(), w.to(self.device).double()) for x, w in everyone]
        if self.kind == "all_gather_matmul":
            pairs = [(torch.cat([x for x, _ in pairs]), pairs[rank][1])]
        partials = [x @ w for x, w in pairs]
        result = torch.stack(partials).sum(0)
        size = torch.stack([p.abs() for p in partials]).sum(0) + result.abs()
        inner = torch.stack([x.abs() @ w.abs() for x, w in pairs]).sum(0)
        allowed = EPS[self.dtype] * size + 2.0**-20 * inner
        if self.kind == "matmul_reduce_scatter":
            parts = list(self.rows)
            return result.split(parts)[rank], allowed.split(parts)[rank]
        return result, allowed

    def by_nccl(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The same by torch alone: NCCL's collective and the whole matmul. Parts go padded.

        Ranks that share a GPU add up in order, rounding each time, and NCCL takes no part.
        """
        rows, rank = self.rows, dist.get_rank()
        if shared():
            return self._one_by_one(x, w)
        tall, even = max(rows), len(set(rows)) == 1
        if self.kind == "matmul_all_reduce":
            y = x @ w
            dist.all_reduce(y)
            return y
        if self.kind == "all_gather_matmul":
            padded = x.new_zeros(tall, x.shape[1])
            padded[: x.shape[0]] = x
            full = x.new_empty(tall * self.world, x.shape[1])
            dist.all_gather_into_tensor(full, padded)
            if not even:
                full = torch.cat([f[:n] for f, n in zip(full.split(tall), rows, strict=True)])
            return full @ w
        y = x @ w
        if not even:
            pieces = [y.new_zeros(tall, y.shape[1]) for _ in rows]
            for piece, part in zip(pieces, y.split(list(rows)), strict=True):
                piece[: part.shape[0]] = part
            y = torch.cat(pieces)
        mine = y.new_empty(tall, y.shape[1])
        dist.reduce_scatter_tensor(mine, y)
        return mine[: rows[rank]]

    def _one_by_one(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, (x.cpu(), w.cpu()))
        pairs = [(x.to(self.device), w.to(self.device)) for x, w in everyone]
        if self.kind == "all_gather_matmul":
            return torch.cat([x for x, _ in pairs]) @ w
        y = reduce(torch.add, (x @ w for x, w in pairs))
        if self.kind == "matmul_all_reduce":
            return y
        return y.split(list(self.rows))[dist.get_rank()]


def shared() -> bool:
    """Whether ranks share a GPU, for which NCCL is not to be had."""
    return dist.get_world_size() > torch.cuda.device_count() > 0


def transport() -> dict[str, str]:
    """Options by which collectives go where NCCL is not to be had."""
    return {"transport": "peer"} if shared() else {}


def here() -> list[str]:
    """Strategies that can be run."""
    return [name for name in STRATEGIES if not (shared() and name in BY_MESSAGES)]


def prepared(
    case: Case, strategy: str, before_op: BeforeOp | None = None, **options: Any
) -> Executor:
    """An Executor of a case on this rank's GPU."""
    chosen = {"timeout_s": 20.0, **STRATEGIES[strategy], **options}
    if case.device == "cuda":
        chosen = {**transport(), **chosen}
    return Executor(
        program_of(case, strategy),
        groups={"tp": world_group()},
        device=case.device,
        options=Options.from_dict(chosen),
        before_op=before_op,
    ).prepare()


@cache
def program_of(case: Case, strategy: str) -> Program:
    """The lowered Program, made once in a process."""
    return case.program(strategy)


def run(executor: Executor, case: Case, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """One run into a new tensor full of NaN."""
    y = case.output()
    executor.run(inputs, out=[y])
    return y


def poison(executor: Executor) -> None:
    """Fills whatever memory of its own a run may read with NaN; collective, nothing may be running.

    The arena, this rank's slots and the staging memory of exchanges: 0xFF in every byte.
    """
    executor.synchronize()
    torch.cuda.synchronize()
    meet()
    assert executor.engine is not None
    context: Any = executor.engine.context
    whole: list[torch.Tensor] = []
    for arena in (context.values.arena, context.arena.storage):
        if arena.nbytes():
            whole.append(torch.empty(0, dtype=torch.uint8, device="cuda").set_(arena))
    for slot in context.resources.slots.values():
        whole += slot.copies[slot.me]
    spaces: Any = context.resources.spaces
    for space in spaces.values():
        whole += [_staging(space.side, area) for area in space.side.areas]
    for memory in whole:
        memory.fill_(0xFF)
    torch.cuda.synchronize()
    meet()


def _staging(side: Any, area: Any) -> torch.Tensor:
    from interlace.comm.cuda.memory import tensor_at

    return tensor_at(area.stages[side.me], area.stage_nbytes, side.device)


def meet() -> None:
    """A barrier of the hosts, through the store: it leaves GPUs and process groups alone."""
    store: Any = dist.distributed_c10d._get_default_store()
    number = store.add(f"meet/{dist.get_rank()}", 1)
    if store.add(f"meet/all/{number}", 1) == dist.get_world_size():
        store.set(f"meet/go/{number}", "1")
    store.wait([f"meet/go/{number}"], timedelta(seconds=60))


def on_a_gpu(timeout_s: float, count: int = 1) -> list[pytest.MarkDecorator]:
    """Marks of the tests of a file that need so many GPUs, and no ranks."""
    lacking = torch.cuda.device_count() < count
    why = pytest.mark.skipif(lacking, reason=f"needs {count} CUDA devices")
    return [pytest.mark.gpu, pytest.mark.timeout(timeout_s), why]


def finish(executor: Executor, case: Case, inputs: list[torch.Tensor]) -> Outcome:
    """A run and its end."""

    def both() -> float:
        y = run(executor, case, inputs)
        executor.synchronize()
        return y.double().sum().item()

    return attempt(both)
