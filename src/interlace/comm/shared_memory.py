"""Memory that the processes of one host share: what symmetric buffers and signals live in.

One rank creates a segment, its peers open it by name, and the name goes away as soon as all have it
mapped: the memory then lives as long as somebody maps it. A process that is killed before that
leaves its names behind; the next one to create a segment there takes them away.
The pages are reserved at creation, since writing to a full tmpfs is a SIGBUS and not an exception.

    >>> segment = Segment.create(4096)
    >>> segment.cells[0] = 7
    >>> peer = Segment.open(segment.path, 4096)
    >>> segment.unlink()
    >>> peer.cells[0]
    7
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import tempfile
from pathlib import Path

import torch

from interlace.comm.liveness import exists, namespace
from interlace.errors import BackendError, SharedMemoryError

PAGE = 4096
ALIGN = 256
"""Bytes at whose multiples buffers start, so that vector loads stay within cache lines."""


def default_folder() -> Path:
    """Where shared memory has its names: `/dev/shm`, or the temporary folder without one."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def align(nbytes: int, to: int = ALIGN) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


def size(nbytes: int) -> str:
    """A number of bytes for people."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


class Segment:
    """A block of shared memory, mapped into this process."""

    def __init__(self, path: str, nbytes: int, descriptor: int) -> None:
        self.path = path
        self.nbytes = nbytes
        try:
            self._map = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.cells = memoryview(self._map).cast("Q")
        """The whole segment as 64-bit cells; a cell is read and written in one access."""

    @classmethod
    def create(cls, nbytes: int, folder: Path | None = None) -> Segment:
        """A new segment of zeros, its pages reserved; `SharedMemoryError` where they do not fit."""
        folder = folder or default_folder()
        nbytes = align(max(nbytes, 1), PAGE)
        sweep(folder)
        stat = os.statvfs(folder)
        free = stat.f_bavail * stat.f_frsize
        if nbytes > free:
            raise SharedMemoryError(_too_little(nbytes, free, folder))
        name = f"interlace-{os.getpid()}-{namespace():x}-{secrets.token_hex(8)}"
        path = str(folder / name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, nbytes)
            else:
                os.ftruncate(descriptor, nbytes)  # macOS: no tmpfs, so no SIGBUS to fear
        except OSError as error:
            os.close(descriptor)
            os.unlink(path)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise SharedMemoryError(_too_little(nbytes, free, folder)) from error
            raise SharedMemoryError(
                f"cannot reserve {nbytes} bytes of shared memory in {folder} ({error.strerror})"
            ) from error
        return cls(path, nbytes, descriptor)

    @classmethod
    def open(cls, path: str, nbytes: int) -> Segment:
        """A segment that another process created."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise BackendError(
                f"cannot open the shared memory {path} of a peer ({error.strerror}): ranks that "
                "share memory need one host, one user and one /dev/shm; give containers the same "
                "/dev/shm (docker: --ipc=host), or choose the transport gloo"
            ) from error
        return cls(path, nbytes, descriptor)

    def unlink(self) -> None:
        """Takes the name away; the memory stays until the last process that maps it lets go."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """A part of the segment as a tensor of bytes, which keeps the mapping alive."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)


def sweep(folder: Path) -> None:
    """Takes away the names of segments whose processes are gone: nobody will open them any more.

    Processes of other containers, which may share the folder, are not seen from here: their names
    stay.
    """
    here = namespace()
    for path in folder.glob(f"interlace-*-{here:x}-*") if here else ():
        pid = path.name.split("-")[1]
        if pid.isdigit() and not exists(int(pid)):
            with contextlib.suppress(OSError):  # another rank was faster, or it is another user's
                path.unlink()


def _too_little(needed: int, free: int, folder: Path) -> str:
    return (
        f"too little shared memory: this rank needs {size(needed)} and {folder} has {size(free)} "
        f"free. Give it more (docker run --shm-size=..., or mount -o remount,size=... {folder}), "
        "use fewer or smaller symmetric buffers (fewer chunks, a shorter sequence), or a strategy "
        "without them (pipeline, shift, ring, broadcast)"
    )
