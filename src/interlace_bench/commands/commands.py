"""`interlace bench`: links, overlapped sites, layers, kernels and optimizers, here and now.

$ interlace bench overlap --preset bars --check                  # starts a rank for each GPU
$ torchrun --nproc-per-node 4 -m interlace bench overlap         # takes torchrun's
$ interlace bench overlap --device cpu --preset tiny --dtype f32 --out /tmp/rows
$ interlace bench interconnect --device cpu --most 1MiB --calibration mine.json
$ interlace bench layer --device cpu --dim 64 --hidden 128 --heads 4 --only eager,interlace
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
from typing import Annotated, Any, Literal

import typer

from interlace.commands.files import read_machine
from interlace.commands.options import Calibration, Strategy
from interlace.commands.output import print_json, say
from interlace.errors import OptionError
from interlace_bench.commands.interconnect import show_interconnect
from interlace_bench.commands.options import (
    Bars,
    BenchOptions,
    Seconds,
    Shapes,
    World,
    benchmark,
    nbytes,
    words,
)
from interlace_bench.commands.report import conclude


@benchmark
def interconnect(
    least: Annotated[str, typer.Option(help="Smallest message.")] = "1KiB",
    most: Annotated[str, typer.Option(help="Largest; default: 1GiB on GPUs, 16MiB on CPUs.")] = "",
    dtype: Annotated[str, typer.Option(help="Element types of matmuls, with commas.")] = "",
    links: Annotated[bool, typer.Option(help="Copies between ranks.")] = True,
    collectives: Annotated[bool, typer.Option(help="Collectives of every backend.")] = True,
    compute: Annotated[bool, typer.Option(help="Matmuls, copies and launches.")] = True,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file to write; default: where auto looks.")
    ] = None,
    calibrate: Annotated[bool, typer.Option(help="Write a calibration file.")] = True,
    world: World = None,
    *,
    given: BenchOptions,
) -> None:
    """Measure copies between ranks, collectives and matmuls; calibrate the cost model by them."""
    from interlace_bench.interconnect import InterconnectSettings, work
    from interlace_bench.ranks import pick_device, run
    from interlace_bench.rows import plain

    on_cpu = pick_device(given.device) == "cpu"
    settings = InterconnectSettings(
        least=nbytes(least),
        most=nbytes(most or ("16MiB" if on_cpu else "1GiB")),
        links=links,
        collectives=collectives,
        device=compute,
        calibration=(_place(calibration) if calibrate else ""),
        commit=given.commit,
        dtypes=tuple(words(dtype or ("f32" if on_cpu else "bf16"))),
    )
    report = run("interconnect", work, settings, given, world)
    if report is None:
        return
    written = [str(path) for path in (given.path, report["calibration"]) if path]
    if given.json:
        print_json({"schema": 1, **plain(report), "files": written})
        return
    show_interconnect(report)
    say("")
    for item in written:
        say(f"wrote {item}")


@benchmark
def overlap(
    preset: Annotated[
        str, typer.Option(help="Shapes: bars, others, tiny, or several with commas.")
    ] = "bars",
    shapes: Shapes = "",
    dtype: Annotated[str, typer.Option(help="Element types, with commas; FP8: f8e4m3.")] = "bf16",
    only: Annotated[str, typer.Option(help="Candidates, with commas; default: all.")] = "",
    graphs: Annotated[bool, typer.Option(help="CUDA graphs of ours as well.")] = True,
    seconds: Seconds = 90,
    host_runs: Annotated[int, typer.Option(help="Calls by which host time is measured.")] = 1000,
    check: Bars = False,
    world: World = None,
    calibration: Calibration = None,
    *,
    given: BenchOptions,
) -> None:
    """Time AG+GEMM, GEMM+RS and GEMM+AR by every strategy and rival, and append rows of CSV."""
    from interlace_bench.bars import judge_overlap
    from interlace_bench.overlap import OverlapSettings, work
    from interlace_bench.ranks import run
    from interlace_bench.sites import cases_of

    cases = cases_of(preset, shapes, words(dtype))
    if not cases or seconds <= 0:
        raise OptionError("nothing to measure: give shapes or a preset, and --seconds > 0")
    settings = OverlapSettings(
        cases=tuple(cases),
        graphs=graphs,
        seconds=seconds,
        host_runs=host_runs,
        calibration=_place(calibration),
        **_asked(given, only),
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
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 4096,
    hidden: Annotated[int, typer.Option(help="Width of the feed-forward.")] = 14336,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 32,
    prefill: Annotated[int, typer.Option(help="Rows of the prefill step.")] = 2048,
    decode: Annotated[int, typer.Option(help="Sequences of the decode step.")] = 16,
    cached: Annotated[int, typer.Option(help="Tokens in each sequence's cache.")] = 2048,
    dtype: Annotated[str, typer.Option(help="Element type.")] = "bf16",
    only: Annotated[str, typer.Option(help="Ways, with commas; default: all.")] = "",
    strategy: Strategy = "auto",
    seconds: Annotated[float, typer.Option(help="Time for timing, compiling apart.")] = 60,
    calibration: Calibration = None,
    world: World = None,
    *,
    given: BenchOptions,
) -> None:
    """Time a layer compiled by Interlace against torch.compile with NCCL, without gradients."""
    from interlace_bench.layer import LayerSettings, work
    from interlace_bench.ranks import run

    settings = LayerSettings(
        dim=dim,
        hidden=hidden,
        heads=heads,
        prefill=prefill,
        decode=decode,
        cached=cached,
        dtype=dtype,
        strategy=strategy,
        seconds=seconds,
        calibration=_place(calibration),
        **_asked(given, only),
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
    only: Annotated[str, typer.Option(help="Ways, with commas; default: all.")] = "",
    strategy: Strategy = "auto",
    seconds: Annotated[float, typer.Option(help="Time for timing, compiling apart.")] = 60,
    simulate: Annotated[
        str,
        typer.Option(help="Run nothing, predict: a calibration file, or the model h200 or cpu."),
    ] = "",
    check: Bars = False,
    calibration: Calibration = None,
    world: World = None,
    *,
    given: BenchOptions,
) -> None:
    """Time forward, backward and step of transformer layers, ours against torch's ways.

    Tensor parallel, with sequence parallelism, on all ranks. The ways, in turn on equal weights:
    eager DTensor; inductor (torch.compile, NCCL), inductor-overlap (its overlap passes) and
    inductor-graph (CUDA graphs); async-tp; compile, compile-graph and layers (ours: the backend of
    torch.compile, the same in CUDA graphs, and interlace.nn.functional); layers-fp8, compile-fp8
    and compile-fp8-graph (interlace.nn.functional with a recipe, and that compiled by our backend);
    ideal (no communication).
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
        seconds=seconds,
        calibration=_place(calibration),
        **_asked(given, only),
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
    only: Annotated[str, typer.Option(help="Ops, with commas; default: all.")] = "",
    seconds: Seconds = 80,
    small: Annotated[
        bool | None, typer.Option("--small/--large", help="Small sizes; default: on a CPU.")
    ] = None,
    check: Bars = False,
    *,
    given: BenchOptions,
) -> None:
    """Time losses, optimizers, layers and the host against torch and others; append rows of CSV."""
    import torch

    from interlace_bench.bars import judge_kernels
    from interlace_bench.kernels.work import KernelSettings, work
    from interlace_bench.ranks import pick_device, progress

    if seconds <= 0:
        raise OptionError("nothing to measure: give --seconds > 0")
    settings = KernelSettings(seconds=seconds, small=small, **_asked(given, only))
    where = torch.device(pick_device(given.device))
    faulthandler.dump_traceback_later(given.time_out, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        with progress("kernels", given) as tell:
            report = work(settings, where, tell)
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
    layers: Annotated[int, typer.Option(help="Layers; 0: as many as the model has.")] = 0,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence; 0: the model's.")] = 0,
    batch: Annotated[int, typer.Option(help="Sequences of a rank; 0: the model's.")] = 0,
    dtype: Annotated[str, typer.Option(help="Element type; default: the model's.")] = "",
    bucket: Annotated[str, typer.Option(help="Most bytes of a bucket; default: 64MiB.")] = "",
    link: Annotated[
        float, typer.Option(help="GB/s of the link that CPU ranks shall have; 0: as it is.")
    ] = 0.0,
    only: Annotated[str, typer.Option(help="Ways, with commas; default: all.")] = "",
    seconds: Annotated[float, typer.Option(help="Time for timing, set-up apart.")] = 60,
    check: Bars = False,
    world: World = None,
    *,
    given: BenchOptions,
) -> None:
    """Time training steps with Muon over data parallelism, LayerWise against others.

    The ways, in turn: overlap (LayerWise), its twins synchronous, under-backward (updates under
    the backward) and no-gather (without any gather: wrong, and the ideal); torch-ddp
    (torch.optim.Muon under DistributedDataParallel); dion and torchtitan (DistMuon on FSDP2), on
    GPUs where they are installed.
    """
    from interlace_bench.bars import judge_optimizer
    from interlace_bench.optimizer.work import OptimizerSettings, work
    from interlace_bench.ranks import pick_device, run

    usual = "small" if pick_device(given.device) == "cpu" else "llama3-8b"
    settings = OptimizerSettings(
        model=model or usual,
        layers=layers,
        sequence=sequence,
        batch=batch,
        dtype=dtype,
        bucket_bytes=nbytes(bucket) if bucket else 0,
        bandwidth=link * 1e9,
        seconds=seconds,
        **_asked(given, only),
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


def _asked(given: BenchOptions, only: str) -> dict[str, Any]:
    """What all settings have: the commit, and what alone is run, if that is said."""
    return {"commit": given.commit, **({"only": tuple(words(only))} if only else {})}


bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure links, overlapped sites, layers, kernels and optimizers, here and now.",
)
for function in (interconnect, overlap, layer, transformer, kernels, optimizer):
    bench.command(no_args_is_help=False)(function)
