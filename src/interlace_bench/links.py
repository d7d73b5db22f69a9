"""Transfers between ranks: one-sided copies by engine and by kernel, messages, collectives.

    best = best_copy(ranks)                     # all ranks copying at once
    for figure in measure_links(ranks, sizes, step):
        print(figure.pattern, figure.protocol, figure.nbytes, figure.bandwidth)
    memory = BenchMemory(ranks, 1 << 20)
    memory.copy("ce", memory.mine, memory.theirs[1], 4096)     # a get: the first 4096 bytes

Patterns: `0>1` is one ordered pair, rank 0 at work and rank 1 the other end; `ring` is every rank
with the next; `all` is every rank with every other, one after another; `team` is a collective;
`hosts` is every rank with the one in its place on the next host, or a collective of all hosts. The
ranks of each host measure what is inside it at once, and then all measure between hosts.
Engines: `ce` copies by the copy engine (`cuMemcpyDtoDAsync`), `sm` by a kernel; a CPU has `cpu`.
"""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm.backends import require_backend
from interlace.comm.host.shared_memory import Segment, share
from interlace.comm.resets import reset_teams
from interlace.cost.machine import link_bytes
from interlace.errors import BackendError, InterlaceError
from interlace.ir import Program
from interlace.ir.ops import KINDS
from interlace.options import BACKENDS, Options
from interlace.runtime import Executor
from interlace_bench.fit import Sample
from interlace_bench.race import burst, describe
from interlace_bench.ranks import WAIT_S, Ranks
from interlace_bench.rows import Row

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

    def copy(self, engine: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int) -> None:
        """Copies the first bytes, on the stream that was current when this was made."""
        if engine == "sm":  # a kernel of one load and one store: numbers of 8 bytes plus nothing
            whole = dst[:nbytes].view(torch.int64)
            torch.bitwise_or(src[:nbytes].view(torch.int64), 0, out=whole)
        elif engine == "ce" and self._driver is not None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured transfer."""

    kind: str
    """`get`, `put`, `send` or a collective's kind."""
    backend: str
    protocol: str = ""
    """`ce`, `sm` or `cpu`."""
    pattern: str
    """Who takes part; see above. Collectives: `team`."""
    nbytes: int
    """Bytes of one copy, or of a collective's larger tensor."""
    ranks: int
    hosts: int = 1
    """On how many hosts they are."""
    moved: float
    """Bytes that went into (or out of) one rank meanwhile."""
    seconds: float = math.nan
    """Time of one transfer on the slowest rank; NaN where it failed."""
    error: str = ""

    @property
    def bandwidth(self) -> float:
        """Bytes a second into (or out of) one rank."""
        return self.moved / self.seconds if self.seconds > 0 else math.nan

    @property
    def row(self) -> Row:
        """The same as a row; `world` is the ranks that took part: inside a host those there."""
        shared = ("kind", "backend", "protocol", "pattern", "nbytes")
        return {
            **{name: getattr(self, name) for name in shared},
            "world": self.ranks,
            "us": self.seconds * 1e6,
            "gbs": self.bandwidth / 1e9,
            "error": self.error,
        }

    @property
    def sample(self) -> Sample:
        """The same for `interlace_bench.fit`."""
        count = self.ranks
        each = self.seconds / (count - 1) if self.pattern == "all" else self.seconds
        return Sample(
            kind=self.kind,
            seconds=each,
            backend=self.backend,
            protocol="ce" if self.protocol == "cpu" else self.protocol,
            nbytes=self.nbytes,
            ranks=2 if ">" in self.pattern else count,
            hosts=self.hosts,
            concurrent=self.pattern in ("ring", "all", "hosts"),
        )


def sizes_between(least: int, most: int, factor: int = 4) -> list[int]:
    """Sizes that grow by `factor`."""
    steps = int(math.log(most / least, factor) + 1e-9)
    sizes = [least * factor**i for i in range(steps + 1)]
    return sizes if sizes[-1] == most else [*sizes, most]


def engines(ranks: Ranks) -> tuple[str, ...]:
    """The ways to copy that there are."""
    return ("ce", "sm") if ranks.cuda else ("cpu",)


def patterns(ranks: Ranks) -> list[tuple[str, list[int]]]:
    """Each pattern with the peers that this rank works with."""
    me, size = ranks.me, ranks.size
    pairs = [
        (f"{a}>{b}", [b] if me == a else []) for a in range(size) for b in range(size) if a != b
    ]
    others = [(me + k) % size for k in range(1, size)]
    return [*pairs, ("ring", others[:1]), *([("all", others)] if size > 2 else [])]


def timed(ranks: Ranks, run: Callable[[], Any] | None, guess: float) -> float:
    """Seconds of one launch: the median of a few bursts, of each the slowest rank."""
    launches = min(100, max(2, round(BURST_S / guess)))
    bursts = [burst(ranks, run, [()], launches)[0] for _ in range(REPEATS)]
    return statistics.median(ranks.maximum(bursts))


def measure_links(
    ranks: Ranks, sizes: Sequence[int], step: Callable[[str], None]
) -> Iterator[Figure]:
    """Every pattern, both directions, every engine, every size; then messages of the backend."""
    inside = ranks.within()
    if inside.size > 1:
        memory = BenchMemory(inside, max(sizes))
        for pattern, peers in patterns(inside):
            for kind in ("get", "put"):
                for engine in engines(inside):
                    step(f"{kind} {engine} {pattern}")
                    for nbytes in sizes:
                        yield _copy(inside, memory, kind, engine, pattern, peers, nbytes)
        step("send")
        for nbytes in sizes:
            yield _message(inside, nbytes)
    if ranks.hosts:
        step("send between hosts")
        for nbytes in sizes:
            yield _message(ranks, nbytes)


def _copy(
    ranks: Ranks,
    memory: BenchMemory,
    kind: str,
    engine: str,
    pattern: str,
    peers: list[int],
    nbytes: int,
) -> Figure:
    mine = memory.private

    def run() -> None:
        for peer in peers:
            dst, src = (mine, memory.theirs[peer]) if kind == "get" else (memory.theirs[peer], mine)
            memory.copy(engine, dst, src, nbytes)

    count = ranks.size - 1 if pattern == "all" else 1
    guess = count * (1e-5 + nbytes / (2e11 if ranks.cuda else 3e9))
    return Figure(
        kind=kind,
        backend="peer",
        protocol=engine,
        pattern=pattern,
        nbytes=nbytes,
        ranks=ranks.size,
        moved=float(count * nbytes),
        seconds=timed(ranks, run if peers else None, guess),
    )


def _message(ranks: Ranks, nbytes: int) -> Figure:
    """Every rank sends to the next and receives from the one before: within a host, or each from
    host to host."""
    backend = "nccl" if ranks.cuda else "gloo"
    out = torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device)
    into = torch.zeros_like(out)
    rows = zip(*ranks.hosts, strict=False) if ranks.hosts else [tuple(range(ranks.size))]
    line = next((row for row in rows if ranks.me in row), (ranks.me,))
    at = line.index(ranks.me)
    to, source = line[(at + 1) % len(line)], line[at - 1]

    def run() -> None:
        ops = [
            dist.P2POp(dist.isend, out, group=ranks.group, group_peer=to),
            dist.P2POp(dist.irecv, into, group=ranks.group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    figure = Figure(
        kind="send",
        backend=backend,
        pattern="hosts" if ranks.hosts else "ring",
        nbytes=nbytes,
        ranks=ranks.size,
        hosts=len(ranks.hosts) or 1,
        moved=float(nbytes),
    )
    guess = (4e-5 + nbytes / 2e11) if ranks.cuda else (2e-4 + nbytes / 1e9)
    return attempt(ranks, figure, lambda: timed(ranks, run if len(line) > 1 else None, guess))


def attempt(ranks: Ranks, figure: Figure, measure: Callable[[], float]) -> Figure:
    """The Figure with its time, or with the error where the measurement raised on some rank."""
    problem, seconds = None, math.nan
    try:
        seconds = measure()
    except Exception as error:
        problem = describe(error, ranks)
    problem = ranks.agree(problem)
    return replace(figure, seconds=math.nan if problem else seconds, error=problem or "")


def best_copy(ranks: Ranks, sizes: Sequence[int] = ROOF_SIZES) -> Figure | None:
    """The link's roof inside a host: the best of long copies by copy engine, get and put, to the
    next rank and to all, all ranks copying. None where a host has one rank."""
    ranks = ranks.within()
    if ranks.size < 2:
        return None
    memory = BenchMemory(ranks, max(sizes))
    found = [
        _copy(ranks, memory, kind, engines(ranks)[0], pattern, peers, nbytes)
        for pattern, peers in patterns(ranks)
        if ">" not in pattern
        for kind in ("get", "put")
        for nbytes in sizes
    ]
    return max(found, key=lambda figure: figure.bandwidth)


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
) -> Iterator[Figure]:
    """Every kind of every backend over the sizes."""
    there = backends(ranks)[0]
    inside = ranks.within()
    for team in [inside] * (inside.size > 1) + [ranks] * bool(ranks.hosts):
        for backend, kind in itertools.product(there, KINDS):
            if backend == "peer" and team.hosts:
                continue
            step(f"{backend} {kind}" + " between hosts" * bool(team.hosts))
            for nbytes in sizes[:1] if kind == "barrier" else sizes:
                figure = _collective(team, backend, kind, nbytes)
                yield figure
                if figure.error:
                    break  # larger ones fail as well, and waiting for each takes its time


def _collective(ranks: Ranks, backend: str, kind: str, nbytes: int) -> Figure:
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

    nbytes = 4 * elements if kind != "barrier" else 0
    figure = Figure(
        kind=kind,
        backend=backend,
        pattern="hosts" if ranks.hosts else "team",
        nbytes=nbytes,
        ranks=world,
        hosts=len(ranks.hosts) or 1,
        moved=link_bytes(kind, nbytes, world) or math.nan,
    )
    figure = attempt(ranks, figure, measure)
    for executor in held:
        executor.close()
    if figure.error:
        try:
            reset_teams()
        except InterlaceError as error:
            step_error = str(error).splitlines()[0]
            raise InterlaceError(f"{backend} {kind}: {figure.error}; then {step_error}") from error
    return figure
