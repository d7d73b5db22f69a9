"""Options and arguments that several commands have, each written once.

@command
def check(file: Schedule, mesh: Mesh = None, json: Json = False) -> None: ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from interlace.strategies import StrategyName

Calibration = Annotated[
    Path | None,
    typer.Option(help="Calibration file. Default: this host's, or else the built-in model."),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="auto: GPUs where there are enough.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Model = Annotated[
    Literal["cpu", "cuda"], typer.Option("--device", help="Without --calibration: whose model.")
]
Mesh = Annotated[str | None, typer.Option(help="Sizes of the teams, such as dp=2,tp=4.")]
Schedule = Annotated[Path, typer.Argument(help="A schedule, or - for standard input.")]
Strategy = Annotated[
    StrategyName,
    typer.Option(
        metavar="NAME", help=f"How sites are overlapped: {', '.join(get_args(StrategyName))}."
    ),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", "--time-out", min=1, help="Seconds after which all ranks end."),
]
