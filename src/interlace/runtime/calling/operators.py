"""From the names that a schedule gives to what PyTorch calls so: operators, and words of arguments.

>>> resolve("aten.mm.out")
<OpOverload(op='aten.mm', overload='out')>
>>> decode("@device", torch.device("cpu"))
device(type='cpu')

Note [What a name may reach]
    Names come from files. They are looked up in PyTorch's dispatcher, which holds operators alone;
    an attribute of a Python object is never taken for one. `refusal` says which names and which
    operators no schedule may call; TorchScript's own (aten.save) are not in the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interlace.errors import ProgramError
from interlace.ir import Arg, DType
from interlace.ir.operators import FIX, WORDS, refusal, split
from interlace.kernels import KERNELS
from interlace.runtime.values import DTYPES
from interlace.torch_private import OpOverload, find_operator

Operator = Callable[..., Any]
"""An operator of torch's, a kernel of ours or a region."""


def resolve(fn: str) -> Operator:
    """The operator of that name, or a kernel of ours: Note [What a name may reach]."""
    kernel = KERNELS.get(fn)
    if kernel is not None:
        return kernel
    why = refusal(fn)
    if why is not None:
        raise ProgramError(f"{why}: {FIX}")
    parts = split(fn)
    assert parts is not None
    space, name, overload = parts
    try:
        schema = f"{space}::{name}", "" if overload == "default" else overload
        find_operator(*schema)
    except RuntimeError as error:
        raise ProgramError(
            f"no operator named {fn!r}. fix: name one of torch's dispatcher with its overload, as "
            f"aten.add.Tensor, after the import of the library that registers {space}.{name}"
        ) from error
    found = getattr(getattr(getattr(torch.ops, space), name), overload)
    assert isinstance(found, OpOverload), fn
    return found


def decode(arg: Arg, device: torch.device) -> Any:
    if isinstance(arg, DType):
        return DTYPES[arg]
    if isinstance(arg, str) and arg.startswith("@"):
        if arg not in WORDS:
            raise ProgramError(f"no value named {arg!r} that an operator could take")
        return device if arg == "@device" else getattr(torch, arg[1:])
    return arg
