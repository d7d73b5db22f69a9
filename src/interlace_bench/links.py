"""Transfers between ranks: one-sided copies, messages, collectives. `interlace bench interconnect`.

    report = work(InterconnectSettings(), ranks, tell)     # on every rank; rank 0 gets the report
    for sample in measured(InterconnectSettings(), ranks, tell):
        print(sample.pattern, sample.kind, sample.nbytes, sample.seconds)
    best = best_copy(ranks)                     # all ranks copying at once
    memory = BenchMemory(ranks, 1 << 20)
    memory.copy(memory.mine, memory.theirs[1], 4096)     # a get: the first 4096 bytes

Patterns: `ring` is every rank with the next; `all` is every rank with every other, one after
another; `team` is a collective; `hosts` is every rank with the one in its place on the next host,
or a collective of all hosts. The ranks of each host measure what is inside it at once, and then all
measure between hosts. GPUs copy by the copy engine (`cuMemcpyDtoDAsync`).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.comm.backends import require_backend
from interlace.comm.host.shared_memory import Segment, share
from interlace.errors import BackendError, OptionError
from interlace.ir import Program
from interlace.ir.ops import KINDS
from interlace.launch import Tell
from interlace.options import BACKENDS, Options
from interlace.runtime import Executor
from interlace_bench.calibration.fit import Sample
from interlace_bench.race import (
    Opened,
    RacePlan,
    Variant,
    benchmark,
    close,
    give_up,
    open_racer,
    prepare,
    race,
    step,
)
from interlace_bench.ranks import WAIT_S, Ranks
from interlace_bench.rows import Row
from interlace_bench.settings import InterconnectSettings, nbytes

ROOF_SIZES = (64 << 20, 256 << 20)
"""Bytes of the copies that make the roof."""
LEAST, COLLECTIVES_MOST = 1 << 10, 1 << 28
"""Bytes of the smallest message, and of the largest collective."""
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


def sample(ranks: Ranks, what: Variant | Callable[[], Any], parts: int = 1, **of: Any) -> Sample:
    """A sample with the time of each of the `parts` of a launch, in a few bursts alone, of which
    the slowest rank counts; or with the error where a rank raised."""
    racer = prepare(ranks, what) if isinstance(what, Variant) else open_racer("launch", what)
    if racer.ready:
        race(ranks, [racer], 0.0, rounds=(REPEATS, REPEATS), launches=(2, 100))
        give_up(ranks, racer)
    close([racer])
    return Sample(seconds=racer.median / parts, ranks=ranks.size, error=racer.problem or "", **of)


def measured(settings: InterconnectSettings, ranks: Ranks, tell: Tell) -> list[Sample]:
    """The samples of links and collectives, alike on all ranks."""
    most = nbytes(settings.most or ("1GiB" if ranks.cuda else "16MiB"))
    if most < LEAST:
        raise OptionError(f"messages of {most} bytes at most: give {LEAST} or more")
    sizes, shorter = (sizes_between(LEAST, each) for each in (most, min(most, COLLECTIVES_MOST)))
    inside = ranks.within()
    teams = [inside] * (inside.size > 1) + [ranks] * bool(ranks.hosts)
    found: list[Sample] = []
    for team in teams:
        where = " between hosts" * bool(team.hosts)
        if not team.hosts:
            step(tell, "get and put")
            found += _copies(team, sizes)
        step(tell, f"send{where}")
        found += [_message(team, size) for size in sizes]
    for team in teams:
        found += _collectives(team, shorter, tell)
    return found + backends(ranks)[1]


def _copies(ranks: Ranks, sizes: Sequence[int]) -> Iterator[Sample]:
    """Gets and puts of every size, in each pattern, all ranks copying."""
    memory = BenchMemory(ranks, max(sizes))
    mine = memory.private
    for (pattern, peers), kind, size in itertools.product(patterns(ranks), ("get", "put"), sizes):

        def run(peers: list[int] = peers, kind: str = kind, size: int = size) -> None:
            for peer in peers:
                theirs = memory.theirs[peer]
                dst, src = (mine, theirs) if kind == "get" else (theirs, mine)
                memory.copy(dst, src, size)

        protocol = "ce" if ranks.cuda else "cpu"
        of = {"kind": kind, "backend": "peer", "protocol": protocol, "pattern": pattern}
        yield sample(ranks, run, len(peers), **of, nbytes=size)


def _message(ranks: Ranks, size: int) -> Sample:
    """Every rank sends to the next and receives from the one before: within a host, or each from
    host to host."""
    out = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
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

    return sample(
        ranks,
        run,
        kind="send",
        backend="nccl" if ranks.cuda else "gloo",
        pattern="hosts" if ranks.hosts else "ring",
        nbytes=size,
        hosts=len(ranks.hosts) or 1,
    )


def best_copy(ranks: Ranks, sizes: Sequence[int] = ROOF_SIZES) -> Sample | None:
    """The link's roof inside a host: the best of long copies, get and put, to the next rank and to
    all, all ranks copying. None where a host has one rank."""
    ranks = ranks.within()
    copies = [copy for copy in _copies(ranks, sizes) if copy.usable] if ranks.size > 1 else []
    return max(copies, key=lambda copy: copy.nbytes / copy.seconds, default=None)


# -- collectives --------------------------------------------------------------------------------


def backends(ranks: Ranks) -> tuple[list[str], list[Sample]]:
    """The backends that serve this device, and those that do not, each with its reason."""
    there: list[str] = []
    absent: list[Sample] = []
    for name in BACKENDS:
        try:
            require_backend(name)
            if name == "nccl" and not ranks.cuda:
                raise BackendError("NCCL moves tensors of GPUs alone")
            there.append(name)
        except BackendError as error:
            absent.append(Sample(kind="any", seconds=math.nan, backend=name, error=str(error)))
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


def _collectives(ranks: Ranks, sizes: Sequence[int], tell: Tell) -> Iterator[Sample]:
    """Every kind of every backend over the sizes."""
    for backend, kind in itertools.product(backends(ranks)[0], KINDS):
        if backend == "peer" and ranks.hosts:
            continue
        step(tell, f"{backend} {kind}" + " between hosts" * bool(ranks.hosts))
        for size in sizes[:1] if kind == "barrier" else sizes:
            found = _collective(ranks, backend, kind, size)
            yield found
            if found.error:
                break  # larger ones fail as well, and waiting for each takes its time


def _collective(ranks: Ranks, backend: str, kind: str, size: int) -> Sample:
    elements = -(-size // 4 // ranks.size) * ranks.size
    held = contextlib.ExitStack()

    def make() -> Opened:
        program = collective_program(kind, backend, ranks.size, elements)
        options = Options(timeout_s=TIMEOUT_S)
        groups = {"tp": ranks.group}
        executor = Executor(program, groups=groups, device=ranks.device, options=options)
        held.callback(executor.close)
        executor.prepare()
        sizes = [[int(str(size)) for size in buffer.shape] for buffer in program.params]
        inputs = [torch.zeros(shape, device=ranks.device) for shape in sizes]
        return Opened(lambda: executor.run(inputs))

    return sample(
        ranks,
        Variant(f"{backend} {kind}", make, held.close),
        COLLECTIVES,
        kind=kind,
        backend=backend,
        pattern="hosts" if ranks.hosts else "team",
        nbytes=4 * elements if kind != "barrier" else 0,
        hosts=len(ranks.hosts) or 1,
    )


# -- the benchmark ------------------------------------------------------------------------------


@benchmark
def work(settings: InterconnectSettings, ranks: Ranks, tell: Tell) -> RacePlan:
    """All of it, as one case."""

    def shown(rows: list[Row]) -> list[Row]:
        largest = {row["kind"]: row["nbytes"] for row in rows}  # sizes grow
        return [row for row in rows if row["nbytes"] == largest[row["kind"]]]

    def rows(seconds: float) -> list[Row]:
        return [each.row for each in measured(settings, ranks, tell)]

    return RacePlan(cases={"links": rows}, headline=f", {ranks.size} ranks", shown=shown)
