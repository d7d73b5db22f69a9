"""The launcher of Triton kernels: compiled once, launched with little host work.

Triton's own launch path looks arguments up, hashes them and builds tensor descriptors at every
call (20 us and more). Here a kernel is compiled when it is bound, its arguments are addresses and
numbers, and the call goes straight to the C launcher that Triton made for it:

    program = kernel_of(device, some_source, "bf16", 128)     # some_source gives a `KernelSource`
    program.launch(stream, grid, (x.data_ptr(), y.data_ptr(), x.numel()))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_source

from interlace.errors import BackendError
from interlace.torch_private import cuda_device, cuda_raw_stream

HOPPER = GPUTarget("cuda", 90, 32)

TYPES: Mapping[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
"""Triton's names of the element types that the kernels take."""
ELEMENTS: Mapping[torch.dtype, str] = {
    **TYPES,
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
}
"""Names of the element types that some kernels take."""
RECENT = 64
"""Sets of addresses that are cached for a kernel: making a tensor map takes microseconds."""


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a tensor's device the current one, if it is not."""
    if device.type != "cuda" or device.index == cuda_device():
        return nullcontext()
    return torch.cuda.device(device)


def stream_of(device: torch.device) -> int:
    """The handle of a tensor's device's current stream."""
    return cuda_raw_stream(device.index)


def block_type(dtype: torch.dtype, rows: int, columns: int, *, gluon: bool = False) -> str:
    """The signature of a tensor descriptor whose tiles have that shape; Gluon's say the layout."""
    layout, name = "", ELEMENTS[dtype]
    if gluon:
        from triton.experimental.gluon import language as gl

        elements = gl.bfloat16, gl.float16, gl.float8e4nv, gl.float8e5
        element = next(element for element in elements if element.name == name)
        layout = f",{gl.NVMMASharedLayout.get_default_for([rows, columns], element)!r}"
    return f"tensordesc<{name}[{rows}, {columns}]{layout}>"


def divisible(names: tuple[str, ...], whole: tuple[bool, ...]) -> dict[str, int]:
    """The `divisible` of a source, of arguments that are multiples of 16 where `whole` says so."""
    return {name: 16 if by16 else 1 for name, by16 in zip(names, whole, strict=True)}


@dataclass(frozen=True, kw_only=True)
class KernelSource:
    """A kernel with the types of its arguments, its constants and how it is compiled.

    A tuple of types is that of an argument that is a tuple. Pointers are 16-byte aligned;
    `divisible` says by what a number, or a pointer that is not, can be divided, which is what wide
    loads and stores need. Compiling needs no GPU.
    """

    kernel: Any
    types: Mapping[str, Any]
    constants: Mapping[str, Any]
    """The last arguments."""
    num_warps: int
    num_stages: int = 1
    divisible: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of the compiler's options, as `{"enable_fp_fusion": False}`."""

    def compile(self, target: GPUTarget = HOPPER) -> CompiledKernel:
        """The compiled kernel: its PTX and cubin are in `.asm`."""
        signature: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for index, name in enumerate(self.kernel.arg_names):
            kind = "constexpr" if name in self.constants else self.types[name]
            signature[name] = kind
            each = kind if isinstance(kind, tuple) else (kind,)
            by = self.divisible.get(name, 16 if each[0][0] == "*" else None)
            if by is not None:
                paths = [(index, i) for i in range(len(each))] if each is kind else [(index,)]
                attributes |= {path: [["tt.divisibility", by]] for path in paths}
        form = ASTSource
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            form = GluonASTSource
        source = form(self.kernel, signature, dict(self.constants), attributes)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}
        return compile_source(source, target=target, options=options)


class LoadedKernel:
    """A kernel compiled and loaded on one device, with its C launcher."""

    def __init__(self, source: KernelSource, device: torch.device) -> None:
        self.source = source
        major, minor = torch.cuda.get_device_capability(device)
        with torch.cuda.device(device):
            self.compiled = source.compile(GPUTarget("cuda", 10 * major + minor, 32))
            launcher: Any = self.compiled.run  # loads the module on the current device
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise BackendError(f"{self.compiled.name} needs scratch memory, which is not provided")
        self._call = _c_launcher(launcher.launch)
        # Triton 3.6 compiles a launcher for each signature; later ones take it as arguments.
        later = hasattr(launcher, "kernel_signature")
        self._signature = (launcher.arg_annotations, launcher.kernel_signature) if later else None
        self._function = self.compiled.function
        self._packed = self.compiled.packed_metadata
        self._rest = (None,) * len(source.constants)
        self._early = bool(source.options.get("launch_pdl"))

    def launch(self, stream: int, grid: int, args: tuple[Any, ...], columns: int = 1) -> None:
        """Launches `grid` blocks by `columns`; `args` are the kernel's in order, without constants:
        pointers are addresses, or tensors, of which the launcher takes the address (None: 0).
        """
        if self._signature is None:
            self._call(
                grid, columns, 1, stream, self._function, False, self._early, None, None,
                self._packed, None, None, None, *args, *self._rest,
            )  # fmt: skip
        else:
            self._call(
                grid, columns, 1, stream, self._function, False, self._early, self._packed,
                None, None, None, None, None, *self._signature, (*args, *self._rest),
            )  # fmt: skip


@lru_cache(maxsize=1024)
def kernel_of(
    device: torch.device, source: Callable[..., KernelSource], *given: Any, **facts: Any
) -> LoadedKernel:
    """The kernel that `source` makes of what is given, ready on a device: loaded once."""
    return LoadedKernel(source(*given, **facts), device)


def _c_launcher(launch: Callable[..., None]) -> Callable[..., None]:
    """The C function behind Triton's wrapper, which encodes tensor descriptors at every call: a
    closure whose only function is the C launcher; without descriptors there is no wrapper.
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


def matrix(
    program: LoadedKernel, index: int, address: int, shape: tuple[int, int], pitch: int = 0
) -> tuple[Any, ...]:
    """The arguments that stand for a matrix, a kernel's descriptor `index`: map, shape, strides.
    Its rows lie one after another, or begin `pitch` elements apart.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    utils: Any = driver.active.utils  # pyright: ignore[reportAttributeAccessIssue]
    later = hasattr(utils, "fill_tma_descriptor_tiled")  # than Triton 3.6
    fill = utils.fill_tma_descriptor_tiled if later else utils.fill_tma_descriptor
    meta = program.compiled.metadata.tensordesc_meta[index]
    element = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    strides = [pitch or shape[1], 1]
    described = fill(
        address, meta["swizzle"], meta["elem_size"], element, meta["block_size"], list(shape),
        strides, 0,
    )  # fmt: skip
    return (described, *shape, *strides)
