"""`interlace calibrate`: measure this machine once, so that later runs choose without measuring.

$ interlace calibrate                                   # links, matmuls and sites; a few minutes
$ torchrun --nproc-per-node 4 -m interlace calibrate --shapes "ag_gemm:8192,4096,7168"
$ torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
    -m interlace calibrate

The file goes where `auto` looks, or to --out. What is not measured again stays in it. On several
hosts rank 0's writes it: the links inside its host and between hosts, but no sites.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from interlace_bench.shapes import check_dtypes

if TYPE_CHECKING:
    from interlace.cost import Machine
    from interlace.cost.machine import Link


@command
def calibrate(
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
    check_places(out)  # and the options, before torch is imported
    check_dtypes(words(dtype))
    OverlapSettings(shapes=shapes, seconds=seconds)
    InterconnectSettings(most=most)
    from interlace.cost import Machine, default_machine
    from interlace_bench.calibration.work import calibrate_work
    from interlace_bench.ranks import pick_device, run, several_hosts

    kind = pick_device(device)
    cuda = kind == "cuda"
    dtypes = words(dtype or ("bf16" if cuda else "f32"))
    links = InterconnectSettings(most=most or ("256MiB" if cuda else "4MiB"))
    sites = OverlapSettings(
        preset="bars" if cuda else "cpu",
        shapes=shapes,
        dtype=",".join(dtypes),
        only=",".join(name for name in STRATEGIES if name != "auto"),
        seconds=seconds,
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = CalibrationSettings(
            device=kind,
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
        found, base = Machine.load(settings.file, any_host=True), default_machine(kind)
    saved, path = _save(found, base, report["rows"], out)
    if not report["first"]:
        return
    if json:
        print_json({"schema": 1, "file": str(path), "host": saved.host, **_facts(saved)})
        return
    table(("of", "what"), [(key, str(value)) for key, value in _facts(saved).items()])
    if report["skipped"]:
        say(f"no time left for: {'; '.join(report['skipped'])}")
    say(f"wrote {path}")


def _save(
    found: Machine, base: Machine, rows: Sequence[Mapping[str, Any]], out: Path | None
) -> tuple[Machine, Path]:
    """Writes what was found, with the sites of these rows and with what the file of this host has
    beside that; the machine, and the file's path."""
    from interlace.cost import default_path, fingerprint
    from interlace.runtime.machine import gpus_of
    from interlace_bench.calibration.sites import site_times, with_sites

    gpus = gpus_of(base.device)
    path, host = out or default_path(gpus), fingerprint(gpus)
    before = _known(path, host) or base
    machine = found.replace(
        name=path.stem,
        host=host,
        sites=before.sites,
        links=_measured(found.links, base.links, before.links),
        between=_measured(found.between, base.between, before.between),
    )
    saved = with_sites(machine, site_times(rows))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CalibrationError(f"cannot make folder {path.parent}: {error}") from error
    saved.save(path)
    return saved, path


def _known(path: Path, host: str) -> Machine | None:
    """The machine in the file, if it is of this host."""
    from interlace.cost import Machine

    if not path.exists():
        return None
    try:
        known = Machine.load(path, any_host=True)
    except CalibrationError as error:
        say(f"starting anew: {error}")
        return None
    return known if known.host == host else None


Links = tuple[tuple[str, "Link"], ...]


def _measured(found: Links, base: Links, before: Links) -> Links:
    """The links that were found, and those before where that is only what is built in."""
    known, kept = dict(base), dict(before)
    return tuple((n, kept.get(n, link) if link == known.get(n) else link) for n, link in found)


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
