"""`interlace doctor`: what is installed, what is missing, and how to fix it.

$ interlace doctor
$ interlace doctor --json | jq '.checks[] | select(.state != "ok")'

It looks at this host alone; of a job on several, run it on each. How fast the links are,
`interlace bench interconnect` measures.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import os
import platform
import shutil
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import typer

from interlace.commands.files import read_machine
from interlace.commands.options import Json
from interlace.commands.output import UNSOUND, command, print_json, say, table
from interlace.errors import CalibrationError, InterlaceError

SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_MEMORY = 1 << 30
STRICT = "AVX512,STRICT"
BACKENDS = {
    "gloo": "take a torch with gloo (USE_DISTRIBUTED=1): every run needs it",
    "nccl": "take a CUDA build of torch",
    "ucc": "take a torch with UCC",
}
PACKAGES = {
    "triton": ("kernels on GPUs and Inductor there", "it comes with a CUDA build of torch"),
    "cuda-bindings": ("peer memory on GPUs", "pip install 'cuda-bindings>=13.0.3,<14'"),
}
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""
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
def doctor(json: Json = False) -> None:
    """Say what is installed on this machine, what is missing and how to fix it.

    Ends with code 1 if something is broken; what is merely absent is optional.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # torchrun started it: one rank of each host answers
    checks = list(look())
    broken = any(check.state == "broken" for check in checks)
    if json:
        listed = [asdict(check) for check in checks]
        print_json({"schema": 1, "ok": not broken, "checks": listed})
    else:
        table(("what", "state", "found"), [(c.name, c.state, c.found) for c in checks])
        say("")
        for check in checks:
            if check.fix:
                say(f"{check.name}: {check.fix}")
    if broken:
        raise typer.Exit(UNSOUND)


def look() -> Iterator[Inspection]:
    """Everything that doctor looks at on this host, in order."""
    import interlace

    place = Path(interlace.__file__).parent
    yield Inspection("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Inspection("interlace", "ok", f"{interlace.__version__} ({place})")
    torch = _import("torch")
    if isinstance(torch, Exception):
        fix = "pip install 'torch>=2.11' (docs/how-to/install.md)"
        yield Inspection("torch", "broken", f"does not import: {torch}", fix)
    else:
        yield from _torch(torch)
        yield _arithmetic(torch)
    for name, (purpose, fix) in PACKAGES.items():
        try:
            yield Inspection(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Inspection(name, "absent", f"not installed ({purpose})", fix)
    points = importlib.metadata.entry_points(group="torch_dynamo_backends").names
    fix = "install the package (pip install .), or pass backend=interlace.frontend.backend"
    yield _optional("torch.compile backend", "interlace" in points, 'backend="interlace"', fix)
    yield _shared_memory()
    yield _interface()
    path = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")
    fix = 'only regions="inductor" on the CPU needs one: apt-get install g++'
    yield _optional("C++ compiler", bool(path), path or "none on PATH", fix)
    yield _calibration(torch)
    if not isinstance(torch, Exception):
        yield _kept_schedules()


def _optional(name: str, there: bool, found: str, fix: str) -> Inspection:
    """Inspection of a part that Interlace can do without: `ok`, or `absent` with its fix."""
    return Inspection(name, "ok", found) if there else Inspection(name, "absent", found, fix)


def _import(name: str) -> Any:
    """The module, or the exception that says why it does not import."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken torch raises what it likes
        return error


def _torch(torch: Any) -> Iterator[Inspection]:
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    build = f"ROCm {torch.version.hip} build" if torch.version.hip else build
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    state, fix = ("ok", "") if release >= (2, 11) else ("broken", "install torch >= 2.11")
    yield Inspection("torch", state, f"{torch.__version__}, {build}", fix)
    if torch.version.cuda:
        yield from look_at_gpus(torch)
    dist = torch.distributed
    for name, fix in BACKENDS.items():
        there = dist.is_available() and getattr(dist, f"is_{name}_available")()
        check = _optional(name, there, "in this torch" if there else "not in this torch", fix)
        yield check if there or name != "gloo" else replace(check, state="broken")


def _arithmetic(torch: Any) -> Inspection:
    """Inspects if chunks of a CPU matmul can equal the whole bit for bit."""
    set_to, capability = os.environ.get("MKL_CBWR", ""), torch.backends.cpu.get_cpu_capability()
    found, fix = f"{capability}, MKL_CBWR={set_to or 'not set'}", f"set MKL_CBWR={STRICT}"
    fix += " where an overlapped fp32 run must equal the serial one in bits"
    if not torch.backends.mkl.is_available():
        found, fix = f"{capability}, torch without MKL", "take a torch with MKL"
    elif "AVX512" not in capability:
        found, fix = f"{capability}: MKL_CBWR={STRICT} needs AVX512", ""
    return _optional("bit-equal chunks", not fix or set_to == STRICT, found, fix)


def _shared_memory() -> Inspection:
    name = "shared memory"
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        fix = "mount a tmpfs at /dev/shm: one-sided copies between CPU ranks need it"
        return Inspection(name, "absent", f"no {SHARED_MEMORY} ({error.strerror})", fix)
    found = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f} at {SHARED_MEMORY}"
    fix = "symmetric buffers of CPU ranks live there: docker run --shm-size=2g, or remount it"
    return _optional(name, usage.free >= ENOUGH_SHARED_MEMORY, found, fix)


def _interface() -> Inspection:
    """The address where gloo listens, which ranks on other hosts have to reach."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    address = _gloo_address(interface.split(",")[0])
    reached = bool(address) and not ip_address(address).is_loopback
    found = f"listens on {address or 'no IPv4 address'} (GLOO_SOCKET_IFNAME={interface})"
    fix = "only ranks on several hosts need it: set GLOO_SOCKET_IFNAME on each host to its "
    fix += "interface that joins them (`ip -br address`)"
    return _optional("gloo's address", reached, found, fix)


def _calibration(torch: Any) -> Inspection:
    """The calibration file of this machine."""
    from interlace.cost import default_path

    gpus = ""
    if not isinstance(torch, Exception) and torch.version.cuda and torch.cuda.is_available():
        from interlace.runtime.machine import gpus_of

        gpus = gpus_of("cuda")
    path = default_path(gpus)
    if not path.exists():
        fix = "interlace calibrate measures this machine, for `auto` to choose by"
        return Inspection("calibration", "absent", f"none at {path}: the built-in model", fix)
    try:
        machine = read_machine(path)
    except CalibrationError as error:
        return Inspection("calibration", "broken", str(error), "calibrate again on this machine")
    return Inspection("calibration", "ok", f"{machine.name} ({path})")


def _kept_schedules() -> Inspection:
    """The schedules of earlier processes, and why some are not used."""
    from interlace.frontend.store import Store, misfits
    from interlace.options import Options

    store, name = Store.of(Options()), "kept schedules"
    if store is None:
        fix = 'torch is told to cache no graphs: give options={"cache": FOLDER} to keep them there'
        return Inspection(name, "absent", "none are kept", fix)
    entries = store.facts()
    differing = [["content"] if facts is None else misfits(facts) for facts in entries]
    reasons = Counter(" and another ".join(names) for names in differing if names)
    num_used = len(entries) - reasons.total()
    found = f"{num_used} of {len(entries)} fit what is installed ({store.folder})"
    listed = [f"{count} with another {names}" for names, count in reasons.most_common()]
    fix = f"those that are compiled anew: {', '.join(listed)}" if listed else ""
    return Inspection(name, "ok", found, fix)


def look_at_gpus(torch: Any) -> Iterator[Inspection]:
    """Everything about GPUs, for a torch that is built for CUDA."""
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    fix = "no device is visible: look at the driver (nvidia-smi)"
    yield _optional("GPUs", bool(count), f"{count} {names}".strip(), fix)
    if not count:
        return
    yield Inspection("NCCL version", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [(i, j) for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    found = f"{len(pairs) - len(apart)} of {len(pairs)} ordered pairs"
    found += f"; none {', '.join(f'{i} > {j}' for i, j in apart[:8])}" if apart else ""
    fix = "teams of GPUs need it (see nvidia-smi topo -p2p r): choose GPUs that reach each other"
    yield _optional("peer access", not apart, found, fix)
    from interlace.comm.cuda.driver import Driver

    fix = "teams of GPUs need it: containers need --ipc=host or one IPC namespace"
    try:
        torch.cuda.set_device(0)
        torch.cuda.synchronize()
        driver = Driver()
        driver.handle(driver.alloc(PROBE))  # this process ends soon, and frees it
        yield Inspection("memory shared by processes", "ok", "CUDA IPC gives handles")
    except (InterlaceError, RuntimeError) as error:
        yield Inspection("memory shared by processes", "absent", str(error), fix)


def _gloo_address(interface: str) -> str:
    """The IPv4 address where gloo listens: an interface's or the host's; empty if there is none."""
    try:
        if not interface:
            address = socket.gethostbyname(socket.gethostname())
            socket.create_server((address, 0)).close()
            return address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket, SIOCGIFADDR, request)[20:24])
    except OSError:
        return "" if interface else "127.0.0.1"
