"""The command line: `interlace`, or `python -m interlace`.

$ interlace demo
$ interlace check ring.ilc --world 4
$ interlace opt mlp.ilc -p "find_sites,decompose{strategy=peer},schedule" --diff

A command's module is imported when the command is used, or when the help lists them all; torch is
imported by those that run something (`demo`, `doctor`).
"""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from interlace.errors import nearest

COMMANDS = {
    "demo": "interlace.commands.demo:demo",
    "run": "interlace_bench.commands.run:run",
    "check": "interlace.commands.check:check",
    "opt": "interlace.commands.schedules:opt",
    "show": "interlace.commands.schedules:show",
    "simulate": "interlace.commands.schedules:simulate",
    "explain": "interlace.commands.explain:explain",
    "calibrate": "interlace_bench.commands.calibrate:calibrate",
    "doctor": "interlace.commands.doctor:doctor",
    "bench": "interlace_bench.commands.commands:bench",
}
"""Where each command is: a function, or a group of commands."""

DEVELOPING = "For developing Interlace"
PANELS = {"opt": DEVELOPING, "bench": DEVELOPING}
"""Heading in the help above commands that are no user's."""

BOXES: Literal["markdown"] | None = (
    "markdown" if sys.stdout.isatty() and sys.stderr.isatty() else None
)
"""Help and errors of usage are in boxes on a terminal, and plain text elsewhere."""

GONE = {
    "fuzz": "it is `python -m tests.fuzzing` in a checkout of the repository",
    "demo --in-order": "leave it out: on GPUs and beyond two ranks the demo trains in order too",
    "doctor --calibration": "`interlace explain FILE --calibration FILE` reads it",
    "doctor --timeout": "leave it out: doctor looks at its own host, and waits for nobody",
    "explain --html": "`interlace simulate FILE --html PAGE` draws a schedule",
    "bench transformer --profile": "`interlace.export`, then `interlace simulate --html`",
    "bench interconnect --calibration": "`interlace calibrate` writes such a file",
    "bench interconnect --plot": "the rows are in a CSV file",
    "bench interconnect --no-plot": "leave it out: nothing is drawn",
    "show --program": "`interlace run FILE --html PAGE` draws what it measured",
    "bench interconnect --calibrate": "`interlace calibrate` writes such a file",
    "bench overlap --host-runs": "leave it out: up to 1,000 calls are timed",
    "bench overlap --graphs": "leave it out: CUDA graphs are timed too",
    "bench overlap --no-graphs": "leave it out: CUDA graphs are timed too",
    **{
        f"bench interconnect --{option}": "leave it out: all is measured"
        for option in ("least", "dtype", "links", "collectives", "compute")
    },
    **{
        f"bench interconnect --no-{option}": "leave it out: all is measured"
        for option in ("links", "collectives", "compute", "calibrate")
    },
    **{
        f"bench layer --{option}": "`--small` and `--large` choose the sizes"
        for option in ("dim", "hidden", "heads", "prefill", "decode", "cached", "dtype")
    },
    **{
        f"bench {name} --check": "leave it out: the table has the figures"
        for name in ("kernels", "transformer")
    },
    "run --inputs": "`interlace.Executor` runs a schedule on tensors of your own",
    "bench transformer --simulate": "`interlace simulate FILE` predicts an exported schedule",
    "calibrate --from": "leave it out: what `auto` chooses by is measured where it runs",
    "calibrate --measure": "leave it out: all is measured",
    "calibrate --preset": "`--shapes` chooses the sites",
    **{
        f"bench {name} --name": "the file has the benchmark's name; `--out` chooses its folder"
        for name in ("interconnect", "overlap", "layer", "transformer", "kernels", "optimizer")
    },
    **{
        f"bench optimizer --{option}": "`--model` chooses the sizes"
        for option in ("layers", "batch", "bucket", "dtype", "sequence")
    },
    "bench optimizer --link": "leave it out: ranks have the link that they have",
}
"""Commands and options that went, and their replacement: for one release."""


class CommandGroup(TyperGroup):
    """Commands whose first sentences are whole, and under their headings, where help is plain."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands: list[Any] = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        for panel in dict.fromkeys(command.rich_help_panel for command in commands):
            with formatter.section(panel or "Commands"):
                listed = [each for each in commands if each.rich_help_panel == panel]
                starts = [inspect.cleandoc(each.help).split("\n\n")[0] for each in listed]
                formatter.write_dl([*zip((each.name for each in listed), starts, strict=True)])


class Commands(CommandGroup):
    """The group of all commands, which imports each when it is asked for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands |= dict.fromkeys(COMMANDS)  # type: ignore[arg-type]

    def get_params(self, ctx: Any) -> list[Any]:
        return untyped(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; an error on a choice names the nearest one."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if wrong := re.search(r"'(.*?)' is not one of (.*)", error.message.rstrip(".")):
                hint = nearest(wrong[1], re.findall(r"'(.*?)'", wrong[2]))
                error.message = f"{wrong[0]}: {hint}" if hint else error.message
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = {arg.partition("=")[0] for arg in args}
        for gone, replacement in GONE.items():
            if gone.split()[0] == args[0] and words.issuperset(gone.split()):
                raise typer.BadParameter(f"{gone} went: {replacement}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        app = getattr(import_module(module), name)
        if not isinstance(app, typer.Typer):
            function, app = (
                app,
                typer.Typer(
                    pretty_exceptions_enable=False, add_completion=False, context_settings=CONTEXT
                ),
            )
            app.command(cmd_name, no_args_is_help=False)(function)
        app.rich_markup_mode, app.info.cls = BOXES, CommandGroup
        command: Any = typer.main.get_command(app)
        for each in (command, *getattr(command, "commands", {}).values()):
            untyped(each.get_params(ctx))
        command.rich_help_panel = PANELS.get(cmd_name)
        return command


def untyped(params: list[Any]) -> list[Any]:
    """The parameters, of which help shows no type beside those that take no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


CONTEXT = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="interlace",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=BOXES,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
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
        typer.Option(
            "-V", "--version", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Hide communication under computation, by schedules that can be read and are proved sound."""


def main() -> None:
    """The `interlace` command."""
    app()
