"""Compiling a Triton kernel once and launching it with little host work.

Triton's own launch path looks arguments up, hashes them and builds tensor descriptors at every
call (20 us and more). Here a kernel is compiled when it is bound, its arguments are addresses and
numbers, and the call goes straight to the C launcher that Triton made for it:

    program = Program(Source(kernel=..., types=..., constants=..., num_warps=8), device)
    program.launch(stream, grid, (x.data_ptr(), y.data_ptr(), x.numel()))

What depends on the addresses alone, tensor maps above all, its users keep for the `RECENT` ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_source

from interlace.errors import BackendError

HOPPER = GPUTarget("cuda", 90, 32)

TYPES: Mapping[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
"""Triton's names of the element types that the kernels take."""
RECENT = 64
"""So many sets of addresses are remembered for a kernel: making a tensor map takes microseconds."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a tensor's device the current one, if it is not."""
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return nullcontext()
    return torch.cuda.device(device)


def stream_of(device: torch.device) -> int:
    """The handle of a tensor's device's current stream."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def block_type(dtype: torch.dtype, rows: int, columns: int, *, gluon: bool = False) -> str:
    """The signature of a tensor descriptor whose tiles have that shape; Gluon's say the layout."""
    layout = ""
    if gluon:
        from triton.experimental.gluon import language as gl

        element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
        layout = f",{gl.NVMMASharedLayout.get_default_for([rows, columns], element)!r}"
    return f"tensordesc<{TYPES[dtype]}[{rows}, {columns}]{layout}>"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A kernel with the types of its arguments, its constants and how it is compiled.

    Pointers are 16-byte aligned; `divisible` says by what a number can be divided, which is what
    wide loads and stores need. Compiling needs no GPU.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1
    divisible: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of the compiler's options, as `{"enable_fp_fusion": False}`."""

    def compile(self, target: GPUTarget = HOPPER) -> CompiledKernel:
        """The compiled kernel: its PTX and cubin are in `.asm`."""
        names = self.kernel.arg_names
        signature = {n: "constexpr" if n in self.constants else self.types[n] for n in names}
        known = dict.fromkeys((n for n in names if signature[n][0] == "*"), 16)
        known.update(self.divisible)
        attributes = {
            (index,): [["tt.divisibility", known[name]]]
            for index, name in enumerate(names)
            if name in known
        }
        form = ASTSource
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            form = GluonASTSource
        source = form(self.kernel, signature, dict(self.constants), attributes)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}
        return compile_source(source, target=target, options=options)


class Program:
    """A kernel compiled and loaded on one device, with its C launcher."""

    def __init__(self, source: Source, device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        with torch.cuda.device(device):
            self.compiled = source.compile(GPUTarget("cuda", 10 * major + minor, 32))
            launcher: Any = self.compiled.run  # loads the module on the current device
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise BackendError(f"{self.compiled.name} wants scratch memory, which nobody gives it")
        self._call = _c_launcher(launcher.launch)
        # What arguments are: Triton 3.6 makes a launcher for them, later ones tell their only one.
        later = hasattr(launcher, "kernel_signature")
        self._told = (launcher.arg_annotations, launcher.kernel_signature) if later else None
        self._function = self.compiled.function
        self._packed = self.compiled.packed_metadata
        self._rest = (None,) * len(source.constants)

    def launch(self, stream: int, grid: int, args: tuple[Any, ...], columns: int = 1) -> None:
        """Launches `grid` blocks by `columns`; `args` are the kernel's, in order, no constants.

        Pointers are addresses, or tensors, of which the launcher takes the address (None: 0).
        """
        if self._told is None:
            self._call(
                grid, columns, 1, stream, self._function, False, False, None, None,
                self._packed, None, None, None, *args, *self._rest,
            )  # fmt: skip
        else:
            self._call(
                grid, columns, 1, stream, self._function, False, False, self._packed,
                None, None, None, None, None, *self._told, (*args, *self._rest),
            )  # fmt: skip


def _c_launcher(launch: Callable[..., None]) -> Callable[..., None]:
    """The C function behind Triton's wrapper for tensor descriptors, which encodes at every call.

    The wrapper is a closure whose only function is the C launcher; without descriptors there is
    no wrapper.
    """
    cells = getattr(launch, "__closure__", None) or ()
    for cell in cells:
        if type(cell.cell_contents).__name__ == "builtin_function_or_method":
            return cell.cell_contents
    if cells:
        raise BackendError(
            "this Triton launches kernels in another way than 3.6 and 3.7 do; install triton==3.6.0"
        )
    return launch


class Descriptors:
    """The tensor maps of one operand: one shape and tile, and whatever addresses come."""

    def __init__(self, program: Program, index: int, shape: tuple[int, int]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
        from triton.runtime import driver

        utils: Any = driver.active.utils  # pyright: ignore[reportAttributeAccessIssue]
        later = hasattr(utils, "fill_tma_descriptor_tiled")  # than Triton 3.6
        self._fill = utils.fill_tma_descriptor_tiled if later else utils.fill_tma_descriptor
        self._meta = program.compiled.metadata.tensordesc_meta[index]
        self._type = TMA_DTYPE_DEVICE_TO_HOST[self._meta["elem_type"]]
        self._shape = shape

    def make(self, address: int) -> tuple[Any, ...]:
        """The arguments that stand for the matrix at that address: its map, shape and strides."""
        meta = self._meta
        shape, strides = list(self._shape), [self._shape[1], 1]
        described = self._fill(
            address,
            meta["swizzle"],
            meta["elem_size"],
            self._type,
            meta["block_size"],
            shape,
            strides,
            0,
        )
        return (described, *shape, *strides)
