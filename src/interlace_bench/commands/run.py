"""`interlace run FILE`: a schedule on real ranks, with its results, its times and its timeline.

$ interlace run forward.ilc --check-against serial --html page.html
$ interlace run ring.ilc --mesh tp=4
$ torchrun --nproc-per-node 4 -m interlace run ring.ilc

Alone, the command starts a process for each rank; under torchrun each process is a rank already,
and rank 0 alone prints and writes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace.commands.files import on_mesh, parse_mesh, read_programs
from interlace.commands.options import Device, Json, Mesh, Timeout
from interlace.commands.output import UNSOUND, command, print_json, say, table
from interlace.commands.pages import check_places
from interlace.errors import InputError, TeamError

if TYPE_CHECKING:
    from interlace.ir import Program

IN_ORDER, SERIAL = "in-order", "serial"
MOST_DIGESTS = 4
MOST_SEED = (1 << 32) - 1
VERDICTS = {
    "equal": "equal, bit for bit",
    "close": "close: sums in another order",
    "differs": "DIFFERS",
}


@command
def run(
    file: Annotated[
        Path, typer.Argument(help="A schedule, a folder that holds one, or - for standard input.")
    ],
    world: Annotated[
        int | None,
        typer.Option(help="Ranks in all: a multiple of the Program's own, which is the default."),
    ] = None,
    mesh: Mesh = None,
    device: Device = "auto",
    seed: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, help="Seed of the inputs that are drawn.")
    ] = 0,
    runs: Annotated[
        int, typer.Option(min=1, help="Runs that are timed, after two that are not.")
    ] = 20,
    check_against: Annotated[
        str | None,
        typer.Option(
            help="Compare the results with those of another schedule: a file; `serial`, the file "
            "NAME.serial.ilc beside NAME.ilc; or `in-order`, the same ops one after another."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the predicted and the measured timeline as a page.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write the measured timeline as JSON."),
    ] = None,
    timeout: Timeout = 300,
    json: Json = False,
) -> None:
    """Run a schedule on this machine: results, times, a timeline.

    The schedule is verified first. Each rank is a process of its own: on the
    CPU, or with a GPU where there is one for each. Inputs are normal numbers
    (integers: 0 and 1), drawn by seed and rank. Shown are each result, by type
    and a digest of its bytes, and the median time of a run, in which the
    slowest rank counts.

    Ends with code 1 if the schedule is unsound, or if a result differs from
    that of --check-against by more than its type rounds.
    """
    from interlace.verify import check

    started = "WORLD_SIZE" in os.environ  # by torchrun
    if started and world is None and mesh is None:
        world = int(os.environ["WORLD_SIZE"])

    def laid_out(programs: list[Program], twin: bool = False) -> tuple[Program, ...]:
        placed = on_mesh(programs, world=world, mesh=parse_mesh(mesh))
        check(placed).raise_if_unsound()
        if twin:
            check(placed, in_order=True).raise_if_unsound()
        return tuple(placed)

    file = the_one(file)
    programs = laid_out(read_programs(file), check_against == IN_ORDER)
    ranks = sorted(rank for program in programs for rank in _ranks(program))
    if ranks != list(range(len(ranks))):
        raise TeamError(f"{file} runs on ranks {ranks}: a run needs all ranks from 0 on")
    if started and len(ranks) != int(os.environ["WORLD_SIZE"]):
        raise TeamError(f"{file} runs on {len(ranks)} ranks: give torchrun as many processes")
    other = () if check_against in (None, IN_ORDER) else laid_out(_other(file, check_against))
    check_places(html, out)
    from interlace_bench.ranks import run as run_on_ranks  # and torch
    from interlace_bench.schedule import RunSettings, work

    settings = RunSettings(
        what=str(file),
        device=device,
        timeout=timeout,
        programs=programs,
        against=programs if check_against == IN_ORDER else other,
        against_name=check_against or "",
        in_order=check_against == IN_ORDER,
        seed=seed,
        runs=runs,
        html=_whole(html),
        out=_whole(out),
    )
    report = run_on_ranks(work, settings, len(ranks))
    if report is None:
        return
    if json:
        print_json(report)
    else:
        show(report)
    if any(item["verdict"] == "differs" for each in report["ranks"] for item in _compared(each)):
        raise typer.Exit(UNSOUND)


def the_one(path: Path) -> Path:
    """The schedule of a folder, which may have its serial one beside it; a file is itself."""
    if not path.is_dir():
        return path
    found = [each for each in sorted(path.glob("*.ilc")) if ".serial" not in each.suffixes]
    if len(found) != 1:
        what = f"holds {len(found)} schedules" if found else "holds no schedule (*.ilc)"
        raise InputError(
            f"{path} {what}: name one{': ' if found else ''}{', '.join(map(str, found))}"
        )
    return found[0]


def _whole(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def _ranks(program: Program) -> tuple[int, ...]:
    return program.world if program.rank is None else (program.rank,)


def _other(file: Path, name: str) -> list[Program]:
    """The Programs of what results are compared with."""
    if name != SERIAL:
        return read_programs(Path(name))
    path = file.with_suffix(".serial.ilc")
    if not path.exists():
        raise InputError(
            f"there is no {path} to compare with, as `interlace demo` and interlace.export write "
            "it: give --check-against the file of a serial schedule, or in-order"
        )
    return read_programs(path)


def _compared(of_rank: dict[str, Any]) -> list[dict[str, Any]]:
    return list(of_rank["compared"].values())


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    against, ranks = report.get("against"), report["ranks"]
    where = "" if report["device"] == "cpu" else f" on {report['device']}"
    drawn = list(ranks[0]["inputs"])
    listed = ", ".join(drawn) if len(drawn) <= 6 else f"{len(drawn)} inputs"
    say(f"sound; {_count(report['world'], 'rank')}{where}; drawn by seed: {listed or 'nothing'}\n")
    names = dict.fromkeys(name for told in ranks for name in told["outputs"])
    rows = [_row(name, [told for told in ranks if name in told["outputs"]]) for name in names]
    headings = ("result", "type", "digest by rank", f"against {against['name']}" if against else "")
    width = len(headings) if against else 3
    table(headings[:width], [row[:width] for row in rows])
    say("")
    for rank, told in enumerate(ranks):
        for name, item in told["compared"].items():
            if item["verdict"] == "differs":
                off = item["off"]
                how = "what is no number" if off is None else f"{off:.2g} of the greatest element"
                say(f"rank {rank}, {name}: off by {how}")
    runs = _count(report["runs"], "run")
    say(f"{_time(report)} (median of {runs}, {_range(report)}; slowest rank)")
    if against:
        gain = against["median_ms"] / report["median_ms"]
        say(f"{_time(against)} for {against['name']} ({_range(against)}), {gain:.2f} times as long")
    for path in report.get("files", ()):
        say(f"wrote {path}")


def _row(name: str, ranks: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """A result on the ranks that have it: types and digests, each once where they are the same."""
    kinds, digests = ([told["outputs"][name][i] for told in ranks] for i in (0, 1))
    if len({*digests}) == 1:
        digests = [digests[0], *(["everywhere"] if len(digests) > 1 else [])]
    more = ["..."] if len(digests) > MOST_DIGESTS else []
    found = [told["compared"][name]["verdict"] for told in ranks if name in told["compared"]]
    verdict = max(found, key=list(VERDICTS).index) if found else ""
    shown = " ".join([*digests[:MOST_DIGESTS], *more])
    return name, " or ".join(dict.fromkeys(kinds)), shown, VERDICTS.get(verdict, "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _time(figures: dict[str, Any]) -> str:
    return f"{figures['median_ms']:.3f} ms"


def _range(figures: dict[str, Any]) -> str:
    return f"{figures['least_ms']:.3f} to {figures['most_ms']:.3f}"
