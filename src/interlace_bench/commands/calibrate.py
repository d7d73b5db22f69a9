"""`interlace calibrate`: measure this machine once, so that later runs choose without measuring.

$ interlace calibrate                                   # links, matmuls and sites; a few minutes
$ torchrun --nproc-per-node 4 -m interlace calibrate --shapes "ag_gemm:8192,4096,7168"
$ torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
    -m interlace calibrate
$ interlace calibrate --from benchmarks/results/overlap.csv      # what was measured before

The file goes where `auto` looks, or to --out. What is not measured again stays in it. On several
hosts rank 0's writes it: the links inside its host and between hosts, but no sites.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from interlace.commands.files import count_gpus
from interlace.commands.options import Device, Json, Timeout
from interlace.commands.output import command, print_json, say, table
from interlace.commands.pages import check_places
from interlace.errors import CalibrationError
from interlace_bench.settings import (
    STRATEGIES,
    CalibrationSettings,
    InterconnectSettings,
    OverlapSettings,
    Shapes,
    Verbose,
    World,
    words,
)

if TYPE_CHECKING:
    from interlace.cost import Machine
    from interlace.cost.machine import Link

HOST_RUNS = 20
"""Calls of the host of a site: nothing is calibrated by them."""


@command
def calibrate(
    given: Annotated[
        list[Path] | None,
        typer.Option("--from", help="CSV of `bench overlap`; measures nothing."),
    ] = None,
    shapes: Shapes = "",
    dtype: Annotated[str, typer.Option(help="Element types; default: bf16, on CPUs f32.")] = "",
    most: Annotated[
        str, typer.Option(help="Largest message; default: 256MiB on GPUs, 4MiB on CPUs.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="Time for the sites; the rest is left out.")] = 240,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default: where auto looks.")
    ] = None,
    device: Device = "auto",
    world: World = None,
    timeout: Timeout = 580,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Measure links, matmuls and whole sites of this machine, for `auto` to choose by.

    Under torchrun on several hosts it measures the links inside a host and between hosts, and no
    sites.
    """
    if not given:
        check_places(out)
    rows: list[Mapping[str, Any]] = [row for path in given or () for row in _read(path)]
    place = _Place(device, rows, out)
    machine = place.start()
    skipped: list[str] = []
    first = True
    if not given:
        from interlace.cost import Machine, default_machine
        from interlace_bench.interconnect import calibrate_work
        from interlace_bench.ranks import run, several_hosts

        dtypes = words(dtype or ("bf16" if place.cuda else "f32"))
        links = InterconnectSettings(most=most or ("256MiB" if place.cuda else "4MiB"))
        sites = OverlapSettings(
            preset="bars" if place.cuda else "cpu",
            shapes=shapes,
            dtype=",".join(dtypes),
            only=",".join(name for name in STRATEGIES if name != "auto"),
            seconds=seconds,
            host_runs=HOST_RUNS,
        )
        with tempfile.TemporaryDirectory() as folder:
            settings = CalibrationSettings(
                device=place.device,
                timeout=timeout,
                verbose=verbose,
                links=links,
                sites=None if several_hosts() else sites,
                file=f"{folder}/machine.json",
                dtypes=tuple(dtypes),
            )
            report = run(calibrate_work, settings, world)
            if report is None:
                return  # no first rank of a host, of torchrun
            found, base = Machine.load(settings.file, any_host=True), default_machine(place.device)
        machine = found.replace(
            sites=machine.sites,
            links=_measured(found.links, base.links, machine.links),
            between=_measured(found.between, base.between, machine.between),
        )
        rows += report["rows"]
        skipped, first = report["skipped"], report["first"]
    saved = _save(machine, rows, place)
    if not first:
        return
    if json:
        print_json({"schema": 1, "file": str(place.path), "host": saved.host, **_facts(saved)})
        return
    table(("of", "what"), [(key, str(value)) for key, value in _facts(saved).items()])
    if skipped:
        say(f"no time left for: {'; '.join(skipped)}")
    say(f"wrote {place.path}")


Links = tuple[tuple[str, "Link"], ...]


def _measured(found: Links, base: Links, before: Links) -> Links:
    """The links that were found, and those before where that is only what is built in."""
    known, kept = dict(base), dict(before)
    return tuple((n, kept.get(n, link) if link == known.get(n) else link) for n, link in found)


class _Place:
    """Which machine is calibrated: this one, or for rows alone the one that they come from."""

    def __init__(self, device: Device, rows: Sequence[Mapping[str, Any]], out: Path | None) -> None:
        from interlace.cost import default_path, fingerprint
        from interlace.runtime.machine import gpus_of
        from interlace_bench.measured_sites import gpu_of
        from interlace_bench.ranks import pick_device

        gpu, world = gpu_of(rows)
        elsewhere = device == "cuda" and rows and not count_gpus()
        self.device: Literal["cpu", "cuda"] = "cuda" if elsewhere else pick_device(device)
        self.cuda = self.device == "cuda"
        if elsewhere and not gpu:
            raise CalibrationError(
                "the rows do not say which GPU they come from: give rows of `interlace bench "
                "overlap`, or calibrate where the GPU is"
            )
        gpus = f"{world} x {gpu}" if elsewhere else gpus_of(self.device)
        self.path, self.host = out or default_path(gpus), fingerprint(gpus)
        if gpu not in (gpus if self.cuda else self.host):
            away = "" if count_gpus() else "; away from those GPUs give --device cuda"
            here = gpus or self.host
            raise CalibrationError(f"the rows were measured on {gpu!r}, and this is {here!r}{away}")

    def start(self) -> Machine:
        """The machine in the file, if it is of this device and host; else the built-in model."""
        from interlace.cost import Machine, default_machine

        if self.path.exists():
            try:
                found = Machine.load(self.path, any_host=True)
            except CalibrationError as error:
                say(f"starting anew: {error}")
            else:
                if (found.device, found.host) == (self.device, self.host):
                    return found
        return default_machine(self.device)


def _read(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            rows = [dict(row) for row in csv.DictReader(file)]
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from error
    if rows and "op" not in rows[0]:
        raise CalibrationError(
            f"{path} has no rows of `interlace bench overlap`, and files of samples are no longer "
            "read. fix: run `interlace calibrate`, which measures this machine"
        )
    return rows


def _save(machine: Machine, rows: Sequence[Mapping[str, Any]], place: _Place) -> Machine:
    """Writes the machine with the sites of these rows."""
    from interlace_bench.measured_sites import site_times, with_sites

    path = place.path
    named = machine.replace(name=path.stem, host=place.host)
    saved = with_sites(named, site_times(rows))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibrationError(f"cannot make folder {path.parent}: {error}") from error
    saved.save(path)
    return saved


def _facts(machine: Machine) -> dict[str, object]:
    """The host of a machine, and the number of its measurements by kind."""
    sites = {time.site for time in machine.sites}
    return {
        "host": machine.host,
        "transfers": sum(len(link.curves) for _, link in machine.links),
        "between hosts": sum(len(link.curves) for _, link in machine.between),
        "matmuls": len(machine.gemms),
        "sites": len(sites),
        "site times": len(machine.sites),
    }
