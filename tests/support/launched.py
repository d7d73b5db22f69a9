"""A stand-in for compiled kernels: what a launch is given must be what the kernel was compiled for.

monkeypatch.setattr(launcher, "LoadedKernel", Launched)
...
stream, grid, columns, given = program.launches[-1]        # given: the arguments by name
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

ELEMENTS = {
    "*i16": torch.int16, "*fp16": torch.float16, "*fp32": torch.float32, "*i32": torch.int32,
    "*fp8e4nv": torch.float8_e4m3fn, "*fp8e5": torch.float8_e5m2,
}  # fmt: skip
KINDS = {"*": (torch.Tensor, type(None), int), "i": (int,), "u": (int,), "f": (float,)}


class Launched:
    """Writes down its launches; a tensor descriptor is the 5 arguments that `matrix` gives."""

    aligned: ClassVar[bool] = True
    """True if addresses are multiples of 16, where the source does not say otherwise."""

    def __init__(self, source: Any, device: torch.device) -> None:
        self.source = source
        self.launches: list[tuple[int, int, int, dict[str, Any]]] = []

    def launch(self, stream: int, grid: int, args: tuple[Any, ...], columns: int = 1) -> None:
        self.launches.append((stream, grid, columns, self.named(args)))

    def named(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """The arguments by name; fails if there are too few or too many, or of other kinds."""
        source, given, found = self.source, list(args), dict[str, Any]()
        names = source.kernel.arg_names
        constants = [name for name in names if name in source.constants]
        assert names[-len(constants) :] == constants, "the launcher gives the constants last"
        for name in names[: -len(constants)]:
            kind = source.types[name]
            if kind.startswith("tensordesc"):
                found[name] = tuple(given[:5])
                del given[:5]
                continue
            found[name] = value = given.pop(0)
            assert isinstance(value, KINDS[kind[0]]), (name, value)
            if isinstance(value, torch.Tensor):
                assert value.dtype == ELEMENTS.get(kind, value.dtype)
                value = value.data_ptr()
            usual = 16 if kind[0] == "*" and self.aligned else 1
            if type(value) is int:
                assert value % source.divisible.get(name, usual) == 0, name
        assert not given
        return found
