"""What `interlace doctor` looks at where torch is a CUDA build: GPUs, and what connects them.

    for finding in look_at_gpus(torch):
        print(finding.name, finding.found)

What is only absent can be done without: the CPU needs none of it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

from interlace.commands.finding import Finding
from interlace.errors import InterlaceError

BINDINGS = "pip install 'cuda-bindings>=13.0.3,<14' (a CUDA build of torch brings it)"
PROBE = 2 << 20
"""Bytes of the allocation with which peer memory is tried."""


def look_at_gpus(torch: Any) -> Iterator[Finding]:
    """Everything about GPUs, for a torch that is built for CUDA."""
    count = torch.cuda.device_count()
    if not count:
        mend = "no device is visible: look at the driver (nvidia-smi)"
        yield Finding("GPUs", "absent", "0", mend)
    else:
        names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
        yield Finding("GPUs", "ok", f"{count} {names}")
    yield _bindings()
    if count:
        yield _nccl(torch)
        yield _peers(torch, count)
        yield from _memory(torch)


def _bindings() -> Finding:
    name = "cuda-bindings"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "absent", "not installed (peer memory on GPUs)", BINDINGS)
    if found.split(".")[0] not in ("12", "13"):
        return Finding(name, "absent", f"{found}, which is not known here", BINDINGS)
    return Finding(name, "ok", found)


def _nccl(torch: Any) -> Finding:
    try:
        version = ".".join(str(part) for part in torch.cuda.nccl.version())
    except (AttributeError, ImportError, RuntimeError) as error:
        return Finding("NCCL version", "absent", str(error), "take a CUDA build of torch with NCCL")
    return Finding("NCCL version", "ok", version)


def _peers(torch: Any, count: int) -> Finding:
    """Which ordered pairs of GPUs cannot reach each other's memory."""
    name = "peer access"
    if count == 1:
        return Finding(name, "absent", "one GPU alone", "overlap needs two ranks")
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    apart = [(i, j) for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if not apart:
        return Finding(name, "ok", f"all {len(pairs)} ordered pairs")
    listed = ", ".join(f"{i} > {j}" for i, j in apart[:8])
    found = f"{len(pairs) - len(apart)} of {len(pairs)} ordered pairs; none {listed}"
    mend = "teams of GPUs need it (see nvidia-smi topo -p2p r): choose GPUs that reach each other"
    return Finding(name, "absent", found, mend)


def _memory(torch: Any) -> Iterator[Finding]:
    """Tries, on the first GPU, what peer memory stands on."""
    from interlace.comm.cuda.driver import Driver

    ipc, words = "memory shared by processes", "stream memory operations"
    mend = "teams of GPUs need it; on the CPU nothing does"
    try:
        torch.cuda.set_device(0)
        torch.cuda.synchronize()
        driver = Driver()
        base = driver.alloc(PROBE)
    except (InterlaceError, RuntimeError) as error:
        yield Finding(ipc, "absent", str(error), mend)
        return
    try:
        try:
            driver.handle(base)
            yield Finding(ipc, "ok", "CUDA IPC gives handles")
        except InterlaceError as error:
            why = "containers need --ipc=host or one IPC namespace; "
            yield Finding(ipc, "absent", str(error), why + mend)
        try:
            stream = driver.private_stream()
            driver.write(stream, base, 7)
            driver.wait(stream, base, 7)
            driver.finish(stream)
            yield Finding(words, "ok", "streams write words and wait for them")
        except InterlaceError as error:
            yield Finding(words, "absent", str(error), mend)
    finally:
        driver.free(base)
