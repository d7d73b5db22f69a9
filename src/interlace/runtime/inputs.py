"""Checks of what the caller gives to a run, with errors that say how to mend it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from interlace.errors import ExecutorError
from interlace.ir import Box, Buffer, DType, Program, contiguous_strides
from interlace.ir.sizes import Size, SizeClass, number, numbers
from interlace.runtime.run_sizes import RunSizes
from interlace.runtime.values import DTYPES, alike, at, maker, whole


def may_be_lazy(box: Box) -> bool:
    """True if a tensor of the box may be a view that torch conjugates or negates when it is read,
    as `z.conj()` and the imaginary part of that are: with other numbers in its memory."""
    if box.is_sized or box.dtype in (DType.c64, DType.c128):
        return True
    return box.strides != contiguous_strides(box.sizes) or box.numel == 1


def _strided(tensor: str, box: Box, strides: str) -> str:
    """Text of a check of strides, but for dimensions of one, whose strides do not matter."""
    if box.is_sized:  # else the slow look tells
        return f"{tensor}.stride() == {strides}"
    if box.strides == contiguous_strides(box.sizes):
        return f"{tensor}.is_contiguous()"
    if 1 not in box.sizes and box.numel:
        return f"{tensor}.stride() == {strides}"
    kept = [at for at, size in enumerate(box.sizes) if size != 1 and box.numel]
    return " and ".join(["True", *(f"{tensor}.stride({at}) == {box.strides[at]}" for at in kept)])


LOOK = """
def look(tensors):
    try:
        return {}
    except Exception:
        return False
"""


@dataclass(frozen=True, slots=True)
class Measure:
    """Where a named size is found: a dimension of an input is `(size * scale + shift) / over`."""

    index: int
    dim: int
    scale: int
    shift: int
    over: int

    def of(self, inputs: Sequence[torch.Tensor]) -> int:
        """Its value in a run with these inputs."""
        return (int(inputs[self.index].shape[self.dim]) * self.over - self.shift) // self.scale


def measures(program: Program, sizes: SizeClass) -> tuple[Measure | None, ...]:
    """Where the named sizes of a Program are found among its inputs; None of one that is not."""
    found: dict[str, Measure] = {}
    inputs = [buffer for buffer in program.params if buffer.kind == "input"]
    for index, buffer in enumerate(inputs):
        for dim, size in enumerate(buffer.shape):
            if isinstance(size, Size) and len(size.names) == 1:
                (name,) = size.names
                if size.terms.keys() <= {(), (name,)}:
                    facts = size.terms[name,], size.terms.get((), 0), size.over
                    found.setdefault(name, Measure(index, dim, *facts))
    return tuple([found.get(size.name) for size in sizes.sizes])


def measured_sizes(
    measures: Sequence[Measure | None], inputs: Sequence[torch.Tensor], at: tuple[int, ...]
) -> tuple[int, ...]:
    """The values of the named sizes, where inputs tell them; else those of `at`, also where the
    inputs are not what a Program takes."""
    try:
        pairs = zip(measures, at, strict=True)
        return tuple([value if m is None else m.of(inputs) for m, value in pairs])
    except (IndexError, AttributeError):
        return at


class Parameters:
    """The parameters of one kind (`input` or `output`) of a concrete Program."""

    def __init__(
        self,
        program: str,
        kind: str,
        params: Sequence[Buffer],
        device: torch.device,
        host: frozenset[str] = frozenset(),
        run_sizes: RunSizes | None = None,
    ) -> None:
        """`host` names those on the CPU."""
        self.program = program
        self.kind = kind
        self.names = tuple(buffer.name for buffer in params)
        self._device, self._host = device, host
        self._asked = [whole(buffer) for buffer in params]
        self._boxes = list(self._asked)
        """As they are for the sizes of the run."""
        self._known: dict[str, Any] = {"Tensor": torch.Tensor, "device": device}
        """Values that the checks of tensors refer to by name."""
        self._known["cpu"] = torch.device("cpu")
        self._makers: list[Callable[[], torch.Tensor]] = [torch.Tensor] * len(params)
        for index, box in enumerate(self._asked):
            (run_sizes or RunSizes({})).follow_box(box, functools.partial(self._size, index))

    def _size(self, index: int, box: Box) -> None:
        self._boxes[index] = box
        self._known |= {f"sizes{index}": box.sizes, f"strides{index}": box.strides}
        self._makers[index] = maker(box, self._device)

    def _looking(self, then: str) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Returns a function that gives `then`, of tensors `t0`, `t1` and so on, where they are on
        the device and fit, and else False. Every run calls it: one expression, since a loop takes
        half as long again. (TorchDynamo's `TensorGuards` would end the process for a nested
        tensor.)"""
        device, known = self._device, self._known
        tests = [f"len(tensors) == {len(self.names)}"]
        there = "{0}.device == device"
        if device.type == "cuda" and device.index is not None:  # half the time
            there = f"{{0}}.get_device() == {device.index}"
        for index, (name, box) in enumerate(zip(self.names, self._asked, strict=True)):
            tensor, dtype = f"t{index}", f"dtype{index}"
            known[dtype] = DTYPES[box.dtype]
            sizes, strides = f"sizes{index}", f"strides{index}"
            if not box.is_sized:
                sizes, strides = repr(box.sizes), repr(box.strides)
            on_cpu = name in self._host or not box.sizes
            tests += [
                f"isinstance({tensor} := tensors[{index}], Tensor)",
                f"{tensor}.dtype is {dtype}",
                f"{tensor}.shape == {sizes}",
                (f"({there} or {{0}}.device == cpu)" if on_cpu else there).format(tensor),
                _strided(tensor, box, strides),
            ]
            if may_be_lazy(box):
                tests += [f"not {tensor}.is_conj()", f"not {tensor}.is_neg()"]
        exec(LOOK.format(" and ".join((*tests, then))), known)
        return known["look"]

    @functools.cached_property
    def fit(self) -> Callable[[Sequence[torch.Tensor]], bool]:
        """Tells whether tensors are what the Program was made for, but not what is wrong."""
        return self._looking("True")

    @functools.cached_property
    def addresses(self) -> Callable[[Sequence[torch.Tensor]], Any]:
        at = [f"t{index}.data_ptr()," for index in range(len(self._boxes))]
        return self._looking(f"({' '.join(at)})")

    def new(self) -> list[torch.Tensor]:
        """New tensors for all of them."""
        made: list[torch.Tensor] = []
        for make in self._makers:  # a list comprehension costs a call
            made.append(make())
        return made

    def zeros(self, written: Collection[str]) -> list[torch.Tensor]:
        """The same, zero. All but the `written` share memory: parameters may fill half the GPU."""
        plain = [name not in written for name in self.names]
        most = max(
            (number(box.hull[1]) for box, p in zip(self._boxes, plain, strict=True) if p), default=0
        )
        place = torch.zeros(most, dtype=torch.uint8, device=self._device).untyped_storage()
        parts = zip(plain, self._boxes, self._makers, strict=True)
        return [at(place, 0, box) if p else make().zero_() for p, box, make in parts]

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises unless the tensors fit; in every run, since a shape can change in place."""
        if not self.fit(tensors):
            self._look(tensors)

    def _look(self, tensors: Sequence[torch.Tensor]) -> None:
        device = self._device
        if len(tensors) != len(self._boxes):
            names = ", ".join(self.names) or "none"
            raise ExecutorError(
                f"{self.program} takes {len(self._boxes)} {self.kind}s ({names}), not "
                f"{len(tensors)}"
            )
        for index, (tensor, name, box) in enumerate(
            zip(tensors, self.names, self._boxes, strict=True)
        ):
            dtype, sizes, strides = DTYPES[box.dtype], box.sizes, numbers(box.strides)
            if not isinstance(tensor, torch.Tensor):
                what = f"is a {type(tensor).__name__}, not a tensor"
            elif tensor.layout is not torch.strided or tensor.is_nested:
                kind = "nested" if tensor.is_nested else str(tensor.layout)
                what = f"is {kind}, not a dense tensor: convert it, with .to_dense() or by padding"
            elif tensor.dtype != dtype:
                what = f"has dtype {tensor.dtype}, not {dtype}: convert it with .to({dtype})"
            elif tensor.shape != sizes:
                what = f"has shape {list(tensor.shape)}, not {list(sizes)}: prepare another Program"
            elif tensor.device != device and not self._elsewhere(name, tensor):
                what = f"is on {tensor.device}, not on {device}: move it with .to('{device}')"
            elif tensor.stride() != strides and not alike(tensor, strides):
                what = (
                    f"has strides {list(tensor.stride())}, not {list(strides)}: make it so, with "
                    ".contiguous() where these are a contiguous tensor's"
                )
            elif may_be_lazy(box) and (tensor.is_conj() or tensor.is_neg()):
                done, how = ("conjugated", "conj") if tensor.is_conj() else ("negated", "neg")
                what = (
                    f"is a view that torch has {done} only by a mark, and peers and copies would "
                    f"take what is in its memory: give .resolve_{how}()"
                )
            else:
                continue
            raise ExecutorError(f"{self.kind} {index} ({name!r}) of {self.program} {what}")

    def _elsewhere(self, name: str, tensor: torch.Tensor) -> bool:
        """True if an input may be on another device: torch takes a CPU scalar beside CUDA tensors,
        and keeps the seed of an attention with dropout on the CPU."""
        device = self._device
        if tensor.device.type == "cpu":
            return device.type == "cpu" or name in self._host or tensor.ndim == 0
        return tensor.device.type == device.type and device.index is None
