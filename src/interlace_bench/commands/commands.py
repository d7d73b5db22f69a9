"""`interlace bench`: links, overlapped sites, layers, kernels and optimizers, here and now.

$ interlace bench overlap --preset bars --check                  # starts a rank for each GPU
$ torchrun --nproc-per-node 4 -m interlace bench overlap         # takes torchrun's
$ interlace bench overlap --device cpu --preset tiny --dtype f32 --out /tmp/rows
$ interlace bench interconnect --device cpu --most 1MiB
$ interlace bench layer --device cpu --only eager,interlace
$ interlace bench transformer --model llama3-70b --simulate h200    # no GPU: predicted
$ interlace bench kernels --device cpu --only adam,host --out /tmp/rows
$ interlace bench optimizer --device cpu --link 0.2 --check

Alone, a command starts its ranks as processes and ends them all, whatever happens; under torchrun
each process is a rank already, and rank 0 alone prints and writes.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from interlace.commands.files import read_machine
from interlace.commands.options import Calibration, Strategy
from interlace.commands.output import print_json, say
from interlace.errors import OptionError
from interlace_bench.commands.interconnect import show_interconnect
from interlace_bench.commands.options import (
    Bars,
    BenchOptions,
    RaceOptions,
    Shapes,
    Small,
    World,
    benchmark,
    nbytes,
    words,
)
from interlace_bench.commands.report import conclude


@benchmark
def interconnect(
    most: Annotated[str, typer.Option(help="Largest; default: 1GiB on GPUs, 16MiB on CPUs.")] = "",
    world: World = None,
    *,
    given: BenchOptions,
) -> None:
    """Measure copies between ranks, and every collective of every backend, by size."""
    from interlace_bench.interconnect import InterconnectSettings, work
    from interlace_bench.ranks import pick_device, run
    from interlace_bench.rows import plain

    usual = "16MiB" if pick_device(given.device) == "cpu" else "1GiB"
    settings = InterconnectSettings(most=nbytes(most or usual), commit=given.commit)
    report = run("interconnect", work, settings, given, world)
    if report is None:
        return
    if given.json:
        print_json({"schema": 1, **plain(report), "files": [str(given.path)]})
        return
    show_interconnect(report)
    say(f"\nwrote {given.path}")


@benchmark
def overlap(
    preset: Annotated[
        str, typer.Option(help="Shapes: bars, others, tiny, or several with commas.")
    ] = "bars",
    shapes: Shapes = "",
    dtype: Annotated[str, typer.Option(help="Element types, with commas; FP8: f8e4m3.")] = "bf16",
    host_runs: Annotated[int, typer.Option(help="Calls by which host time is measured.")] = 1000,
    check: Bars = False,
    world: World = None,
    calibration: Calibration = None,
    *,
    given: RaceOptions,
) -> None:
    """Time AG+GEMM, GEMM+RS and GEMM+AR by every strategy and rival, and append rows of CSV."""
    from interlace_bench.bars import judge_overlap
    from interlace_bench.overlap import OverlapSettings, work
    from interlace_bench.ranks import run
    from interlace_bench.sites import cases_of

    cases = cases_of(preset, shapes, words(dtype))
    if not cases:
        raise OptionError("nothing to measure: give shapes or a preset")
    settings = OverlapSettings(
        cases=tuple(cases),
        host_runs=host_runs,
        calibration=_place(calibration),
        **given.settings,
    )
    report = run("overlap", work, settings, given, world)
    if report is None:
        return
    roof = report["roof"]
    conclude(
        report,
        f"roof of a copy {roof['bandwidth'] / 1e9:.1f} GB/s ({roof['how']})",
        {
            "site": "{op} {m},{k},{n} {dtype}",
            "strategy": "{strategy}",
            "mode": "{mode}",
            "chosen": "{chosen}",
            "median us": "{median_us:.1f}",
            "p90 us": "{p90_us:.1f}",
            "host us": "{host_us:.1f}",
            "x eager": "{speedup_eager:.2f}",
            "x graph": "{speedup_graph:.2f}",
            "R": "{r:.3f}",
            "MHz": "{sm_mhz:.0f}",
        },
        "{op} {m},{k},{n} {strategy} {mode}",
        given,
        judge_overlap(report["rows"]) if check else [],
    )


@benchmark
def layer(
    small: Small = None,
    strategy: Strategy = "auto",
    calibration: Calibration = None,
    world: World = None,
    *,
    given: RaceOptions,
) -> None:
    """Time a layer compiled by Interlace against torch.compile with NCCL, without gradients."""
    from interlace_bench.layer import SMALL, LayerSettings, work
    from interlace_bench.ranks import pick_device, run

    small = pick_device(given.device) == "cpu" if small is None else small
    settings = LayerSettings(
        **(SMALL if small else {}),
        strategy=strategy,
        calibration=_place(calibration),
        **given.settings,
    )
    report = run("layer", work, settings, given, world)
    if report is None:
        return
    columns = {
        "step": "{step}",
        "way": "{way}",
        "rows": "{rows}",
        "median us": "{median_us:.1f}",
        "p90 us": "{p90_us:.1f}",
        "host us": "{host_us:.1f}",
        "device us": "{device_us:.1f}",
        "x inductor": "{speedup:.2f}",
        "MHz": "{sm_mhz:.0f}",
    }
    conclude(report, "one layer", columns, "{step} {way}", given)


@benchmark
def transformer(
    model: Annotated[
        Literal["llama3-8b", "llama3-70b", "gpt3-175b", "tiny", "tiny-gpt"],
        typer.Option(metavar="NAME", help="llama3-8b, llama3-70b, gpt3-175b, tiny or tiny-gpt."),
    ] = "llama3-8b",
    layers: Annotated[int, typer.Option(help="Layers, one after another.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence, over all ranks.")] = 8192,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    dtype: Annotated[Literal["bf16", "f32"], typer.Option(help="Element type.")] = "bf16",
    strategy: Strategy = "auto",
    simulate: Annotated[
        str,
        typer.Option(help="Run nothing, predict: a calibration file, or the model h200 or cpu."),
    ] = "",
    check: Bars = False,
    calibration: Calibration = None,
    world: World = None,
    *,
    given: RaceOptions,
) -> None:
    """Time forward, backward and step of transformer layers, ours against torch's ways.

    Tensor parallel, with sequence parallelism, on all ranks. The ways, in turn on equal weights:
    eager DTensor; inductor and inductor-graph (torch.compile with NCCL, and in CUDA graphs);
    async-tp; compile, compile-graph and layers (ours: the backend of torch.compile, the same in
    CUDA graphs, and interlace.nn.functional); layers-fp8, compile-fp8 and compile-fp8-graph
    (interlace.nn.functional with a recipe, and that compiled by our backend); ideal (no
    communication).
    """
    from interlace_bench.bars import judge_transformer
    from interlace_bench.ranks import run
    from interlace_bench.rows import append
    from interlace_bench.transformer.work import TransformerSettings, work

    settings = TransformerSettings(
        model=model,
        layers=layers,
        sequence=sequence,
        batch=batch,
        dtype=dtype,
        strategy=strategy,
        calibration=_place(calibration),
        **given.settings,
    )
    if simulate:
        from interlace.cost import default_machine
        from interlace_bench.transformer.predict import predict

        built_in = simulate in ("cpu", "cuda", "h200")
        machine = default_machine(simulate) if built_in else read_machine(Path(simulate))
        report = predict(settings, machine, world or 4)
        if given.path is not None:
            append(given.path, report["rows"])
    else:
        report = run("transformer", work, settings, given, world)
    if report is None:
        return
    ranks, what = report["rows"][0]["world"], f"{model} x {layers}"
    headline = f"{ranks} ranks, {what}, {batch} x {sequence} tokens in {dtype}; in ms"
    columns = {
        "way": "{way}",
        "fwd": "{forward_ms:.3f}",
        "bwd": "{backward_ms:.3f}",
        "step": "{step_ms:.3f}",
        "tok/s": "{tokens_s:.0f}",
        "TFLOP/s": "{tflops:.3g}",
        "exposed": "{exposed_ms:.3f}",
        "share": "{exposed_share:.1%}",
        "x nccl": "{speedup:.3f}",
        "GiB": "{peak_bytes_gib:.2f}",
    }
    verdicts = judge_transformer(report["rows"]) if check else []
    conclude(report, headline, columns, "{way}", given, verdicts)


@benchmark
def kernels(
    small: Small = None,
    check: Bars = False,
    *,
    given: RaceOptions,
) -> None:
    """Time losses, optimizers, layers and the host against torch and others; append rows of CSV."""
    import torch

    from interlace_bench.bars import judge_kernels
    from interlace_bench.kernels.work import KernelSettings, work
    from interlace_bench.ranks import pick_device, progress

    settings = KernelSettings(small=small, **given.settings)
    where = torch.device(pick_device(given.device))
    faulthandler.dump_traceback_later(given.time_out, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        report = work(settings, where, progress(given))
    finally:
        faulthandler.cancel_dump_traceback_later()
    conclude(
        report,
        f"Triton {report['facts']['triton'] or 'absent'}",
        {
            "case": "{op} {shape} {dtype} {does}",
            "way": "{way}",
            "median us": "{median_us:.1f}",
            "p90 us": "{p90_us:.1f}",
            "host us": "{host_us:.1f}",
            "GB/s": "{gbs:.0f}",
            "of copy": "{share:.3f}",
            "TFLOP/s": "{tflops:.0f}",
            "x torch": "{speedup_torch:.2f}",
            "peak GiB": "{peak_bytes_gib:.2f}",
            "state GiB": "{state_bytes_gib:.2f}",
            "off": "{deviation:.2f}",
            "MHz": "{sm_mhz:.0f}",
        },
        "{op} {shape} {dtype} {way}",
        given,
        judge_kernels(report["rows"]) if check else [],
    )


@benchmark
def optimizer(
    model: Annotated[
        Literal["llama3-8b", "small", "tiny"] | None,
        typer.Option(help="Default: small on CPUs, llama3-8b on GPUs."),
    ] = None,
    link: Annotated[
        float, typer.Option(help="GB/s of the link that CPU ranks shall have; 0: as it is.")
    ] = 0.0,
    check: Bars = False,
    world: World = None,
    *,
    given: RaceOptions,
) -> None:
    """Time training steps with Muon over data parallelism, LayerWise against others.

    The ways, in turn: overlap (LayerWise), its twins synchronous and no-gather (without any
    gather: wrong, and the ideal); torch-ddp (torch.optim.Muon under DistributedDataParallel);
    torchtitan (DistMuon on FSDP2), on GPUs where it is installed.
    """
    from interlace_bench.bars import judge_optimizer
    from interlace_bench.optimizer.work import OptimizerSettings, work
    from interlace_bench.ranks import pick_device, run

    usual = "small" if pick_device(given.device) == "cpu" else "llama3-8b"
    settings = OptimizerSettings(
        model=model or usual,
        bandwidth=link * 1e9,
        **given.settings,
    )
    report = run("optimizer", work, settings, given, world)
    if report is None:
        return
    size, ranks = settings.size, report["rows"][0]["world"]
    headline = (
        f"{ranks} ranks, {settings.model} x {size.layers}, {size.batch} x {size.sequence} tokens "
        f"in {size.dtype}; in ms"
    )
    columns = {
        "way": "{way}",
        "step": "{step_ms:.2f}",
        "p90": "{p90_ms:.2f}",
        "exposed": "{exposed_ms:.2f}",
        "of all gathers": "{exposed_share:.1%}",
        "x no gather": "{over_no_gather:.3f}",
        "peak GiB": "{peak_bytes_gib:.3f}",
    }
    verdicts = judge_optimizer(report["rows"]) if check else []
    conclude(report, headline, columns, "{way}", given, verdicts)


def _place(calibration: Path | None) -> str | None:
    return None if calibration is None else str(calibration.resolve())


bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure links, overlapped sites, layers, kernels and optimizers, here and now.",
)
for function in (interconnect, overlap, layer, transformer, kernels, optimizer):
    bench.command(no_args_is_help=False)(function)
