"""`interlace bench`: links, overlapped sites, layers, kernels and optimizers, here and now.

$ interlace bench overlap --preset bars --check                  # starts a rank for each GPU
$ torchrun --nproc-per-node 4 -m interlace bench overlap         # takes torchrun's
$ interlace bench overlap --device cpu --preset tiny --dtype f32 --out /tmp/rows
$ interlace bench interconnect --device cpu --most 1MiB
$ interlace bench layer --device cpu --only eager,interlace
$ interlace bench kernels --device cpu --only adam,host
$ interlace bench optimizer --device cpu

Alone, a command starts its ranks as processes and ends them all, whatever happens; under torchrun
each process is a rank already, and rank 0 alone prints and (with --out) writes. All benchmarks are
rows of one table: each has settings (its options), a module that measures, and columns.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

from interlace.commands.files import read_machine
from interlace.commands.output import UNSOUND, command, print_json, say, table
from interlace.commands.pages import check_places
from interlace_bench import settings as of

if TYPE_CHECKING:
    from interlace.launch import Report
    from interlace_bench.bars import BarVerdict
    from interlace_bench.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark, whose module has `work(settings, ranks, tell)`."""

    settings: type[of.BenchSettings]
    module: str
    help: str
    columns: str
    """Headings, each with the format of a row's cell; those without figures name a row."""

    @property
    def cells(self) -> dict[str, str]:
        """The format of a row's cell by heading."""
        return dict(cell.strip().split(": ", 1) for cell in self.columns.split("|"))


BENCHMARKS = (
    Benchmark(
        settings=of.InterconnectSettings,
        module="links",
        help="Measure copies between ranks, and every collective of every backend, by size.",
        columns="""
        kind: {kind} | who: {pattern} | bytes: {nbytes} | backend: {backend} |
        by: {protocol} | us: {us:.1f} | GB/s: {gbs:.3g}""",
    ),
    Benchmark(
        settings=of.OverlapSettings,
        module="overlap",
        help="Time AG+GEMM, GEMM+RS and GEMM+AR by every strategy and rival.",
        columns="""
        site: {op} {m},{k},{n} {dtype} | strategy: {strategy} | mode: {mode} |
        chosen: {chosen} | median us: {median_us:.1f} | p90 us: {p90_us:.1f} |
        host us: {host_us:.1f} | x eager: {speedup_eager:.2f} |
        x graph: {speedup_graph:.2f} | R: {r:.3f} | MHz: {sm_mhz:.0f}""",
    ),
    Benchmark(
        settings=of.LayerSettings,
        module="layers.inference",
        help="Time a layer compiled by Interlace against torch.compile with NCCL, without "
        "gradients.",
        columns="""
        step: {step} | way: {way} | rows: {rows} | median us: {median_us:.1f} |
        p90 us: {p90_us:.1f} | host us: {host_us:.1f} | device us: {device_us:.1f} |
        x inductor: {speedup:.2f} | MHz: {sm_mhz:.0f}""",
    ),
    Benchmark(
        settings=of.TransformerSettings,
        module="layers.training",
        help="""Time forward, backward and step of transformer layers, ours against torch's ways.

        Tensor parallel, with sequence parallelism, on all ranks. The ways, in turn on equal
        weights: eager DTensor; inductor and inductor-graph (torch.compile with NCCL, and in CUDA
        graphs); async-tp; dist-gemm (torchtitan's, eager, where torchtitan is installed); compile,
        compile-graph and layers (ours: the backend of torch.compile, the same in CUDA graphs, and
        interlace.nn.functional); layers-fp8, compile-fp8 and compile-fp8-graph
        (interlace.nn.functional with a recipe, and that compiled by our backend); ideal (no
        communication).
        """,
        columns="""
        layers: {layers} {form} | way: {way} | fwd: {forward_ms:.3f} | bwd: {backward_ms:.3f} |
        step: {step_ms:.3f} | tok/s: {tokens_s:.0f} | TFLOP/s: {tflops:.3g} |
        exposed: {exposed_ms:.3f} | share: {exposed_share:.1%} |
        x nccl: {speedup:.3f} | host us: {host_us:.0f} | idle: {idle_share:.1%} |
        GiB: {peak_bytes_gib:.2f} |
        torch's: {torch_peak_bytes_gib:.2f} | at rest: {rest_bytes_gib:.2f}""",
    ),
    Benchmark(
        settings=of.KernelSettings,
        module="kernels.work",
        help="Time losses, optimizers, layers and the host against torch and others.",
        columns="""
        case: {op} {shape} {dtype} {does} | way: {way} |
        median us: {median_us:.1f} | p90 us: {p90_us:.1f} | host us: {host_us:.1f} |
        GB/s: {gbs:.0f} | of copy: {share:.3f} | TFLOP/s: {tflops:.0f} |
        x torch: {speedup_torch:.2f} | peak GiB: {peak_bytes_gib:.2f} |
        state GiB: {state_bytes_gib:.2f} | off: {off:.2f} |
        MHz: {sm_mhz:.0f}""",
    ),
    Benchmark(
        settings=of.OptimizerSettings,
        module="optimizer",
        help="""Time training steps with Muon over data parallelism, LayerWise against others.

        The ways, in turn: overlap (LayerWise), overlap-nccl (by NCCL alone), its twins synchronous
        and no-gather (without any gather: wrong, and the ideal); torch-ddp (torch.optim.Muon under
        DistributedDataParallel); torchtitan (DistMuon on FSDP2), on GPUs where it is installed.
        """,
        columns="""
        way: {way} | step ms: {step_ms:.2f} | p90: {p90_ms:.2f} |
        exposed: {exposed_ms:.2f} | of all gathers: {exposed_share:.1%} |
        x no gather: {over_no_gather:.3f} | peak GiB: {peak_bytes_gib:.3f}""",
    ),
)


def command_of(benchmark: Benchmark) -> Callable[..., None]:
    """The command, whose options are the fields of the benchmark's settings."""

    def run(**given: Any) -> None:
        conclude(benchmark, benchmark.settings(**given))

    hints = get_type_hints(benchmark.settings, include_extras=True)
    defaults = {item.name: item.default for item in fields(benchmark.settings)}
    own_first = [
        name for each in benchmark.settings.__mro__ for name in inspect.get_annotations(each)
    ]
    run.__name__, run.__doc__ = benchmark.settings.name, inspect.cleandoc(benchmark.help)
    made: Any = command(run)
    made.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name]
            )
            for name in dict.fromkeys(own_first)
            if name in defaults
        ]
    )
    made.__annotations__ = {}
    return made


def measured(benchmark: Benchmark, settings: of.BenchSettings) -> Report | None:
    """The report; None on other ranks of torchrun than the first."""
    check_places(settings.path)
    if (calibration := getattr(settings, "calibration", None)) is not None:
        read_machine(calibration)  # before torch is imported
    from interlace_bench import ranks

    module: Any = importlib.import_module(f"interlace_bench.{benchmark.module}")
    return ranks.run(module.work, settings, getattr(settings, "world", None))


def conclude(benchmark: Benchmark, settings: of.BenchSettings) -> None:
    """Measures, and shows the rows to scripts or people: a table, what was not timed, the bars;
    code 1 where one is missed."""
    report = measured(benchmark, settings)
    if report is None:
        return
    from interlace_bench import bars
    from interlace_bench.rows import append, plain

    rows, headline = report["rows"], report.pop("headline", "")
    shown = [row for row in report.pop("shown", rows) if not row["error"]]
    verdicts = bars.judge(settings.name, rows) if getattr(settings, "check", False) else []
    if settings.out is not None:
        for each in report.get("accounts", ()):
            append(settings.out / "account.csv", [row | report["facts"] for row in each["lines"]])
    if settings.json:
        print_json({"schema": 1, **plain(report), "bars": [item.to_json() for item in verdicts]})
    else:
        facts = report["facts"]
        say(f"{facts['gpu']}, torch {facts['torch']}{headline}\n")
        cells = [[_cell(form, row) for form in benchmark.cells.values()] for row in shown]
        table(tuple(benchmark.cells), cells)
        failed = [row for row in rows if row["error"]]
        if failed:
            say("\nnot timed:")
        for row in failed:
            words = [form.format_map(row) for form in benchmark.cells.values() if ":" not in form]
            say(f"  {' '.join(filter(None, words))}: {row['error']}")
        if report.get("skipped"):
            say(f"no time left for: {'; '.join(report['skipped'])}")
        if report.get("accounts"):
            from interlace_bench.layers.account import show

            show(report["accounts"])
        if verdicts:
            _show_bars(verdicts)
        elif getattr(settings, "check", False):
            say("\nno bar is for these rows")
        if settings.path is not None:
            say(f"\nwrote {settings.path}")
    if bars.missed(verdicts):
        raise typer.Exit(UNSOUND)


class _Cells(dict[str, Any]):
    """The cells of a row, by column; what it has in bytes is there in GiB as well."""

    def __missing__(self, name: str) -> float:
        return self[name.removesuffix("_gib")] / 2**30 if name.endswith("_gib") else math.nan


def _cell(form: str, row: Row) -> str:
    text = form.format_map(_Cells(row))
    return "-" if text.startswith("nan") else text


def _show_bars(verdicts: Sequence[BarVerdict]) -> None:
    cells = [
        (v.bar, v.limit, f"{v.figure:.3f}", "pass" if v.passed else "MISSED", v.mode, v.worst)
        for v in verdicts
    ]
    say("")
    table(("bar", "limit", "figure", "", "of", "the worst case"), cells, title="bars")


bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    add_completion=False,
    help="Measure links, overlapped sites, layers, kernels and optimizers, here and now.",
)
for each in BENCHMARKS:
    bench.command(no_args_is_help=False)(command_of(each))
