"""Memory that the processes of one host share: what symmetric buffers and signals live in.

One rank creates a segment, its peers open it by name, and the name goes away as soon as all have it
mapped. A process that is killed before that leaves its names to the next one that creates a segment
there. Pages are reserved at creation: writing to a full tmpfs is a SIGBUS and not an exception.

    shared = share(board, "ws/1", nbytes=1 << 20, note={"slots": 2}, timeout_s=60)
    shared.segments[1].bytes(0, 64)      # the memory of rank 1 of the team

    >>> segment = Segment.create(4096)
    >>> segment.cells[0] = 7
    >>> peer = Segment.open(segment.path, 4096)
    >>> segment.unlink()
    >>> peer.cells[0]
    7
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import mmap
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interlace.comm.rendezvous.board import Board, Note
from interlace.comm.rendezvous.liveness import exists, namespace
from interlace.errors import BackendError, InterlaceError, SharedMemoryError

PAGE = 4096
MAP_FIXED = 0x10
_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(3 * [ctypes.c_int]), ctypes.c_long)
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
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


class Segment:
    def __init__(self, path: str, nbytes: int, descriptor: int) -> None:
        """Maps the file; the caller closes the descriptor, which the mapping does not need."""
        self.path = path
        self.nbytes = nbytes
        self._map = _mapped(descriptor, nbytes)
        self.cells = memoryview(self._map).cast("Q")
        """The whole segment as 64-bit cells; a cell is read and written in one access."""

    @classmethod
    def create(cls, nbytes: int, folder: Path | None = None) -> Segment:
        """A new segment of zeros, its pages reserved; `SharedMemoryError` where there is none."""
        folder = folder or default_folder()
        nbytes = align(max(nbytes, 1), PAGE)
        path = str(folder / f"interlace-{os.getpid()}-{namespace():x}-{secrets.token_hex(8)}")
        try:
            sweep(folder)
            stat = os.statvfs(folder)
            if nbytes > stat.f_bavail * stat.f_frsize:
                raise SharedMemoryError(_too_little(nbytes, folder))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, 0, nbytes)
                else:
                    os.ftruncate(descriptor, nbytes)  # macOS: no tmpfs, so no SIGBUS to fear
                return cls(path, nbytes, descriptor)
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SharedMemoryError(_why_not(error, nbytes, folder)) from error

    @classmethod
    def open(cls, path: str, nbytes: int) -> Segment:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                return cls(path, nbytes, descriptor)
            finally:
                os.close(descriptor)
        except (FileNotFoundError, PermissionError) as error:
            raise BackendError(
                f"cannot open the shared memory {path} of a peer ({error.strerror}): ranks that "
                "share memory need one host, one user and one /dev/shm; give containers the same "
                "/dev/shm (docker: --ipc=host), or choose the transport gloo"
            ) from error
        except OSError as error:
            raise SharedMemoryError(_why_not(error, nbytes, Path(path).parent)) from error

    def unlink(self) -> None:
        """Takes the name away; the memory stays until the last process that maps it lets go."""
        with contextlib.suppress(OSError):  # it is gone, or goes with the next segment: `sweep`
            os.unlink(self.path)

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """A part of the segment as a tensor of bytes, which keeps the mapping alive."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)


def sweep(folder: Path) -> None:
    """Removes names of segments whose processes are gone; of other containers, nothing is known."""
    here = namespace()
    for name in fnmatch.filter(os.listdir(folder), f"interlace-*-{here:x}-*") if here else ():
        pid = name.split("-")[1]
        if pid.isdigit() and not exists(int(pid)):
            with contextlib.suppress(OSError):  # another rank was faster, or it is another user's
                (folder / name).unlink()


def _mapped(descriptor: int, nbytes: int) -> mmap.mmap:
    """The file's memory. `mmap.mmap` of a file would keep a descriptor, of which there are few."""
    found = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(found))
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
    if _map(address, nbytes, access, flags, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _why_not(error: OSError, needed: int, folder: Path) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "close files, or allow more (ulimit -n)"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        fix = f"make {folder} writable for this user (mount -o remount,rw {folder})"
    elif error.errno == errno.ENOSPC and os.statvfs(folder).f_favail == 0:
        fix = f"there is no room for another name: mount -o remount,nr_inodes=0 {folder}"
    elif error.errno == errno.EFBIG:
        fix = "let this process write larger files (ulimit -f)"
    elif error.errno in (errno.ENOSPC, errno.ENOMEM):
        return _too_little(needed, folder)
    else:
        fix = f"see that {folder} is a working tmpfs"
    return f"cannot have {size(needed)} of shared memory in {folder} ({error.strerror}): {fix}"


def _too_little(needed: int, folder: Path) -> str:
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    return (
        f"too little shared memory: this rank needs {size(needed)} and {folder} has {size(free)} "
        f"free. Give it more (docker run --shm-size=..., or mount -o remount,size=... {folder}), "
        "use fewer or smaller symmetric buffers (fewer chunks, a shorter sequence), or a strategy "
        "without them (pipeline, ring)"
    )


@dataclass(frozen=True, slots=True)
class SharedSegments:
    """One segment per member of the team, in the order of its ranks, with each member's note."""

    me: int
    segments: tuple[Segment, ...]
    notes: tuple[Note, ...]


def share(board: Board, topic: str, nbytes: int, note: Note, timeout_s: float) -> SharedSegments:
    """All ranks of the board create a segment of their own size and map everyone's. Where one
    fails, all raise its error; no name of a segment stays."""
    mine: Segment | None = None
    problem: InterlaceError | None = None
    told, segments = dict[str, Any](), list[Segment]()
    try:
        try:
            mine = Segment.create(nbytes)
            told = {"path": mine.path, "nbytes": mine.nbytes, "note": note}
        except InterlaceError as error:
            problem = error
        notes = board.exchange(f"{topic}/memory", told, timeout_s, problem=problem)
        try:
            for member, their in enumerate(notes):
                here = mine if member == board.me else None
                segments.append(here or Segment.open(their["path"], their["nbytes"]))
        except InterlaceError as error:
            problem = error
        board.exchange(f"{topic}/mapped memory", {}, timeout_s, problem=problem)
        return SharedSegments(board.me, tuple(segments), tuple(their["note"] for their in notes))
    finally:
        if mine is not None:
            mine.unlink()
