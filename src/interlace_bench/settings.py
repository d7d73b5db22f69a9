"""Settings of every benchmark: plain data without torch, which the commands have as options.

    settings = OverlapSettings(preset="tiny", dtype="f32", only="put,sequential")
    settings.names                             # what is raced: ("put", "sequential")

A field is an option: its type, its default and its help.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import typer

from interlace.commands.options import Calibration, Device, Json, Strategy, Timeout
from interlace.errors import OptionError, choose_from
from interlace_bench.shapes import shapes_of

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Bars = Annotated[bool, typer.Option("--check", help="Judge the bars; code 1 if one is missed.")]
Shapes = Annotated[
    str, typer.Option(help="Shapes instead: 'ag_gemm:M,K,N gemm_rs:M,K,N gemm_ar:M,K,N'.")
]
Small = Annotated[
    bool | None, typer.Option("--small/--large", help="Small sizes; default: on a CPU.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Say on stderr what is under way.")]
World = Annotated[int | None, typer.Option(min=2, help="Ranks; default: a rank for each GPU.")]
Mirror = Annotated[
    int | None,
    typer.Option(min=2, help="Ranks, all of them this one process: its schedule without a link."),
]

STRATEGIES = ("serial", "pipeline", "get", "put", "fused", "exchange", "ring", "auto")
"""Our strategies by the name that rows of overlap give them; `get` and `put` are `peer`."""
LAYERS = (
    *("eager", "inductor", "inductor-graph", "interlace", "interlace-graph"),
    *("interlace.compile", "interlace.compile-graph"),
)
"""`inductor` and `interlace` are backends of `torch.compile`; `-graph`: in CUDA graphs."""
FLOAT8_LAYERS = ("layers-fp8", "compile-fp8", "compile-fp8-graph")
TRANSFORMERS = (
    *("eager", "inductor", "inductor-graph", "async-tp", "dist-gemm"),
    *("compile", "layers", "compile-graph", *FLOAT8_LAYERS, "ideal"),
)
FORMS = ("whole", "blocks", "whole+checkpoint", "blocks+checkpoint")
"""Layers compiled as one, or each by itself; with `+checkpoint` computed again in backward."""
KERNELS = ("cross-entropy", "linear-cross-entropy", "adam", "muon", "grouped", "float8", "host")
OPTIMIZERS = ("synchronous", "overlap", "overlap-nccl", "no-gather", "torch-ddp", "torchtitan")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings of every benchmark."""

    name: ClassVar[str]
    as_rivals: ClassVar[bool] = False
    """True where rivals are timed that have NCCL register what graphs touch."""
    exact: ClassVar[bool] = False
    """True where equal computations on a GPU must give equal bits."""
    least_ranks: ClassVar[int] = 2
    keeps_rows: ClassVar[bool] = True
    out: Annotated[
        Path | None, typer.Option(help="Append the rows to a CSV file in this folder, too.")
    ] = None
    device: Device = "auto"
    commit: Annotated[str, typer.Option(help="Commit, where git cannot tell.")] = ""
    timeout: Timeout = 580
    verbose: Verbose = False
    json: Json = False

    @property
    def path(self) -> Path | None:
        """The file to which rows are appended as they come, if any."""
        return self.out / f"{self.name}.csv" if self.out is not None and self.keeps_rows else None

    @property
    def what(self) -> str:
        """The name of what the ranks do, for errors."""
        return f"bench {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceSettings(BenchSettings):
    """Settings of a benchmark in which variants take turns."""

    known: ClassVar[tuple[str, ...]]
    """Names of all that may be raced."""
    usual: ClassVar[tuple[str, ...]] = ()
    """Names of what is raced where nothing is asked for; none: all."""
    only: Annotated[
        str, typer.Option(help="Names of what is raced, with commas; default: all.")
    ] = ""
    seconds: Annotated[
        float, typer.Option(help="Time for timing; what does not fit is left out.")
    ] = 80

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise OptionError("nothing to measure: give --seconds > 0")
        for name in self.names:
            if name not in self.known:
                raise OptionError(f"--only {name}: {choose_from(name, self.known)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of what is raced."""
        return tuple(words(self.only)) or self.usual or self.known


@dataclass(frozen=True, slots=True, kw_only=True)
class InterconnectSettings(BenchSettings):
    """Sizes of messages."""

    name = "interconnect"
    most: Annotated[str, typer.Option(help="Largest; default: 1GiB on GPUs, 16MiB on CPUs.")] = ""
    world: World = None

    def __post_init__(self) -> None:
        if self.most:
            nbytes(self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSettings(RaceSettings):
    """Sites."""

    name, known, as_rivals = "overlap", (*STRATEGIES, "sequential", "async-tp"), True
    usual = tuple(name for name in known if name != "ring")
    """Beside `ring`, which gains only between hosts."""
    preset: Annotated[
        str, typer.Option(help="Shapes: bars, others, tiny, or several with commas.")
    ] = "bars"
    shapes: Shapes = ""
    dtype: Annotated[str, typer.Option(help="Element types, with commas; FP8: f8e4m3.")] = "bf16"
    check: Bars = False
    world: World = None
    calibration: Calibration = None

    def __post_init__(self) -> None:
        RaceSettings.__post_init__(self)
        if not shapes_of(self.preset, self.shapes, words(self.dtype)):
            raise OptionError("nothing to measure: give shapes or a preset")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings(RaceSettings):
    """A layer without gradients."""

    name, known, as_rivals = "layer", LAYERS, True
    small: Small = None
    strategy: Strategy = "auto"
    calibration: Calibration = None
    world: World = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSettings(RaceSettings):
    """Layers of a model, and the sizes of a batch."""

    name, known, as_rivals = "transformer", TRANSFORMERS, True
    model: Annotated[
        Literal["llama3-8b", "llama3-70b", "tiny"],
        typer.Option(metavar="NAME", help="llama3-8b, llama3-70b or tiny."),
    ] = "llama3-8b"
    layers: Annotated[
        str, typer.Option(help="Layers, one after another; several numbers with commas.")
    ] = "1"
    forms: Annotated[
        str,
        typer.Option(help="How they are compiled, with commas: whole, blocks; with +checkpoint."),
    ] = "whole"
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence, over all ranks.")] = 8192
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1
    dtype: Annotated[Literal["bf16", "f32"], typer.Option(help="Element type.")] = "bf16"
    account: Annotated[
        bool, typer.Option("--account", help="Say where each way's time over the ideal goes.")
    ] = False
    strategy: Strategy = "auto"
    calibration: Calibration = None
    world: World = None
    mirror: Mirror = None

    def __post_init__(self) -> None:
        RaceSettings.__post_init__(self)
        if self.mirror is not None and self.world is not None:
            raise OptionError("--mirror is one process in place of --world: give one of them")
        if min(*self.depths, self.sequence, self.batch) < 1:
            raise OptionError("--layers, --sequence and --batch must be >= 1")
        for form in words(self.forms):
            if form not in FORMS:
                raise OptionError(f"--forms {form}: {choose_from(form, FORMS)}")
        if self.account and ("ideal" not in self.names or len(self.names) == 1):
            raise OptionError("--account is over the ideal: give --only ideal and another way")

    @property
    def depths(self) -> tuple[int, ...]:
        """The numbers of layers."""
        try:
            return tuple(int(word) for word in words(self.layers)) or (0,)
        except ValueError:
            raise OptionError(f"--layers {self.layers}: give numbers, with commas") from None

    @property
    def cases(self) -> list[TransformerSettings]:
        """A case for each number of layers and each form."""
        forms, depths = words(self.forms), self.depths
        seconds = self.seconds / max(1, len(forms) * len(depths))
        return [
            replace(self, layers=str(depth), forms=form, seconds=seconds)
            for form in forms
            for depth in depths
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings(RaceSettings):
    """Ops, at sizes for a GPU or small ones."""

    name, known, least_ranks = "kernels", KERNELS, 1
    small: Small = None
    world: Annotated[
        int, typer.Option(help="Ranks; of two, the host's time in a team is measured too.")
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings(RaceSettings):
    """A model trained by layer-wise optimizers and others."""

    name, known = "optimizer", OPTIMIZERS
    model: Annotated[
        Literal["llama3-8b", "tiny"] | None,
        typer.Option(help="Default: tiny on CPUs, llama3-8b on GPUs."),
    ] = None
    check: Bars = False
    world: World = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings(BenchSettings):
    """Settings of `interlace calibrate`: for links, matmuls and copies, and for sites."""

    name, keeps_rows = "calibrate", False
    links: InterconnectSettings = InterconnectSettings()
    sites: OverlapSettings | None = None
    file: str
    """Path of the file that is written, on the first rank of every host."""
    dtypes: tuple[str, ...] = ("bf16",)
    """Dtypes of the matmuls."""


def ours(settings: LayerSettings | TransformerSettings, **more: Any) -> dict[str, Any]:
    """Options of our compiler that the settings ask for."""
    found: dict[str, Any] = {"strategy": settings.strategy, "timeout_s": 60.0, **more}
    if settings.calibration is not None:
        found["calibration"] = whole(settings.calibration)
    return found


def whole(path: Path | None) -> str | None:
    """The path for processes that start in any folder."""
    return None if path is None else str(path.resolve())


def nbytes(text: str) -> int:
    """Bytes of text such as 64MiB, 1K or 4096."""
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = (word[:-1], word[-1]) if word[-1:] in ("K", "M", "G") else (word, "")
    if not number.isdecimal() or int(number) < 1:
        raise OptionError(f"{text!r} is no size: write it as 4096, 64KiB or 1GiB")
    return int(number) * UNITS[unit]


def words(text: str) -> list[str]:
    """The words of an option that takes several, with commas between."""
    return [word.strip() for word in text.split(",") if word.strip()]
