"""The command line: `interlace`, or `python -m interlace`.

$ interlace demo
$ interlace check ring.ilc --world 4
$ interlace opt mlp.ilc -p "find_sites,decompose{strategy=peer},schedule" --diff

Reading the help is quick, and so are the commands on text: torch is imported by those that run
something (`demo`, `doctor`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from interlace.commands.bench.commands import bench
from interlace.commands.calibrate import calibrate
from interlace.commands.check import check
from interlace.commands.demo import demo
from interlace.commands.doctor import doctor
from interlace.commands.explain import explain
from interlace.commands.fuzz import fuzz
from interlace.commands.run import run
from interlace.commands.schedules import opt, show, simulate

app = typer.Typer(
    name="interlace",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from interlace import __version__

        typer.echo(f"interlace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Hide communication under computation, by schedules that can be read and are proved sound."""


for function in (demo, run, check, opt, show, simulate, explain, calibrate, fuzz, doctor):
    app.command(no_args_is_help=False)(function)
app.add_typer(bench)


def main() -> None:
    """The `interlace` command."""
    app()
