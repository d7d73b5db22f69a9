"""`interlace doctor`: what is installed, what is missing, and how to fix it.

$ interlace doctor
$ interlace doctor --json | jq '.checks[] | select(.state != "ok")'

Nothing here is needed to read, check or simulate schedules: those commands do without torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.commands.doctor_cuda import look_at_gpus
from interlace.commands.files import read_machine
from interlace.commands.finding import Finding
from interlace.commands.output import UNSOUND, command, print_json, say, table
from interlace.errors import CalibrationError

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY = 1 << 30
STRICT = "AVX512,STRICT"


@command
def doctor(
    calibration: Annotated[
        Path | None, typer.Option(help="A calibration file to look at as well.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the facts for scripts.")] = False,
) -> None:
    """Say what is installed on this machine, what is missing and how to fix it.

    Ends with code 1 if something is broken; what is merely absent is optional.
    """
    found = list(look(calibration))
    broken = any(item.state == "broken" for item in found)
    if json:
        checks = [
            {"name": item.name, "state": item.state, "found": item.found, "mend": item.mend}
            for item in found
        ]
        print_json({"schema": 1, "ok": not broken, "checks": checks})
    else:
        table(("what", "state", "found"), [(i.name, i.state, i.found) for i in found])
        mends = [item for item in found if item.mend]
        if mends:
            say("")
        for item in mends:
            say(f"{item.name}: {item.mend}")
    if broken:
        raise typer.Exit(UNSOUND)


def look(calibration: Path | None = None) -> Iterator[Finding]:
    """Everything that doctor looks at, in order."""
    import interlace

    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Finding("interlace", "ok", f"{interlace.__version__} ({Path(interlace.__file__).parent})")
    torch = _import("torch")
    yield from _torch(torch)
    yield _plugin()
    yield _shared_memory()
    yield _compiler()
    yield _package("triton", "kernels on GPUs and Inductor there", "it comes with a CUDA torch")
    yield _package("matplotlib", "plots of benchmarks", "pip install 'interlace[bench]'")
    yield _cores(torch)
    yield _arithmetic(torch)
    yield _calibration(calibration, torch)


def _import(name: str) -> Any:
    """The module, or the exception that says why it does not import."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken torch raises what it likes
        return error


def _torch(torch: Any) -> Iterator[Finding]:
    if isinstance(torch, Exception):
        mend = "pip install 'torch>=2.11' (README.md: which torch)"
        yield Finding("torch", "broken", f"does not import: {torch}", mend)
        return
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    build = f"ROCm {torch.version.hip} build" if torch.version.hip else build
    if release < (2, 11):
        yield Finding("torch", "broken", f"{torch.__version__}, {build}", "install torch >= 2.11")
    else:
        yield Finding("torch", "ok", f"{torch.__version__}, {build}")
    if torch.version.cuda:
        yield from look_at_gpus(torch)
    dist = torch.distributed
    if not dist.is_available():
        mend = "take a torch built with USE_DISTRIBUTED=1"
        yield Finding("torch.distributed", "broken", "not in this torch", mend)
        return
    backends: dict[str, tuple[Callable[[], bool], str]] = {
        "gloo": (dist.is_gloo_available, "take a torch with gloo: every CPU program needs it"),
        "nccl": (dist.is_nccl_available, "take a CUDA build of torch"),
        "ucc": (dist.is_ucc_available, "take a torch built with UCC"),
    }
    for name, (available, mend) in backends.items():
        if available():
            yield Finding(name, "ok", "in this torch")
        else:
            state = "broken" if name == "gloo" else "absent"
            yield Finding(name, state, "not in this torch", mend)


def _plugin() -> Finding:
    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "interlace" in points.names:
        return Finding("torch.compile backend", "ok", 'backend="interlace" is registered')
    return Finding(
        "torch.compile backend",
        "absent",
        'backend="interlace" is not registered',
        "install the package (pip install .), or pass backend=interlace.frontend.backend",
    )


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        mend = "mount a tmpfs at /dev/shm: one-sided copies between CPU ranks need it"
        return Finding("shared memory", "absent", f"no {SHARED_MEMORY} ({error.strerror})", mend)
    found = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} at {SHARED_MEMORY}"
    if usage.free < ENOUGH_SHARED_MEMORY:
        mend = "symmetric buffers of CPU ranks live there: docker run --shm-size=2g, or remount it"
        return Finding("shared memory", "absent", found, mend)
    return Finding("shared memory", "ok", found)


def _compiler() -> Finding:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Finding("C++ compiler", "ok", path)
    mend = 'only regions="inductor" on the CPU needs one: apt-get install g++'
    return Finding("C++ compiler", "absent", "none on PATH", mend)


def _package(name: str, purpose: str, mend: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "absent", f"not installed ({purpose})", mend)
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "ok", "installed, of no known version")


def _cores(torch: Any) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = "" if isinstance(torch, Exception) else f", torch uses {torch.get_num_threads()}"
    if cores == 1:
        mend = "two cores or more let communication run beside compute"
        return Finding("cores", "absent", f"1{threads}", mend)
    return Finding("cores", "ok", f"{cores}{threads}")


def _arithmetic(torch: Any) -> Finding:
    """Whether chunks of a CPU matmul can equal the whole bit for bit."""
    name = "bit-equal chunks"
    if isinstance(torch, Exception):
        return Finding(name, "absent", "unknown without torch")
    capability = torch.backends.cpu.get_cpu_capability()
    if not torch.backends.mkl.is_available():
        return Finding(name, "absent", f"{capability}, torch without MKL", "take a torch with MKL")
    if "AVX512" not in capability:
        return Finding(name, "absent", f"{capability}: MKL_CBWR={STRICT} needs AVX512")
    given = os.environ.get("MKL_CBWR", "")
    if given == STRICT:
        return Finding(name, "ok", f"{capability}, MKL_CBWR={given}")
    mend = f"set MKL_CBWR={STRICT} where an overlapped fp32 run must equal the serial one in bits"
    return Finding(name, "absent", f"{capability}, MKL_CBWR={given or 'not set'}", mend)


def _calibration(path: Path | None, torch: Any) -> Finding:
    """The file that was named, or the one of this machine."""
    if path is None:
        path = _own_calibration(torch)
        if not path.exists():
            mend = "interlace calibrate measures this machine, for `auto` to choose by"
            return Finding("calibration", "absent", f"none at {path}: the built-in model", mend)
    try:
        machine = read_machine(path)
    except CalibrationError as error:
        return Finding("calibration", "broken", str(error), "calibrate again on this machine")
    return Finding("calibration", "ok", f"{machine.name} ({path})")


def _own_calibration(torch: Any) -> Path:
    """Where the calibration file of this machine is, if there is one."""
    from interlace.cost import default_path

    if isinstance(torch, Exception) or not (torch.version.cuda and torch.cuda.is_available()):
        return default_path()
    from interlace.runtime.machine import gpus_of

    return default_path(gpus_of("cuda"))
