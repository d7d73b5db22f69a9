"""`interlace run`: a schedule from a file on all ranks, timed, drawn and compared with another.

    report = work(settings, ranks, tell)         # on every rank

Each rank draws its inputs by seed and rank; runs the Programs on copies of these;
compares results and inputs that were written in place; times the Programs in turn, run by run, of
which the slowest rank counts; and records a timeline. Rank 0 reports, and writes the page.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.cost import Timeline, simulate
from interlace.errors import InputError
from interlace.ir import Buffer, Program, View
from interlace.ir.text.printer import print_view
from interlace.launch import Report, Tell
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime.machine import machine_for
from interlace.runtime.values import DTYPES, once, whole
from interlace.trace import Run, figures_json, write_page
from interlace.trace.figures import milliseconds
from interlace.trace.tracks import ranks_of, write_whole
from interlace_bench.ranks import WAIT_S, Ranks
from interlace_bench.settings import BenchSettings

TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float8_e4m3fn: 0.25,
    torch.float8_e5m2: 0.5,
    torch.complex64: 1e-5,
    torch.complex128: 1e-10,
}
"""Largest difference of an element, relative to the tensor's greatest element, where sums are taken
in another order. Other types must be equal."""
WARM_UPS, TRACED_RUNS = 2, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings(BenchSettings):
    """Programs to run, their reference, and the files to write."""

    name, least_ranks, keeps_rows = "run", 1, False
    what: str = "the schedule"  # pyright: ignore[reportIncompatibleVariableOverride]
    """The file, for errors."""
    programs: tuple[Program, ...]
    against: tuple[Program, ...] = ()
    """Programs whose results are the reference; none: no comparison."""
    against_name: str = ""
    in_order: bool = False
    """The reference runs one op after another."""
    seed: int = 0
    runs: int = 20
    html: str | None = None
    """Path of the page with the timelines."""
    out: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Path of the measured timeline as data."""

    @property
    def exact(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True where results are compared: equal operations then give equal bits on GPUs."""
        return bool(self.against)


@dataclass(frozen=True, slots=True)
class ResultComparison:
    """The difference of one result of one rank from its reference."""

    verdict: str
    """`equal` (bit for bit), `close` (within the tolerance of its type) or `differs`."""
    off: float | None = 0.0
    """The largest difference, as a part of the greatest element; None where that is no number."""


class OpenedSchedule:
    """A Program of a set, bound on this rank, with inputs that its runs may write."""

    def __init__(
        self,
        programs: Sequence[Program],
        ranks: Ranks,
        groups: dict[tuple[str, tuple[int, ...]], Any],
        given: dict[str, Tensor],
        options: Options,
    ) -> None:
        program = next(p for p in programs if ranks.me in ranks_of(p))
        own = program.instantiate(ranks.me).at(program.sizes.values)
        members = program.where(ranks.me).members
        self.inputs = {b.name: _empty(b, ranks.device) for b in inputs_of(own)}
        outs = {b.name: _empty(b, ranks.device) for b in own.params if b.kind == "output"}
        writes = {access.view.buffer for op in own.ops for access in op.writes()}
        self._written = [name for name in self.inputs if name in writes]
        self._out = list(outs.values())
        handed = self.inputs.keys() - writes
        self._names: list[str | None] = []
        for result in own.returned():
            name = print_view(result, own) if isinstance(result, View) else str(result)
            name = f"{name} ({len(self._names)})" if name in self._names else name
            through = isinstance(result, View) and result.buffer in handed
            self._names.append(None if through else name)
        self._given = given
        self._fill()
        self.executor = Executor(
            program,
            groups={name: groups[name, member.ranks] for name, member in members.items()},
            device=ranks.device,
            options=options,
        ).prepare()

    def _fill(self) -> None:
        for name, tensor in self.inputs.items():
            place = once(tensor)
            place.copy_(self._given[name][tuple(map(slice, place.shape))])

    def run(self) -> tuple[Any, ...]:
        """One run on the inputs as they are now."""
        found = self.executor.run([*self.inputs.values()], self._out or None)
        self.executor.synchronize()
        return found

    def results(self, seed: int) -> dict[str, Tensor]:
        """Results of a run on the inputs as they were given, and inputs that it wrote; without
        inputs that are handed through."""
        self._fill()
        torch.manual_seed(seed)
        named = {n: x for n, x in zip(self._names, self.run(), strict=True) if n is not None}
        named |= {name: self.inputs[name] for name in self._written}
        return {n: torch.as_tensor(x).clone() for n, x in named.items() if x is not None}


@torch.no_grad()
def work(settings: RunSettings, ranks: Ranks, tell: Tell) -> Report | None:
    """Runs the schedule on this rank; rank 0 reports."""
    sets = [settings.programs, *([settings.against] if settings.against else [])]
    groups = groups_of([program for each in sets for program in each], ranks)
    given = make_inputs(sets, settings, ranks)
    with opened_sets(sets, settings, ranks, groups, given) as opened:
        seed = settings.seed + ranks.me
        results = [each.results(seed) for each in opened]
        compared = compare_all(*results) if len(results) > 1 else {}
        note = {
            "outputs": {n: [str(_type(x)), digest(x)] for n, x in results[0].items()},
            "compared": {name: asdict(item) for name, item in compared.items()},
            "inputs": {n: str(_type(x)) for n, x in opened[0].inputs.items()},
        }
        seconds = timed(opened, settings.runs, ranks)
    told = ranks.exchange(note)
    drawing = settings.html is not None or settings.out is not None
    timelines = traced(sets, settings, ranks, groups, given) if drawing else []
    if ranks.me:
        return None
    report: dict[str, Any] = {
        "schema": 1,
        "world": ranks.size,
        "device": torch.cuda.get_device_name() if ranks.cuda else "cpu",
        "seed": settings.seed,
        "ranks": told,
        **times(seconds[0]),
    }
    if settings.against:
        report["against"] = {"name": settings.against_name, **times(seconds[1])}
    if drawing:
        report |= draw(settings, timelines, ranks, seconds)
    return report


@contextlib.contextmanager
def opened_sets(
    sets: Sequence[Sequence[Program]],
    settings: RunSettings,
    ranks: Ranks,
    groups: Any,
    given: dict[str, Tensor],
    trace: bool = False,
) -> Iterator[list[OpenedSchedule]]:
    """This rank's Program of each set, bound; the second set, the reference, may be in order."""
    with contextlib.ExitStack() as stack:
        opened: list[OpenedSchedule] = []
        for programs in sets:
            in_order = bool(opened) and settings.in_order
            options = Options(
                timeout_s=min(settings.timeout, WAIT_S), in_order=in_order, trace=trace
            )
            opened.append(OpenedSchedule(programs, ranks, groups, given, options))
            stack.callback(opened[-1].executor.close)
        yield opened


def groups_of(programs: Sequence[Program], ranks: Ranks) -> dict[tuple[str, tuple[int, ...]], Any]:
    """A process group for each team and its ranks. All ranks call it."""
    wanted = {
        (name, member.ranks)
        for program in programs
        for rank in ranks_of(program)
        for name, member in program.where(rank).members.items()
    }
    return {(name, of): dist.new_group(list(of)) for name, of in sorted(wanted)}


def inputs_of(program: Program) -> list[Buffer]:
    """The inputs of a Program, in order."""
    return [buffer for buffer in program.params if buffer.kind == "input"]


def make_inputs(
    sets: Sequence[Sequence[Program]], settings: RunSettings, ranks: Ranks
) -> dict[str, Tensor]:
    """This rank's inputs by name. Raises InputError where the two sets take others."""
    signatures: list[dict[str, Buffer]] = []
    for programs in sets:
        program = next(p for p in programs if ranks.me in ranks_of(p))
        own = program.instantiate(ranks.me).at(program.sizes.values)
        signatures.append({buffer.name: buffer for buffer in inputs_of(own)})
    first = signatures[0]
    for other in signatures[1:]:
        ours, theirs = ({n: str(whole(b)) for n, b in each.items()} for each in (first, other))
        if wrong := [n for n in ours | theirs if ours.get(n) != theirs.get(n)]:
            raise InputError(
                f"{settings.against_name} takes other inputs: {', '.join(wrong)}. Results are "
                "compared of schedules that have the same inputs"
            )
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + ranks.me)
    given: dict[str, Tensor] = {}
    for name, buffer in first.items():
        box = whole(buffer)
        shape, dtype = tuple(map(int, box.sizes)), DTYPES[box.dtype]
        given[name] = draw_tensor(shape, dtype, generator).to(ranks.device)
    return given


def draw_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers; for integers 0 and 1, which are in the range of nearly any index."""
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=wide).to(dtype)
    return torch.randint(2, shape, generator=generator).to(dtype)


def _empty(buffer: Buffer, device: torch.device) -> Tensor:
    box = whole(buffer)
    sizes, strides = (tuple(map(int, each)) for each in (box.sizes, box.strides))
    return torch.empty_strided(sizes, strides, dtype=DTYPES[box.dtype], device=device)


def _type(tensor: Tensor) -> str:
    short = next(str(name) for name, dtype in DTYPES.items() if dtype == tensor.dtype)
    return f"{short}[{', '.join(map(str, tensor.shape))}]"


def digest(tensor: Tensor) -> str:
    """A short digest of the bytes of a tensor."""
    return hashlib.sha256(_bytes(tensor).numpy().data).hexdigest()[:8]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def compare_all(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, ResultComparison]:
    """Results compared in order: the two Programs may call them otherwise."""
    if len(found) != len(wanted):
        raise InputError(f"one schedule has {len(found)} results, and the other {len(wanted)}")
    pairs = zip(found.items(), wanted.values(), strict=True)
    return {name: compare(one, other) for (name, one), other in pairs}


def compare(found: Tensor, wanted: Tensor) -> ResultComparison:
    """Compares a tensor with its reference, bit for bit and then within the tolerance."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return ResultComparison("differs", None)
    if torch.equal(_bytes(found), _bytes(wanted)):
        return ResultComparison("equal")
    wide = torch.complex128 if found.is_complex() else torch.float64
    one, other = found.cpu().to(wide), wanted.cpu().to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    most = torch.where(same, 0.0, torch.nan_to_num((one - other).abs(), nan=math.inf)).max().item()
    greatest = torch.nan_to_num(other.abs(), nan=0.0, posinf=0.0).max().item()
    off = most / greatest if greatest else (math.inf if most else 0.0)
    verdict = "close" if off <= TOLERANCES.get(found.dtype, 0.0) else "differs"
    return ResultComparison(verdict, off if math.isfinite(off) else None)


def timed(opened: Sequence[OpenedSchedule], runs: int, ranks: Ranks) -> list[list[float]]:
    """Seconds of each run of each, of which the slowest rank counts; they take turns."""
    found: list[list[float]] = [[] for _ in opened]
    for number in range(WARM_UPS + runs):
        for each, spent in zip(opened, found, strict=True):
            ranks.align()
            begun = time.perf_counter()
            each.run()
            if number >= WARM_UPS:
                spent.append(time.perf_counter() - begun)
    return [ranks.maximum(spent) for spent in found]


def times(seconds: Sequence[float]) -> dict[str, Any]:
    """The figures of some runs, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "runs": len(ordered),
        "median_ms": statistics.median(ordered) * 1e3,
        "least_ms": ordered[0] * 1e3,
        "most_ms": ordered[-1] * 1e3,
    }


def traced(
    sets: Sequence[Sequence[Program]], settings: RunSettings, ranks: Ranks, groups: Any, given: Any
) -> list[Timeline]:
    """The timeline of each set of Programs on all ranks: of some runs, the one of median time; the
    sets take turns. All ranks call it."""
    found: list[list[Timeline]] = [[] for _ in sets]
    with opened_sets(sets, settings, ranks, groups, given, trace=True) as opened:
        for _ in range(WARM_UPS + TRACED_RUNS):
            for each, runs in zip(opened, found, strict=True):
                ranks.align()
                each.run()
                told = ranks.exchange({"timeline": each.executor.timeline().to_json()})
                parts = [Timeline.from_json(note["timeline"]) for note in told]
                spans = tuple(span for part in parts for span in part.spans)
                runs.append(Timeline(spans, parts[0].name, "measured"))
    return [
        sorted(runs[WARM_UPS:], key=lambda run: run.makespan_s)[TRACED_RUNS // 2] for runs in found
    ]


def draw(
    settings: RunSettings,
    timelines: Sequence[Timeline],
    ranks: Ranks,
    seconds: Sequence[Sequence[float]],
) -> dict[str, Any]:
    """Writes the page and the data that are wanted; what they show as figures, and their paths.
    `seconds` are those of the runs that were timed and not recorded."""
    report: dict[str, Any] = {"figures": figures_json(timelines), "files": []}
    if settings.out is not None:
        report["files"].append(str(write_whole(settings.out, timelines[0].to_json() + "\n")))
    if settings.html is None:
        return report
    machine, before = machine_for(Options(), ranks.device.type), None
    if settings.against:
        predicted = None if settings.in_order else simulate(settings.against, machine)
        before = Run(settings.against, predicted, timelines[1], label=settings.against_name)
    predicted = simulate(settings.programs, machine)
    run = Run(settings.programs, predicted, timelines[0], label="this schedule", before=before)
    facts = [
        *(("ranks", str(ranks.size)), ("verifier", "sound"), ("machine", machine.name)),
        ("recorded", f"the run of median time of {TRACED_RUNS}"),
        (
            f"median of {settings.runs} runs that were not",
            " → ".join(milliseconds(statistics.median(spent)) for spent in reversed(seconds)),
        ),
    ]
    report["files"].append(str(write_page([run], settings.html, facts=facts)))
    return report
