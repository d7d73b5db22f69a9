"""Every kind of collective, on gloo and through shared memory, against plain arithmetic.

The values are small integers, so that sums are exact in every element type and order.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool

from interlace.comm import (
    BoundedWait,
    Demand,
    Spec,
    TeamComm,
    Workspace,
    bind_collective,
    bind_peer_collective,
    staged_nbytes,
    team_of,
)
from interlace.comm.collectives import Run, nothing, reduce_into
from interlace.errors import UnsupportedError
from interlace.ir import KINDS
from interlace.kernels import sum_slots
from interlace.verify.in_place import COLLECTIVES

TIMEOUT_S = 20.0
COLUMNS = 3
Shape = tuple[int, ...]


def rows(shape: str, world: int) -> Shape:
    """How many rows each rank has."""
    return {
        "even": (2,) * world,
        "uneven": tuple(rank + 1 for rank in range(world)),
        "one-row": (1, *(0,) * (world - 1)),
        "empty": (0,) * world,
    }[shape]


def values(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank gives: known to every rank."""
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randint(0, 4, (numel,), generator=generator).to(dtype)


def meet() -> tuple[TeamComm, BoundedWait]:
    group = dist.group.WORLD
    assert group is not None
    team = team_of(group, "tp")
    team.setup(TIMEOUT_S)
    return team, BoundedWait(TIMEOUT_S, lambda: "the op under test", team.control.check)


def bind(team: TeamComm, backend: str, specs: list[Spec], topic: str) -> list[Run]:
    if backend == "gloo":
        gloo = team.backend("gloo", "cpu", TIMEOUT_S)
        return [bind_collective(gloo, spec, TIMEOUT_S) for spec in specs]
    stage = max(map(staged_nbytes, specs))
    space = Workspace(team, topic, Demand(stage_nbytes=stage), TIMEOUT_S)
    return [bind_peer_collective(space, spec, k + 1) for k, spec in enumerate(specs)]


def numel_given(spec: Spec, rank: int) -> int:
    """How many elements a rank gives."""
    if KINDS[spec.kind].scales == "gather":
        return spec.parts[rank]
    return spec.size * spec.parts[rank] if spec.merges else sum(spec.parts)


def expected(spec: Spec, given: list[torch.Tensor]) -> torch.Tensor | None:
    """What this rank's destination should hold; None where it has none."""
    parts, me = list(spec.parts), spec.me
    is_root = me == spec.root
    if spec.kind in ("all_gather", "gather"):
        return torch.cat(given) if spec.kind == "all_gather" or is_root else None
    if spec.kind == "broadcast":
        return given[spec.root]
    if spec.kind == "scatter":
        return given[spec.root].split(parts)[me]
    if spec.kind == "all_to_all":
        alike = [part.numel() // spec.size for part in given]
        cuts = [[n] * spec.size if spec.merges else parts for n in alike]
        return torch.cat([part.split(cut)[me] for part, cut in zip(given, cuts, strict=True)])
    stack = torch.stack([part.double() for part in given])
    total = {
        "sum": lambda: stack.sum(0),
        "avg": lambda: stack.mean(0),
        "prod": lambda: stack.prod(0),
        "min": lambda: stack.amin(0),
        "max": lambda: stack.amax(0),
    }[spec.reduce or "sum"]()
    if spec.kind == "reduce_scatter":
        return total.split(parts)[me]
    return total if spec.kind == "all_reduce" or is_root else None


def specs_of(kind: str, world: int, me: int) -> list[Spec]:
    row = KINDS[kind]
    found: list[Spec] = []
    shapes = ("even", "uneven", "one-row", "empty")
    roots = range(world) if row.rooted else (0,)
    reductions = ("sum", "avg", "prod", "min", "max") if row.reduces else (None,)
    types = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    for shape, dtype, root, reduce in itertools.product(shapes, types, roots, reductions):
        if reduce and (dtype == torch.bool or (reduce == "avg" and dtype == torch.int64)):
            continue
        parts = tuple(n * COLUMNS for n in rows(shape, world))
        split = row.scales or kind == "all_to_all"
        whole = parts if split else (sum(parts),)
        found.append(Spec(kind, world, me, whole, dtype, reduce, root))
        if kind == "all_to_all":
            found.append(Spec(kind, world, me, whole, dtype, merges=True))
    return found


def run_all(kind: str, backend: str, seed: int, topic: str, in_place: bool) -> int:
    """Runs every variant of a kind twice, each from memory of its own or in its form in place, and
    compares; how many there were."""
    team, wait = meet()
    specs, row = specs_of(kind, team.size, team.me), KINDS[kind]
    if in_place:  # of larger parts too
        specs = [
            dataclasses.replace(s, parts=tuple(n * (k % 2 * seed % 5000 + 1) for n in s.parts))
            for k, s in enumerate(specs)
        ]
    runs = bind(team, backend, specs, topic)
    for _ in range(2):
        team.control.enter(1, "collectives")
        for number, (spec, run) in enumerate(zip(specs, runs, strict=True)):
            team.control.reach(0, number + 1, wait)
            given = [
                values(seed + number, rank, numel_given(spec, rank), spec.dtype)
                for rank in range(team.size)
            ]
            wanted = expected(spec, given)
            reads = row.reads == "all" or spec.me == spec.root
            src = given[spec.me].clone()
            own = slice(sum(spec.parts[: spec.me]), sum(spec.parts[: spec.me + 1]))
            dst = None if wanted is None else torch.full_like(wanted, 77).to(spec.dtype)
            changes = slice(0, 0)  # of the source
            if in_place and COLLECTIVES[kind][0] != "own":
                dst, changes = src, slice(None)
            elif in_place and row.scales == "gather" and dst is not None:
                dst[own] = src
                src, changes = dst[own], slice(None)
            elif in_place and row.scales == "scatter":
                dst = src[own] if reads else src.new_empty(spec.parts[spec.me])
                changes = own
            run(src if reads else None, None if wanted is None else dst, wait)
            if dst is not None and wanted is not None:
                assert torch.equal(dst, wanted.to(spec.dtype)), (spec, dst, wanted)
            after, before = src.clone(), given[spec.me].clone()
            after[changes] = before[changes] = 0
            assert torch.equal(after, before), f"{spec} changed its source"
        team.control.leave()
    return len(specs)


@pytest.mark.parametrize(
    "world", ["drawn", *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4))]
)
@pytest.mark.parametrize(
    ("kind", "backend", "in_place"),
    [
        *((kind, b, False) for kind in KINDS if kind != "barrier" for b in ("gloo", "peer")),
        *((k, b, True) for k, (_, of) in COLLECTIVES.items() for b in of if b in ("gloo", "peer")),
    ],
)
def test_kind_moves_and_reduces_as_it_says(
    pool: Pool, kind: str, backend: str, in_place: bool, world: int | str, seed: int
) -> None:
    """Also in place, where the verifier allows it; for a team whose size is drawn."""
    size = random.Random(seed).choice((2, 3)) if isinstance(world, str) else world
    topic = f"{kind}-{seed}-{in_place}"
    counts = pool(size).run(run_all, kind, backend, seed, topic, in_place)
    assert counts == [counts[0]] * size
    assert counts[0] >= 8


def refuse(dtype: torch.dtype, reduce: str, backend: str) -> str:
    team, _ = meet()
    spec = Spec("all_reduce", team.size, team.me, (4,), dtype, reduce)
    try:
        bind(team, backend, [spec], f"refuse-{dtype}-{reduce}")
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("dtype", "reduce", "backend", "advice"),
    [
        (torch.int32, "avg", "gloo", "divide"),
        (torch.int32, "avg", "peer", "divide"),
        (torch.int16, "sum", "gloo", "backend='peer'"),
        (torch.complex64, "max", "peer", "order"),
        (torch.bool, "sum", "peer", "max"),
    ],
    ids=str,
)
def test_reductions_without_a_meaning_are_refused_with_advice(
    pool: Pool, dtype: torch.dtype, reduce: str, backend: str, advice: str
) -> None:
    for text in pool(2).run(refuse, dtype, reduce, backend):
        assert advice in text


def peer_bits(seed: int) -> torch.Tensor:
    """An fp32 all-reduce of values whose sum depends on the order."""
    team, wait = meet()
    spec = Spec("all_reduce", team.size, team.me, (1000,), torch.float32, "sum")
    (run,) = bind(team, "peer", [spec], f"bits-{seed}")
    generator = torch.Generator().manual_seed(seed + team.me)
    src, dst = torch.randn(1000, generator=generator) * 1e3, torch.empty(1000)
    team.control.enter(2, "bits")
    team.control.reach(0, 1, wait)
    run(src, dst, wait)
    team.control.leave()
    return dst


def test_peer_reduces_in_rank_order(pool: Pool, seed: int) -> None:
    results = pool(4).run(peer_bits, seed)
    total = torch.zeros(1000)
    for rank in range(4):
        total += torch.randn(1000, generator=torch.Generator().manual_seed(seed + rank)) * 1e3
    assert all(torch.equal(result, total) for result in results)


FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.bfloat16], ids=str)
def test_narrow_floats_add_up_in_fp32(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randn(3, 5, 8, generator=generator).to(dtype)
    wide = slots.float()
    total = wide[0] + wide[1] + wide[2]
    assert torch.equal(sum_slots(slots).float(), total.to(dtype).float())
    out = torch.empty_like(slots[0])
    for reduce, wanted in {
        "sum": total,
        "avg": total / 3,
        "prod": wide[0] * wide[1] * wide[2],
        "min": wide.amin(0),
        "max": wide.amax(0),
    }.items():
        reduce_into(list(slots), reduce, out=out)
        assert torch.equal(out.float(), wanted.to(dtype).float()), reduce


def test_what_stands_for_nothing_is_made_once_and_has_no_memory() -> None:
    with torch.inference_mode():
        first = nothing(torch.device("cpu"), torch.int16)
    assert nothing(torch.device("cpu"), torch.int16) is first
    assert nothing(torch.device("cpu")) is not first
    assert not first.is_inference()
    assert (first.dtype, first.numel(), first.untyped_storage().nbytes()) == (torch.int16, 0, 0)
    first.copy_(first)  # as a collective writes it


def test_what_gloo_does_not_reduce_another_transport_does() -> None:
    class Gloo:
        def name(self) -> str:
            return "gloo"

    spec = Spec("all_reduce", 2, 0, (4,), torch.bool, "max")
    with pytest.raises(UnsupportedError, match=r"torch\.bool.*transport='peer'"):
        bind_collective(Gloo(), spec, 1.0)


def test_ucc_reads_from_a_copy_of_what_it_writes() -> None:
    class Ucc:
        def name(self) -> str:
            return "ucc"

        def _allgather_base(self, dst: torch.Tensor, src: torch.Tensor, options: object) -> Ucc:
            self.apart = src.untyped_storage().data_ptr() != dst.untyped_storage().data_ptr()
            return self

        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: object) -> None:
            pass

    backend, whole = Ucc(), torch.zeros(8)
    run = bind_collective(backend, Spec("all_gather", 2, 0, (4, 4), torch.float32), 1.0)
    run(whole[:4], whole, BoundedWait(1.0, lambda: "the op under test"))
    assert backend.apart
