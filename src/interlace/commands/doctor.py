"""`interlace doctor`: what is installed, what is missing, and how to fix it.

$ interlace doctor
$ interlace doctor --json | jq '.checks[] | select(.state != "ok")'
$ torchrun --nnodes 2 ... -m interlace doctor       # on each host: docs/how-to/hosts.md

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.commands.files import read_machine
from interlace.commands.options import Json
from interlace.commands.output import UNSOUND, command, print_json, prose, say, table
from interlace.errors import CalibrationError, InterlaceError

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY = 1 << 30
NEEDED = {"torch", "torch.distributed", "gloo"}
"""Without these no rank joins a job."""
STRICT = "AVX512,STRICT"
BINDINGS = "pip install 'cuda-bindings>=13.0.3,<14' (a CUDA build of torch brings it)"
PROBE = 2 << 20
"""Bytes of the allocation with which peer memory is tried."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """One thing that was looked at. `state`: ok, absent (something does without) or broken."""

    name: str
    state: str
    found: str
    fix: str = ""


@command
def doctor(
    calibration: Annotated[
        Path | None, typer.Option(help="A calibration file to look at as well.")
    ] = None,
    time_out: Annotated[
        float, typer.Option(help="Under torchrun: seconds within which all ranks are to come.")
    ] = 60,
    json: Json = False,
) -> None:
    """Say what is installed on this machine, what is missing and how to fix it.

    Under torchrun, also which hosts there are, how gloo joins them, and what teams will use. Ends
    with code 1 if something is broken; what is merely absent is optional.
    """
    found, job = list(look(calibration)), None
    able = NEEDED.isdisjoint(item.name for item in found if item.state == "broken")
    if able and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from interlace.commands.doctor_job import show_job, survey

        job = survey(found, time_out)
        if job is None:
            return  # another rank than 0
        found = job.checks
    broken = any(item.state == "broken" for item in found)
    if json:
        whole = {} if job is None else {"hosts": job.hosts, "links": job.links, "teams": job.teams}
        checks = [asdict(item) for item in found]
        print_json({"schema": 1, "ok": not broken, "checks": checks, **whole})
    else:
        table(("what", "state", "found"), [(i.name, i.state, i.found) for i in found])
        fixes = [item for item in found if item.fix]
        if fixes:
            say("")
        for item in fixes:
            prose(f"{item.name}: {item.fix}")
        if job is not None:
            show_job(job)
    if broken:
        raise typer.Exit(UNSOUND)


def look(calibration: Path | None = None) -> Iterator[Inspection]:
    """Everything that doctor looks at, in order."""
    import interlace

    yield Inspection("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Inspection(
        "interlace", "ok", f"{interlace.__version__} ({Path(interlace.__file__).parent})"
    )
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


def _torch(torch: Any) -> Iterator[Inspection]:
    if isinstance(torch, Exception):
        fix = "pip install 'torch>=2.11' (docs/how-to/install.md)"
        yield Inspection("torch", "broken", f"does not import: {torch}", fix)
        return
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    build = f"ROCm {torch.version.hip} build" if torch.version.hip else build
    if release < (2, 11):
        yield Inspection(
            "torch", "broken", f"{torch.__version__}, {build}", "install torch >= 2.11"
        )
    else:
        yield Inspection("torch", "ok", f"{torch.__version__}, {build}")
    if torch.version.cuda:
        yield from look_at_gpus(torch)
    dist = torch.distributed
    if not dist.is_available():
        fix = "take a torch built with USE_DISTRIBUTED=1"
        yield Inspection("torch.distributed", "broken", "not in this torch", fix)
        return
    backends: dict[str, tuple[Callable[[], bool], str]] = {
        "gloo": (dist.is_gloo_available, "take a torch with gloo: every CPU program needs it"),
        "nccl": (dist.is_nccl_available, "take a CUDA build of torch"),
        "ucc": (dist.is_ucc_available, "take a torch built with UCC"),
    }
    for name, (available, fix) in backends.items():
        if available():
            yield Inspection(name, "ok", "in this torch")
        else:
            state = "broken" if name == "gloo" else "absent"
            yield Inspection(name, state, "not in this torch", fix)


def _plugin() -> Inspection:
    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "interlace" in points.names:
        return Inspection("torch.compile backend", "ok", 'backend="interlace" is registered')
    return Inspection(
        "torch.compile backend",
        "absent",
        'backend="interlace" is not registered',
        "install the package (pip install .), or pass backend=interlace.frontend.backend",
    )


def _shared_memory() -> Inspection:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        fix = "mount a tmpfs at /dev/shm: one-sided copies between CPU ranks need it"
        return Inspection("shared memory", "absent", f"no {SHARED_MEMORY} ({error.strerror})", fix)
    found = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} at {SHARED_MEMORY}"
    if usage.free < ENOUGH_SHARED_MEMORY:
        fix = "symmetric buffers of CPU ranks live there: docker run --shm-size=2g, or remount it"
        return Inspection("shared memory", "absent", found, fix)
    return Inspection("shared memory", "ok", found)


def _compiler() -> Inspection:
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return Inspection("C++ compiler", "ok", path)
    fix = 'only regions="inductor" on the CPU needs one: apt-get install g++'
    return Inspection("C++ compiler", "absent", "none on PATH", fix)


def _package(name: str, purpose: str, fix: str) -> Inspection:
    if importlib.util.find_spec(name) is None:
        return Inspection(name, "absent", f"not installed ({purpose})", fix)
    try:
        return Inspection(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Inspection(name, "ok", "installed, of no known version")


def _cores(torch: Any) -> Inspection:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = "" if isinstance(torch, Exception) else f", torch uses {torch.get_num_threads()}"
    if cores == 1:
        fix = "two cores or more let communication run beside compute"
        return Inspection("cores", "absent", f"1{threads}", fix)
    return Inspection("cores", "ok", f"{cores}{threads}")


def _arithmetic(torch: Any) -> Inspection:
    """Whether chunks of a CPU matmul can equal the whole bit for bit."""
    name = "bit-equal chunks"
    if isinstance(torch, Exception):
        return Inspection(name, "absent", "unknown without torch")
    capability = torch.backends.cpu.get_cpu_capability()
    if not torch.backends.mkl.is_available():
        return Inspection(
            name, "absent", f"{capability}, torch without MKL", "take a torch with MKL"
        )
    if "AVX512" not in capability:
        return Inspection(name, "absent", f"{capability}: MKL_CBWR={STRICT} needs AVX512")
    given = os.environ.get("MKL_CBWR", "")
    if given == STRICT:
        return Inspection(name, "ok", f"{capability}, MKL_CBWR={given}")
    fix = f"set MKL_CBWR={STRICT} where an overlapped fp32 run must equal the serial one in bits"
    return Inspection(name, "absent", f"{capability}, MKL_CBWR={given or 'not set'}", fix)


def _calibration(path: Path | None, torch: Any) -> Inspection:
    """The file that was named, or the one of this machine."""
    if path is None:
        path = _own_calibration(torch)
        if not path.exists():
            fix = "interlace calibrate measures this machine, for `auto` to choose by"
            return Inspection("calibration", "absent", f"none at {path}: the built-in model", fix)
    try:
        machine = read_machine(path)
    except CalibrationError as error:
        return Inspection("calibration", "broken", str(error), "calibrate again on this machine")
    return Inspection("calibration", "ok", f"{machine.name} ({path})")


def _own_calibration(torch: Any) -> Path:
    """Where the calibration file of this machine is, if there is one."""
    from interlace.cost import default_path

    if isinstance(torch, Exception) or not (torch.version.cuda and torch.cuda.is_available()):
        return default_path()
    from interlace.runtime.machine import gpus_of

    return default_path(gpus_of("cuda"))


# -- GPUs, where torch is a CUDA build ---------------------------------------------------------


def look_at_gpus(torch: Any) -> Iterator[Inspection]:
    """Everything about GPUs, for a torch that is built for CUDA."""
    count = torch.cuda.device_count()
    if not count:
        fix = "no device is visible: look at the driver (nvidia-smi)"
        yield Inspection("GPUs", "absent", "0", fix)
    else:
        names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
        yield Inspection("GPUs", "ok", f"{count} {names}")
    yield _bindings()
    if count:
        yield _nccl(torch)
        yield _peers(torch, count)
        yield from _memory(torch)


def _bindings() -> Inspection:
    name = "cuda-bindings"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Inspection(name, "absent", "not installed (peer memory on GPUs)", BINDINGS)
    if found.split(".")[0] not in ("12", "13"):
        return Inspection(name, "absent", f"{found}, which is not known here", BINDINGS)
    return Inspection(name, "ok", found)


def _nccl(torch: Any) -> Inspection:
    try:
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
    except (AttributeError, ImportError, RuntimeError) as error:
        return Inspection(
            "NCCL version", "absent", str(error), "take a CUDA build of torch with NCCL"
        )
    return Inspection("NCCL version", "ok", version)


def _peers(torch: Any, count: int) -> Inspection:
    """Which ordered pairs of GPUs cannot reach each other's memory."""
    name = "peer access"
    if count == 1:
        return Inspection(name, "absent", "one GPU alone", "overlap needs two ranks")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [(i, j) for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if not apart:
        return Inspection(name, "ok", f"all {len(pairs)} ordered pairs")
    listed = ", ".join(f"{i} > {j}" for i, j in apart[:8])
    found = f"{len(pairs) - len(apart)} of {len(pairs)} ordered pairs; none {listed}"
    fix = "teams of GPUs need it (see nvidia-smi topo -p2p r): choose GPUs that reach each other"
    return Inspection(name, "absent", found, fix)


def _memory(torch: Any) -> Iterator[Inspection]:
    """Tries, on the first GPU, what peer memory stands on."""
    from interlace.comm.cuda.driver import Driver

    ipc, words = "memory shared by processes", "stream memory operations"
    fix = "teams of GPUs need it; on the CPU nothing does"
    try:
        torch.cuda.set_device(0)
        torch.cuda.synchronize()
        driver = Driver()
        base = driver.alloc(PROBE)
    except (InterlaceError, RuntimeError) as error:
        yield Inspection(ipc, "absent", str(error), fix)
        return
    try:
        try:
            driver.handle(base)
            yield Inspection(ipc, "ok", "CUDA IPC gives handles")
        except InterlaceError as error:
            why = "containers need --ipc=host or one IPC namespace; "
            yield Inspection(ipc, "absent", str(error), why + fix)
        try:
            stream = driver.private_stream()
            driver.write(stream, base, 7)
            driver.wait(stream, base, 7)
            driver.finish(stream)
            yield Inspection(words, "ok", "streams write words and wait for them")
        except InterlaceError as error:
            yield Inspection(words, "absent", str(error), fix)
    finally:
        driver.free(base)
