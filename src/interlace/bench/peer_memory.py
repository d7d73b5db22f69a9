"""Memory of the peers, for benchmarks of bare copies: symmetric memory on GPUs, shared on a CPU.

    memory = PeerMemory(ranks, 1 << 20)
    memory.copy("ce", memory.mine, memory.theirs[1], 4096)     # a get: the first 4096 bytes

`ce` copies by the copy engine (`cuMemcpyDtoDAsync`), `sm` by a kernel. A CPU has one way: `cpu`.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from interlace.bench.ranks import WAIT_S, Ranks
from interlace.comm.host.shared_memory import Segment
from interlace.comm.host.sharing import share
from interlace.errors import BackendError


def assert_no_multicast(device: torch.device) -> None:
    """Raises BackendError unless torch's symmetric memory leaves multicast alone."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index or 0):
        raise BackendError(
            "torch's symmetric memory would use NVLink multicast, which this benchmark must not: "
            "set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before python starts"
        )


def enable_symmetric_memory(ranks: Ranks) -> str:
    """Lets torch's symmetric memory serve the ranks' group; the group's name."""
    symm_mem: Any = importlib.import_module("torch.distributed._symmetric_memory")
    name = ranks.group.group_name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and 2.11 looks for it in places
        symm_mem.enable_symm_mem_for_group(name)
    return name


class PeerMemory:
    """As many bytes on every rank, which all ranks can read and write. All ranks make it."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        self.nbytes = nbytes
        self.theirs: list[torch.Tensor]
        """By rank, this one's own included."""
        if ranks.cuda:
            self._on_gpus(ranks)
        else:
            everyone = range(ranks.size)
            shared = share(
                *(ranks.board, ranks.topic("peers"), everyone, ranks.me, nbytes, {}, WAIT_S)
            )
            self._segments: tuple[Segment, ...] = shared.segments
            self.theirs = [segment.bytes(0, nbytes) for segment in shared.segments]
        self.mine = self.theirs[ranks.me]
        private = torch.empty(nbytes, dtype=torch.uint8, device=ranks.device)
        self.private = private.random_(0, 256)
        """What puts read and gets fill: ordinary memory."""
        self._driver = _driver() if ranks.cuda else None
        self._stream = torch.cuda.current_stream().cuda_stream if ranks.cuda else 0

    def _on_gpus(self, ranks: Ranks) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        assert_no_multicast(ranks.device)
        name = enable_symmetric_memory(ranks)
        shape = (self.nbytes,), (1,), torch.uint8, ranks.device, name
        buffer: torch.Tensor = _SymmetricMemory.empty_strided_p2p(*shape)
        handle: Any = _SymmetricMemory.rendezvous(buffer)
        self._held = buffer, handle
        self.theirs = [
            buffer if rank == ranks.me else handle.get_buffer(rank, (self.nbytes,), torch.uint8)
            for rank in range(ranks.size)
        ]

    def copy(self, engine: str, dst: torch.Tensor, src: torch.Tensor, nbytes: int) -> None:
        """Copies the first bytes, on the stream that was current when this was made."""
        if engine == "sm":  # a kernel of one load and one store: numbers of 8 bytes plus nothing
            whole = dst[:nbytes].view(torch.int64)
            torch.bitwise_or(src[:nbytes].view(torch.int64), 0, out=whole)
        elif engine == "ce" and self._driver is not None:
            self._driver(dst.data_ptr(), src.data_ptr(), nbytes, self._stream)
        else:  # torch copies between a peer's memory and its own by the copy engine as well
            dst[:nbytes].copy_(src[:nbytes])


def _driver() -> Any:
    """`cuMemcpyDtoDAsync` of cuda-bindings, checked; None without them."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None

    def copy(dst: int, src: int, nbytes: int, stream: int) -> None:
        (code,) = driver.cuMemcpyDtoDAsync(dst, src, nbytes, stream)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuMemcpyDtoDAsync: {code}")

    return copy
