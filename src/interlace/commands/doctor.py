"""`interlace doctor`: what is installed, what is missing, and how to fix it.

$ interlace doctor
$ interlace doctor --json | jq '.checks[] | select(.state != "ok")'
$ torchrun --nnodes 2 ... -m interlace doctor       # on each host: docs/how-to/hosts.md

Under torchrun, rank 0 also says what keeps the hosts of the job apart. Their notes go through the
store, before gloo connects them: where gloo listens on loopback, nothing else could. How fast the
links are, `interlace bench interconnect` measures.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from interlace.commands.files import read_machine
from interlace.commands.options import Json
from interlace.commands.output import UNSOUND, command, print_json, say, table
from interlace.errors import CalibrationError, CommTimeoutError, InterlaceError

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
SAME = "python", "torch", "interlace", "device"
"""Facts that must be the same on every host of a job."""
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
def doctor(
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            "--time-out",
            help="Under torchrun: seconds within which all ranks are to come.",
        ),
    ] = 60,
    json: Json = False,
) -> None:
    """Say what is installed on this machine, what is missing and how to fix it.

    Under torchrun, also which hosts there are, and whether gloo joins them. Ends with code 1 if
    something is broken; what is merely absent is optional.
    """
    checks, hosts = list(look()), list[dict[str, Any]]()
    joins = not any(c.state == "broken" and c.name in ("torch", "gloo") for c in checks)
    if joins and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        rank, hosts, found = look_at_job(checks, timeout)
        if rank:
            return
        checks += found
    broken = any(check.state == "broken" for check in checks)
    if json:
        listed = [asdict(check) for check in checks]
        print_json({"schema": 1, "ok": not broken, "checks": listed, "hosts": hosts})
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
    path = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")
    fix = 'only regions="inductor" on the CPU needs one: apt-get install g++'
    yield _optional("C++ compiler", bool(path), path or "none on PATH", fix)
    yield _calibration(torch)


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


def look_at_job(
    own: Sequence[Inspection], timeout_s: float
) -> tuple[int, list[dict[str, Any]], list[Inspection]]:
    """This rank; the hosts of the job; and what keeps them apart. All ranks call it.

    Raises:
        CommTimeoutError: the store of torch.distributed did not answer in time.
        AgreementError: a rank did not come in time.
    """
    import torch.distributed as dist

    from interlace.comm import Board
    from interlace.comm.backends import connect
    from interlace.launch import prepare_for_gpus

    prepare_for_gpus(os.environ)
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except (RuntimeError, ValueError) as error:
        raise CommTimeoutError(
            f"the ranks of this job did not meet in the store of torch.distributed: {error}. See "
            "that all are started, and that MASTER_ADDR and MASTER_PORT can be reached from here"
        ) from error
    board = Board(store, range(world), rank, "interlace/doctor", limit_s=timeout_s)
    board.announce()
    by_host: dict[str, dict[str, Any]] = {}
    for other, note in enumerate(board.exchange("doctor", _note(own), timeout_s)):
        by_host.setdefault(note["host"], {**note, "ranks": []})["ranks"].append(other)
    hosts = [*by_host.values()]
    checks = [*job_checks(hosts)]
    if any(check.state == "broken" for check in checks):
        return rank, hosts, checks

    def look() -> None:
        if board.is_over("gloo"):
            board.decide("gloo")  # raises what a peer gave up for

    ended, gloo = (lambda: board.ended({*board.ranks})), dist.PrefixStore("doctor", store)
    try:  # init_process_group would wait far longer for those that another cannot reach
        with board.attending(["gloo"]):
            group = connect("gloo", gloo, rank, world, timeout_s, "all ranks", look, ended)
        board.exchange("gloo", {}, timeout_s)
        group.barrier().wait()  # none leaves, perhaps with the store, while others ask it
    except (InterlaceError, RuntimeError) as error:
        fix = "let hosts reach where gloo listens, on any port (firewalls: docs/how-to/hosts.md)"
        checks.append(Inspection("gloo between ranks", "broken", str(error), fix))
    return rank, hosts, checks


def _note(own: Sequence[Inspection]) -> dict[str, Any]:
    """Facts of this rank's host."""
    import torch

    import interlace
    from interlace.comm.teams import host

    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return {
        "host": host(),
        "name": socket.gethostname(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "interlace": interlace.__version__,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "gloo": [interface, _gloo_address(interface.split(",")[0])],
        "checks": [asdict(check) for check in own if check.state != "ok"],
    }


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


def job_checks(hosts: Sequence[dict[str, Any]]) -> Iterator[Inspection]:
    """Checks of a job: whether its hosts have the same, and can reach one another."""
    for what in SAME:
        if len({host[what] for host in hosts}) > 1:
            listed = ", ".join(f"{host[what]} on {host['name']}" for host in hosts)
            yield Inspection(f"{what} of the hosts", "broken", listed, "have the same on each")
    first = {check["name"] for check in hosts[0]["checks"]}
    for host in hosts:
        for check in host["checks"]:
            if check["name"] not in first:
                yield Inspection(**check | {"name": f"{check['name']} on {host['name']}"})
        interface, address = host["gloo"]
        fix = "set GLOO_SOCKET_IFNAME on each host to its interface that joins them"
        found = f"listens on {address or 'no IPv4 address'} (GLOO_SOCKET_IFNAME={interface})"
        lost = len(hosts) > 1 and address and ip_address(address).is_loopback
        state = "broken" if lost else "ok" if address else "absent"
        fix = "" if state == "ok" else f"{fix} (`ip -br address`)"
        yield Inspection(f"gloo on {host['name']}", state, found, fix)
