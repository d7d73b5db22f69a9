"""Transfers between ranks: one-sided copies, messages, collectives.

    best = best_copy(ranks)                     # all ranks copying at once
    for sample in measure_links(ranks, sizes, step):
        print(sample.pattern, sample.kind, sample.nbytes, sample.seconds)
    memory = BenchMemory(ranks, 1 << 20)
    memory.copy(memory.mine, memory.theirs[1], 4096)     # a get: the first 4096 bytes

Patterns: `ring` is every rank with the next; `all` is every rank with every other, one after
another; `team` is a collective; `hosts` is every rank with the one in its place on the next host,
or a collective of all hosts. The ranks of each host measure what is inside it at once, and then all
measure between hosts. GPUs copy by the copy engine (`cuMemcpyDtoDAsync`).
"""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm.backends import require_backend
from interlace.comm.host.shared_memory import Segment, share
from interlace.comm.resets import reset_teams
from interlace.errors import BackendError, InterlaceError
from interlace.ir import Program
from interlace.ir.ops import KINDS
from interlace.options import BACKENDS, Options
from interlace.runtime import Executor
from interlace_bench.fit import Sample
from interlace_bench.race import burst, describe
from interlace_bench.ranks import WAIT_S, Ranks

ROOF_SIZES = (64 << 20, 256 << 20)
"""Bytes of the copies that make the roof."""
BURST_S = 2e-3
REPEATS = 3
COLLECTIVES = 4
"""Collectives in a Program: what a run costs besides is spread over them."""
TIMEOUT_S = 30.0


# -- memory of the peers ------------------------------------------------------------------------


def assert_no_multicast(device: torch.device) -> None:
    """Raises BackendError unless torch's symmetric memory leaves multicast alone."""
    from interlace.torch_private.distributed import DeviceType, SymmetricMemory

    if SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0):
        raise BackendError(
            "torch's symmetric memory would use NVLink multicast, which this benchmark must not: "
            "set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before python starts"
        )


def enable_symmetric_memory(group: dist.ProcessGroup) -> str:
    """Lets torch's symmetric memory serve a group; its name."""
    symm_mem: Any = importlib.import_module("torch.distributed._symmetric_memory")
    name = group.group_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and 2.11 looks for it in places
        symm_mem.enable_symm_mem_for_group(name)
    return name


class BenchMemory:
    """As many bytes on every rank, which all ranks can read and write. All ranks make it."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        self.nbytes = nbytes
        self.theirs: list[torch.Tensor]
        """Memory of every rank, in order of rank, this one's own included."""
        if ranks.cuda:
            self._on_gpus(ranks)
        else:
            shared = share(ranks.board, ranks.topic("peers"), nbytes, {}, WAIT_S)
            self._segments: tuple[Segment, ...] = shared.segments
            self.theirs = [segment.bytes(0, nbytes) for segment in shared.segments]
        self.mine = self.theirs[ranks.me]
        private = torch.empty(nbytes, dtype=torch.uint8, device=ranks.device)
        self.private = private.random_(0, 256)
        """Ordinary memory, which puts read and gets fill."""
        self._driver = _driver() if ranks.cuda else None
        self._stream = torch.cuda.current_stream().cuda_stream if ranks.cuda else 0

    def _on_gpus(self, ranks: Ranks) -> None:
        from interlace.torch_private.distributed import SymmetricMemory

        assert_no_multicast(ranks.device)
        name = enable_symmetric_memory(ranks.group)
        shape = (self.nbytes,), (1,), torch.uint8, ranks.device, name
        buffer: torch.Tensor = SymmetricMemory.empty_strided_p2p(*shape)
        handle: Any = SymmetricMemory.rendezvous(buffer)
        self._held = buffer, handle
        self.theirs = [
            buffer if rank == ranks.me else handle.get_buffer(rank, (self.nbytes,), torch.uint8)
            for rank in range(ranks.size)
        ]

    def copy(self, dst: torch.Tensor, src: torch.Tensor, nbytes: int) -> None:
        """Copies the first bytes, on the stream that was current when this was made."""
        if self._driver is not None:
            self._driver(dst.data_ptr(), src.data_ptr(), nbytes, self._stream)
        else:  # torch copies between a peer's memory and its own by the copy engine as well
            dst[:nbytes].copy_(src[:nbytes])


def _driver() -> Any:
    """`cuMemcpyDtoDAsync` of cuda-bindings, checked; None without them."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None

    def copy(dst: int, src: int, nbytes: int, stream: int) -> None:
        (code,) = driver.cuMemcpyDtoDAsync(dst, src, nbytes, stream)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuMemcpyDtoDAsync: {code}")

    return copy


# -- copies and messages ------------------------------------------------------------------------


def sizes_between(least: int, most: int, factor: int = 4) -> list[int]:
    """Sizes that grow by `factor`."""
    steps = int(math.log(most / least, factor) + 1e-9)
    sizes = [least * factor**i for i in range(steps + 1)]
    return sizes if sizes[-1] == most else [*sizes, most]


def patterns(ranks: Ranks) -> list[tuple[str, list[int]]]:
    """Each pattern with the peers that this rank works with."""
    others = [(ranks.me + k) % ranks.size for k in range(1, ranks.size)]
    return [("ring", others[:1]), *([("all", others)] if ranks.size > 2 else [])]


def timed(ranks: Ranks, run: Callable[[], Any], guess: float) -> float:
    """Seconds of one launch: the median of a few bursts, of each the slowest rank."""
    launches = min(100, max(2, round(BURST_S / guess)))
    bursts = [burst(ranks, run, [()], launches)[0] for _ in range(REPEATS)]
    return statistics.median(ranks.maximum(bursts))


def measure_links(
    ranks: Ranks, sizes: Sequence[int], step: Callable[[str], None]
) -> Iterator[Sample]:
    """Every pattern, both directions, every size; then messages of the backend."""
    inside = ranks.within()
    if inside.size > 1:
        step("get and put")
        yield from _copies(inside, sizes)
        step("send")
        for nbytes in sizes:
            yield _message(inside, nbytes)
    if ranks.hosts:
        step("send between hosts")
        for nbytes in sizes:
            yield _message(ranks, nbytes)


def _copies(ranks: Ranks, sizes: Sequence[int]) -> Iterator[Sample]:
    """Gets and puts of every size, in each pattern, all ranks copying."""
    memory = BenchMemory(ranks, max(sizes))
    mine = memory.private
    for (pattern, peers), kind, nbytes in itertools.product(patterns(ranks), ("get", "put"), sizes):

        def run(peers: list[int] = peers, kind: str = kind, nbytes: int = nbytes) -> None:
            for peer in peers:
                theirs = memory.theirs[peer]
                dst, src = (mine, theirs) if kind == "get" else (theirs, mine)
                memory.copy(dst, src, nbytes)

        guess = len(peers) * (1e-5 + nbytes / (2e11 if ranks.cuda else 3e9))
        yield Sample(
            kind=kind,
            backend="peer",
            protocol="ce" if ranks.cuda else "cpu",
            pattern=pattern,
            nbytes=nbytes,
            ranks=ranks.size,
            seconds=timed(ranks, run, guess) / len(peers),
        )


def _message(ranks: Ranks, nbytes: int) -> Sample:
    """Every rank sends to the next and receives from the one before: within a host, or each from
    host to host."""
    out = torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device)
    into = torch.zeros_like(out)
    rows = zip(*ranks.hosts, strict=False) if ranks.hosts else [tuple(range(ranks.size))]
    line = next((row for row in rows if ranks.me in row), (ranks.me,))
    at = line.index(ranks.me)
    to, source = line[(at + 1) % len(line)], line[at - 1]

    def run() -> None:
        if len(line) < 2:
            return  # no rank has this one's place on another host
        ops = [
            dist.P2POp(dist.isend, out, group=ranks.group, group_peer=to),
            dist.P2POp(dist.irecv, into, group=ranks.group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    blank = Sample(
        kind="send",
        seconds=math.nan,
        backend="nccl" if ranks.cuda else "gloo",
        pattern="hosts" if ranks.hosts else "ring",
        nbytes=nbytes,
        ranks=ranks.size,
        hosts=len(ranks.hosts) or 1,
    )
    guess = (4e-5 + nbytes / 2e11) if ranks.cuda else (2e-4 + nbytes / 1e9)
    return attempt(ranks, blank, lambda: timed(ranks, run, guess))


def attempt(ranks: Ranks, blank: Sample, measure: Callable[[], float]) -> Sample:
    """The sample with its time, or with the error where the measurement raised on some rank."""
    problem, seconds = None, math.nan
    try:
        seconds = measure()
    except Exception as error:
        problem = describe(error, ranks)
    problem = ranks.agree(problem)
    return replace(blank, seconds=math.nan if problem else seconds, error=problem or "")


def best_copy(ranks: Ranks, sizes: Sequence[int] = ROOF_SIZES) -> Sample | None:
    """The link's roof inside a host: the best of long copies, get and put, to the next rank and to
    all, all ranks copying. None where a host has one rank."""
    ranks = ranks.within()
    if ranks.size < 2:
        return None
    return max(_copies(ranks, sizes), key=lambda sample: sample.nbytes / sample.seconds)


# -- collectives --------------------------------------------------------------------------------


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


def collective_program(kind: str, backend: str, world: int, elements: int) -> Program:
    """A Program of a few collectives of that kind; the larger tensor has so many f32."""
    part = elements // world
    sizes = {
        **dict.fromkeys(("all_gather", "gather"), (part, elements)),
        **dict.fromkeys(("reduce_scatter", "scatter"), (elements, part)),
    }.get(kind, (elements, elements))
    with interlace.program(kind, team=world) as p:
        views = [p.input(name, "f32", (size,)) for name, size in zip("xy", sizes, strict=True)]
        for _ in range(COLLECTIVES):
            getattr(p, kind)(*views if kind != "barrier" else (), backend=backend)
    return p.program


def measure_collectives(
    ranks: Ranks, sizes: Sequence[int], step: Callable[[str], None]
) -> Iterator[Sample]:
    """Every kind of every backend over the sizes."""
    there = backends(ranks)[0]
    inside = ranks.within()
    for team in [inside] * (inside.size > 1) + [ranks] * bool(ranks.hosts):
        for backend, kind in itertools.product(there, KINDS):
            if backend == "peer" and team.hosts:
                continue
            step(f"{backend} {kind}" + " between hosts" * bool(team.hosts))
            for nbytes in sizes[:1] if kind == "barrier" else sizes:
                sample = _collective(team, backend, kind, nbytes)
                yield sample
                if sample.error:
                    break  # larger ones fail as well, and waiting for each takes its time


def _collective(ranks: Ranks, backend: str, kind: str, nbytes: int) -> Sample:
    world = ranks.size
    elements = -(-nbytes // 4 // world) * world
    held: list[Executor] = []

    def measure() -> float:
        program = collective_program(kind, backend, world, elements)
        options = Options(timeout_s=TIMEOUT_S)
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
        guess = COLLECTIVES * ((5e-4 + nbytes / 5e8) if slow else (3e-5 + nbytes / 1e11))
        return timed(ranks, lambda: executor.run(inputs), guess) / COLLECTIVES

    blank = Sample(
        kind=kind,
        seconds=math.nan,
        backend=backend,
        pattern="hosts" if ranks.hosts else "team",
        nbytes=4 * elements if kind != "barrier" else 0,
        ranks=world,
        hosts=len(ranks.hosts) or 1,
    )
    sample = attempt(ranks, blank, measure)
    for executor in held:
        executor.close()
    if sample.error:
        try:
            reset_teams()
        except InterlaceError as error:
            step_error = str(error).splitlines()[0]
            raise InterlaceError(f"{backend} {kind}: {sample.error}; then {step_error}") from error
    return sample
